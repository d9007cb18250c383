"""Who asks: keys, and what each may do."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from typing import Any, Final

import pytest
from support.serving import ENDPOINTS, HANGS_S, RULES, ask, check_error, remote, serving, until

from llm_spec import Price, SpeculativeConfig
from llm_spec.server import KeyConfig, ModelConfig
from llm_spec.server import clients as clients_module
from llm_spec.server.clients import ApiClient, ClientRegistry
from llm_spec.server.problems import HttpProblem
from llm_spec.server.usage_ledger import UsageLedger
from llm_spec.testing.server import ScriptedModelServer, ServerLatency

pytestmark = pytest.mark.virtual_clock

ANN: Final = KeyConfig(key="secret-of-ann")
BOB: Final = KeyConfig(key="secret-of-bob", models=("fast",))


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong-key-here"},
        {"Authorization": "Bearer "},
        {"Authorization": "secret-of-ann"},
        {"Authorization": "Basic secret-of-ann"},
        {"x_api_key": "secret-of-an"},
        {"x_api_key": "secret-of-ann2"},
        {"Authorization": "Bearer sécret"},
        {"Authorization": "Bearer wrong-key-here", "x_api_key": "another-wrong-one"},
    ],
)
async def test_without_a_right_key_nothing_is_answered(path: str, headers: dict[str, str]) -> None:
    """401 in the API's form, whatever the body was, and the key that came is not repeated."""
    async with serving(keys={"ann": ANN}) as server:
        reply = await server.post(path, ask(path), **headers)
    assert reply.status == 401
    check_error(path, reply)
    assert reply.error["type"] == "authentication_error"
    assert "secret" not in reply.data.decode()


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer secret-of-ann"},
        {"Authorization": "bearer  secret-of-ann "},
        {"x_api_key": ANN.key},
        {"x_api_key": ANN.key, "Authorization": "Bearer another-login"},
        {"x_api_key": ANN.key, "Authorization": "Basic another-login"},
        {"x_api_key": "another-login", "Authorization": "Bearer secret-of-ann"},
    ],
)
async def test_a_key_comes_either_way(headers: dict[str, str]) -> None:
    """OpenAI's clients send it as Authorization, Anthropic's as x-api-key."""
    async with serving(keys={"ann": ANN, "bob": BOB}) as server:
        for path in ENDPOINTS:
            assert (await server.post(path, ask(path), **headers)).status == 200


@pytest.mark.parametrize("path", ["/v1/models", "/models", "/v1/models/fast", "/v1/budget", "/metrics"])
async def test_what_is_told_of_the_server_wants_a_key(path: str) -> None:
    """Models and metrics are for those who have one."""
    async with serving(keys={"ann": ANN}) as server:
        assert (await server.get(path)).status == 401
        assert (await server.get(path, x_api_key=ANN.key)).status == 200


async def test_a_key_sees_metrics_of_its_models_alone() -> None:
    """What a key may not use does not exist for it; what belongs to no model is everybody's."""
    async with serving({"fast": RULES, "dear": RULES}, keys={"ann": ANN, "bob": BOB}) as server:
        for name in ("fast", "dear"):
            body = ask(ENDPOINTS[0], model=name)
            assert (await server.post(ENDPOINTS[0], body, x_api_key=ANN.key)).status == 200
        anns, bobs = [(await server.get("/metrics", x_api_key=each.key)).data.decode() for each in (ANN, BOB)]
    assert 'model="dear"' in anns
    assert 'model="fast"' in bobs
    assert "dear" not in bobs
    assert "llm_spec_open_requests" in bobs


async def test_a_bad_key_is_refused_before_the_body_is_read() -> None:
    """Nobody without a key makes this server read megabytes."""
    async with serving(keys={"ann": ANN}, max_body_bytes=10) as server:
        assert (await server.chat("x" * 1000)).status == 401


async def test_a_key_may_use_its_models_alone() -> None:
    """What a key may not use does not exist for it, listed or asked for."""
    async with serving({"fast": RULES, "dear": RULES}, keys={"ann": ANN, "bob": BOB}) as server:
        for key, names in ((ANN.key, ["fast", "dear"]), (BOB.key, ["fast"])):
            listed = (await server.get("/v1/models", x_api_key=key)).json["data"]
            assert [model["id"] for model in listed] == names
        refused = await server.post(ENDPOINTS[0], ask(ENDPOINTS[0], model="dear"), x_api_key=BOB.key)
        secret_texts = await server.get("/v1/models/dear", x_api_key=BOB.key)
    assert (refused.status, refused.error["code"]) == (404, "model_not_found")
    assert secret_texts.status == 404


