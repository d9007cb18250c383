"""How long a target may be silent, call by call."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Generic, TypeVar

from llm_spec._clock import now
from llm_spec.config import Timeouts
from llm_spec.resilience import wait_within

__all__ = ["ChunkTimeouts"]

T = TypeVar("T")


class ChunkTimeouts:
    """What a target of this name may take; raises TransientError when it takes longer."""

    def __init__(self, name: str, timeouts: Timeouts) -> None:
        self._name = name
        self.timeouts = timeouts

    async def wait_for_first_chunk(self, awaitable: Awaitable[T]) -> T:
        """Await what comes as late as a first chunk."""
        return await self.wait_at_most(awaitable, self.timeouts.first_chunk_s)

    async def wait_at_most(self, awaitable: Awaitable[T], seconds: float | None, reported_s: float | None = None) -> T:
        """Await it for so long; `reported_s`: what the error tells, None: the same."""
        return await wait_within(awaitable, seconds, f"{self._name} was silent for {reported_s or seconds} s")

    def limit_waits_for_chunks(
        self, opened: AbstractAsyncContextManager[AsyncIterator[T]]
    ) -> AbstractAsyncContextManager[AsyncIterator[T]]:
        """The same stream, whose chunks come in time."""
        is_bounded = self.timeouts.first_chunk_s is not None or self.timeouts.between_chunks_s is not None
        return _TimeLimitedStream(opened, self) if is_bounded else opened


class _TimeLimitedStream(AbstractAsyncContextManager[AsyncIterator[T]], AsyncIterator[T], Generic[T]):
    def __init__(self, opened: AbstractAsyncContextManager[AsyncIterator[T]], chunk_timeouts: ChunkTimeouts) -> None:
        self._opened = opened
        self._chunk_timeouts = chunk_timeouts
        self._items: AsyncIterator[T] | None = None
        self._began_s = 0.0
        self._has_begun = False

    async def __aenter__(self) -> AsyncIterator[T]:
        self._began_s = now()
        self._items = await self._chunk_timeouts.wait_for_first_chunk(self._opened.__aenter__())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return await self._opened.__aexit__(kind, error, traceback)

    async def __anext__(self) -> T:
        if self._items is None:
            raise RuntimeError("a stream can only be read inside its context")
        if self._has_begun:
            return await self._chunk_timeouts.wait_at_most(
                anext(self._items), self._chunk_timeouts.timeouts.between_chunks_s
            )
        first_s = self._chunk_timeouts.timeouts.first_chunk_s
        left_s = None if first_s is None else max(0.0, first_s - (now() - self._began_s))
        item = await self._chunk_timeouts.wait_at_most(anext(self._items), left_s, first_s)
        self._has_begun = True
        return item
