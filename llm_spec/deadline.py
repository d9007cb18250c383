"""Deadline: the moment at which a request ends, whatever its target and its consumer are doing then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import TypeVar

from llm_spec._clock import now

__all__ = ["Deadline"]

T = TypeVar("T")


class Deadline:
    """`seconds` from now on the event loop's clock; None: never. `is_reached` once it has ended something."""

    def __init__(self, seconds: float | None) -> None:
        self._at = None if seconds is None else now() + seconds
        self.is_reached = False

    @property
    def left_s(self) -> float | None:
        """Seconds until then, negative afterwards; None: there is none."""
        return None if self._at is None else self._at - now()

    async def wait_for(self, awaitable: Awaitable[T]) -> T | None:
        """Await it; None when the deadline comes first, and has cancelled it."""
        if self._at is None:
            return await awaitable
        timeout = asyncio.timeout_at(self._at)
        try:
            async with timeout:
                return await awaitable
        except TimeoutError:
            if not timeout.expired():
                raise
            self.is_reached = True
            return None

    def bound(self, items: AsyncGenerator[T]) -> AsyncGenerator[T]:
        """`items` up to the deadline, at which they are closed, also while their consumer is busy with one of them.

        None is begun before the consumer comes back for it. Leaving waits until `items` are closed.
        """
        return items if self._at is None else self._bounded(items)

    async def _bounded(self, items: AsyncGenerator[T]) -> AsyncGenerator[T]:
        # A task of their own, because whatever they opened has to be closed by the task that opened it, and that of
        # the consumer is elsewhere between two items.
        if self.is_reached:
            return
        handed: asyncio.Queue[T | None] = asyncio.Queue()
        reading = asyncio.create_task(self._read(items, handed))
        try:
            while (item := await handed.get()) is not None and not self.is_reached:
                yield item
                handed.task_done()
            await reading  # raises what the items raised
        finally:
            await _end(reading)

    async def _read(self, items: AsyncGenerator[T], handed: asyncio.Queue[T | None]) -> None:
        async def hand_over() -> None:
            async for item in items:
                handed.put_nowait(item)
                await handed.join()

        try:
            async with aclosing(items):
                await self.wait_for(hand_over())
        finally:
            handed.put_nowait(None)


async def _end(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait until it has ended; whoever is cancelled meanwhile cancels it once more."""
    interrupted: asyncio.CancelledError | None = None
    task.cancel()
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            interrupted = error
            task.cancel()
    if not task.cancelled():
        task.exception()  # it has been raised, or nobody listens any more
    if interrupted is not None:
        raise interrupted
