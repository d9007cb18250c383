"""Fused kernels beside the operations that they stand for: in Triton's interpreter, by its compiler, and on a GPU."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# (torch is partly untyped)

from __future__ import annotations

import importlib
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from llm_spec_torch.kernel_choice import choose_faster_network, make_layer_kernels
from llm_spec_torch.network import (
    AttentionShape,
    KeyValueCache,
    LayerKernels,
    LayerKind,
    LayerWeights,
    RmsNorm,
    TransformerNetwork,
)
from torch.nn import functional
from triton_process import run_python

CAPACITY, VOCAB = 2100, 50


def make_network(
    *, group: int, window: int | None, has_head_norms: bool, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> TransformerNetwork:
    """Two layers of random weights: 2 key heads of 32, matrices that neither packing nor folding has touched."""
    torch.manual_seed(0)
    hidden, inner, num_kv, head_dim = 48, 40, 2, 32

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape) * scale).to(dtype).to(device)

    def make_linear(num_out: int, num_in: int) -> Any:
        weight = draw(num_out, num_in, scale=num_in**-0.5)
        return lambda rows: functional.linear(rows, weight)

    def make_norm(size: int) -> RmsNorm:
        return RmsNorm((1.0 + draw(size, scale=0.1)).to(dtype), 1e-5)

    def make_layer() -> LayerWeights:
        return LayerWeights(
            attention_norm=make_norm(hidden),
            queries_keys_values=make_linear((group + 2) * num_kv * head_dim, hidden),
            query_norm=make_norm(head_dim) if has_head_norms else None,
            key_norm=make_norm(head_dim) if has_head_norms else None,
            output=make_linear(hidden, group * num_kv * head_dim),
            after_attention_norm=None,
            mlp_norm=make_norm(hidden),
            gate_up=make_linear(2 * inner, hidden),
            down=make_linear(hidden, inner),
            after_mlp_norm=None,
            kind=0,
        )

    angles = torch.arange(CAPACITY)[:, None] * 10000.0 ** -(torch.arange(head_dim // 2) / (head_dim // 2))
    rotation = torch.polar(torch.ones_like(angles), angles)[:, None].to(device)
    return TransformerNetwork(
        embedding=draw(VOCAB, hidden),
        dtype=dtype,
        embedding_scale=None,
        layers=(make_layer(), make_layer()),
        kinds=(LayerKind(window, rotation),),
        attention=AttentionShape(
            num_heads=group * num_kv, num_kv_heads=num_kv, head_dim=head_dim, scale=head_dim**-0.5, fused=False
        ),
        final_norm=make_norm(hidden),
        head=make_linear(VOCAB, hidden),
        final_softcap=None,
        activation=functional.silu,
        vocab_size=VOCAB,
    )


def make_cache(network: TransformerNetwork, batch: int) -> KeyValueCache:
    shape, device = network.attention, network.embedding.device
    size = (batch, CAPACITY, 2 * shape.num_kv_heads, shape.head_dim)
    return KeyValueCache(tuple(torch.randn(size, device=device).to(network.dtype) for _ in network.layers))


CASES: list[dict[str, Any]] = [
    {"group": 1, "window": None, "has_head_norms": False},
    {"group": 3, "window": 9, "has_head_norms": False},
    {"group": 4, "window": 100, "has_head_norms": True},
]
# how many keys are read, and where each sequence's tokens stand: within a part, at its end, after many
PASSES: list[tuple[int, list[range]]] = [
    (64, [range(3, 4)]),
    (256, [range(60, 76)]),
    (256, [range(10, 12), range(250, 252)]),
    (2050, [range(1990, 1993), range(3)]),
]


def check_passes(case: dict[str, Any], tolerance: float, **where: Any) -> None:
    """Hidden states and what is left in the cache are those of the operations one by one, for every pass."""
    from llm_spec_torch.layer_triton import TritonLayerKernels

    network = make_network(**case, **where)
    shape = network.attention
    kernels = TritonLayerKernels(
        num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, scale=shape.scale
    )
    for num_keys, places in PASSES:
        positions = torch.tensor([list(row) for row in places], device=network.embedding.device)
        token_ids = torch.randint(0, VOCAB, positions.shape).to(positions.device)
        expected_cache = make_cache(network, len(places) + 1)  # one that is not read
        cache = KeyValueCache(tuple(stored.clone() for stored in expected_cache.layers))
        expected = network.compute_hidden_states(token_ids, positions, expected_cache, num_keys)
        found = replace(network, kernels=kernels).compute_hidden_states(token_ids, positions, cache, num_keys)
        check_near(found, expected, tolerance)
        for mine, theirs in zip(cache.layers, expected_cache.layers, strict=True):
            check_near(mine, theirs, tolerance)


def check_near(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    error = float((found.float() - expected.float()).norm() / expected.float().norm())
    assert found.shape == expected.shape
    assert error <= tolerance, error


IN_INTERPRETER = """
import torch
from test_layer_kernels import CASES, check_passes, run_on_host
torch.set_num_threads(1)
run_on_host()
for case in CASES:
    check_passes(case, 1e-5)
