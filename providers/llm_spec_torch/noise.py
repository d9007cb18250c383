"""The noise of `llm_spec.local.noise` for a seed in a tensor.

So one CUDA graph serves many requests. The Philox words equal the reference's bit for bit; the
Gumbel noise is within 2 ulp of it. Nothing here asks the device for a value. Every tensor may have
further leading dimensions, which broadcast: independent requests.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from llm_spec.local.noise import NOISE_GROUP_SIZE, NoisePurpose, philox4x32

__all__ = ["has_triton", "make_gumbel_tensor", "split_seed_into_words"]

_SCALE = 2.0**-32
_MASK32 = 0xFFFFFFFF


def split_seed_into_words(seed: int) -> tuple[int, int]:
    """Return the low and the high word of a seed below 2**64, the elements of a `key`."""
    return seed & _MASK32, seed >> 32


def make_gumbel_tensor(key: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Return standard Gumbel noise for coupled sampling: [num_positions, vocab_size] float64.

    `key` is int64 [2], `positions` int64 [num_positions]. On CUDA one Triton kernel computes it, if
    Triton is installed.
    """
    if positions.is_cuda and has_triton():
        from llm_spec_torch.noise_triton import make_gumbel_tensor_fused  # needs Triton

        return make_gumbel_tensor_fused(key, positions, vocab_size)
    least, leaders = _draw_groups(key, positions, vocab_size)
    tokens = torch.arange(vocab_size, device=positions.device)
    groups = tokens // NOISE_GROUP_SIZE
    more = -torch.log(_draw_token_uniforms(key, positions, vocab_size))
    return -torch.log(least[..., groups] + more.masked_fill(leaders[..., groups] == tokens, 0.0))


def _draw_groups(key: Tensor, positions: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return the reference's `NoiseGroups`, [num_positions, num_groups] each.

    They are the least exponentials and their leaders.
    """
    num_groups = -(-vocab_size // NOISE_GROUP_SIZE)
    w0, w1, w2, w3 = _draw_words(key, positions, -(-num_groups // 2), NoisePurpose.GROUP)
    uniforms = (torch.stack((w0, w2), dim=-1).flatten(-2)[..., :num_groups].double() + 0.5) * _SCALE
    choices = torch.stack((w1, w3), dim=-1).flatten(-2)[..., :num_groups] * NOISE_GROUP_SIZE >> 32
    starts = torch.arange(num_groups, device=positions.device) * NOISE_GROUP_SIZE
    return -torch.log(uniforms) / NOISE_GROUP_SIZE, starts + choices


def _draw_token_uniforms(key: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Return uniforms, [num_positions, vocab_size]; one Philox call serves four tokens."""
    words = _draw_words(key, positions, -(-vocab_size // 4), NoisePurpose.TOKEN)
    uniforms = torch.stack(words, dim=-1).flatten(-2)[..., :vocab_size].double()
    return uniforms.add_(0.5).mul_(_SCALE)


def _draw_words(key: Tensor, positions: Tensor, num_calls: int, purpose: NoisePurpose) -> tuple[Tensor, ...]:
    """Return the four words of each call, [num_positions, num_calls] int64 each."""
    position = positions[..., None]
    counter = (
        torch.arange(num_calls, device=positions.device),
        position & _MASK32,
        position >> 32,
        int(purpose),
    )
    return philox4x32(counter, (key[..., 0, None, None], key[..., 1, None, None]))


@cache
def has_triton() -> bool:
    """Return True if Triton is installed; torch brings it for NVIDIA's GPUs on Linux."""
    return find_spec("triton") is not None
