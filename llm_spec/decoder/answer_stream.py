"""AnswerStream and SyncAnswerStream: what a decoder's `stream` returns. A loop reads it, in a `with` block or not."""

from __future__ import annotations

import weakref
from collections.abc import AsyncGenerator, Callable, Generator
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
        """A second loop would silently see nothing."""
        if self._has_ended:
            raise RuntimeError("this stream was read to its end, or closed; call `stream` again for another answer")

    def _keep_result(self, event: StreamEvent) -> StreamEvent:
        if isinstance(event, SpeculativeFinish):
            self._result = event.result
        return event


def _release(events: AsyncGenerator[StreamEvent]) -> None:
    """Let go of the events of a stream that nobody holds; then the event loop closes them.

    `weakref.finalize` holds them until then. If the stream is in a circle of references, the garbage collector does not
    find the generators behind it, each of which it would have closed by a task of its own, all at the same time.
    """


class AnswerStream(_ResultKeeper):
    """The events of one answer. The answer begins when the first of them is awaited.

        async for event in decoder.stream("Hi"):
            ...

    If a loop is left early and nothing else holds the stream, the event loop ends the answer in its next turns.
    `aclose`, and the end of an `async with` block, wait until the answer has ended.
    """

    def __init__(self, open_events: Callable[[], AsyncGenerator[StreamEvent]]) -> None:
        super().__init__()
        self._open_events = open_events
        self._events: AsyncGenerator[StreamEvent] | None = None

    def __aiter__(self) -> Self:
        self._check_has_not_ended()
        return self

    async def __anext__(self) -> StreamEvent:
        if self._events is None:
            if self._has_ended:
                raise StopAsyncIteration
            self._events = self._open_events()
            weakref.finalize(self, _release, self._events).atexit = False
        try:
            return self._keep_result(await anext(self._events))
        except BaseException:
            self._has_ended = True
            raise

    async def aclose(self) -> None:
        """End the answer, and wait until all that it opened is closed; twice is harmless."""
        self._has_ended = True
        if self._events is not None:
            await self._events.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()


class SyncAnswerStream(_ResultKeeper):
    """The events of one answer. The answer begins when the first of them is taken.

        for event in decoder.stream("Hi"):
            ...

    If a loop is left early and nothing else holds the stream, the answer ends before the next statement. `close`, and
    the end of a `with` block, wait until the answer has ended.
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
        """End the answer, and wait until all that it opened is closed; twice is harmless."""
        self._has_ended = True
        self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
