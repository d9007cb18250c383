"""SharedVocabularyStats: whether a draft's own token ids are the target's.

Two models of one family have one vocabulary, and nothing tells so: it shows in ids of the same text. A draft whose ids
are used without the target's tokenizer is ready a round trip sooner, and does not wait for a word's end. What is
assumed wrongly is a wrong guess, no more.
"""

from __future__ import annotations

from typing import Final

__all__ = ["SharedVocabularyStats"]

_MIN_SAME: Final = 16  # stretches of text in a row, of which both had the same ids
_MAX_UNCOMPARED: Final = 32  # that are believed before one is compared again


class SharedVocabularyStats:
    """Of one pair. Kept across requests, on one event loop."""

    def __init__(self) -> None:
        self._num_same = 0  # in a row
        self._num_uncompared = 0

    @property
    def is_believed(self) -> bool:
        """Whether the next stretch's ids are to be believed; now and then they are not, so that they are compared."""
        return self._num_same >= _MIN_SAME and self._num_uncompared < _MAX_UNCOMPARED

    def add_comparison(self, *, has_same: bool) -> None:
        """The target's own tokenizer has encoded a stretch of which the draft gave its ids."""
        self._num_same = self._num_same + 1 if has_same else 0
        self._num_uncompared = 0

    def add_believed(self) -> None:
        """A stretch's ids were believed."""
        self._num_uncompared += 1
