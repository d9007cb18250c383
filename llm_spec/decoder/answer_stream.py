"""AnswerStream and SyncAnswerStream, which a decoder's `stream` returns.

Read them with a loop, with or without a `with` block.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import suppress
from types import TracebackType
from typing import Self

from llm_spec.contract.events import StreamEvent
from llm_spec.decoder.result import SpeculativeFinish, SpeculativeResult

__all__ = ["AnswerStream", "SyncAnswerStream"]


class _ResultKeeper:
    """A stream that is read once, and keeps the result of its last event."""

    def __init__(self) -> None:
        self._has_ended = False
        self._result: SpeculativeResult | None = None

    @property
    def result(self) -> SpeculativeResult:
        """The whole answer. Raises RuntimeError before the last event has been read."""
        if self._result is None:
            raise RuntimeError("the answer has no result before its last event; read the stream to its end first")
        return self._result

    def _check_has_not_ended(self) -> None:
        """Raise RuntimeError for a second loop, which would silently see nothing."""
        if self._has_ended:
            raise RuntimeError("this stream was read to its end, or closed; call `stream` again for another answer")

    def _keep_result(self, event: StreamEvent) -> StreamEvent:
        if isinstance(event, SpeculativeFinish):
            self._result = event.result
        return event


class AnswerStream(_ResultKeeper):
    """The events of one answer. The answer begins when the first of them is awaited.

        async for event in decoder.stream("Hi"):
            ...

    If a loop is left early and nothing else holds the stream, the event loop ends the answer in its
    next turns. `aclose`, and the end of an `async with` block, wait until the answer has ended.
    """

    def __init__(self, open_events: Callable[[], AsyncGenerator[StreamEvent]]) -> None:
        super().__init__()
        self._open_events = open_events
        self._events: AsyncGenerator[StreamEvent] | None = None
        self._is_entered = False
        self._release: Callable[[], object] | None = None

    def __aiter__(self) -> Self:
        self._check_has_not_ended()
        return self

    async def __anext__(self) -> StreamEvent:
        if self._events is None:
            if self._has_ended:
                raise StopAsyncIteration
            self._events = self._open_events()
            if not self._is_entered:
                self._release = _close_with(self, self._events)
        try:
            return self._keep_result(await anext(self._events))
        except BaseException:
            self._end()
            raise

    async def aclose(self) -> None:
        """End the answer, and wait until everything that it opened is closed; twice is harmless."""
        self._end()
        if self._events is not None:
            await self._events.aclose()

    def _end(self) -> None:
        self._has_ended = True
        if self._release is not None:
            self._release()

    async def __aenter__(self) -> Self:
        self._is_entered = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()


def _close_with(stream: AnswerStream, events: AsyncGenerator[StreamEvent]) -> Callable[[], object]:
    """Have a task close the events once nothing holds the stream; returns a way to do it now.

    The event loop would close them without a task, but badly. At its end, or if the garbage
    collector finds the stream in a reference cycle, it closes all generators behind the stream at
    the same time, which raises errors in them. `asyncio.run` waits for a task first, and objects
    that a task holds are not collected.
    """
    loop, is_released = asyncio.get_running_loop(), asyncio.Event()
    loop.create_task(_close_when_released(events, is_released))
    release = weakref.finalize(stream, _set_from_any_thread, loop, is_released)
    release.atexit = False
    return release


async def _close_when_released(events: AsyncGenerator[StreamEvent], is_released: asyncio.Event) -> None:
    try:
        await is_released.wait()
    finally:
        # RuntimeError: a task reads the events at the end of the loop; it is cancelled, too, and
        # closes them
        with suppress(RuntimeError):
            await events.aclose()


def _set_from_any_thread(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    with suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(event.set)


class SyncAnswerStream(_ResultKeeper):
    """The events of one answer. The answer begins when the first of them is taken.

        for event in decoder.stream("Hi"):
            ...

    If a loop is left early and nothing else holds the stream, the answer ends before the next
    statement. `close`, and the end of a `with` block, wait until the answer has ended.
    """

    def __init__(self, events: Generator[StreamEvent]) -> None:
        super().__init__()
        self._events = events

    def __iter__(self) -> Self:
        self._check_has_not_ended()
        return self

    def __next__(self) -> StreamEvent:
        try:
            return self._keep_result(next(self._events))
        except BaseException:
            self._has_ended = True
            raise

    def close(self) -> None:
        """End the answer, and wait until everything that it opened is closed; twice is harmless."""
        self._has_ended = True
        self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
