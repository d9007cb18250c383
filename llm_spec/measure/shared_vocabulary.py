"""SharedVocabularyStats: whether a draft's own token ids are the target's.

Two models of one family have one vocabulary, and nothing tells so: it shows in ids of the same text. A draft whose ids
are used without the target's tokenizer is ready a round trip sooner, and does not wait for a word's end. What is
assumed wrongly is a wrong guess, no more.
"""

from __future__ import annotations

from typing import Final

__all__ = ["SharedVocabularyStats"]

_MIN_SAME: Final = 16  # tokens in a row, for which both had the same ids
_MAX_WRONG: Final = 16  # tokens of the target in a row that contradict the draft's


class SharedVocabularyStats:
    """Of one pair. Kept across requests, on one event loop."""

    def __init__(self) -> None:
        self._num_same = self._num_wrong = 0  # in a row

    @property
    def is_believed(self) -> bool:
        """Whether the draft's ids are used as they are, until the target's own tokens contradict them."""
        return self._num_same >= _MIN_SAME

    def add_comparison(self, num_tokens: int, *, has_same: bool) -> None:
        """The target's own tokenizer has encoded a text of which the draft gave its ids."""
        self._num_same = self._num_same + num_tokens if has_same else 0

    def add_confirmed_token(self, *, is_right: bool) -> None:
        """The target's own token is known in the place of one of the draft's."""
        self._num_wrong = 0 if is_right else self._num_wrong + 1
        if self._num_wrong >= _MAX_WRONG:
            self._num_same = self._num_wrong = 0
