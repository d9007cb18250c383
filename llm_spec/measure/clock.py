"""The clock by which everything is measured, waits that it ends, and the deadline of a request."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

from llm_spec.contract.errors import TransientError

__all__ = [
    "Deadline",
    "get_asyncio_loop",
    "get_loop_clock",
    "now",
    "wait_within",
]

T = TypeVar("T")


def get_asyncio_loop() -> asyncio.AbstractEventLoop:
    """The running event loop; raises RuntimeError where it is not one of asyncio's."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise RuntimeError(
            "llm_spec runs on asyncio, and no event loop of asyncio runs here; call it from asyncio.run, and under "
            "trio in a thread that runs one"
        ) from None


def get_loop_clock() -> Callable[[], float]:
    """The running event loop's clock, in seconds, which a test may replace.

    uvloop's own clock stands still while a callback runs and counts in milliseconds, so `time.monotonic` is used.
    """
    loop, uvloop = get_asyncio_loop(), sys.modules.get("uvloop")
    return time.monotonic if uvloop is not None and isinstance(loop, uvloop.Loop) else loop.time


def now() -> float:
    """Seconds by that clock."""
    return get_loop_clock()()


async def wait_within(awaitable: Awaitable[T], seconds: float | None, message: str) -> T:
    """Await it; raises TransientError(message) when it takes longer. None: it may."""
    if seconds is None:
        return await awaitable
    timeout = asyncio.timeout(seconds)
    try:
        async with timeout:
            return await awaitable
    except TimeoutError as error:
        if not timeout.expired():
            raise
        raise TransientError(message) from error


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
