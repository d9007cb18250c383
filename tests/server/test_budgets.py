"""A key's budget under many requests at once: nearly all of it is used, little more than it, and by many of them."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import aiohttp
import pytest
from support.serving import HANGS_S, Asking, ask, remote

from llm_spec.budget import RESERVED_OUTPUT_TOKENS
from llm_spec.server import KeyConfig, Server, ServerConfig
from llm_spec.server.usage_ledger import UsageLedger
from llm_spec.testing.server import ScriptedModelServer, ServerLatency

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
