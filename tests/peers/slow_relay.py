"""A relay that makes a server's streams slow and leaves its other calls alone, so that rows pay at any server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

import aiohttp
from aiohttp import web

__all__ = ["open_slow_relay"]

_EVENT_END: Final = b"\n\n"


@asynccontextmanager
async def open_slow_relay(url: str, pause_s: float) -> AsyncGenerator[str]:
    """The address, ending in /v1, of a relay to the server at `url`: each event of a stream comes `pause_s` later."""
    root = url.removesuffix("/v1")

    async def relay(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {"Content-Type": request.content_type}
        async with session.request(request.method, root + request.path_qs, data=body, headers=headers) as upstream:
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

    app = web.Application(client_max_size=2**24)
    app.router.add_route("*", "/{path:.*}", relay)
    runner = web.AppRunner(app)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60.0)) as session:
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        finally:
            await runner.cleanup()
