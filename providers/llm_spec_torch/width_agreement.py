"""Tracks if the same-text promise holds for the numbers of keys that attention has read so far."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from llm_spec.local.forks import reset_in_forked_child

__all__ = ["WidthAgreement"]


class WidthAgreement:
    """Tests if the widths of exact passes agree for each number of keys.

    Several threads may use it. `holds` is True until a test fails. `do_widths_agree_at` tests a
    number of keys; with None, all agree. At `key_counts` the widths were found to agree already.
    """

    def __init__(self, do_widths_agree_at: Callable[[int], bool] | None = None, key_counts: Iterable[int] = ()) -> None:
        self.holds = True
        self._do_widths_agree_at = do_widths_agree_at
        self._checked_key_counts = set(key_counts)
        self.reset_after_fork()
        reset_in_forked_child(self)

    def reset_after_fork(self) -> None:
        self._lock = threading.Lock()

    def check_at(self, num_keys: int) -> float:
        """Test a number of keys unless that was done; return the seconds that it took."""
        if self._do_widths_agree_at is None or num_keys in self._checked_key_counts or not self.holds:
            return 0.0
        started = time.perf_counter()
        with self._lock:
            if self.holds and num_keys not in self._checked_key_counts:
                self.holds = self._do_widths_agree_at(num_keys)
                self._checked_key_counts.add(num_keys)
        return time.perf_counter() - started
