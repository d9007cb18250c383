"""What a client says in the words of its target's own API arrives there as it was, and the answer's words at it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final

from support.messages_wire import MessagesWire, answer_frames, begin, end, frame, serve
from support.serving import Asking, ask, remote, serving
from support.wire import Wire, chunk, served, text_chunks

from llm_spec import ChatRequest
from llm_spec.decoder.entry_points import NamedProvider
from llm_spec.drafting.provider_draft import ProviderDraft
from llm_spec.server import ModelConfig
from llm_spec.server.apis.messages_parser import parse_messages_request
from llm_spec.strategies.base import find_multi_call_refusal
from llm_spec.testing import ScriptedProvider
from llm_spec.testing.server import ScriptedModelServer

PATH: Final = "/v1/messages"
CACHED: Final[dict[str, Any]] = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
TOOL: Final[dict[str, Any]] = {"name": "f", "description": "d", "input_schema": {"type": "object"}, **CACHED}
CALL: Final[dict[str, Any]] = {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}, **CACHED}
THOUGHTS: Final[list[dict[str, Any]]] = [
    {"type": "thinking", "thinking": "hmm", "signature": "SIG=="},
    {"type": "redacted_thinking", "data": "b3BhcXVl"},
    {"type": "thinking", "thinking": "", "signature": "SECOND"},
]
CONVERSATION: Final[list[dict[str, Any]]] = [
    {"role": "user", "content": [{"type": "text", "text": "q", **CACHED}]},
    {"role": "assistant", "content": [*THOUGHTS, {"type": "text", "text": "let me see"}, CALL]},
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "t1", "is_error": True, "content": "broken", **CACHED},
            {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "d"}},
            {"type": "text", "text": "so?"},
        ],
    },
    {"role": "system", "content": "Hurry."},
    {"role": "user", "content": "now"},
]
FIELDS: Final[dict[str, Any]] = {
    "metadata": {"user_id": "u1"},
    "output_config": {"effort": "high"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
}


@asynccontextmanager
async def serving_claude() -> AsyncIterator[tuple[Asking, MessagesWire]]:
    """A server whose target speaks Anthropic's messages."""
    async with serve() as wire:
        claude = NamedProvider(type="anthropic", base_url=wire.url, api_key="sk-ant-any")
        async with serving(ModelConfig(target="claude:claude-sonnet-4-5"), providers={"claude": claude}) as server:
            yield server, wire


async def test_messages_fields_and_betas_arrive_as_they_were() -> None:
    """Nothing of a conversation, its tools and its fields is lost or reworded on the way to a target of that API."""
    system = [{"type": "text", "text": "Be brief.", **CACHED}]
    body = ask(PATH, messages=CONVERSATION, system=system, tools=[TOOL], **FIELDS)
    async with serving_claude() as (server, wire):
        reply = await server.post(PATH, body, anthropic_beta="context-management-2025-06-27,other")
    assert reply.status == 200
    (sent,) = wire.bodies
    assert {name: sent[name] for name in body} == {**body, "model": "claude-sonnet-4-5"}
    assert wire.headers[0]["anthropic-beta"] == "context-management-2025-06-27,other"


async def test_thinking_comes_back_with_its_signatures() -> None:
    """What a client has to send back with the next turn is in the answer, whole and streamed."""
    starts = [{"type": "thinking", "thinking": "", "signature": ""}, THOUGHTS[1], THOUGHTS[0] | {"thinking": ""}]
    deltas: list[list[dict[str, Any]]] = [
        [{"type": "thinking_delta", "thinking": "hmm"}, {"type": "signature_delta", "signature": "SIG=="}],
        [],
        [{"type": "signature_delta", "signature": "SECOND"}],
    ]
    starts[2] = {"type": "thinking", "thinking": "", "signature": ""}
    frames = begin(cache_creation_input_tokens=50, cache_read_input_tokens=900)
    for index, start in enumerate(starts):
        frames.append(frame("content_block_start", index=index, content_block=start))
        frames += [frame("content_block_delta", index=index, delta=delta) for delta in deltas[index]]
        frames.append(frame("content_block_stop", index=index))
    frames.append(frame("content_block_start", index=3, content_block={"type": "text", "text": "7"}))
    frames += [frame("content_block_stop", index=3), *end()]
    async with serving_claude() as (server, wire):
        wire.frames = frames
        whole = await server.post(PATH, ask(PATH))
        streamed = await server.post(PATH, ask(PATH, stream=True))
        chat = await server.chat()
    assert whole.json["content"] == [*THOUGHTS, {"type": "text", "text": "7"}]
    counts = {"input_tokens": 10, "cache_read_input_tokens": 900, "cache_creation_input_tokens": 50}
    assert counts.items() <= whole.json["usage"].items()
    told = [f.data for f in streamed.frames if f.event and f.event.startswith("content_block")]
    assert [f["content_block"] for f in told if "content_block" in f][:3] == starts
    assert [f["delta"] for f in told if "delta" in f][:3] == [*deltas[0], *deltas[2]]
    assert [f["index"] for f in told if f["type"] == "content_block_stop"] == [0, 1, 2, 3]
    message = chat.json["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("7", "hmm")
    assert "reasoning_details" not in message


async def test_a_beginning_that_says_more_than_text_is_no_prefix() -> None:
    """A last message of the assistant with other blocks is sent as it is; text alone is continued."""
    paused = [{"type": "text", "text": "one", **CACHED}]
    async with serving_claude() as (server, wire):
        wire.frames = answer_frames("two")
        for content in (paused, [{"type": "text", "text": "one"}]):
            messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]
            await server.post(PATH, ask(PATH, messages=messages))
    assert wire.bodies[0]["messages"][-1]["content"] == paused
    assert wire.bodies[1]["messages"][-1]["content"] == "one"


