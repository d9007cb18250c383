"""Places for so many requests at once, first come, first served, whichever event loop or thread they come from."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

__all__ = ["FairPlaces"]


class FairPlaces:
    """What `asyncio.Semaphore` is for one event loop, for all of a process: a loaded model outlives loops."""

    def __init__(self, num_places: int) -> None:
        self._lock = threading.Lock()
        self._num_free = num_places
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def place(self) -> AsyncGenerator[None]:
        """Wait for a place and keep it while the context is open."""
        await self._enter()
        try:
            yield
        finally:
            self._leave()

    async def _enter(self) -> None:
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        with self._lock:
            if self._num_free and not self._waiting:
                self._num_free -= 1
                return
            self._waiting.append((loop, turn))
        try:
            await turn
        except BaseException:  # cancelled, or its task is given up
            with self._lock:
                is_waiting = (loop, turn) in self._waiting
                if is_waiting:
                    self._waiting.remove((loop, turn))
            if not is_waiting:
                self._leave()  # the place was given in the same moment
            raise

    def _leave(self) -> None:
        with self._lock:
            while self._waiting:
                loop, turn = self._waiting.popleft()
                try:
                    loop.call_soon_threadsafe(_take_turn, turn)
                except RuntimeError:
                    continue  # its loop has been closed; nobody waits there any more
                return
            self._num_free += 1


def _take_turn(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)
