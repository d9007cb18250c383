"""A relay that makes a server's streams slow and leaves its other calls alone, so that rows pay at any server."""

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
    """The address, ending in /v1, of a relay to the server at `url`: each event of a stream comes `pause_s` later."""
    root = url.removesuffix("/v1")

    async def relay(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {"Content-Type": request.content_type}
        async with session.post(root + request.path, data=body, headers=headers) as upstream:
            if upstream.content_type != "text/event-stream":
                return web.Response(
                    status=upstream.status, body=await upstream.read(), content_type=upstream.content_type
                )
            response = web.StreamResponse(status=upstream.status, headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            while event := await upstream.content.readuntil(_EVENT_END):  # empty at the end
                await asyncio.sleep(pause_s)
                await response.write(event)
            await response.write_eof()
            return response

    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60.0)) as session,
        served("/{path:.*}", relay) as address,
    ):
        yield f"{address}/v1"