"""

# One in each thing that a kernel does.
FAULTS = [
    ("/ size + eps", "/ size + 0.1"),
    ("(row.to(tl.float32) + tl.load", "(0.5 * row.to(tl.float32) + tl.load"),
    ("1.0 + tl.exp(-numbers)", "1.01 + tl.exp(-numbers)"),
    ("a * sine + b * cosine", "a * sine - b * cosine"),
    ("/ HEAD_DIM + eps", "/ HEAD_DIM + 0.1"),
    ("tl.load(key_weight + 2 * pair), ", "tl.load(query_weight + 2 * pair), "),
    ("+ head - GROUP * NUM_KV\n", "+ (head - GROUP * NUM_KV) // 2\n"),
    ("place[None, :] <= position", "place[None, :] < position"),
    ("position[:, None] - window", "position[:, None] - window - 1"),
    ("total = total * fade", "total = total"),
    ("tl.sum(parts * weight[:, None], 0)", "tl.sum(parts, 0)"),
]

WITH_FAULTS = """
import importlib.util, sys
from pathlib import Path
import torch
from llm_spec_torch import layer_triton
from test_layer_kernels import CASES, FAULTS, check_passes, run_on_host

torch.set_num_threads(1)
source, folder = Path(layer_triton.__file__).read_text(encoding="utf-8"), Path(sys.argv[1])
missed = []
for number, (old, new) in enumerate(FAULTS):
    assert source.count(old) == 1, old
    path = folder / f"faulty_{number}.py"
    path.write_text(source.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    sys.modules["llm_spec_torch.layer_triton"] = module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    run_on_host()
    try:
        check_passes(CASES[-1], 1e-5)
        missed.append(new)
    except AssertionError:
        pass
assert not missed, missed
"""

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from llm_spec_torch import layer_triton

def compile_kernel(kernel, types, fixed):
    for capability in (80, 90):
        source = ASTSource(kernel, {**types, **dict.fromkeys(fixed, "constexpr")}, fixed)
        assert triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]

b, f, i = "*bf16", "*fp32", "*i64"
shape = {"NUM_KV": 8, "GROUP": 4, "HEAD_DIM": 128}
compile_kernel(
    layer_triton._add_and_norm,
    {"states": b, "update": b, "weight": b, "summed": b, "normed": b, "size": "i32", "eps": "fp32"},
    {"HAS_UPDATE": True, "BLOCK": 4096},
)
compile_kernel(layer_triton._activate, {"gate_up": b, "out": b, "size": "i32"}, {"BLOCK": 1024})
compile_kernel(
    layer_triton._rotate_and_store,
    {"heads": b, "rotation": f, "query_weight": b, "key_weight": b, "eps": "fp32", "cache_rows": i, "queries": b,
     "stored": b, "width": "i32"},
    {**shape, "HAS_NORM": True},
)
compile_kernel(
    layer_triton._attend_to_part,
    {"queries": b, "stored": b, "positions": i, "outs": f, "maxima": f, "sums": f, "scale": "fp32", "window": "i32",
     "num_keys": "i32", "width": "i32", "sequence_stride": "i64"},
    {**shape, "ROWS": 64, "KEYS": 64, "PART": 64},
)
compile_kernel(
    layer_triton._join_parts,
    {"outs": f, "maxima": f, "sums": f, "joined": b, "width": "i32", "num_parts": "i32"},
    {**shape, "PARTS": 16},
)
"""


def run_on_host() -> None:
    """Triton's interpreter runs on the host, where there is no current device."""
    module: Any = importlib.import_module("llm_spec_torch.layer_triton")
    module._device_of = lambda _: nullcontext()


def test_kernels_in_the_interpreter() -> None:
    """No GPU is needed for what they compute, in float32."""
    pytest.importorskip("triton")
    run_python(IN_INTERPRETER, TRITON_INTERPRET="1")


def test_faults_in_kernels_are_found(tmp_path: Path) -> None:
    """What compares them with the operations one by one notices a fault in any of them."""
    pytest.importorskip("triton")
    run_python(WITH_FAULTS, str(tmp_path), TRITON_INTERPRET="1")


def test_kernels_compile_for_gpus() -> None:
    """The compiler takes them, which the interpreter does not tell; no GPU is needed."""
    pytest.importorskip("triton")
    run_python(COMPILE, TRITON_INTERPRET="0")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2), ("float16", 3e-3)])
