"""Limits on a target's silence, for each call."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Final, Generic, TypeVar

from llm_spec.contract.provider import Capabilities
from llm_spec.decoder.config import Timeouts
from llm_spec.measure.clock import now, wait_within

__all__ = ["ChunkTimeouts"]

T = TypeVar("T")

_UNBOUNDED: Final = Capabilities()


class ChunkTimeouts:
    """The timeouts of one target; raises TransientError when it takes longer.

    `timeouts` comes first, then the target's capabilities.
    """

    def __init__(self, name: str, timeouts: Timeouts, can: Capabilities = _UNBOUNDED) -> None:
        self._name = name
        self.first_chunk_s = can.first_chunk_s if timeouts.first_chunk_s is None else timeouts.first_chunk_s
        self.between_chunks_s = can.between_chunks_s if timeouts.between_chunks_s is None else timeouts.between_chunks_s

    async def wait_for_first_chunk(self, awaitable: Awaitable[T]) -> T:
        """Await something that may take as long as a first chunk."""
        return await self.wait_at_most(awaitable, self.first_chunk_s)

    async def wait_at_most(self, awaitable: Awaitable[T], seconds: float | None, reported_s: float | None = None) -> T:
        """Await for at most `seconds`; the error names `reported_s`, or `seconds` if it is None."""
        return await wait_within(awaitable, seconds, f"{self._name} was silent for {reported_s or seconds} s")

    def limit_waits_for_chunks(
        self, opened: AbstractAsyncContextManager[AsyncIterator[T]]
    ) -> AbstractAsyncContextManager[AsyncIterator[T]]:
        """Return the same stream with limited waits for its chunks."""
        is_bounded = self.first_chunk_s is not None or self.between_chunks_s is not None
        return _TimeLimitedStream(opened, self) if is_bounded else opened


class _TimeLimitedStream(AbstractAsyncContextManager[AsyncIterator[T]], AsyncIterator[T], Generic[T]):
    def __init__(self, opened: AbstractAsyncContextManager[AsyncIterator[T]], chunk_timeouts: ChunkTimeouts) -> None:
        self._opened = opened
        self._chunk_timeouts = chunk_timeouts
        self._items: AsyncIterator[T] | None = None
        self._began_s = 0.0
        self._read_next: Callable[[], Awaitable[T]] | None = None  # set once it has begun

    async def __aenter__(self) -> AsyncIterator[T]:
        self._began_s = now()
        self._items = await self._chunk_timeouts.wait_for_first_chunk(self._opened.__aenter__())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return await self._opened.__aexit__(kind, error, traceback)

    def __anext__(self) -> Awaitable[T]:
        read_next = self._read_next
        return self._wait_for_first_item() if read_next is None else read_next()

    async def _wait_for_first_item(self) -> T:
        items = self._items
        if items is None:
            raise RuntimeError("a stream can only be read inside its context")
        timeouts = self._chunk_timeouts
        first_s = timeouts.first_chunk_s
        left_s = None if first_s is None else max(0.0, first_s - (now() - self._began_s))
        item = await timeouts.wait_at_most(anext(items), left_s, first_s)
        between_s, read_next = timeouts.between_chunks_s, items.__anext__
        # usually there is no wrapper
        self._read_next = read_next if between_s is None else lambda: timeouts.wait_at_most(read_next(), between_s)
        return item
