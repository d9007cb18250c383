"""Service tiers and speeds: what is wanted passes where the operator says so, what was served is told, and priced."""

from __future__ import annotations

from typing import Any, Final

import pytest
from support.messages_wire import begin, end, serve, text_frames
from support.serving import Reply, ask, serving
from support.wire import Wire, chunk, served

from llm_spec import Budget, Price, SpeculativeConfig, SpeculativeDecoder, Usage, open_provider
from llm_spec.decoder.entry_points import NamedProvider
from llm_spec.decoder.pricing import find_model_price, find_tier_prices, get_billed_tier
from llm_spec.server import ModelConfig

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
PATHS: Final = (CHAT, RESPONSES, MESSAGES)
CHOICE: Final = {"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}
USAGE: Final = {"prompt_tokens": 1_000_000, "completion_tokens": 1_000_000}


def show_tier(path: str, reply: Reply, *, stream: bool) -> Any:
    """Where each API's clients look for it: the last thing that is said."""
    if path == MESSAGES:
        usage = reply.frames[-2].data["usage"] if stream else reply.json["usage"]
        return usage.get("service_tier"), usage.get("speed")
    if path == RESPONSES:
        return (reply.frames[-1].data["response"] if stream else reply.json).get("service_tier")
    if not stream:
        return reply.json.get("service_tier")
    told = {chunk.get("service_tier") for chunk in reply.chunks[-2:]}
    assert len(told) == 1
    return told.pop()


async def ask_chat_target(
    path: str, tier: Any = None, extra_fields: tuple[str, ...] = (), kind: str = "generic", **fields: Any
) -> tuple[Reply, dict[str, Any]]:
    """The reply, and what the target was sent."""
    wire = Wire()
    told: dict[str, Any] = {} if tier is None else {"service_tier": tier}
    frames = [chunk({"content": "ok"}, **told), chunk({}, "stop", **told)]
    wire.frames = [*frames, chunk(usage=USAGE, **told), b"data: [DONE]\n\n"]
    wire.whole = {"choices": [CHOICE], "usage": USAGE, **told}
    fields |= {"stream_options": {"include_usage": True}} if fields.get("stream") and path == CHAT else {}
    async with (
        served("/chat/completions", wire.answer) as url,
        serving(ModelConfig(target=f"{kind}:m@{url}", extra_fields=extra_fields)) as server,
    ):
        reply = await server.post(path, ask(path, **fields))
    assert reply.status == 200
    return reply, wire.bodies[-1]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("wanted", "sent"), [("priority", "priority"), ("flex", "flex"), ("standard_only", "default")])
async def test_what_costs_more_passes_where_the_operator_says_so(path: str, wanted: str, sent: str) -> None:
    """Otherwise its client is told that it was left out."""
    reply, body = await ask_chat_target(path, service_tier=wanted)
    assert "service_tier" not in body
    assert reply.headers["x-llm-spec-left-out"] == "service_tier"
    reply, body = await ask_chat_target(path, extra_fields=("service_tier",), service_tier=wanted)
    assert body["service_tier"] == (sent if path == MESSAGES else wanted)
    assert "x-llm-spec-left-out" not in reply.headers


@pytest.mark.parametrize("path", PATHS)
async def test_speed_is_anthropics_word(path: str) -> None:
    reply, body = await ask_chat_target(path, speed="fast")
    assert "speed" not in body
    assert reply.headers["x-llm-spec-left-out"] == "speed"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("tier", ["priority", "flex", "default", None])
@pytest.mark.parametrize("kind", ["generic", "vllm"])  # the second answers whole requests without a stream
async def test_the_tier_that_was_served_is_told(path: str, tier: str | None, kind: str, *, stream: bool) -> None:
    """Whatever was wanted; nothing where the target says nothing."""
    reply, _ = await ask_chat_target(path, tier, kind=kind, stream=stream, service_tier="auto")
    if path == MESSAGES:
        assert show_tier(path, reply, stream=stream) == ("standard" if tier == "default" else tier, None)
    else:
        assert show_tier(path, reply, stream=stream) == tier


