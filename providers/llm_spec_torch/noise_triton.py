"""`noise.make_gumbel_tensor` in one CUDA kernel: no intermediate result goes through memory.

`tl.philox` on 32-bit counters is Philox 4x32-10 with the words of `llm_spec.local.noise` (tested in
Triton's interpreter, which needs no GPU). Triton has no types, so everything of it is Any here. It
reads a kernel's annotations as code. So they are strings, and this file does not import annotations
from the future.
"""

import importlib
from typing import Any, Final

import torch
from torch import Tensor

from llm_spec.local.noise import NOISE_GROUP_SIZE, NoisePurpose

__all__ = ["make_gumbel_tensor_fused"]

triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")

_NUM_QUADS: Final = 256  # Philox calls of one program, four tokens each
_BLOCK: Any = tl.constexpr(_NUM_QUADS)
_SCALE: Any = tl.constexpr(2.0**-32)
_GROUP_SIZE: Any = tl.constexpr(NOISE_GROUP_SIZE)
_GROUP_PURPOSE: Any = tl.constexpr(int(NoisePurpose.GROUP))


def make_gumbel_tensor_fused(key: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Return standard Gumbel noise, [num_positions, vocab_size] float64.

    `key` is int64 [2], `positions` int64 [num_positions]. With leading dimensions, `positions` is
    [batch, num_positions], and `key` [batch, 2] or [2].
    """
    rows = positions.contiguous().view(-1)
    keys = key[..., None, :].expand(*positions.shape, 2).contiguous()
    out = torch.empty(rows.shape[0], vocab_size, dtype=torch.float64, device=positions.device)
    grid = (rows.shape[0], -(-vocab_size // (4 * _NUM_QUADS)))
    device_of: Any = torch.cuda.device_of  # it has no types
    with device_of(out):  # Triton launches on the current device, whatever its arguments are on
        _kernel[grid](out, keys, rows, vocab_size)
    return out.view(*positions.shape, vocab_size)


def _gumbel_noise_kernel(out: "Any", keys: "Any", positions: "Any", vocab_size: "Any") -> None:
    """Compute some Philox calls of a row. `out` [num_rows, vocab_size], `keys` [num_rows, 2]."""
    row = tl.program_id(0).to(tl.int64)
    seed = tl.load(keys + 2 * row) | (tl.load(keys + 2 * row + 1) << 32)
    position = tl.load(positions + row)
    quad = tl.program_id(1) * _BLOCK + tl.arange(0, _BLOCK)
    token = 4 * quad
    zero = quad * 0
    low, high = zero + position.to(tl.int32), zero + (position >> 32).to(tl.int32)
    group = token // _GROUP_SIZE
    g0, g1, g2, g3 = tl.philox(seed, group // 2, low, high, zero + _GROUP_PURPOSE)
    least = _exponential(tl.where(group % 2 == 0, g0, g2)) / _GROUP_SIZE
    choice = tl.where(group % 2 == 0, g1, g3).to(tl.uint32).to(tl.int64) * _GROUP_SIZE >> 32
    leader = group * _GROUP_SIZE + choice.to(tl.int32)
    w0, w1, w2, w3 = tl.philox(seed, quad, low, high, zero)
    start = out + row * vocab_size
    tl.store(start + token, _gumbel(w0, least, leader == token), mask=token < vocab_size)
    tl.store(start + token + 1, _gumbel(w1, least, leader == token + 1), mask=token + 1 < vocab_size)
    tl.store(start + token + 2, _gumbel(w2, least, leader == token + 2), mask=token + 2 < vocab_size)
    tl.store(start + token + 3, _gumbel(w3, least, leader == token + 3), mask=token + 3 < vocab_size)


def _draw_exponential(word: "Any") -> "Any":
    return -tl.log((word.to(tl.uint32).to(tl.float64) + 0.5) * _SCALE)


def _compute_gumbel_noise(word: "Any", least: "Any", is_leader: "Any") -> "Any":
    return -tl.log(least + tl.where(is_leader, 0.0, _exponential(word)))


_exponential: Any = triton.jit(_draw_exponential)
_gumbel: Any = triton.jit(_compute_gumbel_noise)
_kernel: Any = triton.jit(_gumbel_noise_kernel)