async def test_a_key_has_its_requests_at_once() -> None:
    """One more than `max_concurrent` gets 429 and a wait; other keys, and the same one later, are answered."""
    keys = {"one": KeyConfig(key="secret-of-one", max_concurrent=1), "ann": ANN}
    async with (
        ScriptedModelServer("one two", latency=ServerLatency(first_token_s=30.0)) as upstream,
        serving({"slow": remote(upstream.url), "fast": RULES}, keys=keys) as server,
    ):
        path = ENDPOINTS[0]
        slow = asyncio.create_task(server.post(path, ask(path, model="slow"), x_api_key="secret-of-one"))
        await until(lambda: upstream.num_open_streams > 0)
        reply = await server.post(path, ask(path), x_api_key="secret-of-one")
        assert (reply.status, reply.error["code"]) == (429, "too_many_requests")
        assert int(reply.headers["Retry-After"]) >= 1
        assert (await server.post(path, ask(path), x_api_key=ANN.key)).status == 200
        slow.cancel()
        await asyncio.gather(slow, return_exceptions=True)
        async with asyncio.timeout(HANGS_S):
            while (await server.post(path, ask(path), x_api_key="secret-of-one")).status == 429:  # noqa: ASYNC110 - what is asked is a server
                await asyncio.sleep(0.005)


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 2}])
async def test_a_budget_is_spent(fields: dict[str, Any]) -> None:
    """A key whose tokens are spent, however they were asked for, is told so, and that asking again is of no use."""
    keys = {"poor": KeyConfig(key="secret-of-poor", max_tokens=8), "ann": ANN}
    path = ENDPOINTS[0]
    async with serving(keys=keys) as server:
        statuses = [(await server.post(path, ask(path, **fields), x_api_key="secret-of-poor")).status for _ in range(4)]
        reply = await server.post(path, ask(path, **fields), x_api_key="secret-of-poor")
        assert (await server.post(path, ask(path, **fields), x_api_key=ANN.key)).status == 200
    assert statuses[0] == 200
    assert statuses[-1] == 429
    assert reply.error["code"] == "insufficient_quota"
    assert reply.headers["x-should-retry"] == "false"


async def test_a_key_sees_what_its_own_budget_has_left() -> None:
    """Tokens and money, of its own key alone; None for what is not limited."""
    keys = {
        "poor": KeyConfig(key="secret-of-poor", max_tokens=1000),
        "rich": KeyConfig(key="secret-of-rich", max_cost=2.5),
    }
    priced = ModelConfig(
        target="rules:any", speculative=SpeculativeConfig(prices={"rules:any": Price(input=1.0, output=1.0)})
    )
    async with serving(priced, keys=keys | {"ann": ANN}) as server:
        path = ENDPOINTS[0]
        usage = (await server.post(path, ask(path), x_api_key="secret-of-poor")).json["usage"]
        budgets = {
            key: (await server.get("/v1/budget", x_api_key=key)).json for key in ("secret-of-poor", "secret-of-rich")
        }
        unlimited = (await server.get("/budget", x_api_key=ANN.key)).json
    tokens = budgets["secret-of-poor"]["tokens"]
    assert tokens["limit"] == 1000
    assert tokens["spent"] >= usage["total_tokens"] > 0
    assert (tokens["reserved"], tokens["left"]) == (0, 1000 - tokens["spent"])
    assert budgets["secret-of-poor"]["cost"] is None
    cost = {"limit": 2.5, "spent": 0, "reserved": 0, "left": 2.5}
    assert budgets["secret-of-rich"] == {"object": "budget", "tokens": None, "cost": cost}
    assert unlimited == {"object": "budget", "tokens": None, "cost": None}


async def test_without_keys_there_is_no_budget() -> None:
    """Whoever asks may spend what it likes."""
    async with serving() as server:
        assert (await server.get("/v1/budget")).json == {"object": "budget", "tokens": None, "cost": None}