async def test_other_targets_get_none_of_anthropics_words() -> None:
    """Fields that only Anthropic knows reach no body of chat completions, and keep no request from speculation."""
    fields = {name: FIELDS[name] for name in ("metadata", "output_config", "thinking", "context_management")}
    body = ask(PATH, **fields, cache_control={"type": "ephemeral"}, betas=["x"])
    request = parse_messages_request(body, target_api="chat").request
    assert request.extra == {}
    assert find_multi_call_refusal(request) is None
    async with ScriptedModelServer("Fine.") as upstream, serving(remote(upstream.url)) as server:
        reply = await server.post(PATH, ask(PATH, messages=CONVERSATION[:1], **fields), anthropic_beta="x")
        assert reply.status == 200
        sent = upstream.requests[-1]
    assert sent["messages"] == [{"role": "user", "content": "q"}]
    assert sent.keys() <= {"model", "messages", "max_tokens", "stream", "stream_options"}


async def test_labels_keep_no_request_from_speculation() -> None:
    """Who asks and what is cached changes no text; how the target thinks may."""
    request = parse_messages_request(ask(PATH, metadata=FIELDS["metadata"], **CACHED), target_api="messages").request
    assert request.extra == {"metadata": FIELDS["metadata"], **CACHED}
    assert find_multi_call_refusal(request) is None
    thinking = parse_messages_request(ask(PATH, thinking=FIELDS["thinking"]), target_api="messages").request
    assert find_multi_call_refusal(thinking) == "the request sets thinking"
    unknown = ChatRequest.create("q", extra={"user": "u", "vendor": 1})
    assert find_multi_call_refusal(unknown) == "the request sets vendor"


async def test_a_draft_hears_nothing_that_was_said_to_the_target() -> None:
    """Another vendor's model would refuse the target's own words; the rest it gets."""
    request = parse_messages_request(
        ask(PATH, messages=CONVERSATION[:1], metadata=FIELDS["metadata"], top_k=3), target_api="messages"
    ).request
    provider = ScriptedProvider("Fine.")
    async with ProviderDraft(provider).draft(replace(request, extra={**request.extra, "vendor": 1}), 8) as pieces:
        assert [piece async for piece in pieces]
    (asked,) = provider.requests
    assert [message.to_openai() for message in asked.messages] == [{"role": "user", "content": "q"}]
    assert asked.messages[0].native is None
    assert asked.extra == {"vendor": 1}


async def test_tools_that_the_server_runs_are_refused() -> None:
    """Their answers are of blocks that are not passed on; tools that the client runs are passed."""
    client_tool = {"type": "bash_20250124", "name": "bash"}
    async with serving_claude() as (server, wire):
        good = await server.post(PATH, ask(PATH, tools=[client_tool]))
        bad = await server.post(PATH, ask(PATH, tools=[{"type": "web_search_20250305", "name": "web_search"}]))
        mcp = await server.post(PATH, ask(PATH, mcp_servers=[{"type": "url", "url": "http://x", "name": "x"}]))
    assert (good.status, wire.bodies[0]["tools"]) == (200, [client_tool])
    assert (bad.status, mcp.status) == (400, 400)
    assert "web_search" in bad.error["message"]
    assert "mcp_servers" in mcp.error["message"]


async def test_reasoning_of_earlier_turns_reaches_a_chat_target() -> None:
    """Assistant turns keep what vendors want back beside text and calls, down to their signatures of calls."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}, "extra_content": {"s": "S"}}
    turn = {
        "role": "assistant",
        "content": None,
        "reasoning_content": "I should call",
        "reasoning_details": [{"type": "reasoning.encrypted", "data": "opaque"}],
        "tool_calls": [call],
    }
    messages = [
        {"role": "user", "content": "q", "name": "bob"},
        turn | {"refusal": None, "annotations": []},  # as SDKs dump a message
        {"role": "tool", "tool_call_id": "c1", "content": "ok"},
    ]
    async with ScriptedModelServer("Fine.") as upstream, serving(remote(upstream.url)) as server:
        await server.chat(messages=messages)
        assert upstream.requests[-1]["messages"] == [messages[0], turn, messages[2]]


async def test_reasoning_details_come_back() -> None:
    """What a vendor wants back of its reasoning is in the answer: piece by piece as it came, or whole."""
    pieces = [
        {"type": "reasoning.text", "text": "one ", "index": 0},
        {"type": "reasoning.text", "text": "two", "index": 0, "signature": "S"},
        {"type": "reasoning.encrypted", "data": "opaque", "index": 1},
    ]
    deltas = [{"content": "", "reasoning": piece.get("text"), "reasoning_details": [piece]} for piece in pieces]
    wire = Wire()
    async with served("/chat/completions", wire.answer) as url:
        wire.frames = [*(chunk(delta) for delta in deltas), *text_chunks("7")]
        async with serving(ModelConfig(target=f"generic:m@{url}")) as server:
            whole = (await server.chat()).json["choices"][0]["message"]
            streamed = await server.chat(stream=True)
    assert (whole["content"], whole["reasoning_content"]) == ("7", "one two")
    assert whole["reasoning_details"] == [
        {"type": "reasoning.text", "text": "one two", "index": 0, "signature": "S"},
        pieces[2],
    ]
    told = [choice["delta"] for chunk in streamed.chunks for choice in chunk["choices"]]
    assert [delta["reasoning_details"] for delta in told if "reasoning_details" in delta] == [[p] for p in pieces]
