"""Connections of aiohttp that do not wait for clients that stop reading or send broken bodies."""

from __future__ import annotations

import asyncio
from typing import Any, Final, cast

from aiohttp import hdrs, web

__all__ = ["SERVER_NAME", "ReaderWatch", "adopt_connections"]

SERVER_NAME: Final = "llm-spec"  # reveals neither the software nor its version
# A reader that takes fewer in all of its time only keeps its connection busy
_MIN_TAKEN_BYTES: Final = 16 * 1024


def adopt_connections(server: web.Server, *, write_timeout_s: float) -> None:
    """Make a server create this module's connections; aiohttp has no parameter for their class.

    A connection is aborted if its reader takes almost nothing for `write_timeout_s` seconds.
    """
    server.__class__ = _ConnectionFactory
    cast("_ConnectionFactory", server).reader_watch = ReaderWatch(write_timeout_s)


class _ConnectionFactory(web.Server):
    """Creates connections for aiohttp."""

    reader_watch: ReaderWatch

    def __call__(self) -> _Connection:
        connection = super().__call__()
        connection.__class__ = _Connection
        return cast("_Connection", connection)


class _Connection(web.RequestHandler):
    """A connection that hides the server's software, and ends if its client stops reading."""

    __slots__ = ()

    def handle_error(self, *args: Any, **kwargs: Any) -> web.StreamResponse:
        response = super().handle_error(*args, **kwargs)
        response.headers[hdrs.SERVER] = SERVER_NAME
        return response

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        request = self._current_request
        if request is None or not self._messages or request.content.is_eof():
            return
        # Before a body ends, this can only be an error in it, kept until after the answer
        self._messages.clear()
        request.content.set_exception(web.RequestPayloadError())

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.transport is not None:
            self._reader_watch.watch(self.transport)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.transport is not None:
            self._reader_watch.unwatch(self.transport)

    async def start(self) -> None:
        transport, reader_watch = self.transport, self._reader_watch
        try:
            await super().start()
        finally:  # it closes as soon as its reader has taken the rest
            if transport is not None:
                reader_watch.watch(transport)

    @property
    def _reader_watch(self) -> ReaderWatch:
        return cast("_ConnectionFactory", self._manager).reader_watch


class ReaderWatch:
    """Aborts connections whose readers do not take what waits for them."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._timers: dict[asyncio.Transport, asyncio.TimerHandle] = {}

    def watch(self, transport: asyncio.Transport) -> None:
        """Watch a connection as long as data waits; nothing more is written meanwhile."""
        num_unsent = transport.get_write_buffer_size()
        if num_unsent and transport not in self._timers:
            loop = asyncio.get_running_loop()
            self._timers[transport] = loop.call_later(self._timeout_s, self._check_progress, transport, num_unsent)

    def unwatch(self, transport: asyncio.Transport) -> None:
        """Stop watching: the reader has taken enough for more to be written."""
        timer = self._timers.pop(transport, None)
        if timer is not None:
            timer.cancel()

    def _check_progress(self, transport: asyncio.Transport, num_before: int) -> None:
        del self._timers[transport]
        num_unsent = transport.get_write_buffer_size()
        if num_unsent and num_before - num_unsent < _MIN_TAKEN_BYTES:
            transport.abort()
        else:
            self.watch(transport)
