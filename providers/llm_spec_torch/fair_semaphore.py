"""A semaphore for all event loops and threads of a process, first come, first served."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from llm_spec.local.forks import reset_in_forked_child

__all__ = ["FairSemaphore"]


class FairSemaphore:
    """Like `asyncio.Semaphore`, but for all event loops: a loaded model outlives loops."""

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self.reset_after_fork()
        reset_in_forked_child(self)

    def reset_after_fork(self) -> None:
        self._lock = threading.Lock()
        self._num_free = self._num_places
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def hold_place(self) -> AsyncGenerator[None]:
        """Wait for a place and keep it while the context is open."""
        await self._acquire()
        try:
            yield
        finally:
            self._release()

    async def _acquire(self) -> None:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        with self._lock:
            if self._num_free and not self._waiting:
                self._num_free -= 1
                return
            self._waiting.append((loop, waiter))
        try:
            await waiter
        except BaseException:  # cancelled, or the task was closed
            with self._lock:
                is_waiting = (loop, waiter) in self._waiting
                if is_waiting:
                    self._waiting.remove((loop, waiter))
            if not is_waiting:
                self._release()  # the place was given in the same moment
            raise

    def _release(self) -> None:
        with self._lock:
            while self._waiting:
                loop, waiter = self._waiting.popleft()
                try:
                    loop.call_soon_threadsafe(_wake_waiter, waiter)
                except RuntimeError:
                    continue  # its loop is closed, so nobody waits there
                return
            self._num_free += 1


def _wake_waiter(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
