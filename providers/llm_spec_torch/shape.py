"""How forward passes are cut and padded, so that a position's logits never depend on what is read beside it.

Kernels choose their way by the number of rows and keys, and ways differ in the last bit. So exact sessions read, plain
decoding included, only numbers of rows that gave the same bits when the model was loaded (on CUDA: one number), and
attention always reads as many places as the position alone says.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["PassShape", "pad_to_next"]


def pad_to_next(sizes: Sequence[int], num_tokens: int) -> int:
    """The first of ascending sizes that has room for so many tokens."""
    return sizes[bisect_left(sizes, num_tokens)]


@dataclass(frozen=True, slots=True)
class PassShape:
    """`widths`: numbers of rows that may be read, ascending; `key_step`: attention reads a multiple of so many places.

    `doubling`: the multiples are powers of two of it, so that there are few of them (a CUDA graph for each).
    """

    widths: Sequence[int]
    key_step: int
    doubling: bool = False

    @property
    def max_width(self) -> int:
        """Most tokens of one verifying pass."""
        return self.widths[-1]

    def pad_width(self, num_tokens: int) -> int:
        """How many rows are read for so many tokens, at most `max_width`."""
        return pad_to_next(self.widths, num_tokens)

    def pad_num_keys(self, position: int) -> int:
        """How many places attention reads for the token at a position."""
        steps = position // self.key_step + 1
        return self.key_step * (1 << (steps - 1).bit_length() if self.doubling else steps)
