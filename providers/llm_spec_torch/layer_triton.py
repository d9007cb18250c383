"""Five CUDA kernels for a layer's work between its matrix products, instead of thirteen.

A pass of a few tokens reads every weight once. All its other work is small, and takes as long as
starting its kernels. On one H200, with 32 layers of 4,096 in bfloat16, matrix products take 3.8 of
a pass's 5.6 ms.

Attention reads the cache in parallel parts (Flash-Decoding, Dao et al. 2023), because a few rows
would keep only a few of a GPU's processors busy. The number of parts depends on the number of keys
alone, and a row's numbers never depend on its neighbours. Norms, rotations and softmax are computed
in float32.

Triton has no types, so everything of it is Any here. It reads a kernel's annotations as code. So
they are strings, and this file does not import annotations from the future.
"""

# ruff: noqa: N803, PLR0917 - kernels' arguments are positional, and constants are in capitals

import importlib
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import torch
from torch import Tensor

from llm_spec_torch.network import FoldedRmsNorm, RmsNorm

__all__ = ["TritonLayerKernels"]

triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")
if TYPE_CHECKING:
    constexpr: TypeAlias = Any  # noqa: PYI042 - Triton's name
else:
    constexpr = tl.constexpr

_MAX_QUERY_ROWS: Final = 128  # of one key head in a pass: tokens times queries that share its keys
_MIN_DOT_SIZE: Final = 16  # of each side of a product in Triton
_MAX_HEAD_DIM: Final = 256
_MIN_PART: Final = 64  # keys that a program reads at once
_MAX_PARTS: Final = 16
_COLUMNS: Final = 1024  # of one program of `activate`


