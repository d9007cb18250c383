"""Philox 4x32-10: random words as a pure function of counter and key.

Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011), checked against the Random123 vectors. (numpy's
own Philox is 4x64.) A word has 32 bits and is stored in an int64. The product of two words wraps to the right 64 bits,
and `(product >> 32) & 0xFFFFFFFF` is its high word although the shift is arithmetic.

This is the only function of `llm_spec.local` that takes arrays of another library: `llm_spec_torch.noise` calls it
with int64 tensors, on a GPU too, so that host and device share one generator. It uses their operators alone.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["MASK32", "philox4x32"]

Word: TypeAlias = Any  # an int, an int64 numpy array or an int64 torch tensor
Words: TypeAlias = tuple[Word, Word, Word, Word]

MASK32 = 0xFFFFFFFF
_NUM_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_SHIFT = np.uint64(32)
_LOW_WORD = np.uint64(MASK32)


def philox4x32(counter: Words, key: tuple[Word, Word]) -> Words:
    """Four random words for each counter.

    The four counter words are ints, numpy arrays or torch tensors (int64) that broadcast together; if any is an array
    or a tensor, the first one is. The random words have the common shape and the same type. The key is two ints; with
    torch counters it may be two int64 tensors that broadcast with them.
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
    """The same on numpy, in place: two words to a uint64, whose left shift drops the high one; both pairs at once."""
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


_cached_round_keys = lru_cache(maxsize=64)(_make_round_keys)  # of ints: a tensor's content can change


@lru_cache(maxsize=64)
def _pack_round_keys(key: tuple[int, int]) -> tuple[NDArray[np.uint64], ...]:
    """Both words of each round's key, as high words: [2] each."""
    return tuple(np.array(words, dtype=np.uint64) << _SHIFT for words in _make_round_keys(key))
