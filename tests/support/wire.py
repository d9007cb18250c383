"""A real server on 127.0.0.1 that answers with the bytes a test gives it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
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
    """The server: what it was asked, what it answers, and how many answers are still being written."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.frames: list[bytes] = []
        self.whole: Any = None  # for who asks for no stream
        self.pause_s = 0.0  # before each frame
        self.end_s = 0.0  # before the body's end
        self.connections: set[object] = set()
        self.status = 200
        self.error: Any = None
        self.drop = False  # the connection, behind the last frame
        self.num_open = 0
        self.was_asked, self.was_left = asyncio.Event(), asyncio.Event()  # for a whole answer
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        if request.transport is not None:
            self.connections.add(request.transport.get_extra_info("peername"))
        self.headers.append(dict(request.headers))
        if self.status != 200:
            elsewhere = {"Location": f"{self.url}/elsewhere"} if 300 <= self.status < 400 else {}
            return web.json_response(self.error, status=self.status, headers=elsewhere)
        if not self.bodies[-1].get("stream"):
            return await self._answer_whole(request)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.num_open += 1
        try:
            for frame in self.frames:
                await asyncio.sleep(self.pause_s)
                await response.write(frame)
            await asyncio.sleep(self.end_s)
            if self.drop and request.transport is not None:
                request.transport.abort()
        finally:
            self.num_open -= 1
        return response

    async def _answer_whole(self, request: web.Request) -> web.StreamResponse:
        self.num_open += 1
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
        finally:
            self.num_open -= 1


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
