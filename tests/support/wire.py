"""A real server on 127.0.0.1 that answers with the bytes a test gives it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

__all__ = ["Wire", "chunk", "served", "text_chunks"]


def chunk(delta: dict[str, Any] | None = None, finish: str | None = None, **fields: Any) -> bytes:
    """One frame as OpenAI's servers send it."""
    choice = {"index": 0, "delta": delta or {}, "finish_reason": finish}
    return b"data: " + json.dumps({"object": "chat.completion.chunk", "choices": [choice], **fields}).encode() + b"\n\n"


def text_chunks(*texts: str, finish: str = "stop") -> list[bytes]:
    return [*(chunk({"content": text}) for text in texts), chunk(finish=finish), b"data: [DONE]\n\n"]


class Wire:
    """The server: what it was asked, what it answers, and how many requests are still being answered."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.peers: list[object] = []  # the connection that each request came by
        self.frames: list[bytes] | None = []  # None: what `write_answer` gives
        self.whole: Any = None  # for who asks for no stream
        self.wait_s = 0.0  # before the answer begins
        self.pause_s = 0.0  # before each frame
        self.end_s = 0.0  # before the body's end
        self.status = 200
        self.error: Any = None
        self.error_headers: dict[str, str] = {}
        self.is_silent = False  # not even a status comes
        self.cuts_refusal = False  # a status comes, but not the text of the refusal
        self.drop = False  # the connection, behind the last frame
        self.num_open = 0
        self.closed_at = 0.0  # when the last answer ended, whoever ended it, by the loop's clock
        self.was_asked, self.was_left = asyncio.Event(), asyncio.Event()  # for a whole answer
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.paths.append(request.path_qs)
        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        self.peers.append(request.transport and request.transport.get_extra_info("peername"))
        self.num_open += 1
        try:
            await (asyncio.Event().wait() if self.is_silent else asyncio.sleep(self.wait_s))
            if self.status != 200:
                return await self._refuse(request)
            return await self._answer(request, self.bodies[-1])
        finally:
            self.num_open -= 1
            self.closed_at = asyncio.get_running_loop().time()

    def write_answer(self, body: Mapping[str, Any]) -> list[bytes]:
        """The frames of an answer of which the test says nothing."""
        raise NotImplementedError

    async def until_idle(self) -> None:
        """Wait, at most two seconds, until nothing is being answered any more."""
        give_up_at = asyncio.get_running_loop().time() + 2
        while self.num_open and asyncio.get_running_loop().time() < give_up_at:  # noqa: ASYNC110 - for tests to poll
            await asyncio.sleep(0.002)

    async def _refuse(self, request: web.Request) -> web.StreamResponse:
        if self.cuts_refusal:
            response = web.StreamResponse(status=self.status)
            await response.prepare(request)
            await asyncio.Event().wait()
        return web.json_response(self.error, status=self.status, headers=self.error_headers)

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await (self._write(request, body) if body.get("stream") else self._answer_whole(request))

    async def _write(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for frame in self.write_answer(body) if self.frames is None else self.frames:
            await asyncio.sleep(self.pause_s)
            await response.write(frame)
        await asyncio.sleep(self.end_s)
        if self.drop and request.transport is not None:
            request.transport.abort()
        return response

    async def _answer_whole(self, request: web.Request) -> web.StreamResponse:
        self.was_asked.set()
        try:
            await asyncio.sleep(self.pause_s)
            if not self.drop:
                return web.json_response(self.whole)
            response = web.StreamResponse(headers={"Content-Length": "1000"})
            await response.prepare(request)
            await response.write(json.dumps(self.whole).encode())
            if request.transport is not None:
                request.transport.abort()
            return response
        except asyncio.CancelledError:
            self.was_left.set()
            raise


@asynccontextmanager
async def served(path: str, answer: Handler, *, shutdown_s: float = 1.0) -> AsyncGenerator[str]:
    """Answer what is posted to `path`, on a port of its own; the server's root address."""
    app = web.Application()
    app.router.add_post(path, answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=shutdown_s, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()
