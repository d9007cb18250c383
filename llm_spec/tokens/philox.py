"""Philox 4x32-10: random words as a pure function of counter and key.

Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011), checked against the Random123 vectors. (numpy's
own Philox is 4x64.) A word has 32 bits and is stored in an int64. The product of two words wraps to the right 64 bits,
and `(product >> 32) & 0xFFFFFFFF` is its high word although the shift is arithmetic.

This is the only function of `llm_spec.tokens` that takes arrays of another library: `llm_spec_torch.noise` calls it
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
    """The same on numpy, twice as fast: in place, two words to a uint64, whose left shift drops the high one."""
    c0, c1, c2, c3 = (np.asarray(word, dtype=np.uint64) for word in counter)
    shape = np.broadcast_shapes(c0.shape, c1.shape, c2.shape, c3.shape)
    pair_0, pair_1 = _pack_words(c0, c1, shape), _pack_words(c2, c3, shape)
    product_0, product_1 = np.empty_like(pair_0), np.empty_like(pair_1)
    for k0, k1 in _cached_round_keys(key):
        np.right_shift(pair_0, 32, out=product_0)
        np.right_shift(pair_1, 32, out=product_1)
        product_0 *= np.uint64(_MULTIPLIERS[0])
        product_1 *= np.uint64(_MULTIPLIERS[1])
        pair_0 <<= np.uint64(32)
        pair_1 <<= np.uint64(32)
        pair_0 ^= product_1
        pair_1 ^= product_0
        pair_0 ^= np.uint64(k0 << 32)
        pair_1 ^= np.uint64(k1 << 32)
    halves = (pair_0 >> np.uint64(32), pair_0 & MASK32, pair_1 >> np.uint64(32), pair_1 & MASK32)
    w0, w1, w2, w3 = (half.view(np.int64) for half in halves)
    return w0, w1, w2, w3


def _pack_words(high: NDArray[np.uint64], low: NDArray[np.uint64], shape: tuple[int, ...]) -> NDArray[np.uint64]:
    return np.broadcast_to((high << np.uint64(32)) | low, shape).copy()


def _make_round_keys(key: tuple[Word, Word]) -> tuple[tuple[Word, Word], ...]:
    low, high = key
    return tuple(
        ((low + index * _KEY_STEPS[0]) & MASK32, (high + index * _KEY_STEPS[1]) & MASK32)
        for index in range(_NUM_ROUNDS)
    )


_cached_round_keys = lru_cache(maxsize=64)(_make_round_keys)  # of ints: a tensor's content can change
