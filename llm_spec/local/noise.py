"""Noise as a pure function of (seed, position, token): the root of "one seed, one text".

One Philox call gives four words, one for each of four neighbouring tokens. Uniforms are `(word + 0.5) * 2**-32` in
float64: never 0 and never 1 (in float32 the largest would round to 1 and its Gumbel noise to infinity).

Gumbel noise is `-log(e)`, with independent standard exponentials `e`. They are drawn by groups of 256 neighbouring
tokens, first the least of each group: an exponential of rate 256, at a random token of the group. Since exponentials
have no memory, each other token's is the least and a standard exponential of its own. So it is known how much noise a
token of a group has at most, and most tokens are too unlikely to be sampled with that: their noise is never computed.
Large vocabularies are sampled from in a fraction of the time. (Maddison et al., arXiv 1411.0030, draw the largest of a
set first, too.)

`llm_spec_torch.noise` computes the same on a device. Its words are equal bit for bit; its Gumbel noise is within 2 ulp,
because the logarithms of numpy and torch differ.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llm_spec.local.philox import MASK32, philox4x32

__all__ = [
    "NOISE_GROUP_SIZE",
    "NoiseGroups",
    "NoisePurpose",
    "compute_gumbel_number",
    "draw_noise_groups",
    "draw_uniform_number",
    "make_gumbel_noise",
    "make_gumbel_noise_of_tokens",
    "make_uniform_noise",
]

Floats: TypeAlias = NDArray[np.float64]

NOISE_GROUP_SIZE: Final = 256  # tokens

_SCALE = 2.0**-32


class NoisePurpose(IntEnum):
    """What a stream of noise is for; sharing one between two purposes biases the output (vLLM #54282)."""

    TOKEN = 0  # coupled sampling: draft and target use the same noise on purpose
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    BONUS = 4
    GROUP = 5  # coupled sampling, too: the largest noise of a group of tokens, and whose it is


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


def draw_uniform_number(
    seed: int, position: int, purpose: NoisePurpose, round_index: int = 0, *, token_id: int = 0
) -> float:
    """A token's `make_uniform_noise` at one position, in plain integers: a single number costs numpy far more."""
    index, lane = divmod(token_id, 4)
    counter = (index, position & MASK32, position >> 32, _combine_purpose_and_round(purpose, round_index))
    word: int = philox4x32(counter, _split_seed_into_key(seed))[lane]
    return (word + 0.5) * _SCALE


class NoiseGroups(NamedTuple):
    """Of each group of `NOISE_GROUP_SIZE` tokens the least exponential, so the largest noise, and whose it is.

    Both are [num_positions, num_groups]. The last group's token may be one beyond the vocabulary.
    """

    least: Floats
    leaders: NDArray[np.int64]


def draw_noise_groups(seed: int, positions: NDArray[np.int64], vocab_size: int) -> NoiseGroups:
    """Those of a vocabulary, for coupled sampling. One Philox call gives two words to each of two groups."""
    num_groups = -(-vocab_size // NOISE_GROUP_SIZE)
    position = positions[:, None]
    counter = (
        np.arange(-(-num_groups // 2), dtype=np.int64)[None, :],
        position & MASK32,
        position >> 32,
        int(NoisePurpose.GROUP),
    )
    w0, w1, w2, w3 = philox4x32(counter, _split_seed_into_key(seed))
    words = np.stack([w0, w2], axis=-1).reshape(len(positions), -1)[:, :num_groups]
    choices = np.stack([w1, w3], axis=-1).reshape(len(positions), -1)[:, :num_groups]
    least = _replace_by_negative_log((words + 0.5) * _SCALE) / NOISE_GROUP_SIZE
    leaders = np.arange(num_groups) * NOISE_GROUP_SIZE + (choices * NOISE_GROUP_SIZE >> 32)
    return NoiseGroups(least, leaders)


def make_gumbel_noise(seed: int, positions: NDArray[np.int64], vocab_size: int) -> Floats:
    """Standard Gumbel noise for coupled sampling: [num_positions, vocab_size], between -3.3 and 28.5.

    The argmax of log-probabilities plus this noise is a sample from their distribution (the Gumbel-max trick).
    """
    groups = draw_noise_groups(seed, positions, vocab_size)
    noise = _replace_by_negative_log(make_uniform_noise(seed, positions, vocab_size, NoisePurpose.TOKEN))
    rows, columns = np.nonzero(groups.leaders < vocab_size)
    noise[rows, groups.leaders[rows, columns]] = 0.0
    noise += np.repeat(groups.least, NOISE_GROUP_SIZE, axis=1)[:, :vocab_size]
    return _replace_by_negative_log(noise)


def make_gumbel_noise_of_tokens(
    seed: int, position: int, token_ids: NDArray[np.int64], groups: NoiseGroups, row: int
) -> Floats:
    """The `make_gumbel_noise` of `token_ids` ([num_tokens]) at one position, the `row`-th of `groups`: [num_tokens]."""
    counter = (token_ids >> 2, position & MASK32, position >> 32, int(NoisePurpose.TOKEN))
    words = np.choose(token_ids & 3, philox4x32(counter, _split_seed_into_key(seed)))
    noise = _replace_by_negative_log((words + 0.5) * _SCALE)
    group = token_ids // NOISE_GROUP_SIZE
    noise[token_ids == groups.leaders[row, group]] = 0.0
    noise += groups.least[row, group]
    return _replace_by_negative_log(noise)


def compute_gumbel_number(seed: int, position: int, token_id: int, groups: NoiseGroups, row: int) -> float:
    """The same of one token, as a plain number: within 2 ulp of the array's."""
    group = token_id // NOISE_GROUP_SIZE
    exponential = float(groups.least[row, group])
    if token_id != groups.leaders[row, group]:
        exponential -= math.log(draw_uniform_number(seed, position, NoisePurpose.TOKEN, token_id=token_id))
    return -math.log(exponential)


def _replace_by_negative_log(values: Floats) -> Floats:
    """`-log(values)`, in place: a block of noise is large, and new memory costs as much as the logarithm."""
    np.log(values, out=values)
    return np.negative(values, out=values)


def _split_seed_into_key(seed: int) -> tuple[int, int]:
    return seed & MASK32, seed >> 32


def _combine_purpose_and_round(purpose: NoisePurpose, round_index: int) -> int:
    return int(purpose) | round_index << 8
