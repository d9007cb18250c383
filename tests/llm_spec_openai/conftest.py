"""A server for one test, and no environment."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from openai_wire import OpenAIWire


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK takes keys and addresses from the environment; of these tests' machine it gets none."""
    for name in list(os.environ):
        if "OPENAI" in name:
            monkeypatch.delenv(name)


@pytest.fixture
async def wire() -> AsyncIterator[OpenAIWire]:
    """A server for one test."""
    wire = OpenAIWire()
    app = web.Application()
    app.router.add_post("/{path:.*}", wire.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    wire.url = f"http://{host}:{port}/v1"
    try:
        yield wire
    finally:
        await runner.cleanup()
