"""TrialTurns: when calls that find out what a server can do are made, so that they hold no answer up for long.

One at a time, while no answer has been open for a second, since one answer often follows another. Where no such second
comes within a minute, one call is made beside an answer, and one more a minute later.
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
_CALL_TIMEOUT_S: Final = 60.0  # a server may compile something for its first scored prompt: vLLM does, for seconds
_POLL_S: Final = 0.05


class TrialTurns:
    """The answers that are open at one server, and calls of trials. Any number of event loops may use it."""

    def __init__(self) -> None:
        self._ended_s = -math.inf  # when the last answer did
        self.reset_after_fork()
        reset_in_forked_child(self)

    def reset_after_fork(self) -> None:
        self._lock = threading.Lock()
        self._num_open = 0
        self._busy_until_s = -math.inf  # by a call of a trial, at the longest
        self._due_s = -math.inf  # when a call may be made beside an answer

    def watch(self, opened: AbstractAsyncContextManager[T]) -> AbstractAsyncContextManager[T]:
        """An answer, which is open as long as this is entered."""
        return _OpenAnswer(self, opened)

    def note_begin(self) -> None:
        with self._lock:
            self._num_open += 1

    def note_end(self) -> None:
        with self._lock:
            self._num_open -= 1
            self._ended_s = now()

    async def run_call(self, call: Callable[[], Awaitable[T]]) -> T:
        """What a trial's call gives, once it may be made; raises what it raises, and TimeoutError after 60 s."""
        while not self._may_begin_call():  # noqa: ASYNC110 - an Event belongs to one event loop
            await asyncio.sleep(_POLL_S)
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                return await call()
        finally:
            self._busy_until_s = -math.inf

    def _may_begin_call(self) -> bool:
        """Whether a call may be made now; then it is under way."""
        with self._lock:
            now_s = now()
            if now_s - self._due_s > _MAX_WAIT_S:  # nobody has waited for so long
                self._due_s = now_s + _MAX_WAIT_S
            is_idle = not self._num_open and now_s - self._ended_s >= _IDLE_S
            if now_s < self._busy_until_s or not (is_idle or now_s >= self._due_s):
                return False
            self._busy_until_s, self._due_s = now_s + _CALL_TIMEOUT_S, now_s + _MAX_WAIT_S
            return True


class _OpenAnswer(AbstractAsyncContextManager[T]):
    """A class, as each answer passes here: as a generator it took some 4 % of a server's requests a second."""

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
