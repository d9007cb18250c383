"""The clock by which everything is measured, and waits that it ends."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from llm_spec.contract.errors import TransientError

__all__ = ["get_asyncio_loop", "get_loop_clock", "now", "wait_within"]

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
