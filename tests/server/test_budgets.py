"""A key's budget under many requests at once: nearly all of it is used, little more than it, and by many of them."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import aiohttp
import pytest
from support.serving import HANGS_S, Asking, ask, remote

from llm_spec import RetryPolicy, SpeculativeConfig
from llm_spec.decoder.budget import RESERVED_OUTPUT_TOKENS
from llm_spec.server import KeyConfig, Server, ServerConfig
from llm_spec.server.usage_ledger import UsageLedger
from llm_spec.testing.server import ScriptedModelServer, ServerFaults, ServerLatency

pytestmark = pytest.mark.virtual_clock

CHAT: Final = "/v1/chat/completions"
TEXT: Final = " ".join(f"word{i}" for i in range(900))
KEY: Final = "secret-of-poor"
BUDGET: Final = 2000
NUM_REQUESTS: Final = 200


async def ask_at_once(upstream: ScriptedModelServer, num_workers: int, **fields: Any) -> tuple[list[int], int]:
    """The statuses of many streams, by turns at servers that share a ledger as workers do, and what they have spent."""
    keys = {"poor": KeyConfig(key=KEY, max_tokens=BUDGET)}
    config = ServerConfig(models={"fast": remote(upstream.url)}, keys=keys, port=0, shutdown_s=0.2)
    ledger = UsageLedger(num_workers, 1)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=HANGS_S)
    ) as session:
        servers = [Server(config, ledger=ledger, worker=worker) for worker in range(num_workers)]
        for server in servers:
            await server.__aenter__()
        try:
            clients = [Asking(server.url, session, {"x-api-key": KEY}) for server in servers]
            body = ask(CHAT, stream=True, **fields)
            asked = [clients[index % num_workers].post(CHAT, body) for index in range(NUM_REQUESTS)]
            statuses = [reply.status for reply in await asyncio.gather(*asked)]
        finally:
            for server in servers:
                await server.__aexit__()
    assert [ledger.sum_over_workers(0, column) for column in (2, 3, 4)] == [0, 0, 0], "nothing is held or open any more"
    return statuses, int(ledger.sum_over_workers(0, 0))


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("fields", [{"max_tokens": 800}, {}])
async def test_many_at_once_use_a_budget_and_little_more(num_workers: int, fields: dict[str, Any]) -> None:
    """200 streams that want 160,000 tokens of 2,000: by the upstream's own count, and by ours."""
    async with ScriptedModelServer(TEXT, latency=ServerLatency(first_token_s=1.0, token_s=0.05)) as upstream:
        statuses, num_spent = await ask_at_once(upstream, num_workers, **fields)
        num_answered = statuses.count(200)
        assert set(statuses) == {200, 429}
        assert num_answered >= 16
        assert num_answered == len(upstream.requests), "what is refused has not been sent"
        num_used = upstream.num_generated_tokens + 2 * num_answered
    for count in (num_spent, num_used):
        assert 0.95 * BUDGET <= count <= BUDGET + num_answered * RESERVED_OUTPUT_TOKENS
    assert num_used <= 1.1 * BUDGET


FAST_RETRIES: Final = SpeculativeConfig(
    stream_always=False, retry=RetryPolicy(max_attempts=3, first_wait_s=0.0, max_wait_s=0.0)
)
KINDS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "chat": (CHAT, {}),
    "a chat's stream": (CHAT, {"stream": True}),
    "responses": ("/v1/responses", {}),
    "responses' stream": ("/v1/responses", {"stream": True}),
    "messages": ("/v1/messages", {}),
    "messages' stream": ("/v1/messages", {"stream": True}),
    "completions": ("/v1/completions", {}),
    "completions' stream": ("/v1/completions", {"stream": True}),
    "three prompts": ("/v1/completions", {"prompt": ["one two three four"] * 3}),
    "relayed": (CHAT, {"n": 2}),
    "a relayed stream": (CHAT, {"n": 2, "stream": True}),
}


async def ask_once(upstream: ScriptedModelServer, kind: str) -> tuple[int, int]:
    """The status of one answer, and what its key has spent."""
    keys = {"poor": KeyConfig(key=KEY, max_tokens=BUDGET)}
    model = remote(upstream.url, speculative=FAST_RETRIES)
    config = ServerConfig(models={"fast": model}, keys=keys, port=0, shutdown_s=0.2)
    ledger = UsageLedger(1, 1)
    path, fields = KINDS[kind]
    async with Server(config, ledger=ledger) as server, aiohttp.ClientSession() as session:
        reply = await Asking(server.url, session, {"x-api-key": KEY}).post(
            path, ask(path, "one two three four", **fields)
        )
    assert ledger.sum_over_workers(0, 2) == 0
    return reply.status, int(ledger.sum_over_workers(0, 0))


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500, 503, 529])
@pytest.mark.parametrize("kind", KINDS)
async def test_refused_attempts_cost_nothing(kind: str, status: int) -> None:
    """None of the target's refusals is charged, however often it was asked."""
    async with ScriptedModelServer("one two", faults=ServerFaults(status=status)) as upstream:
        reply_status, num_spent = await ask_once(upstream, kind)
    assert reply_status >= 400
    assert num_spent == 0


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "a relayed stream"])  # which is not retried
async def test_an_answer_after_refusals_costs_what_it_took(kind: str) -> None:
    """A prompt of 4 tokens, or 7 with a chat's template, and 2 of an answer, by the target's count, once."""
    faults = ServerFaults(status=503, num_requests=2)
    async with ScriptedModelServer("one two", faults=faults) as upstream:
        counts = await ask_once(upstream, kind)
        num_alone = (await ask_once(upstream, kind))[1]  # of the same, without refusals
    assert counts == (200, num_alone)
    assert num_alone == (3 * 6 if kind == "three prompts" else 6 if kind.startswith("completions") else 9)