@pytest.mark.parametrize("case", CASES)
def test_kernels_on_a_gpu(case: dict[str, Any], dtype: str, tolerance: float) -> None:
    check_passes(case, tolerance, device="cuda", dtype=getattr(torch, dtype))


# ------------------------------------------------------------------------------------------- the choice


def choose(logits: torch.Tensor | Exception, seconds: float) -> bool:
    """Whether kernels are chosen that give these logits, in so many seconds for the other's one."""
    plain = make_network(**CASES[0])
    fused = replace(plain, kernels=cast("LayerKernels", object()))

    def read_logits(network: TransformerNetwork) -> torch.Tensor:
        if network is plain:
            return LOGITS
        if isinstance(logits, Exception):
            raise logits
        return logits

    chosen = choose_faster_network(plain, fused, read_logits, lambda network: 1.0 if network is plain else seconds)
    return chosen is fused


LOGITS = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("logits", "seconds", "expected"),
    [
        (LOGITS, 0.9, True),
        (LOGITS * (1.0 + 1e-4), 0.9, True),
        (LOGITS, 1.1, False),
        (LOGITS * 1.1, 0.9, False),
        (LOGITS * torch.nan, 0.9, False),
        (RuntimeError("no kernel image is available"), 0.9, False),
    ],
)
def test_kernels_are_used_where_they_are_right_and_faster(
    logits: torch.Tensor | Exception, seconds: float, expected: bool
) -> None:
    assert choose(logits, seconds) == expected


def test_no_memory_for_the_look_at_kernels_is_no_reason_against_them() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        choose(torch.OutOfMemoryError("out of memory"), 0.9)


def test_layers_that_kernels_are_for() -> None:
    """Others are computed by torch's operations: Gemma's, and heads of a size that Triton's products cannot have."""
    pytest.importorskip("triton")
    network = make_network(**CASES[0])
    attention = replace(network.attention, fused=True)
    network = replace(network, attention=attention)
    assert make_layer_kernels(network) is not None
    for other in (
        replace(network, activation=functional.gelu),
        replace(network, attention=replace(attention, softcap=30.0)),
        replace(network, attention=replace(attention, head_dim=80)),
        replace(network, attention=replace(attention, fused=False)),
        replace(network, layers=tuple(replace(e, after_mlp_norm=network.final_norm) for e in network.layers)),
    ):
        assert make_layer_kernels(other) is None
