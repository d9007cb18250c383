"""Cuts and pads forward passes so that a position's logits do not depend on its neighbours.

Kernels are chosen by the numbers of rows and keys, and they differ in the last bit. So exact
sessions, and plain decoding in them, only read numbers of rows that gave the same bits when the
model was loaded (on CUDA: one number). Attention reads a number of places that depends on the
position alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["PassShape", "pad_to_next"]


def pad_to_next(sizes: Sequence[int], num_tokens: int) -> int:
    """Return the first of ascending sizes that has room for that many tokens."""
    return sizes[bisect_left(sizes, num_tokens)]


@dataclass(frozen=True, slots=True)
class PassShape:
    """The sizes that passes may have.

    `widths` are the numbers of rows that may be read, ascending. Attention reads a multiple of
    `key_step` places. With `doubling`, the multiples are powers of two, so that there are few of
    them (a CUDA graph for each).
    """

    widths: Sequence[int]
    key_step: int
    doubling: bool = False

    @property
    def max_width(self) -> int:
        """The most tokens of one verifying pass."""
        return self.widths[-1]

    def pad_width(self, num_tokens: int) -> int:
        """Return the number of rows of a pass with that many tokens, at most `max_width`."""
        return pad_to_next(self.widths, num_tokens)

    def pad_num_keys(self, position: int) -> int:
        """Return the number of places that attention reads for the token at a position."""
        steps = position // self.key_step + 1
        return self.key_step * (1 << (steps - 1).bit_length() if self.doubling else steps)
