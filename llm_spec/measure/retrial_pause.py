"""RetrialPause: when something that was found not to pay is tried again. Counted in answers."""

from __future__ import annotations

from typing import Final

__all__ = ["RetrialPause"]

_FIRST: Final = 16  # answers
_LAST: Final = 64


class RetrialPause:
    """After 16 answers, then 32, then 64 each time: what was measured in a bad moment must not hold for good."""

    def __init__(self) -> None:
        self._pause = _FIRST
        self._num_answers = 0  # in a row without it

    def count_answer(self, *, was_tried: bool) -> bool:
        """An answer has ended; gives whether it is time to forget why it is not tried."""
        self._num_answers = 0 if was_tried else self._num_answers + 1
        if self._num_answers < self._pause:
            return False
        self._num_answers, self._pause = 0, min(_LAST, 2 * self._pause)
        return True
