"""Noise as a pure function of (seed, position, token): the root of "one seed, one text".

One Philox call gives four words, one for each of four neighbouring tokens. Uniforms are `(word + 0.5) * 2**-32` in
float64: never 0 and never 1 (in float32 the largest would round to 1 and its Gumbel noise to infinity). Backends agree
on the words bit for bit and on the Gumbel noise within 2 ulp, since their logarithms differ.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llm_spec.tokens.philox import MASK32, Array, get_array_namespace, philox4x32

__all__ = ["Purpose", "gumbel", "uniform", "uniform_number"]

_SCALE = 2.0**-32


class Purpose(IntEnum):
    """What a stream of noise is for; sharing one between two purposes biases the output (vLLM #54282)."""

    TOKEN = 0  # coupled sampling: draft and target use the same noise on purpose
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    BONUS = 4


def uniform(seed: int, positions: Array, vocab_size: int, purpose: Purpose, round_index: int = 0) -> Array:
    """Uniform noise in (0, 1): [num_positions, vocab_size], float64.

    `positions` is int64 [num_positions], numpy or torch; the noise comes out in its library, on its device. `seed` is
    below 2**64. `round_index` below 2**24 is for rejection sampling: a position that is drafted again in a later round
    must not meet the noise that it met before, since what has been seen of it steers what is drafted.
    """
    xp: Any = get_array_namespace(positions)
    tokens = xp.arange(-(-vocab_size // 4), dtype=xp.int64, device=positions.device)[None, :]
    position = positions[:, None]
    counter = (tokens, position & MASK32, position >> 32, _stream_counter(purpose, round_index))
    words = philox4x32(counter, _seed_to_key(seed))
    out = xp.empty((*words[0].shape, 4), dtype=xp.float64, device=positions.device)
    for lane, word in enumerate(words):
        out[..., lane] = word
    out += 0.5
    out *= _SCALE
    return xp.reshape(out, (out.shape[0], -1))[:, :vocab_size]


def uniform_number(seed: int, position: int, purpose: Purpose, round_index: int = 0) -> float:
    """`uniform` of token 0 at one position, in plain integers (a single number costs numpy thirty times as much)."""
    counter = (0, position & MASK32, position >> 32, _stream_counter(purpose, round_index))
    word: int = philox4x32(counter, _seed_to_key(seed))[0]
    return (word + 0.5) * _SCALE


def gumbel(seed: int, positions: Array, vocab_size: int, purpose: Purpose, round_index: int = 0) -> Array:
    """Standard Gumbel noise `-log(-log(u))`: [num_positions, vocab_size], float64, between -3.14 and 22.9.

    The argmax of log-probabilities plus this noise is a draw from their law.
    """
    noise = uniform(seed, positions, vocab_size, purpose, round_index)
    return _to_gumbel_numpy(noise) if isinstance(positions, np.ndarray) else _to_gumbel(noise)


def _to_gumbel(uniforms: Array) -> Array:
    xp: Any = get_array_namespace(uniforms)
    return -xp.log(-xp.log(uniforms))


def _to_gumbel_numpy(uniforms: NDArray[np.float64]) -> NDArray[np.float64]:
    """In place: a block of noise is large, and new memory costs as much as the logarithm."""
    for _ in range(2):
        np.log(uniforms, out=uniforms)
        np.negative(uniforms, out=uniforms)
    return uniforms


def _seed_to_key(seed: int) -> tuple[int, int]:
    return seed & MASK32, seed >> 32


def _stream_counter(purpose: Purpose, round_index: int) -> int:
    return int(purpose) | round_index << 8
