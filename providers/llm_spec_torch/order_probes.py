"""Inputs that show in which order a kernel adds, even if it rounds to bfloat16.

Kernels that add the same products in different orders differ in the last bits of float32. That
changes about one in 60,000 outputs in bfloat16 (measured: one row among others with
`ONEDNN_MAX_CPU_ISA=AVX512_CORE`). A sample of passes misses it, but answers do not. So each part of
a pass is computed from inputs that hide nothing:

- Products are summed that cancel exactly. The result is the rounding of the partial sums, which
  differs with each order.
- Vector code and scalar code of a function may differ in the last bits. Which of the two computes a
  number depends on how threads divide a tensor. A function is tested with a number for which they
  do differ, if there is any.
- Norms and rotations compute in float32, and are tested before they round.

A kernel is chosen by shapes, dtypes and threads, not by numbers. So what agrees here agrees in
passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeAlias

import torch
from torch import Tensor

from llm_spec_torch.linear_layers import Linear
from llm_spec_torch.network import RmsNorm, TransformerNetwork

__all__ = [
    "ReadRows",
    "has_tile_registers",
    "hides_order",
    "list_attention_probes",
    "list_elementwise_probes",
    "list_matrix_probes",
]

# Reads numbered rows in one pass, into [num_rows, any]; equal numbers mean equal input rows.
ReadRows: TypeAlias = Callable[[Sequence[int]], Tensor]

_NUM_KEYS_APART: Final = 32  # different keys, which then repeat
_MATRIX_FACTOR: Final = 2.0**40  # so large that a bias vanishes beside the sums' rounding errors
# Of factors. Without them, float32 would hold sums of bfloat16 numbers of one size exactly.
_MAX_EXPONENT: Final = 12
_SCORE_FACTOR: Final = 2.0**6  # of queries and keys, so that a score's rounding error is about 1
_NUM_NORMED: Final = 16
_NUM_TRIED: Final = 4096  # enough numbers to find one for which vector and scalar code differ


def hides_order(network: TransformerNetwork) -> bool:
    """Return True if a CPU rounds a network's outputs to less than float32."""
    return network.dtype != torch.float32 and network.embedding.device.type == "cpu"


def has_tile_registers() -> bool:
    """Return True if this CPU multiplies bfloat16 by tiles (AMX: Xeons of 2023 and later)."""
    tells: Callable[[], bool] | None = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return tells is not None and tells()


def list_matrix_probes(network: TransformerNetwork) -> Iterator[ReadRows]:
    """Yield a probe of every matrix product."""
    for layer in network.layers:
        for linear in (layer.queries_keys_values, layer.output, layer.gate_up, layer.down):
            yield _make_matrix_probe(linear)
    yield _make_matrix_probe(network.head)


