"""Reads request bodies, with a bound for each and a bound for all of them together."""

from __future__ import annotations

import asyncio
import math
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple, cast

from aiohttp import hdrs, web

from llm_spec.server.apis.fields import Json
from llm_spec.server.config import ServerConfig
from llm_spec.server.content_encoding import BodyUnpacker, find_content_encoding
from llm_spec.server.json_decoder import LONG_BYTES, decode_json, decode_long_json, run_in_body_thread
from llm_spec.server.problems import HttpProblem

__all__ = ["BodyReader", "RequestBody"]


class RequestBody(NamedTuple):
    """A request's body.

    `fields`: the JSON object.
    `is_long`: the body is so long that work on all of it belongs in `run_in_body_thread`.
    """

    fields: Json
    is_long: bool


class BodyReader:
    """Reads the bodies of one worker's requests. Only long ones count towards the common bound."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._max_reserved_bytes = config.max_bodies_bytes or 4 * config.max_body_bytes
        self._num_reserved_bytes = 0  # of all bodies that are held
        self._timeouts: set[asyncio.Timeout] = set()  # of bodies that are still coming
        self._all_have_come = asyncio.Event()
        self._shutdown_at_s = math.inf

    def read_body(self, request: web.Request) -> AbstractAsyncContextManager[RequestBody]:
        """Read a request's body, which counts until the context is left.

        Raises HttpProblem if the body is not a JSON object, is too long, or does not arrive in
        time.
        """
        return _HeldBody(self, request)

    async def read_body_in_time(self, request: web.Request, held: _HeldBody) -> bytearray:
        """Return the unpacked bytes of a body; they count as they arrive."""
        encoding = find_content_encoding(request.headers.get(hdrs.CONTENT_ENCODING))
        if (request.content_length or 0) > self._config.max_body_bytes:
            raise self._build_too_long_problem()
        try:
            body = await self._read_body_before_timeout(request, held)
        except web.RequestPayloadError:
            _give_up_rest(request)  # it is unknown where the next request begins
            message = "the request's body is not valid HTTP: its chunks are not what Transfer-Encoding says"
            raise HttpProblem(400, message, code="invalid_body") from None
        return body if encoding is None else await self._unpack_body(encoding, body, held)

    async def _read_body_before_timeout(self, request: web.Request, held: _HeldBody) -> bytearray:
        if request.content.is_eof():  # it came with its headers
            return await self._read_bounded_body(request, held)
        latest_s = asyncio.get_running_loop().time() + self._config.body_timeout_s
        timeout = asyncio.timeout_at(min(latest_s, self._shutdown_at_s))
        self._timeouts.add(timeout)
        try:
            async with timeout:
                return await self._read_bounded_body(request, held)
        except TimeoutError:
            if self._shutdown_at_s < math.inf:
                _give_up_rest(request)
            raise HttpProblem(408, "the request's body did not arrive in time", code="timeout") from None
        finally:
            self._timeouts.discard(timeout)
            if not self._timeouts:
                self._all_have_come.set()

    async def wait_for_last_bodies(self, max_s: float) -> None:
        """Wait up to `max_s` seconds for bodies that are arriving; do not wait for later ones."""
        self._shutdown_at_s = asyncio.get_running_loop().time() + max_s
        for timeout in self._timeouts:
            if not timeout.expired():
                timeout.reschedule(min(self._shutdown_at_s, timeout.when() or math.inf))
        while self._timeouts:
            self._all_have_come.clear()
            await self._all_have_come.wait()

    async def _read_bounded_body(self, request: web.Request, held: _HeldBody) -> bytearray:
        body = bytearray()  # joining pieces at the end would hold them twice
        while piece := await request.content.readany():
            self._append_piece(piece, body, held)
        return body

    async def _unpack_body(self, encoding: str, packed: bytearray, held: _HeldBody) -> bytearray:
        """Unpack a body in the body thread, since it may be long; it counts as it grows."""
        body = bytearray()
        unpacker = BodyUnpacker(encoding, packed)
        try:
            while piece := await run_in_body_thread(unpacker.read_piece):
                self._append_piece(piece, body, held)
        except ValueError as error:
            message = f"the request's body is not valid {encoding}: {error}"
            raise HttpProblem(400, message, code="invalid_content_encoding") from None
        return body

    def _append_piece(self, piece: bytes, body: bytearray, held: _HeldBody) -> None:
        num_bytes = len(body) + len(piece)
        if num_bytes > self._config.max_body_bytes:
            raise self._build_too_long_problem()
        if num_bytes > max(LONG_BYTES, held.num_bytes):
            self._reserve_long_body_bytes(num_bytes - held.num_bytes, held)
        body += piece

    def _reserve_long_body_bytes(self, more_bytes: int, held: _HeldBody) -> None:
        if self._num_reserved_bytes + more_bytes > self._max_reserved_bytes:
            message = "the server already holds as many long requests as it can"
            raise HttpProblem(503, message, code="overloaded", retry_after_s=1.0)
        self._num_reserved_bytes += more_bytes
        held.num_bytes += more_bytes

    def release_held_body(self, held: _HeldBody) -> None:
        """Stop counting a body."""
        self._num_reserved_bytes -= held.num_bytes
        held.num_bytes = 0

    def _build_too_long_problem(self) -> HttpProblem:
        message = f"the request's body is longer than {self._config.max_body_bytes} bytes"
        return HttpProblem(413, message, code="request_too_large")


class _HeldBody(AbstractAsyncContextManager[RequestBody]):
    """One body, of which `num_bytes` count.

    This is a class because a context of a generator costs a small request more than its body does.
    """

    def __init__(self, reader: BodyReader, request: web.Request) -> None:
        self._reader = reader
        self._request = request
        self.num_bytes = 0

    async def __aenter__(self) -> RequestBody:
        try:
            return await _decode_json_object_body(await self._reader.read_body_in_time(self._request, self))
        except BaseException:
            self._reader.release_held_body(self)
            raise

    async def __aexit__(self, *_: object) -> None:
        self._reader.release_held_body(self)


def _give_up_rest(request: web.Request) -> None:
    """Have aiohttp answer without reading the rest of a body, and then close the connection."""
    request.content.feed_eof()
    request.protocol.close()


async def _decode_json_object_body(data: bytearray) -> RequestBody:
    is_long = len(data) > LONG_BYTES
    try:
        body: Any = await run_in_body_thread(decode_long_json, data) if is_long else decode_json(data)
    except (ValueError, RecursionError) as error:
        raise HttpProblem(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise HttpProblem(400, f"the body is of type {type(body).__name__}; it must be a JSON object")
    return RequestBody(cast("Json", body), is_long)
