"""Sends one streamed response; pieces that come together are sent together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

from aiohttp import web

__all__ = ["StreamSender"]

_MAX_PENDING_BYTES: Final = 64 * 1024  # a writer with more than this waits for the reader


class StreamSender:
    """Sends from a task of its own, so that a slow reader delays only its own answer.

    `keep_alive`: sent if nothing has come for `keep_alive_s` seconds.
    """

    def __init__(self, response: web.StreamResponse, *, keep_alive: bytes, keep_alive_s: float) -> None:
        self.response = response
        self._keep_alive = keep_alive
        self._keep_alive_s = keep_alive_s
        self._loop = asyncio.get_running_loop()
        self._pending: list[bytes] = []
        self._num_pending_bytes = 0
        self._is_closed = self._has_ended = False
        self._data_ready: asyncio.Future[None] | None = None  # the sender waits for this
        self._room_ready: asyncio.Future[None] | None = None  # the writer waits for this
        self._task: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def run_sender_task(self) -> AsyncGenerator[None]:
        """Send what is put in until the context is left.

        By then all of it has been sent, or an error is raised.
        """
        self._task = asyncio.create_task(self._send_until_closed())
        try:
            yield
            self._is_closed = True
            self._wake_sender()
            await self._task
        finally:
            self._task.cancel()
            await asyncio.wait([self._task])
            if not self._task.cancelled():
                self._task.exception()  # it was raised above, or another was

    def put(self, data: bytes) -> None:
        """Queue data for sending; raises ConnectionError if the reader has gone."""
        if data:
            if self._has_ended and self._task is not None:
                self._task.result()
            self._pending.append(data)
            self._num_pending_bytes += len(data)
            if self._data_ready is not None:
                self._wake_sender()

    @property
    def is_full(self) -> bool:
        """True if the writer should call `wait_for_room`."""
        return self._num_pending_bytes > _MAX_PENDING_BYTES

    async def wait_for_room(self) -> None:
        """Wait until the reader has taken what waits; raises ConnectionError if it has gone."""
        while self.is_full:
            if self._task is not None and self._task.done():
                await self._task
                raise ConnectionResetError("the reader has gone")
            self._room_ready = self._loop.create_future()
            await self._room_ready

    def _wake_sender(self) -> None:
        data_ready, self._data_ready = self._data_ready, None
        if data_ready is not None and not data_ready.done():
            data_ready.set_result(None)

    async def _send_until_closed(self) -> None:
        try:
            while True:
                if not self._pending and not self._is_closed:
                    await self._wait_for_data()
                if not self._pending and self._is_closed:
                    return  # no keep-alive after the end
                data, self._pending = b"".join(self._pending), []
                await self.response.write(data or self._keep_alive)
                self._num_pending_bytes -= len(data)
                self._wake_writer()
        finally:
            self._has_ended = True
            self._wake_writer()

    def _wake_writer(self) -> None:
        if self._room_ready is not None and not self._room_ready.done():
            self._room_ready.set_result(None)

    async def _wait_for_data(self) -> None:
        """Wait for data, or until a keep-alive is due."""
        data_ready = self._data_ready = self._loop.create_future()
        timer = self._loop.call_later(self._keep_alive_s, self._wake_sender)
        try:
            await data_ready
        finally:
            timer.cancel()
            self._data_ready = None
