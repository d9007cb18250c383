"""Whoever stops listening stops the server's work: seen from the server, over both transports."""

from __future__ import annotations

import asyncio

import pytest
from anthropic import AsyncAnthropic
from llm_spec_anthropic import AnthropicProvider
from support.messages_wire import MessagesWire, answer_frames

from llm_spec import ChatRequest, SpeculativeConfig, SpeculativeDecoder

pytestmark = pytest.mark.virtual_clock

KEY = "sk-any"
SOON_S = 0.05
DEADLINE_S = 5.0  # the SDK asks a thread for the platform before its first request, and that takes real time


async def listen(provider: AnthropicProvider, how: str, when: str, begun: asyncio.Event) -> float:
    """Read an answer until it is cancelled, or of the reader's own will, or until the decoder's deadline: that time."""
    loop = asyncio.get_running_loop()
    if how == "deadline":
        deadline = loop.time() + DEADLINE_S
        await SpeculativeDecoder(target=provider, draft=None, config=SpeculativeConfig(deadline_s=DEADLINE_S)).decode(
            "q"
        )
        return deadline
    async with provider.stream(ChatRequest.create("q")) as events:
        if how == "left" and when == "before":
            return loop.time()
        async for _ in events:
            begun.set()
            if how == "left":
                return loop.time()
    raise AssertionError("the answer has come to its end")


@pytest.mark.parametrize("transport", ["aiohttp", "httpx2"])
@pytest.mark.parametrize("when", ["before", "midway"])
@pytest.mark.parametrize("how", ["cancelled", "left", "deadline"])
async def test_going_away_closes_the_connection(wire: MessagesWire, how: str, when: str, transport: str) -> None:
    """Before the first byte and midway, the server is rid of the request at once: no timer stands between the two."""
    loop = asyncio.get_running_loop()
    wire.frames, wire.pause_s = answer_frames(*["x"] * 1000), 0.01
    if when == "before" and how == "left":
        wire.pause_s = 60.0  # there is nothing to leave before the headers are there
    elif when == "before":
        wire.wait_s = 60.0
    async with AsyncAnthropic(base_url=wire.url, api_key=KEY) as given:
        own = AnthropicProvider("claude-haiku-5-5", base_url=wire.url, api_key=KEY)
        provider = own if transport == "aiohttp" else AnthropicProvider("claude-haiku-5-5", client=given)
        begun = asyncio.Event()
        listening = asyncio.create_task(listen(provider, how, when, begun))
        if how == "cancelled":
            while not (begun.is_set() if when == "midway" else wire.bodies):  # noqa: ASYNC110 - as below
                await asyncio.sleep(0.001)
            left_at = loop.time()
            listening.cancel()
            await asyncio.wait([listening])
            assert listening.cancelled()
        else:
            left_at = await listening
        await wait_until_closed(wire)
        await own.aclose()
    assert (len(wire.bodies), wire.num_open) == (1, 0)
    assert wire.closed_at - left_at < SOON_S


async def wait_until_closed(wire: MessagesWire) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + 2
    while wire.num_open and loop.time() < end:  # noqa: ASYNC110 - the server is to be watched, not changed
        await asyncio.sleep(0.005)
