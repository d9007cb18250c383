"""Silence: how long a target may be silent, call by call, whoever waits for it and whatever else that waits for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Generic, TypeVar

from llm_spec._clock import now
from llm_spec.config import Timeouts
from llm_spec.resilience import within

__all__ = ["Silence"]

T = TypeVar("T")


class Silence:
    """What a target of this name may take; raises TransientError when it takes longer."""

    def __init__(self, name: str, timeouts: Timeouts) -> None:
        self._name = name
        self.timeouts = timeouts

    async def first(self, awaitable: Awaitable[T]) -> T:
        """Await what comes as late as a first chunk."""
        return await self.bound(awaitable, self.timeouts.first_chunk_s)

    async def bound(self, awaitable: Awaitable[T], seconds: float | None, told_s: float | None = None) -> T:
        """Await it for so long; `told_s`: what the error tells, None: the same."""
        return await within(awaitable, seconds, f"{self._name} was silent for {told_s or seconds} s")

    def stream(
        self, opened: AbstractAsyncContextManager[AsyncIterator[T]]
    ) -> AbstractAsyncContextManager[AsyncIterator[T]]:
        """The same stream, whose chunks come in time."""
        is_bounded = self.timeouts.first_chunk_s is not None or self.timeouts.between_chunks_s is not None
        return _Bounded(opened, self) if is_bounded else opened


class _Bounded(AbstractAsyncContextManager[AsyncIterator[T]], AsyncIterator[T], Generic[T]):
    def __init__(self, opened: AbstractAsyncContextManager[AsyncIterator[T]], silence: Silence) -> None:
        self._opened = opened
        self._silence = silence
        self._items: AsyncIterator[T] | None = None
        self._began_s = 0.0
        self._has_begun = False

    async def __aenter__(self) -> AsyncIterator[T]:
        self._began_s = now()
        self._items = await self._silence.first(self._opened.__aenter__())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return await self._opened.__aexit__(kind, error, traceback)

    async def __anext__(self) -> T:
        if self._items is None:
            raise RuntimeError("a stream is read inside its context")
        if self._has_begun:
            return await self._silence.bound(anext(self._items), self._silence.timeouts.between_chunks_s)
        first_s = self._silence.timeouts.first_chunk_s
        left_s = None if first_s is None else max(0.0, first_s - (now() - self._began_s))
        item = await self._silence.bound(anext(self._items), left_s, first_s)
        self._has_begun = True
        return item
