"""`noise.make_gumbel_tensor` in one CUDA kernel: words, uniforms and logarithms without a trip to memory.

`tl.philox` on 32-bit counters is Philox 4x32-10 with the words of `llm_spec.tokens.philox` (tested in Triton's
interpreter, which needs no GPU). Triton has no types: everything of it is Any here; and it reads the annotations of a
kernel as code, so those are strings, and this file does not import annotations from the future.
"""

import importlib
from typing import Any, Final

import torch
from torch import Tensor

__all__ = ["make_gumbel_tensor_fused"]

triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")

_NUM_QUADS: Final = 256  # Philox calls of one program, four tokens each
_BLOCK: Any = tl.constexpr(_NUM_QUADS)
_SCALE: Any = tl.constexpr(2.0**-32)


def make_gumbel_tensor_fused(key: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise: [num_positions, vocab_size] float64; key int64 [2], positions int64 [num_positions].

    With leading dimensions: positions [batch, num_positions], key [batch, 2] or [2].
    """
    rows = positions.contiguous().view(-1)
    keys = key[..., None, :].expand(*positions.shape, 2).contiguous()
    out = torch.empty(rows.shape[0], vocab_size, dtype=torch.float64, device=positions.device)
    grid = (rows.shape[0], -(-vocab_size // (4 * _NUM_QUADS)))
    device_of: Any = torch.cuda.device_of  # without types
    with device_of(out):  # Triton launches on the current device, whatever its arguments are on
        _kernel[grid](out, keys, rows, vocab_size)
    return out.view(*positions.shape, vocab_size)


def _gumbel_noise_kernel(out: "Any", keys: "Any", positions: "Any", vocab_size: "Any") -> None:
    """One program: Philox calls of one row. `out` [num_rows, vocab_size], keys [num_rows, 2]."""
    row = tl.program_id(0).to(tl.int64)
    seed = tl.load(keys + 2 * row) | (tl.load(keys + 2 * row + 1) << 32)
    position = tl.load(positions + row)
    quad = tl.program_id(1) * _BLOCK + tl.arange(0, _BLOCK)
    zero = quad * 0
    low, high = zero + position.to(tl.int32), zero + (position >> 32).to(tl.int32)
    w0, w1, w2, w3 = tl.philox(seed, quad, low, high, zero)
    start = out + row * vocab_size
    _store(start, w0, 4 * quad, vocab_size)
    _store(start, w1, 4 * quad + 1, vocab_size)
    _store(start, w2, 4 * quad + 2, vocab_size)
    _store(start, w3, 4 * quad + 3, vocab_size)


def _store_gumbel_noise(start: "Any", word: "Any", token: "Any", vocab_size: "Any") -> None:
    uniform = (word.to(tl.uint32).to(tl.float64) + 0.5) * _SCALE
    tl.store(start + token, -tl.log(-tl.log(uniform)), mask=token < vocab_size)


_store: Any = triton.jit(_store_gumbel_noise)
_kernel: Any = triton.jit(_gumbel_noise_kernel)
