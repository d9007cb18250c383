"""What is to be sent on one streamed response: pieces that come together go out together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

from aiohttp import web

__all__ = ["Outbox"]

_MAX_WAITING: Final = 64 * 1024  # bytes; whoever writes more waits for the reader


class Outbox:
    """Sends from a task of its own, so that a slow reader holds up its own answer alone, and a pause is bridged.

    Where nothing came for `keep_alive_s` seconds, `keep_alive` is sent. A reader that takes nothing for `patience_s`
    seconds has its connection closed.
    """

    def __init__(
        self, response: web.StreamResponse, *, keep_alive: bytes, keep_alive_s: float, patience_s: float
    ) -> None:
        self.response = response
        self._keep_alive = keep_alive
        self._keep_alive_s = keep_alive_s
        self._patience_s = patience_s
        self._loop = asyncio.get_running_loop()
        self._waiting: list[bytes] = []
        self._size = 0
        self._is_closed = False
        self._news: asyncio.Future[None] | None = None  # the sender waits for it …
        self._room: asyncio.Future[None] | None = None  # … and the writer for this
        self._task: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def sending(self) -> AsyncGenerator[None]:
        """Send what is put in until the context is left; then all of it has been sent, or an error is raised."""
        self._task = asyncio.create_task(self._send())
        try:
            yield
            self._is_closed = True
            self._wake()
            await self._task
        finally:
            self._task.cancel()
            await asyncio.wait([self._task])
            if not self._task.cancelled():
                self._task.exception()  # it was raised above, or another was

    def put(self, data: bytes) -> None:
        """Send this, soon; raises ConnectionError if the reader has gone."""
        if data:
            if self._task is not None and self._task.done():
                self._task.result()
            self._waiting.append(data)
            self._size += len(data)
            self._wake()

    @property
    def is_full(self) -> bool:
        """Whether the writer should wait for `room`."""
        return self._size > _MAX_WAITING

    async def room(self) -> None:
        """Wait until the reader has taken what is waiting; raises ConnectionError if it has gone."""
        while self.is_full:
            if self._task is not None and self._task.done():
                await self._task
                raise ConnectionResetError("the reader has gone")
            self._room = self._loop.create_future()
            await self._room

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def _send(self) -> None:
        try:
            while True:
                if not self._waiting and not self._is_closed:
                    await self._wait()
                if not self._waiting and self._is_closed:
                    return  # a sign of life behind the end would be none
                data, self._waiting = b"".join(self._waiting), []
                async with asyncio.timeout(self._patience_s):
                    await self.response.write(data or self._keep_alive)
                self._size -= len(data)
                self._make_room()
        except TimeoutError:
            raise ConnectionResetError("the reader takes nothing") from None
        finally:
            self._make_room()

    def _make_room(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    async def _wait(self) -> None:
        """Wait for something to send, or until it is time for a sign of life."""
        self._news = self._loop.create_future()
        timer = self._loop.call_later(self._keep_alive_s, self._wake)
        try:
            await self._news
        finally:
            timer.cancel()
            self._news = None
