"""Noise for a seed in a tensor: the reference's words bit for bit, its Gumbel noise within 2 ulp, by every path."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# (torch is partly untyped)

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from llm_spec_torch import noise
from llm_spec_torch.noise import make_gumbel_tensor, split_seed_into_words
from numpy.typing import NDArray
from triton_process import run_python

from llm_spec.local.noise import NoisePurpose
from llm_spec.local.noise import make_gumbel_noise as reference_gumbel
from llm_spec.local.noise import make_uniform_noise as reference_uniform

SEEDS = [0, 5, 2**32 + 7, 2**63, 2**64 - 3]
POSITIONS = np.array([0, 1, 77, 2**31 + 5, 2**32 - 1, 2**33 + 9, 2**40])


def key(seed: int) -> torch.Tensor:
    return torch.tensor(split_seed_into_words(seed))


def check_close(found: NDArray[Any], expected: NDArray[Any]) -> None:
    """Within 2 ulp; near a noise of 0 those of the inner logarithm's 1.0, many of the result."""
    assert found.shape == expected.shape
    ulp = np.spacing(np.maximum(np.abs(expected), 1.0))
    assert (np.abs(found - expected) <= 2 * ulp).all()


@pytest.mark.parametrize("vocab_size", [1, 7, 50, 4096])
@pytest.mark.parametrize("seed", SEEDS)
def test_token_noise_is_the_references(seed: int, vocab_size: int) -> None:
    """Words bit for bit, for seeds and positions above 32 bits and vocabularies that four does not divide."""
    positions = torch.from_numpy(POSITIONS)
    words = noise._draw_token_uniforms(key(seed), positions, vocab_size)  # pyright: ignore[reportPrivateUsage] # their source
    assert np.array_equal(words.numpy(), reference_uniform(seed, POSITIONS, vocab_size, NoisePurpose.TOKEN))
    expected = reference_gumbel(seed, POSITIONS, vocab_size)
    check_close(make_gumbel_tensor(key(seed), positions, vocab_size).numpy(), expected)


def test_a_key_that_changes_in_place_changes_the_noise() -> None:
    """A recorded graph serves the next request: nothing is kept of the seed before."""
    position, words = torch.tensor([3]), key(1)
    make_gumbel_tensor(words, position, 9)
    words.copy_(key(2**40))
    assert torch.equal(make_gumbel_tensor(words, position, 9), make_gumbel_tensor(key(2**40), position, 9))


def test_independent_requests_in_one_call() -> None:
    """With a leading dimension each request has its own seed and its own positions."""
    keys, positions = torch.stack([key(seed) for seed in SEEDS]), torch.arange(15).view(5, 3)
    together = make_gumbel_tensor(keys, positions, 10)
    for row in range(5):
        assert torch.equal(together[row], make_gumbel_tensor(keys[row], positions[row], 10))


# ------------------------------------------------------------------------------------------------ the kernel

IN_INTERPRETER = """
import torch
from llm_spec_torch.noise_triton import make_gumbel_tensor_fused
from test_noise import POSITIONS, SEEDS, check_close, key
from llm_spec.local.noise import make_gumbel_noise

for seed in SEEDS:
    for vocab_size in (1, 7, 1030):
        found = make_gumbel_tensor_fused(key(seed), torch.from_numpy(POSITIONS), vocab_size).numpy()
        check_close(found, make_gumbel_noise(seed, POSITIONS, vocab_size))
keys, positions = torch.stack([key(seed) for seed in SEEDS]), torch.arange(10).view(5, 2)
together = make_gumbel_tensor_fused(keys, positions, 6)
for row in range(5):
    assert torch.equal(together[row], make_gumbel_tensor_fused(keys[row], positions[row], 6))
"""

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from llm_spec_torch import noise_triton

types = {"out": "*fp64", "keys": "*i64", "positions": "*i64", "vocab_size": "i32"}
for capability in (80, 90):
    source = ASTSource(noise_triton._kernel, types, {})
    assert triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]
"""


def test_triton_kernel_in_the_interpreter() -> None:
    """The kernel gives the reference's noise within 2 ulp, so its words bit for bit; no GPU is needed."""
    pytest.importorskip("triton")
    run_python(IN_INTERPRETER, TRITON_INTERPRET="1")


def test_triton_kernel_compiles_for_gpus() -> None:
    """The kernel is one that the compiler takes, which the interpreter does not tell; no GPU is needed."""
    pytest.importorskip("triton")
    run_python(COMPILE, TRITON_INTERPRET="0")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("fused", [True, False])
def test_noise_on_a_gpu(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's noise is the reference's too, by the kernel and without it."""
    monkeypatch.setattr(noise, "has_triton", lambda: fused)
    for seed in SEEDS:
        found = make_gumbel_tensor(key(seed).cuda(), torch.from_numpy(POSITIONS).cuda(), 1030).cpu().numpy()
        check_close(found, reference_gumbel(seed, POSITIONS, 1030))
