"""TrialTurns: schedules the calls that discover a server's features.

Calls run one at a time, after a second without open answers, since one answer often follows
another. If no such second comes within a minute, one call runs beside an answer, and one more each
further minute. So no answer is delayed for long.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Final, TypeVar

from llm_spec.local.forks import reset_in_forked_child
from llm_spec.measure.clock import now

__all__ = ["TrialTurns"]

T = TypeVar("T")

_IDLE_S: Final = 1.0
_MAX_WAIT_S: Final = 60.0  # for an idle second
_CALL_TIMEOUT_S: Final = 60.0  # vLLM compiles for seconds before its first scored prompt
_POLL_S: Final = 0.05


class TrialTurns:
    """Tracks a server's open answers and runs trial calls; any number of event loops may use it."""

    def __init__(self) -> None:
        self._ended_s = -math.inf  # when the last answer ended
        self.reset_after_fork()
        reset_in_forked_child(self)

    def reset_after_fork(self) -> None:
        self._lock = threading.Lock()
        self._num_open = 0
        self._busy_until_s = -math.inf  # the latest end of the running trial call
        self._due_s = -math.inf  # when a call may be made beside an answer

    def watch(self, opened: AbstractAsyncContextManager[T]) -> AbstractAsyncContextManager[T]:
        """Count an answer as open while its context is entered."""
        return _OpenAnswer(self, opened)

    def note_begin(self) -> None:
        with self._lock:
            self._num_open += 1

    def note_end(self) -> None:
        with self._lock:
            self._num_open -= 1
            self._ended_s = now()

    async def run_call(self, call: Callable[[], Awaitable[T]]) -> T:
        """Run a trial's call in its turn; raises its errors, and TimeoutError after 60 s."""
        while not self._may_begin_call():  # noqa: ASYNC110 - an Event belongs to one event loop
            await asyncio.sleep(_POLL_S)
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                return await call()
        finally:
            self._busy_until_s = -math.inf

    def _may_begin_call(self) -> bool:
        """Return True if a call may begin now; it then counts as running."""
        with self._lock:
            now_s = now()
            if now_s - self._due_s > _MAX_WAIT_S:  # the last wait ended long ago
                self._due_s = now_s + _MAX_WAIT_S
            is_idle = not self._num_open and now_s - self._ended_s >= _IDLE_S
            if now_s < self._busy_until_s or not (is_idle or now_s >= self._due_s):
                return False
            self._busy_until_s, self._due_s = now_s + _CALL_TIMEOUT_S, now_s + _MAX_WAIT_S
            return True


class _OpenAnswer(AbstractAsyncContextManager[T]):
    """Counts an answer as open.

    This is a class because each answer passes here: a generator cost 4 % of a server's requests a
    second.
    """

    __slots__ = ("_opened", "_turns")

    def __init__(self, turns: TrialTurns, opened: AbstractAsyncContextManager[T]) -> None:
        self._turns = turns
        self._opened = opened

    async def __aenter__(self) -> T:
        self._turns.note_begin()
        try:
            return await self._opened.__aenter__()
        except BaseException:
            self._turns.note_end()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        try:
            return await self._opened.__aexit__(kind, error, traceback)
        finally:
            self._turns.note_end()
