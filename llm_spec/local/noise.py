"""Noise as a pure function of (seed, position, token): the root of "one seed, one text".

One Philox call gives four words, one for each of four neighbouring tokens. Uniforms are
`(word + 0.5) * 2**-32` in float64: never 0 and never 1. In float32 the largest would round to 1 and
its Gumbel noise to infinity.

Gumbel noise is `-log(e)` of independent standard exponentials `e`. They are drawn by groups of 256
neighbouring tokens. The least of a group is drawn first: an exponential of rate 256, at a random
token of the group. Exponentials are memoryless, so each other token's exponential is the least plus
a standard exponential of its own. The largest noise of each group is therefore known before the
rest. Most tokens are too unlikely to be sampled even with that noise, so their own is never
computed. This makes sampling from large vocabularies much faster. (Maddison et al., arXiv
1411.0030, also draw the maximum of a set first.)

`llm_spec_torch.noise` computes the same on a device. Its words are equal bit for bit. Its Gumbel
noise is within 2 ulp, because the logarithms of numpy and torch differ.

Philox 4x32-10 gives random words as a pure function of counter and key: Salmon et al., "Parallel
Random Numbers: As Easy as 1, 2, 3" (SC 2011), checked against the Random123 vectors. (numpy's own
Philox is 4x64.) A word has 32 bits and is stored in an int64. The product of two words wraps to the
right 64 bits. `(product >> 32) & 0xFFFFFFFF` is its high word, although the shift is arithmetic.

`philox4x32` is the only function of `llm_spec.local` that takes arrays of another library:
`llm_spec_torch.noise` calls it with int64 tensors, on a GPU too, so that host and device share one
generator. It uses only their operators.
"""

from __future__ import annotations

import math
from enum import IntEnum
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "MASK32",
    "NOISE_GROUP_SIZE",
    "NoiseGroups",
    "NoisePurpose",
    "compute_gumbel_number",
    "draw_noise_groups",
    "draw_uniform_number",
    "make_gumbel_noise",
    "make_gumbel_noise_of_tokens",
    "make_uniform_noise",
    "philox4x32",
]

Word: TypeAlias = Any  # an int, an int64 numpy array or an int64 torch tensor
Words: TypeAlias = tuple[Word, Word, Word, Word]

MASK32 = 0xFFFFFFFF
_NUM_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_SHIFT = np.uint64(32)
_LOW_WORD = np.uint64(MASK32)


def philox4x32(counter: Words, key: tuple[Word, Word]) -> Words:
    """Return four random words for each counter.

    The four counter words are ints, numpy arrays or torch tensors (int64) that broadcast together;
    if any is an array or a tensor, the first one is. The random words have the common shape and the
    same type. The key is two ints; with torch counters it may be two int64 tensors that broadcast
    with them.
    """
    c0, c1, c2, c3 = counter
    if isinstance(c0, np.ndarray):
        return _philox4x32_numpy(counter, key)
    for k0, k1 in _cached_round_keys(key) if isinstance(key[0], int) else _make_round_keys(key):
        product_0 = c0 * _MULTIPLIERS[0]
        product_1 = c2 * _MULTIPLIERS[1]
        c0 = ((product_1 >> 32) & MASK32) ^ c1 ^ k0
        c2 = ((product_0 >> 32) & MASK32) ^ c3 ^ k1
        c1 = product_1 & MASK32
        c3 = product_0 & MASK32
    return c0, c1, c2, c3


def _philox4x32_numpy(counter: Words, key: tuple[int, int]) -> Words:
    """Compute `philox4x32` on numpy arrays, in place, with two words in each uint64.

    A left shift drops the high word, and both pairs are computed at once.
    """
    c0, c1, c2, c3 = (np.asarray(word, dtype=np.uint64) for word in counter)
    shape = np.broadcast_shapes(c0.shape, c1.shape, c2.shape, c3.shape)
    pairs = np.empty((2, *shape), dtype=np.uint64)
    pairs[0], pairs[1] = (c0 << _SHIFT) | c1, (c2 << _SHIFT) | c3
    products = np.empty_like(pairs)
    columns = (2, *(1 for _ in shape))
    multipliers = np.array(_MULTIPLIERS, dtype=np.uint64).reshape(columns)
    for round_key in _pack_round_keys(key):
        np.right_shift(pairs, _SHIFT, out=products)
        products *= multipliers
        pairs <<= _SHIFT
        pairs ^= products[::-1]
        pairs ^= round_key.reshape(columns)
    high, low = (pairs >> _SHIFT).view(np.int64), (pairs & _LOW_WORD).view(np.int64)
    return high[0], low[0], high[1], low[1]


