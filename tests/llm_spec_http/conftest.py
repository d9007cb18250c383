"""A server for one test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from wire import Wire


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    """A server for one test."""
    wire = Wire()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", wire.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    wire.url = f"http://{host}:{port}/v1"
    try:
        yield wire
    finally:
        await runner.cleanup()