def test_what_is_left_is_without_what_running_answers_hold() -> None:
    """All workers count, and less than nothing is nothing."""
    ledger = UsageLedger(2, 1)
    keys = {"ann": KeyConfig(key="secret-of-ann", max_tokens=100)}
    first, second = (ClientRegistry(keys, ledger, worker).authenticate({"x-api-key": ANN.key}) for worker in (0, 1))
    assert first.budget is not None
    first.budget.spend(60, 0.0)
    assert first.budget.try_reserve(30, 0.0)
    assert second.describe_budget()["tokens"] == {"limit": 100, "spent": 60, "reserved": 30, "left": 10}
    first.budget.spend(60, 0.0)
    assert second.describe_budget()["tokens"]["left"] == 0


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All keys are compared, by their digests and by hmac.compare_digest, whichever is right."""
    compared: list[tuple[bytes, bytes]] = []

    def compare(known: bytes, given: bytes) -> bool:
        compared.append((known, given))
        return hmac.compare_digest(known, given)

    monkeypatch.setattr(clients_module, "hmac", type("Hmac", (), {"compare_digest": staticmethod(compare)}))
    clients = ClientRegistry({"ann": ANN, "bob": BOB}, UsageLedger(1, 2), 0)
    for given in (ANN.key, BOB.key, "x", "secret-of-ann-and-more"):
        compared.clear()
        if given in (ANN.key, BOB.key):
            clients.authenticate({"x-api-key": given})
        else:
            with pytest.raises(HttpProblem):
                clients.authenticate({"x-api-key": given})
        assert len(compared) == 2
        assert {len(part) for pair in compared for part in pair} == {32}


# ---------------------------------------------------------------------------------------------- the ledger


def test_workers_count_together() -> None:
    """What one worker counted, all see; each writes its own rows."""
    ledger = UsageLedger(2, 2)
    keys = {"ann": KeyConfig(key="secret-of-ann", max_concurrent=2, max_tokens=100), "bob": BOB}
    first, second = (
        ClientRegistry(keys, ledger, worker).authenticate({"x-api-key": "secret-of-ann"}) for worker in (0, 1)
    )
    assert first.budget is not None
    assert second.budget is not None
    first.budget.spend(60, 0.0)
    assert second.budget.spent_tokens == 60
    second.budget.spend(50, 0.0)
    assert first.budget.max_affordable_tokens(1, None) == 0
    first.begin_client_request()
    second.begin_client_request()
    with pytest.raises(HttpProblem):
        first.begin_client_request()
    second.end_request()
    first.begin_client_request()


def test_two_workers_never_let_in_more_than_a_key_may_have() -> None:
    """Also where the other lets one in at the very moment at which the first has counted what is open."""
    keys = {"ann": KeyConfig(key="secret-of-ann", max_concurrent=1)}
    let_in = 0

    class Busy(UsageLedger):
        """Between a count and what follows from it, the other worker is asked."""

        def sum_over_workers(self, client: int, column: int) -> float:
            counted, others[:], waiting = super().sum_over_workers(client, column), [], list(others)
            for other in waiting:
                enter(other)
            return counted

    def enter(client: ApiClient) -> None:
        nonlocal let_in
        with contextlib.suppress(HttpProblem):
            client.begin_client_request()
            let_in += 1

    ledger = Busy(2, 1)
    first, second = (
        ClientRegistry(keys, ledger, worker).authenticate({"x-api-key": "secret-of-ann"}) for worker in (0, 1)
    )
    others = [second]
    enter(first)
    assert let_in == 1
    first.end_request()
    second.begin_client_request()


def test_a_worker_that_died_leaves_no_request_open() -> None:
    """One that begins in its place forgets what was open, keeps what was spent, and counts as spent what was held."""
    ledger = UsageLedger(2, 1)
    keys = {"ann": KeyConfig(key="secret-of-ann", max_concurrent=1, max_tokens=100)}
    client = ClientRegistry(keys, ledger, 0).authenticate({"x-api-key": "secret-of-ann"})
    assert client.budget is not None
    client.budget.spend(60, 0.0)
    assert client.budget.try_reserve(30, 0.0)
    client.begin_client_request()
    ledger.settle_dead_worker(0)
    assert (client.budget.spent_tokens, client.budget.reserved_tokens) == (90, 0)
    client.begin_client_request()
