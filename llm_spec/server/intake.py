"""Requests' bodies as they come in: each of them bounded, and all of them together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, cast

from aiohttp import web

from llm_spec.server.bodies import Json
from llm_spec.server.config import ServerConfig
from llm_spec.server.parsing import LONG_BYTES, apart, parse, parse_long
from llm_spec.server.problems import Problem

__all__ = ["Intake", "Received"]


class Received(NamedTuple):
    """A body, and whether it is so long that work on all of it belongs into the thread `apart`."""

    fields: Json
    is_long: bool


class Intake:
    """Reads the bodies of one worker's requests. Only long ones count: the others pass whatever is sent beside them."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._max_bytes = config.max_bodies_bytes or 4 * config.max_body_bytes
        self._num_bytes = 0  # of all bodies that are held

    @asynccontextmanager
    async def body(self, request: web.Request) -> AsyncGenerator[Received]:
        """A request's body, a JSON object, which counts until the context is left; raises Problem for what is not."""
        held = _Held()
        try:
            data = await self._read(request, held)
            yield await _received(data)
        finally:
            self._num_bytes -= held.num_bytes

    async def _read(self, request: web.Request, held: _Held) -> bytes:
        if (request.content_length or 0) > self._config.max_body_bytes:
            raise self._too_long()
        if request.content.is_eof():  # it came with its headers
            return await self._collect(request, held)
        try:
            async with asyncio.timeout(self._config.body_timeout_s):
                return await self._collect(request, held)
        except TimeoutError:
            raise Problem(408, "the request's body did not come in time", code="timeout") from None

    async def _collect(self, request: web.Request, held: _Held) -> bytes:
        pieces: list[bytes] = []
        num_bytes = 0
        while piece := await request.content.readany():
            num_bytes += len(piece)
            if num_bytes > self._config.max_body_bytes:
                raise self._too_long()
            if num_bytes > LONG_BYTES:
                self._hold(num_bytes - held.num_bytes, held)
            pieces.append(piece)
        return b"".join(pieces)

    def _hold(self, more_bytes: int, held: _Held) -> None:
        if self._num_bytes + more_bytes > self._max_bytes:
            message = "the server holds as many long requests as it may"
            raise Problem(503, message, code="overloaded", retry_after_s=1.0)
        self._num_bytes += more_bytes
        held.num_bytes += more_bytes

    def _too_long(self) -> Problem:
        message = f"the request's body is longer than {self._config.max_body_bytes} bytes"
        return Problem(413, message, code="request_too_large")


class _Held:
    """How much of one body counts."""

    def __init__(self) -> None:
        self.num_bytes = 0


async def _received(data: bytes) -> Received:
    is_long = len(data) > LONG_BYTES
    try:
        body: Any = await apart(parse_long, data) if is_long else parse(data)
    except (ValueError, RecursionError) as error:
        raise Problem(400, f"the body is no JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise Problem(400, f"the body is of type {type(body).__name__}; it must be a JSON object")
    return Received(cast("Json", body), is_long)
