"""Counts the answers that models in this process write at once: their steps wait for each other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final

from llm_spec.local.forks import reset_in_forked_child

__all__ = ["count_concurrent_answers", "count_open_answers"]


class _AnswerClock:
    """The total writing time of all answers, in seconds; any thread may use it."""

    def __init__(self) -> None:
        self.reset_after_fork()
        reset_in_forked_child(self)

    def reset_after_fork(self) -> None:
        self.num_open = 0
        self._lock = threading.Lock()
        self._changed_s = 0.0
        self._answer_s = 0.0  # the total time of all answers until then

    def read_times(self, change: int = 0) -> tuple[float, float]:
        """Return the time and the total time of all answers; then add `change` to the open ones."""
        with self._lock:
            now_s = time.perf_counter()
            self._answer_s += self.num_open * (now_s - self._changed_s)
            self._changed_s = now_s
            self.num_open += change
            return now_s, self._answer_s


_clock: Final = _AnswerClock()


@contextmanager
def count_concurrent_answers() -> Generator[Callable[[], float]]:
    """Count an answer as open while the context is open.

    Yields a function that returns the average number of open answers since the context was entered.
    """
    began_s, answer_s = _clock.read_times(1)

    def average() -> float:
        now_s, now_answer_s = _clock.read_times()
        return (now_answer_s - answer_s) / (now_s - began_s) if now_s > began_s else 1.0

    try:
        yield average
    finally:
        _clock.read_times(-1)


def count_open_answers() -> int:
    """The number of answers being written now."""
    return _clock.num_open