class TritonLayerKernels:
    """The kernels for one shape of attention; `network.LayerKernels` documents them."""

    def __init__(self, *, num_heads: int, num_kv_heads: int, head_dim: int, scale: float) -> None:
        self._num_kv_heads, self._group, self._head_dim = num_kv_heads, num_heads // num_kv_heads, head_dim
        self._num_heads = num_heads
        self._scale = scale

    @staticmethod
    def supports(head_dim: int) -> bool:
        """Return True if heads may have this size: powers of two from 16 to 256."""
        return _MIN_DOT_SIZE <= head_dim <= _MAX_HEAD_DIM and head_dim & (head_dim - 1) == 0

    def has_room(self, width: int) -> bool:
        return width * self._group <= _MAX_QUERY_ROWS

    def add_and_norm(
        self, states: Tensor, update: Tensor | None, norm: RmsNorm | FoldedRmsNorm
    ) -> tuple[Tensor, Tensor]:
        if isinstance(norm, FoldedRmsNorm):
            raise TypeError("a folded norm has no weight; norms are folded only on a CPU")
        num_rows, size = states.shape
        summed = states if update is None else torch.empty_like(states)
        normed = torch.empty_like(states)
        block = _pad_to_power_of_two(size)
        with _device_of(states):
            _add_and_norm[(num_rows,)](
                states, update, norm.weight, summed, normed, size, norm.eps,
                HAS_UPDATE=update is not None, BLOCK=block, num_warps=_choose_num_warps(block),
            )  # fmt: skip
        return summed, normed

    def activate(self, gate_up: Tensor) -> Tensor:
        num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(num_rows, size)
        with _device_of(out):
            _activate[(num_rows, -(-size // _COLUMNS))](gate_up, out, size, BLOCK=_COLUMNS, num_warps=4)
        return out

    def rotate_and_store(
        self,
        heads: Tensor,
        rotation: Tensor,
        norms: tuple[RmsNorm | None, RmsNorm | None],
        cache_rows: Tensor,
        stored: Tensor,
        batch: int,
    ) -> Tensor:
        num_rows = heads.shape[0]
        queries = heads.new_empty(num_rows, self._num_heads, self._head_dim)
        query_weight, key_weight = (None if norm is None else norm.weight for norm in norms)
        eps = 0.0 if norms[0] is None else norms[0].eps
        with _device_of(heads):
            _rotate_and_store[(num_rows, self._num_heads + 2 * self._num_kv_heads)](
                heads, torch.view_as_real(rotation), query_weight, key_weight, eps, cache_rows, queries,
                stored, num_rows // batch,
                NUM_KV=self._num_kv_heads, GROUP=self._group, HEAD_DIM=self._head_dim,
                HAS_NORM=query_weight is not None, num_warps=1,
            )  # fmt: skip
        return queries.view(batch, self._num_kv_heads, -1, self._head_dim)

    def attend(self, queries: Tensor, stored: Tensor, positions: Tensor, num_keys: int, window: int | None) -> Tensor:
        positions = positions.contiguous()
        batch, width = positions.shape
        num_rows = width * self._group
        part = max(_MIN_PART, _pad_to_power_of_two(-(-num_keys // _MAX_PARTS)))
        num_parts = -(-num_keys // part)
        shape = (batch, self._num_kv_heads, num_parts, num_rows)
        outs = torch.empty(*shape, self._head_dim, dtype=torch.float32, device=queries.device)
        maxima, sums = torch.empty(2, *shape, dtype=torch.float32, device=queries.device)
        out = queries.new_empty(batch * width, self._num_heads * self._head_dim)
        with _device_of(queries):
            _attend_to_part[(num_parts, self._num_kv_heads, batch)](
                queries, stored, positions, outs, maxima, sums, self._scale, window or 0, num_keys, width,
                stored.stride(0), NUM_KV=self._num_kv_heads, GROUP=self._group, HEAD_DIM=self._head_dim,
                ROWS=max(_MIN_DOT_SIZE, _pad_to_power_of_two(num_rows)), KEYS=_MIN_PART, PART=part, num_warps=4,
                num_stages=2,
            )  # fmt: skip
            _join_parts[(num_rows, self._num_kv_heads, batch)](
                outs, maxima, sums, out, width, num_parts,
                NUM_KV=self._num_kv_heads, GROUP=self._group, HEAD_DIM=self._head_dim, PARTS=_MAX_PARTS, num_warps=1,
            )  # fmt: skip
        return out


def _device_of(tensor: Tensor) -> Any:
    """Make a tensor's device current, because Triton launches on the current device."""
    return cast("Any", torch.cuda.device_of)(tensor)


def _pad_to_power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _choose_num_warps(block: int) -> int:
    return min(16, max(1, block // 512))


# ------------------------------------------------------------------------------------------ kernels


def _add_and_norm_kernel(
    states: "Any",
    update: "Any",
    weight: "Any",
    summed: "Any",
    normed: "Any",
    size: "Any",
    eps: "Any",
    HAS_UPDATE: constexpr,
    BLOCK: constexpr,
) -> None:
    """Compute one row. `states`, `update`, `summed`, `normed` [num_rows, size], `weight` [size]."""
    column = tl.arange(0, BLOCK)
    inside = column < size
    at = tl.program_id(0).to(tl.int64) * size + column
    row = tl.load(states + at, mask=inside, other=0.0)
    if HAS_UPDATE:
        row = (row.to(tl.float32) + tl.load(update + at, mask=inside, other=0.0).to(tl.float32)).to(row.dtype)
        tl.store(summed + at, row, mask=inside)
    numbers = row.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(numbers * numbers, 0) / size + eps)
    factors = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + at, (numbers * scale * factors).to(row.dtype), mask=inside)


def _activate_kernel(
    gate_up: "Any",
    out: "Any",
    size: "Any",
    BLOCK: constexpr,
) -> None:
    """Compute some columns of a row. `gate_up` [num_rows, 2 * size], `out` [num_rows, size]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_up + row * 2 * size + column, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * size + size + column, mask=inside, other=0.0)
    numbers = gate.to(tl.float32)
    active = (numbers / (1.0 + tl.exp(-numbers))).to(gate.dtype)
    tl.store(out + row * size + column, active * up, mask=inside)


def _rotate_and_store_kernel(
    heads: "Any",
    rotation: "Any",
    query_weight: "Any",
    key_weight: "Any",
    eps: "Any",
    cache_rows: "Any",
    queries: "Any",
    stored: "Any",
    width: "Any",
    NUM_KV: constexpr,
    GROUP: constexpr,
    HEAD_DIM: constexpr,
    HAS_NORM: constexpr,
) -> None:
    """Compute one head of a row.

    `heads` [num_rows, num_heads + 2 * num_kv_heads, head_dim], `rotation`
    [num_rows, head_dim / 2, 2], `queries` [batch, num_kv_heads, width * group, head_dim], `stored`
    [batch, capacity, 2 * num_kv_heads, head_dim]. `cache_rows` [num_rows] are places in `stored`
    with its first two dimensions flattened.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, HEAD_DIM // 2)
    start = heads + (row * (GROUP * NUM_KV + 2 * NUM_KV) + head) * HEAD_DIM
    even, odd = tl.load(start + 2 * pair), tl.load(start + 2 * pair + 1)
    if head < GROUP * NUM_KV + NUM_KV:
        a, b = even.to(tl.float32), odd.to(tl.float32)
        if HAS_NORM:
            scale = 1.0 / tl.sqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / HEAD_DIM + eps)
            if head < GROUP * NUM_KV:
                first, second = tl.load(query_weight + 2 * pair), tl.load(query_weight + 2 * pair + 1)
            else:
                first, second = tl.load(key_weight + 2 * pair), tl.load(key_weight + 2 * pair + 1)
            a = (a * scale * first.to(tl.float32)).to(even.dtype).to(tl.float32)
            b = (b * scale * second.to(tl.float32)).to(even.dtype).to(tl.float32)
        turn = rotation + (row * (HEAD_DIM // 2) + pair) * 2
        cosine, sine = tl.load(turn), tl.load(turn + 1)
        even_turned, odd_turned = a * cosine - b * sine, a * sine + b * cosine
        even, odd = even_turned.to(even.dtype), odd_turned.to(odd.dtype)
    if head < GROUP * NUM_KV:
        key_head, member = head // GROUP, head % GROUP
        place = ((row // width * NUM_KV + key_head) * width + row % width) * GROUP + member
        tl.store(queries + place * HEAD_DIM + 2 * pair, even)
        tl.store(queries + place * HEAD_DIM + 2 * pair + 1, odd)
    else:
        place = tl.load(cache_rows + row) * (2 * NUM_KV) + head - GROUP * NUM_KV
        tl.store(stored + place * HEAD_DIM + 2 * pair, even)
        tl.store(stored + place * HEAD_DIM + 2 * pair + 1, odd)


def _attend_to_part_kernel(
    queries: "Any",
    stored: "Any",
    positions: "Any",
    outs: "Any",
    maxima: "Any",
    sums: "Any",
    scale: "Any",
    window: "Any",
    num_keys: "Any",
    width: "Any",
    sequence_stride: "Any",
    NUM_KV: constexpr,
    GROUP: constexpr,
    HEAD_DIM: constexpr,
    ROWS: constexpr,
    KEYS: constexpr,
    PART: constexpr,
) -> None:
    """Attend with all queries of one key head to one part of the keys.

    `queries` [batch, num_kv_heads, width * group, head_dim], `stored`
    [batch, capacity, 2 * num_kv_heads, head_dim], `positions` [batch, width]; `outs`
    [batch, num_kv_heads, num_parts, width * group, head_dim], `maxima` and `sums` the same without
    the last dimension. A `window` of 0 means no window.
    """
    part, key_head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    row, column = tl.arange(0, ROWS), tl.arange(0, HEAD_DIM)
    num_rows = width * GROUP
    inside = row < num_rows
    position = tl.load(positions + sequence * width + row // GROUP, mask=inside, other=0)
    position = tl.minimum(position, num_keys - 1)
    at = (sequence * NUM_KV + key_head) * num_rows + row
    query = tl.load(queries + at[:, None] * HEAD_DIM + column[None, :], mask=inside[:, None], other=0.0)
    keys = stored + sequence * sequence_stride + key_head * HEAD_DIM
    values = keys + NUM_KV * HEAD_DIM
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    stop = tl.minimum((part + 1) * PART, tl.max(position, 0) + 1)
    for start in range(part * PART, stop, KEYS):
        place = start + tl.arange(0, KEYS)
        known = place < num_keys
        offset = place.to(tl.int64) * (2 * NUM_KV * HEAD_DIM)
        block = tl.load(keys + offset[None, :] + column[:, None], mask=known[None, :], other=0.0)
        score = tl.dot(query, block, input_precision="ieee") * scale
        visible = place[None, :] <= position[:, None]
        if window > 0:
            visible = visible & (place[None, :] > position[:, None] - window)
        score = tl.where(visible, score, float("-inf"))
        above = tl.maximum(best, tl.max(score, 1))
        finite = tl.where(above == float("-inf"), 0.0, above)
        weight = tl.exp(score - finite[:, None])
        fade = tl.exp(best - finite)
        total = total * fade + tl.sum(weight, 1)
        block = tl.load(values + offset[:, None] + column[None, :], mask=known[:, None], other=0.0)
        out = out * fade[:, None] + tl.dot(weight.to(block.dtype), block, input_precision="ieee")
        best = above
    at = ((sequence * NUM_KV + key_head) * tl.num_programs(0) + part) * num_rows + row
    tl.store(outs + at[:, None] * HEAD_DIM + column[None, :], out, mask=inside[:, None])
    tl.store(maxima + at, best, mask=inside)
    tl.store(sums + at, total, mask=inside)


def _join_parts_kernel(
    outs: "Any",
    maxima: "Any",
    sums: "Any",
    joined: "Any",
    width: "Any",
    num_parts: "Any",
    NUM_KV: constexpr,
    GROUP: constexpr,
    HEAD_DIM: constexpr,
    PARTS: constexpr,
) -> None:
    """Join the parts of one query. `joined` [batch, width, num_heads, head_dim]; rest as above."""
    row, key_head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    num_rows = width * GROUP
    part, column = tl.arange(0, PARTS), tl.arange(0, HEAD_DIM)
    at = ((sequence * NUM_KV + key_head) * num_parts + part) * num_rows + row
    known = part < num_parts
    maximum = tl.load(maxima + at, mask=known, other=float("-inf"))
    weight = tl.exp(maximum - tl.max(maximum, 0))
    total = tl.sum(weight * tl.load(sums + at, mask=known, other=0.0), 0)
    parts = tl.load(outs + at[:, None] * HEAD_DIM + column[None, :], mask=known[:, None], other=0.0)
    out = tl.sum(parts * weight[:, None], 0) / total
    place = (sequence * width + row // GROUP) * (GROUP * NUM_KV) + key_head * GROUP + row % GROUP
    tl.store(joined + place * HEAD_DIM + column, out.to(joined.dtype.element_ty))


_add_and_norm: Any = triton.jit(_add_and_norm_kernel)
_activate: Any = triton.jit(_activate_kernel)
_rotate_and_store: Any = triton.jit(_rotate_and_store_kernel)
_attend_to_part: Any = triton.jit(_attend_to_part_kernel)
_join_parts: Any = triton.jit(_join_parts_kernel)