def _make_round_keys(key: tuple[Word, Word]) -> tuple[tuple[Word, Word], ...]:
    low, high = key
    return tuple(
        ((low + index * _KEY_STEPS[0]) & MASK32, (high + index * _KEY_STEPS[1]) & MASK32)
        for index in range(_NUM_ROUNDS)
    )


# only for ints: a tensor's content can change
_cached_round_keys = lru_cache(maxsize=64)(_make_round_keys)


@lru_cache(maxsize=64)
def _pack_round_keys(key: tuple[int, int]) -> tuple[NDArray[np.uint64], ...]:
    """Return both words of each round's key, as high words: [2] each."""
    return tuple(np.array(words, dtype=np.uint64) << _SHIFT for words in _make_round_keys(key))


Floats: TypeAlias = NDArray[np.float64]

NOISE_GROUP_SIZE: Final = 256  # tokens

_SCALE = 2.0**-32


class NoisePurpose(IntEnum):
    """The purpose of a stream of noise.

    Sharing a stream between two purposes biases the output (vLLM #54282).
    """

    TOKEN = 0  # coupled sampling: draft and target use the same noise on purpose
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    BONUS = 4
    # also coupled sampling: the largest noise of a group of tokens, and its token
    GROUP = 5


def make_uniform_noise(
    seed: int, positions: NDArray[np.int64], vocab_size: int, purpose: NoisePurpose, round_index: int = 0
) -> Floats:
    """Return uniform noise in (0, 1): [num_positions, vocab_size].

    `positions` is [num_positions], `seed` is below 2**64, `round_index` below 2**24. The round is
    for rejection sampling: a position that is drafted again in a later round needs new noise,
    because the draft already depends on the old.
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
    """Compute one token's `make_uniform_noise` at one position, in plain integers.

    For a single number numpy would be far slower.
    """
    index, lane = divmod(token_id, 4)
    counter = (index, position & MASK32, position >> 32, _combine_purpose_and_round(purpose, round_index))
    word: int = philox4x32(counter, _split_seed_into_key(seed))[lane]
    return (word + 0.5) * _SCALE


class NoiseGroups(NamedTuple):
    """The least exponential (so the largest noise) of each group of tokens, and its token.

    Groups have `NOISE_GROUP_SIZE` tokens. Both arrays are [num_positions, num_groups]. The last
    group's token may be beyond the vocabulary.
    """

    least: Floats
    leaders: NDArray[np.int64]


def draw_noise_groups(seed: int, positions: NDArray[np.int64], vocab_size: int) -> NoiseGroups:
    """Draw the groups of a vocabulary for coupled sampling; one Philox call serves two groups."""
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
    """Return standard Gumbel noise: [num_positions, vocab_size], between -3.3 and 28.5.

    It is for coupled sampling. The argmax of log-probabilities plus this noise is a sample from
    their distribution (the Gumbel-max trick).
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
    """Compute the `make_gumbel_noise` of `token_ids` at one position: [num_tokens].

    The position is the `row`-th of `groups`.
    """
    counter = (token_ids >> 2, position & MASK32, position >> 32, int(NoisePurpose.TOKEN))
    words = np.choose(token_ids & 3, philox4x32(counter, _split_seed_into_key(seed)))
    noise = _replace_by_negative_log((words + 0.5) * _SCALE)
    group = token_ids // NOISE_GROUP_SIZE
    noise[token_ids == groups.leaders[row, group]] = 0.0
    noise += groups.least[row, group]
    return _replace_by_negative_log(noise)


def compute_gumbel_number(seed: int, position: int, token_id: int, groups: NoiseGroups, row: int) -> float:
    """Compute `make_gumbel_noise` of one token, as a plain number: within 2 ulp of the array's."""
    group = token_id // NOISE_GROUP_SIZE
    exponential = float(groups.least[row, group])
    if token_id != groups.leaders[row, group]:
        exponential -= math.log(draw_uniform_number(seed, position, NoisePurpose.TOKEN, token_id=token_id))
    return -math.log(exponential)


def _replace_by_negative_log(values: Floats) -> Floats:
    """Compute `-log(values)` in place: new memory for a block costs as much as the logarithm."""
    np.log(values, out=values)
    return np.negative(values, out=values)


def _split_seed_into_key(seed: int) -> tuple[int, int]:
    return seed & MASK32, seed >> 32


def _combine_purpose_and_round(purpose: NoisePurpose, round_index: int) -> int:
    return int(purpose) | round_index << 8
