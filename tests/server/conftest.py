"""Servers that several tests share."""

from __future__ import annotations

import asyncio
import http.client
import threading
from collections.abc import Iterator

import pytest
from support.serving import HANGS_S, RULES, Post, Reply, serving

from llm_spec import SpeculativeConfig
from llm_spec.server import ModelConfig


@pytest.fixture(scope="module")
def post() -> Iterator[Post]:
    """Posts bytes to a server in a thread of its own: `fast` answers by rules, `local` is the built-in pair."""
    local = ModelConfig(target="builtin:target", draft="lookup", speculative=SpeculativeConfig(max_total_tokens=3))
    ready, ended, urls = threading.Event(), asyncio.Event(), list[str]()
    loop = asyncio.new_event_loop()

    async def run() -> None:
        async with serving({"fast": RULES, "local": local}) as asking:
            urls.append(asking.url)
            ready.set()
            await ended.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    assert ready.wait(HANGS_S)
    connection = http.client.HTTPConnection(urls[0].removeprefix("http://"), timeout=HANGS_S)

    def send(path: str, data: bytes) -> Reply:
        connection.request("POST", path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return Reply(response.status, dict(response.headers.items()), response.read())

    try:
        yield send
    finally:
        connection.close()
        loop.call_soon_threadsafe(ended.set)
        thread.join(HANGS_S)
        loop.close()
