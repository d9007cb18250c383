"""A relay that makes a server's streams slow and leaves its other calls alone: rows come first at any server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

import aiohttp
from aiohttp import web
from support.wire import served

__all__ = ["open_slow_relay"]

_EVENT_END: Final = b"\n\n"


@asynccontextmanager
async def open_slow_relay(url: str, pause_s: float) -> AsyncGenerator[str]:
    """The address, ending in /v1, of a relay to the server at `url`.

    Each event of a stream comes `pause_s` later, and not before the calls without a stream that were under way when it
    came have ended: rows overtake streams on a busy machine as well.
    """
    root = url.removesuffix("/v1")
    calls = set[asyncio.Event]()

    async def relay(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {"Content-Type": request.content_type}
        ended = asyncio.Event()
        calls.add(ended)
        try:
            async with session.post(root + request.path, data=body, headers=headers) as upstream:
                if upstream.content_type == "text/event-stream":
                    ended.set()  # as a call that streams wait for
                    return await relay_stream(request, upstream)
                return web.Response(
                    status=upstream.status, body=await upstream.read(), content_type=upstream.content_type
                )
        finally:
            calls.discard(ended)
            ended.set()

    async def relay_stream(request: web.Request, upstream: aiohttp.ClientResponse) -> web.StreamResponse:
        response = web.StreamResponse(status=upstream.status, headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while event := await upstream.content.readuntil(_EVENT_END):  # empty at the end
            under_way = tuple(calls)
            await asyncio.sleep(pause_s)
            for ended in under_way:
                await ended.wait()
            await response.write(event)
        await response.write_eof()
        return response

    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60.0)) as session,
        served("/{path:.*}", relay) as address,
    ):
        yield f"{address}/v1"