def list_attention_probes(network: TransformerNetwork, num_keys: int) -> Iterator[ReadRows]:
    """Yield probes of attention to `num_keys` keys: of the scores, and of the outputs."""
    shape, generator = network.attention, torch.Generator().manual_seed(0)
    query = (_SCORE_FACTOR * torch.randn(1, shape.head_dim, generator=generator)).to(network.dtype)
    stored = torch.randn(1, num_keys, 2 * shape.num_kv_heads, shape.head_dim, generator=generator).to(network.dtype)
    keys, values = stored[0].chunk(2, 1)
    across = torch.cat([_make_cancelling_rows(query, generator) for _ in range(_NUM_KEYS_APART)])
    keys.copy_(across[torch.arange(num_keys) % _NUM_KEYS_APART, None])
    yield _make_attention_probe(network, query, stored.clone())
    keys.zero_()  # so that all have the same weight
    first, second = torch.randperm(num_keys, generator=generator)[: num_keys // 2 * 2].chunk(2)
    values.mul_(2.0 ** torch.randint(_MAX_EXPONENT, (num_keys, 1, 1), generator=generator))
    values[second] = -values[first]
    yield _make_attention_probe(network, query, stored)


def list_elementwise_probes(network: TransformerNetwork) -> Iterator[ReadRows]:
    """Yield probes of activations, rotations and norms."""
    every_number = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    for gate in _find_where_vector_code_differs(network.activation, every_number):
        yield _make_activation_probe(network, *gate)
    tried = torch.randn(2, _NUM_TRIED, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    for pair in _find_where_vector_code_differs(torch.mul, *tried):
        yield _make_rotation_probe(network, *pair)
    for layer in network.layers:
        for norm in (layer.attention_norm, layer.after_attention_norm, layer.mlp_norm, layer.after_mlp_norm):
            if isinstance(norm, RmsNorm):
                yield _make_norm_probe(norm, norm.weight.shape[0])
        if layer.query_norm is not None:
            yield _make_norm_probe(layer.query_norm, network.attention.num_heads, network.attention.head_dim)


def _make_matrix_probe(linear: Linear) -> ReadRows:
    rows = _MATRIX_FACTOR * _make_cancelling_rows(linear.weight_sample, torch.Generator().manual_seed(0))
    return lambda numbers: linear(rows[torch.tensor(numbers) % len(rows)])


def _make_cancelling_rows(vectors: Tensor, generator: torch.Generator) -> Tensor:
    """Return a row for each vector; their product is exactly zero, as a sum of large numbers.

    Both are [num, size]. Coordinates change places in random pairs, times powers of two, so that
    nothing is rounded.
    """
    size = vectors.shape[1]
    first, second = torch.randperm(size, generator=generator)[: size // 2 * 2].chunk(2)
    factors = (2.0 ** torch.randint(_MAX_EXPONENT, (len(first),), generator=generator)).to(vectors)
    rows = torch.zeros_like(vectors)
    rows[:, first] = vectors[:, second] * factors
    rows[:, second] = -vectors[:, first] * factors
    return rows


def _make_attention_probe(network: TransformerNetwork, query: Tensor, stored: Tensor) -> ReadRows:
    """Make a probe of rows that are all the same: [num_rows, num_heads * head_dim]."""
    shape = network.attention
    keys, values = stored.transpose(1, 2).chunk(2, 1)

    def read_rows(numbers: Sequence[int]) -> Tensor:
        num_rows = len(numbers) * shape.num_heads // shape.num_kv_heads
        queries = query.expand(1, shape.num_kv_heads, num_rows, -1).contiguous()
        bias = torch.zeros(1, 1, num_rows, keys.shape[2], dtype=network.dtype)
        out = shape(queries, keys, values, bias)
        return out.view(shape.num_kv_heads, len(numbers), -1).transpose(0, 1).flatten(1)

    return read_rows


def _find_where_vector_code_differs(function: Callable[..., Tensor], *numbers: Tensor) -> list[Sequence[Tensor]]:
    """Return the first arguments for which vector code and scalar code differ; [] if none."""
    # Vector code does not read strided numbers.
    apart = [torch.stack([each, each], 1)[:, 0] for each in numbers]
    by_vectors, by_scalars = function(*numbers), function(*apart)
    places = ((by_vectors != by_scalars) & by_vectors.isfinite()).nonzero().flatten()[:1]
    return [[each[place] for each in numbers] for place in places]


def _make_activation_probe(network: TransformerNetwork, gate: Tensor) -> ReadRows:
    size = network.layers[0].gate_up.num_outputs

    def read_rows(numbers: Sequence[int]) -> Tensor:
        gates, _ = gate.expand(len(numbers), size).contiguous().chunk(2, -1)
        return _spoil_uneven_rows(network.activation(gates))

    return read_rows


def _make_rotation_probe(network: TransformerNetwork, pair: Tensor, turn: Tensor) -> ReadRows:
    shape = network.attention

    def read_rows(numbers: Sequence[int]) -> Tensor:
        pairs = pair.expand(len(numbers), shape.num_heads + shape.num_kv_heads, shape.head_dim // 2).contiguous()
        turned = pairs * turn.expand(len(numbers), 1, shape.head_dim // 2).contiguous()
        return _spoil_uneven_rows(torch.view_as_real(turned).flatten(1))

    return read_rows


def _spoil_uneven_rows(rows: Tensor) -> Tensor:
    """Replace rows that differ from the first by NaN, which agrees with nothing."""
    return rows.where((rows == rows[:1]).all(1, keepdim=True), torch.nan)


def _make_norm_probe(norm: RmsNorm, *sizes: int) -> ReadRows:
    """Make a probe in float32, in which the norm computes."""
    norm = RmsNorm(norm.weight.float(), norm.eps)
    rows = torch.randn(_NUM_NORMED, *sizes, generator=torch.Generator().manual_seed(0))
    return lambda numbers: norm(rows[torch.tensor(numbers) % len(rows)]).flatten(1)
