"""`/v1/messages/count_tokens`: by the target's server or tokenizer, else by an estimate; and nothing is answered."""

from __future__ import annotations

from typing import Any, Final

import pytest
from support.messages_wire import MessagesWire, serve
from support.serving import RULES, Asking, ask, remote, serving

from llm_spec import ChatMessage, ChatRequest, open_provider
from llm_spec.contract.messages import NativeMessage
from llm_spec.decoder.entry_points import NamedProvider
from llm_spec.measure.tokens import estimate_request_tokens
from llm_spec.server import ModelConfig
from llm_spec.testing.server import ScriptedModelServer

PATH: Final = "/v1/messages/count_tokens"
MESSAGES: Final = [{"role": "user", "content": [{"type": "text", "text": "q", "cache_control": {"type": "ephemeral"}}]}]


def counting(wire: MessagesWire) -> dict[str, Any]:
    claude = NamedProvider(type="anthropic", base_url=wire.url, api_key="sk-ant-any")
    return {"models": ModelConfig(target="claude:claude-sonnet-4-5"), "providers": {"claude": claude}}


async def test_anthropics_server_counts_itself() -> None:
    """It is sent the fields that its counting takes, as they came, and no others."""
    fields = {"messages": MESSAGES, "system": "s", "thinking": {"type": "adaptive"}, "tools": [{"name": "f"}]}
    async with serve() as wire, serving(**counting(wire)) as server:
        reply = await server.post(PATH, {"model": "fast", "metadata": {}, **fields}, anthropic_beta="b")
    assert (reply.status, reply.json) == (200, {"input_tokens": 2095})
    assert wire.bodies == [{"model": "claude-sonnet-4-5", **fields}]
    assert wire.headers[0]["anthropic-beta"] == "b"


@pytest.mark.parametrize("status", [404, 500])
async def test_a_server_that_cannot_count_is_no_error(status: int) -> None:
    """Others that speak the API lack the call: clients get an estimate."""
    async with serve() as wire, serving(**counting(wire)) as server:
        wire.status, wire.error = status, {"type": "error", "error": {"type": "api_error", "message": "no"}}
        reply = await server.post(PATH, {"model": "fast", "messages": [{"role": "user", "content": "one two three"}]})
    assert (reply.status, reply.json) == (200, {"input_tokens": 3})


async def test_a_request_that_the_server_refuses_is_refused() -> None:
    async with serve() as wire, serving(**counting(wire)) as server:
        wire.status = 400
        wire.error = {"type": "error", "error": {"type": "invalid_request_error", "message": "messages: too many"}}
        reply = await server.post(PATH, {"model": "fast", "messages": MESSAGES})
    assert reply.status == 400
    assert "too many" in reply.error["message"]


async def test_a_local_model_counts_by_its_tokenizer() -> None:
    """The prompt with its chat template, exactly."""
    provider = open_provider("builtin:target")
    model = provider.capabilities.token_model
    assert model is not None
    request = ChatRequest(messages=(ChatMessage("system", "s"), ChatMessage("user", "one two")))
    async with serving(ModelConfig(target="builtin:target")) as server:
        body = {"model": "fast", "system": "s", "messages": [{"role": "user", "content": "one two"}]}
        reply = await server.post(PATH, body)
    await provider.aclose()
    assert reply.json == {"input_tokens": len(model.tokenizer.encode_chat(request))}


async def test_what_is_counted_is_what_would_be_sent() -> None:
    """Billing lines are left out, reasoning, documents and images count."""
    question = {"role": "user", "content": "one two"}
    call = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
    thinking = {"type": "thinking", "thinking": "x" * 4000, "signature": ""}
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x" * 4000}}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x" * 400_000}}

    async def count(server: Asking, *content: dict[str, Any], **fields: Any) -> int:
        answer = {"role": "assistant", "content": [*fields.pop("before", ()), call]}
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [*content]}]}
        body = {"model": "fast", "messages": [question, answer, result], **fields}
        reply = await server.post(PATH, body)
        assert reply.status == 200, reply.data
        return int(reply.json["input_tokens"])

    async with ScriptedModelServer("one") as upstream, serving(remote(upstream.url)) as server:
        plain = await count(server, system="s")
        billed = await count(server, system="x-anthropic-billing-header: cch=1;\ns")
        assert billed == plain
        assert await count(server, system="s", before=[thinking]) >= 1000
        assert await count(server, document, system="s") >= 1000
        assert 1600 <= await count(server, image, system="s") - plain < 1700
        assert upstream.requests == []


async def test_other_targets_are_estimated_and_not_asked() -> None:
    """In both places of the path; errors are in Anthropic's form."""
    async with ScriptedModelServer("one") as upstream, serving(remote(upstream.url)) as server:
        for path in (PATH, PATH.removeprefix("/v1")):
            reply = await server.post(path, ask("/v1/messages", "Good morning to you"))
            assert reply.json == {"input_tokens": 4}
        wrong = await server.post(PATH, {"model": "fast", "messages": []})
        assert upstream.requests == []
    assert (wrong.status, wrong.json["type"]) == (400, "error")


async def test_keys_and_models_hold_here_too() -> None:
    async with serving(RULES) as server:
        assert (await server.post(PATH, {"model": "other", "messages": MESSAGES})).status == 404


def test_native_blocks_are_counted() -> None:
    """What a message says beside its text costs tokens, too."""

    def count(*blocks: dict[str, Any]) -> int:
        native = NativeMessage("messages", {"role": "user", "content": [{"type": "text", "text": "q"}, *blocks]})
        return estimate_request_tokens(ChatRequest(messages=(ChatMessage("user", "q", native=native),)))

    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x" * 4000}}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x" * 400_000}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "x"}, image]}
    assert count() == 1
    assert count({"type": "thinking", "thinking": "x" * 4000, "signature": "S"}) > 1000
    assert count(document) > 1000
    assert 1600 <= count(result) < 1700
    chat = NativeMessage("chat", {"role": "assistant", "content": "q", "reasoning_content": "x" * 4000})
    assert estimate_request_tokens(ChatRequest(messages=(ChatMessage("assistant", "q", native=chat),))) > 1000


async def test_health() -> None:
    """The path that most servers have for it."""
    async with serving() as server:
        reply = await server.get("/health")
    assert (reply.status, reply.json) == (200, {"status": "ok"})