@pytest.mark.parametrize("stream", [False, True])
async def test_relayed_answers_tell_it_too(*, stream: bool) -> None:
    reply, _ = await ask_chat_target(CHAT, "priority", stream=stream, n=2)
    assert show_tier(CHAT, reply, stream=stream) == "priority"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("tier", "openais"), [("priority", "priority"), ("standard", "default"), (None, None)])
async def test_claudes_tier_and_speed_are_told(
    path: str, tier: str | None, openais: str | None, *, stream: bool
) -> None:
    """As its first event says them."""
    async with serve() as wire:
        wire.frames = [*begin(service_tier=tier, speed="fast"), *text_frames("ok"), *end(service_tier=None)]
        claude = NamedProvider(type="anthropic", base_url=wire.url, api_key="sk-ant-any")
        config = ModelConfig(target="claude:claude-opus-5-5", extra_fields=("speed",))
        async with serving(config, providers={"claude": claude}) as server:
            fields = {"stream_options": {"include_usage": True}} if path == CHAT and stream else {}
            reply = await server.post(path, ask(path, stream=stream, speed="fast", **fields))
        assert wire.bodies[-1]["speed"] == "fast"
    assert show_tier(path, reply, stream=stream) == ((tier, "fast") if path == MESSAGES else openais)


@pytest.mark.parametrize("stream_always", [False, True])
@pytest.mark.parametrize(
    ("tier", "spent", "cost"), [("priority", 30.0, 30.0), ("flex", 3.0, None), ("default", 3.0, 3.0), (None, 3.0, 3.0)]
)
async def test_an_answer_costs_what_its_tier_costs(
    tier: str | None, spent: float, cost: float | None, *, stream_always: bool
) -> None:
    """By the price that the operator says; a tier without one is charged as any other, and its cost is not known."""
    prices = {"m": Price(input=1.0, output=2.0), "vllm:m#priority": Price(input=10.0, output=20.0)}
    told: dict[str, Any] = {} if tier is None else {"service_tier": tier}
    wire = Wire()
    wire.frames = [chunk({"content": "ok"}), chunk({}, "stop"), chunk(usage=USAGE, **told), b"data: [DONE]\n\n"]
    wire.whole = {"choices": [CHOICE], "usage": USAGE, **told}
    budget = Budget(max_cost=1000.0)
    config = SpeculativeConfig(prices=prices, budget=budget, stream_always=stream_always)
    async with served("/chat/completions", wire.answer) as url:
        target = open_provider(f"vllm:m@{url}")
        result = await SpeculativeDecoder(target=target, draft=None, config=config).decode("q")
        await target.aclose()
    assert (budget.spent_cost, result.cost.target) == (spent, cost)
    assert (result.service_tier, result.to_dict()["service_tier"]) == (tier, tier)


@pytest.mark.parametrize(
    ("tier", "speed", "cost"),
    [
        ("priority", None, 30.0),
        ("priority", "standard", 30.0),
        ("default", "fast", 300.0),
        ("flex", None, None),
        ("on_demand", None, 3.0),
        (None, None, 3.0),
    ],
)
def test_prices_of_tiers(tier: str | None, speed: str | None, cost: float | None) -> None:
    """A price that is not known is none."""
    name = "openai:m-2026-01-01"
    prices = {
        "m": Price(input=1.0, output=2.0),
        "m#priority": Price(input=9.0, output=9.0),
        f"{name}#priority": Price(input=10.0, output=20.0),
        "m#fast": Price(input=100.0, output=200.0),
        "other#flex": Price(input=1.0, output=1.0),
    }
    billed = get_billed_tier(tier, speed)
    found = find_model_price(name, prices) if billed is None else find_tier_prices(name, prices).get(billed)
    usage = Usage(input_tokens=1_000_000, output_tokens=1_000_000)
    assert (None if found is None else found.cost_of(usage)) == cost
