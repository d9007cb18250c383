"""Deadline: the moment at which a request ends, whatever its target and its consumer are doing then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import TypeVar

from llm_spec.measure.clock import now

__all__ = ["Deadline"]

T = TypeVar("T")


class Deadline:
    """`seconds` from now on the event loop's clock; None: never. `is_reached` once it has ended something."""

    def __init__(self, seconds: float | None) -> None:
        self._at = None if seconds is None else now() + seconds
        self.is_reached = False

    @property
    def remaining_s(self) -> float | None:
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

    def end_stream_at_deadline(self, items: AsyncGenerator[T]) -> AsyncGenerator[T]:
        """`items` up to the deadline, at which they are closed, also while their consumer is busy with one of them.

        None is begun before the consumer comes back for it. Leaving waits until `items` are closed.
        """
        return items if self._at is None else self._iterate_until_deadline(items)

    async def _iterate_until_deadline(self, items: AsyncGenerator[T]) -> AsyncGenerator[T]:
        # A task of their own, because whatever they opened has to be closed by the task that opened it, and that of
        # the consumer is elsewhere between two items.
        if self.is_reached:
            return
        queue: asyncio.Queue[T | None] = asyncio.Queue()
        reading = asyncio.create_task(self._read_into_queue(items, queue))
        try:
            while (item := await queue.get()) is not None and not self.is_reached:
                yield item
                queue.task_done()
            await reading  # raises what the items raised
        finally:
            await _cancel_and_wait(reading)

    async def _read_into_queue(self, items: AsyncGenerator[T], queue: asyncio.Queue[T | None]) -> None:
        async def forward_items() -> None:
            async for item in items:
                queue.put_nowait(item)
                await queue.join()

        try:
            async with aclosing(items):
                await self.wait_for(forward_items())
        finally:
            queue.put_nowait(None)


async def _cancel_and_wait(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait until it has ended. If the waiting is cancelled, the task is cancelled once more."""
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
