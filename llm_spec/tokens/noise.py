"""Noise as a pure function of (seed, position, token): the root of "one seed, one text".

One Philox call gives four words, one for each of four neighbouring tokens. Uniforms are `(word + 0.5) * 2**-32` in
float64: never 0 and never 1 (in float32 the largest would round to 1 and its Gumbel noise to infinity).

`llm_spec_torch.noise` computes the same on a device. Its words are equal bit for bit; its Gumbel noise is within 2 ulp,
because the logarithms of numpy and torch differ.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from llm_spec.tokens.philox import MASK32, philox4x32

__all__ = ["NoisePurpose", "draw_uniform_number", "make_gumbel_noise", "make_uniform_noise"]

Floats: TypeAlias = NDArray[np.float64]

_SCALE = 2.0**-32


class NoisePurpose(IntEnum):
    """What a stream of noise is for; sharing one between two purposes biases the output (vLLM #54282)."""

    TOKEN = 0  # coupled sampling: draft and target use the same noise on purpose
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    BONUS = 4


def make_uniform_noise(
    seed: int, positions: NDArray[np.int64], vocab_size: int, purpose: NoisePurpose, round_index: int = 0
) -> Floats:
    """Uniform noise in (0, 1): [num_positions, vocab_size].

    `positions`: [num_positions]. `seed` is below 2**64, `round_index` below 2**24. The round is for rejection sampling:
    a position that is drafted again in a later round needs new noise, since what was seen of the old steers the draft.
    """
    tokens = np.arange(-(-vocab_size // 4), dtype=np.int64)[None, :]
    position = positions[:, None]
    counter = (tokens, position & MASK32, position >> 32, _combine_purpose_and_round(purpose, round_index))
    words = philox4x32(counter, _split_seed_into_key(seed))
    out = np.empty((*words[0].shape, 4), dtype=np.float64)
    for lane, word in enumerate(words):
        out[..., lane] = word
    out += 0.5
    out *= _SCALE
    return out.reshape(out.shape[0], -1)[:, :vocab_size]


def draw_uniform_number(seed: int, position: int, purpose: NoisePurpose, round_index: int = 0) -> float:
    """`uniform` of token 0 at one position, in plain integers (a single number costs numpy thirty times as much)."""
    counter = (0, position & MASK32, position >> 32, _combine_purpose_and_round(purpose, round_index))
    word: int = philox4x32(counter, _split_seed_into_key(seed))[0]
    return (word + 0.5) * _SCALE


def make_gumbel_noise(
    seed: int, positions: NDArray[np.int64], vocab_size: int, purpose: NoisePurpose, round_index: int = 0
) -> Floats:
    """Standard Gumbel noise `-log(-log(u))`: [num_positions, vocab_size], between -3.14 and 22.9.

    The argmax of log-probabilities plus this noise is a sample from their distribution (the Gumbel-max trick).
    """
    noise = make_uniform_noise(seed, positions, vocab_size, purpose, round_index)
    for _ in range(2):  # in place: a block of noise is large, and new memory costs as much as the logarithm
        np.log(noise, out=noise)
        np.negative(noise, out=noise)
    return noise


def _split_seed_into_key(seed: int) -> tuple[int, int]:
    return seed & MASK32, seed >> 32


def _combine_purpose_and_round(purpose: NoisePurpose, round_index: int) -> int:
    return int(purpose) | round_index << 8
