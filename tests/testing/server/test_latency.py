"""How long ScriptedModelServer takes: round trips, and prompts of which it has computed a part before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from llm_spec.testing.server import ScriptedModelServer, ServerFaults, ServerLatency
from llm_spec.testing.server.latency import PrefixCache

pytestmark = pytest.mark.virtual_clock

PROMPT = list(range(1, 161))  # ten blocks
SPENT = 0.15  # at 1,000 tokens a second, and a little less, for the clocks


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        yield session


async def complete(
    session: aiohttp.ClientSession, server: ScriptedModelServer, prompt: Any, **options: Any
) -> tuple[float, dict[str, int]]:
    """The time that one token takes, and the usage's counts."""
    words = {"prompt": " ".join(f"w{i}" for i in PROMPT)}  # ids are given out for them
    async with session.post(server.url.removesuffix("/v1") + "/tokenize", json=words) as response:
        assert (await response.json())["count"] == len(PROMPT)
    start = asyncio.get_running_loop().time()
    body = {"prompt": prompt, "max_tokens": 1, **options}
    async with session.post(f"{server.url}/completions", json=body) as response:
        usage = (await response.json())["usage"]
    counts = {"prompt": usage["prompt_tokens"], "cached": usage["prompt_tokens_details"]["cached_tokens"]}
    return asyncio.get_running_loop().time() - start, counts


def test_whole_blocks_are_cached_and_never_the_last_token() -> None:
    """What is behind the first other token is not, though it is equal."""
    cache = PrefixCache()
    assert [cache.count_cached_and_add_prompt(PROMPT[:n]) for n in (0, 15, 33, 33, 32, 48, 49)] == [
        0,
        0,
        0,
        32,
        16,
        32,
        48,
    ]
    assert cache.count_cached_and_add_prompt([*PROMPT[:20], 999, *PROMPT[21:]]) == 16
    assert cache.count_cached_and_add_prompt(PROMPT[16:]) == 0


async def test_only_the_tokens_that_are_not_cached_take_time(session: aiohttp.ClientSession) -> None:
    async with ScriptedModelServer("Yes.", latency=ServerLatency(prefill_tokens_per_s=1000)) as server:
        first, first_counts = await complete(session, server, PROMPT)
        again, again_counts = await complete(session, server, PROMPT)
    assert (first_counts, again_counts) == ({"prompt": 160, "cached": 0}, {"prompt": 160, "cached": 144})
    assert first > SPENT > again


async def test_the_first_token_takes_its_time_in_any_case(session: aiohttp.ClientSession) -> None:
    async with ScriptedModelServer(
        "Yes.", latency=ServerLatency(first_token_s=0.03, prefill_tokens_per_s=1e6)
    ) as server:
        times = [(await complete(session, server, PROMPT))[0] for _ in range(2)]
    assert min(times) > 0.029


async def test_a_server_without_a_cache(session: aiohttp.ClientSession) -> None:
    async with ScriptedModelServer("Yes.", latency=ServerLatency(prefill_tokens_per_s=1000, cached=False)) as server:
        asked = [await complete(session, server, PROMPT) for _ in range(2)]
    assert min(time for time, _ in asked) > SPENT
    assert asked[1][1] == {"prompt": 160, "cached": 0}


async def test_a_batch_shares_its_prefixes(session: aiohttp.ClientSession) -> None:
    """Each further row computes what is behind its last whole block."""
    async with ScriptedModelServer("Yes.", latency=ServerLatency(prefill_tokens_per_s=1000)) as server:
        batch = [PROMPT[:n] for n in range(145, 151)]
        time, counts = await complete(session, server, batch)
    assert counts == {"prompt": sum(range(145, 151)), "cached": 5 * 144}
    assert 0.145 + sum(range(2, 7)) / 1000 - 0.01 < time < 0.5


async def test_the_logprobs_of_a_prompt_are_computed_all(session: aiohttp.ClientSession) -> None:
    """vLLM takes nothing from its cache for them."""
    async with ScriptedModelServer("Yes.", latency=ServerLatency(prefill_tokens_per_s=1000)) as server:
        await complete(session, server, PROMPT)
        time, counts = await complete(session, server, PROMPT, prompt_logprobs=1)
    assert counts["cached"] == 0
    assert time > SPENT


async def test_a_stream_reports_cached_tokens(session: aiohttp.ClientSession) -> None:
    body = {"messages": [{"role": "user", "content": "so " * 40}], "stream": True}
    texts: list[str] = []
    async with ScriptedModelServer("Yes.") as server:
        for _ in range(2):
            options = {**body, "stream_options": {"include_usage": True}}
            async with session.post(f"{server.url}/chat/completions", json=options) as response:
                texts.append(await response.text())
    assert '"prompt_tokens_details": {"cached_tokens": 32}' in texts[1]


@pytest.mark.parametrize("path", ["/v1/models", "/v1/unheard_of", "/tokenize", "/detokenize"])
async def test_a_round_trip_is_added_on_every_path(session: aiohttp.ClientSession, path: str) -> None:
    faults = ServerFaults(missing=frozenset({"/detokenize"}))
    async with ScriptedModelServer("Yes.", latency=ServerLatency(round_trip_s=0.02), faults=faults) as server:
        start = asyncio.get_running_loop().time()
        method = "POST" if path.endswith("tokenize") else "GET"
        async with session.request(method, server.url.removesuffix("/v1") + path, json={"prompt": ""}) as response:
            await response.read()
        assert 0.019 < asyncio.get_running_loop().time() - start < 1


async def test_a_round_trip_is_added_once_to_a_stream(session: aiohttp.ClientSession) -> None:
    body = {"messages": [{"role": "user", "content": "Well?"}], "stream": True}
    async with ScriptedModelServer("so " * 40, latency=ServerLatency(round_trip_s=0.05)) as server:
        start = asyncio.get_running_loop().time()
        async with session.post(f"{server.url}/chat/completions", json=body) as response:
            await response.read()
        assert 0.049 < asyncio.get_running_loop().time() - start < 1
