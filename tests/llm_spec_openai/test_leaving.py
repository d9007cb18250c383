"""Whoever goes away closes the connection, and with it the server's work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from llm_spec_openai import OpenAIProvider
from openai import AsyncOpenAI, DefaultAioHttpClient, DefaultAsyncHttpxClient
from support.openai_wire import KEY, QUESTION
from support.wire import Wire, text_chunks

from llm_spec import SpeculativeConfig, SpeculativeDecoder

pytestmark = pytest.mark.virtual_clock

SOON_S = 0.05
DEADLINE_S = 5.0  # the SDK asks a thread for the platform before its first request, and that takes real time
CLIENTS = {"aiohttp": DefaultAioHttpClient, "httpx2": DefaultAsyncHttpxClient}


@pytest.mark.parametrize("transport", CLIENTS)
@pytest.mark.parametrize(
    ("how", "moment"),
    [
        ("cancelled", "no status"),
        ("cancelled", "no text"),
        ("cancelled", "mid-stream"),
        ("left", "no text"),
        ("left", "mid-stream"),
        ("failed", "mid-stream"),
        ("deadline", "no status"),
        ("deadline", "no text"),
        ("deadline", "mid-stream"),
    ],
)
async def test_going_away_closes_the_connection(wire: Wire, transport: str, how: str, moment: str) -> None:
    """The server sees it at once, whoever goes, however, and whenever: no timer stands between the two."""
    wire.frames = text_chunks(*["x"] * 1000)
    wire.is_silent, wire.pause_s = moment == "no status", 0.01 if moment == "mid-stream" else 60.0
    async with AsyncOpenAI(base_url=wire.url, api_key=KEY, http_client=CLIENTS[transport]()) as client:
        provider = OpenAIProvider("gpt-4o", client=client)
        assert await leave(wire, provider, how, moment) < SOON_S
    assert len(wire.bodies) == 1


async def leave(wire: Wire, provider: OpenAIProvider, how: str, moment: str) -> float:
    """Go away; the seconds that the server took to see it."""
    loop = asyncio.get_running_loop()
    started, gone = loop.time(), loop.create_future()
    listening = asyncio.create_task(listen(provider, how, moment, lambda: gone.set_result(loop.time())))
    if how == "cancelled":
        while not wire.num_open or (moment == "mid-stream" and loop.time() < started + 0.05):  # noqa: ASYNC110 - the server sets no events here
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.02)
        gone.set_result(loop.time())
        listening.cancel()
    elif how == "deadline":
        gone.set_result(started + DEADLINE_S)
    (outcome,) = await asyncio.gather(listening, return_exceptions=True)
    assert isinstance(outcome, asyncio.CancelledError) == (how == "cancelled")
    await wire.until_idle()
    assert wire.num_open == 0
    return wire.closed_at - await gone


async def listen(provider: OpenAIProvider, how: str, moment: str, going: Callable[[], None]) -> None:
    if how == "deadline":
        await SpeculativeDecoder(target=provider, draft=None, config=SpeculativeConfig(deadline_s=DEADLINE_S)).decode(
            "q"
        )
        return
    async with provider.stream(QUESTION) as events:
        if how == "left" and moment == "no text":
            going()
            return
        async for _ in events:
            if how == "left":
                going()
                return
            if how == "failed":
                going()
                raise RuntimeError("the consumer's own error")
