"""Requests as they go over the wire: the JSON body that the server reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from llm_spec_anthropic import AnthropicProvider
from llm_spec_anthropic.convert import build_request_body
from support.messages_wire import MessagesWire, answer_frames

from llm_spec import (
    ChatMessage,
    ChatRequest,
    InvalidRequestError,
    ReasoningDelta,
    ReasoningDetail,
    ToolCall,
)
from llm_spec.contract.messages import NativeMessage
from llm_spec.contract.reasoning_details import merge_reasoning_details
from llm_spec.contract.request import Messages

NEW, OLD = "claude-haiku-5-5", "claude-sonnet-4-5"
CACHED = {"cache_control": {"type": "ephemeral"}}
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "additionalProperties": False}


async def body_of(wire: MessagesWire, messages: Messages = "q", model: str = NEW, **options: Any) -> dict[str, Any]:
    """The body that the server read."""
    wire.frames = answer_frames("x")
    provider = AnthropicProvider(model, base_url=wire.url, api_key="sk-any")
    try:
        await provider.complete(ChatRequest.create(messages, **options))
    finally:
        await provider.aclose()
    return wire.bodies[-1]


async def test_a_question(wire: MessagesWire) -> None:
    """Nothing is sent that was left open, but the limit that the API requires."""
    assert await body_of(wire) == {
        "model": NEW,
        "max_tokens": 32_000,
        "messages": [{"role": "user", "content": "q"}],
        "stream": True,
    }


async def test_sampling_limits_and_extra(wire: MessagesWire) -> None:
    """What can be said is said in Anthropic's words; `extra` wins; a seed and a prediction have no counterpart."""
    body = await body_of(
        wire,
        temperature=0.0,
        top_p=0.9,
        top_k=5,
        seed=3,
        stop=["END", "###"],
        max_tokens=7,
        prediction="guess",
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        extra={"thinking": {"type": "adaptive"}, "max_tokens": 9},
    )
    assert body == {
        "model": NEW,
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "q"}],
        "stream": True,
        "temperature": 0.0,
        "top_p": 0.9,
        "top_k": 5,
        "stop_sequences": ["END", "###"],
        "thinking": {"type": "adaptive"},
    }


async def test_one_system_text(wire: MessagesWire) -> None:
    """A single system text is sent as text."""
    body = await body_of(wire, [{"role": "system", "content": "be brief"}, {"role": "user", "content": "q"}])
    assert body["system"] == "be brief"
    assert body["messages"] == [{"role": "user", "content": "q"}]


async def test_several_system_texts(wire: MessagesWire) -> None:
    """Several, of either role, are blocks in their order, each with its cache mark."""
    body = await body_of(
        wire,
        [
            {"role": "system", "content": [{"type": "text", "text": "long", **CACHED}]},
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": "q"},
        ],
    )
    assert body["system"] == [{"type": "text", "text": "long", **CACHED}, {"type": "text", "text": "be brief"}]
    assert body["messages"] == [{"role": "user", "content": "q"}]


@pytest.mark.parametrize(
    ("native", "sent"),
    [
        (False, [("user", "a"), ("assistant", "b"), ("user", "<system>\nlater\n</system>"), ("user", "c")]),
        (True, [("user", "a"), ("assistant", "b"), ("system", "later"), ("user", "c")]),
    ],
)
async def test_later_system_texts_keep_their_place(
    wire: MessagesWire, sent: list[tuple[str, str]], *, native: bool
) -> None:
    """At the front each would change the beginning of the prompt, and with it all that is cached."""
    later = NativeMessage("messages", {"role": "system", "content": "later"}) if native else None
    body = await body_of(
        wire,
        [
            ChatMessage("user", "a"),
            ChatMessage("developer", "first"),
            ChatMessage("assistant", "b"),
            ChatMessage("system", "later", native=later),
            ChatMessage("user", "c"),
        ],
    )
    assert body["system"] == "first"
    assert [(message["role"], message["content"]) for message in body["messages"]] == sent


EMPTY = {"type": "text", "text": ""}
BLANK = {"type": "text", "text": " \n", **CACHED}
TEXT = {"type": "text", "text": "hi"}
USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
CALLS = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


@pytest.mark.parametrize(
    ("message", "sent"),
    [
        ({"role": "user", "content": [EMPTY, TEXT, BLANK]}, {"role": "user", "content": [TEXT]}),
        ({"role": "user", "content": [EMPTY, BLANK]}, None),
        ({"role": "user", "content": " "}, None),
        ({"role": "assistant", "content": ""}, None),
        ({"role": "assistant", "content": None}, None),
        ({"role": "assistant", "content": "", "tool_calls": CALLS}, {"role": "assistant", "content": [USE]}),
        ({"role": "assistant", "content": [BLANK], "tool_calls": CALLS}, {"role": "assistant", "content": [USE]}),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": ""}, TEXT]},
            {"role": "assistant", "content": [TEXT]},
        ),
        (
            {"role": "tool", "tool_call_id": "a", "content": [EMPTY]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": []}]},
        ),
        (
            {"role": "tool", "tool_call_id": "a", "content": ""},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": ""}]},
        ),
        ({"role": "system", "content": [EMPTY]}, None),
        ({"role": "system", "content": ""}, None),
    ],
)
async def test_no_blank_text_is_sent(wire: MessagesWire, message: dict[str, Any], sent: dict[str, Any] | None) -> None:
    """The API refuses them; so messages that say nothing else are no messages."""
    body = await body_of(wire, [message, {"role": "user", "content": "q"}])
    assert body["messages"] == [*([] if sent is None else [sent]), {"role": "user", "content": "q"}]
    assert "system" not in body


async def test_files_and_refusals(wire: MessagesWire) -> None:
    """Parts that OpenAI's API has other names for."""
    pdf = {"file_data": "data:application/pdf;base64,JVBERg==", "filename": "a.pdf"}
    parts = [{"type": "file", "file": pdf}, {"type": "file", "file": {"file_data": "data:text/csv;base64,YSxi"}}]
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    body = await body_of(wire, [{"role": "user", "content": parts}, refused, {"role": "user", "content": "q"}])
    source = {"type": "base64", "media_type": "application/pdf", "data": "JVBERg=="}
    assert body["messages"][0]["content"] == [
        {"type": "document", "source": source, "title": "a.pdf"},
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a,b"}},
    ]
    assert body["messages"][1]["content"] == [{"type": "text", "text": "no"}]


@pytest.mark.parametrize(("mode", "kind"), [("auto", "auto"), ("required", "any")])
async def test_tools_that_are_allowed(wire: MessagesWire, mode: str, kind: str) -> None:
    """There is no such choice: the others are not shown."""
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools[1:]}}
    body = await body_of(wire, tools=tools, tool_choice=choice, extra={"parallel_tool_calls": False})
    assert [tool["name"] for tool in body["tools"]] == ["g"]
    assert body["tool_choice"] == {"type": kind, "disable_parallel_tool_use": True}


@pytest.mark.parametrize(
    ("schema", "sent"),
    [
        ({"properties": {"a": {}}}, {"type": "object", "properties": {"a": {}}}),
        ({"type": "object", "properties": {}}, {"type": "object", "properties": {}}),
        ({}, {"type": "object", "properties": {}}),
        (None, {"type": "object", "properties": {}}),
    ],
)
async def test_a_schema_has_a_type(wire: MessagesWire, schema: Any, sent: dict[str, Any]) -> None:
    """OpenAI's API takes one without; Anthropic's does not."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    assert (await body_of(wire, tools=tools))["tools"] == [{"name": "f", "input_schema": sent}]


async def test_a_call_of_a_tool_that_takes_a_text(wire: MessagesWire) -> None:
    """Its input is one field of an object there."""
    call = ToolCall("a", "f", "*** patch", "custom")
    messages = [ChatMessage("user", "q"), ChatMessage("assistant", tool_calls=(call,)), ChatMessage("user", "so?")]
    body = await body_of(wire, messages)
    assert body["messages"][1]["content"] == [USE | {"input": {"input": "*** patch"}}]


async def test_parts(wire: MessagesWire) -> None:
    """Images come by URL or as data, cache marks stay, blocks in Anthropic's own words pass as they are."""
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "d"}}
    parts = [
        {"type": "text", "text": "look", **CACHED},
        {"type": "image_url", "image_url": {"url": "https://example.org/a.png", "detail": "high"}, **CACHED},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0="}},
        document,
    ]
    body = await body_of(wire, [{"role": "user", "content": parts}])
    assert body["messages"] == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "look", **CACHED},
                {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}, **CACHED},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0="}},
                document,
            ],
        }
    ]


async def test_a_mark_on_a_message_goes_to_its_last_block(wire: MessagesWire) -> None:
    """A cache mark beside a chat message's content, as some clients write it, is none that is lost."""
    messages = [
        {"role": "system", "content": "s", **CACHED},
        {"role": "user", "content": "q", **CACHED},
        {
            "role": "assistant",
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "1", **CACHED},
    ]
    body = await body_of(wire, messages)
    assert body["system"] == [{"type": "text", "text": "s", **CACHED}]
    assert body["messages"][0]["content"] == [{"type": "text", "text": "q", **CACHED}]
    assert body["messages"][2]["content"] == [{"type": "tool_result", "tool_use_id": "a", "content": "1", **CACHED}]


async def test_tool_calls_and_their_results(wire: MessagesWire) -> None:
    """Calls become blocks with parsed arguments; results that follow one another become one turn."""
    calls = [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
        {"id": "b", "type": "function", "function": {"name": "g", "arguments": ""}},
    ]
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "let me see", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "2", **CACHED}]},
        {"role": "assistant", "content": None, "tool_calls": calls[:1]},
        {"role": "tool", "tool_call_id": "a", "content": "3"},
        {"role": "user", "content": "so?"},
    ]
    first = {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}}
    assert (await body_of(wire, messages))["messages"] == [
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "let me see"},
                first,
                {"type": "tool_use", "id": "b", "name": "g", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": "1"},
                {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "2", **CACHED}]},
            ],
        },
        {"role": "assistant", "content": [first]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "3"}]},
        {"role": "user", "content": "so?"},
    ]


async def test_tools(wire: MessagesWire) -> None:
    """Functions become tools with their cache marks; tools in Anthropic's own words pass as they are."""
    search = {"type": "web_search_20250305", "name": "web_search"}
    tools = [
        {"type": "function", "function": {"name": "f", "description": "does", "parameters": SCHEMA, "strict": True}},
        {"type": "function", "function": {"name": "g"}, **CACHED},
        search,
    ]
    assert (await body_of(wire, tools=tools))["tools"] == [
        {"name": "f", "description": "does", "input_schema": SCHEMA, "strict": True},
        {"name": "g", "input_schema": {"type": "object", "properties": {}}, **CACHED},
        search,
    ]


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        ("auto", {"type": "auto"}),
        ("required", {"type": "any"}),
        ("none", {"type": "none"}),
        ({"type": "function", "function": {"name": "f"}}, {"type": "tool", "name": "f"}),
        (
            {"type": "any", "disable_parallel_tool_use": True},
            {"type": "any", "disable_parallel_tool_use": True},
        ),
    ],
)
async def test_tool_choice(wire: MessagesWire, choice: Any, sent: Mapping[str, Any]) -> None:
    """Every way to choose has its counterpart."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert (await body_of(wire, tools=tools, tool_choice=choice))["tool_choice"] == sent


async def test_a_json_schema(wire: MessagesWire) -> None:
    """A schema is the API's structured output; an effort given in `extra` leaves it as it is."""
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA}}
    body = await body_of(wire, response_format=wanted, extra={"output_config": {"effort": "low"}})
    assert body["output_config"] == {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}}
    assert "output_config" not in await body_of(wire, response_format={"type": "text"})


async def test_a_prefix(wire: MessagesWire) -> None:
    """Where the model can, it goes on from a trailing assistant message."""
    body = await body_of(wire, "count", OLD, prefix="one two")
    assert body["messages"] == [{"role": "user", "content": "count"}, {"role": "assistant", "content": "one two"}]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"min_p": 0.1}, "min_p is 0.1"),
        ({"repetition_penalty": 1.1}, "repetition_penalty is 1.1"),
        ({"presence_penalty": 0.5}, "presence_penalty is 0.5"),
        ({"frequency_penalty": 0.5}, "frequency_penalty is 0.5"),
        ({"logit_bias": {5: 1.0}}, "logit_bias is"),
        ({"response_format": {"type": "json_object"}}, "response_format is of type 'json_object'"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "holds the custom tool 'f'"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]}, "tool 'parameters' is 'x'"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format 'schema' is None",
        ),
        ({"tool_choice": "any"}, "tool_choice is 'any'"),
        ({"tools": [{"type": "function"}]}, "tool 'function' is None"),
        ({"tools": [{"type": "function", "function": {}}]}, "has no function name"),
        ({"prefix": "one"}, "claude-haiku-5-5 cannot continue"),
    ],
)
def test_options_that_cannot_be_said(options: dict[str, Any], words: str) -> None:
    """Each is refused by name before anything is sent."""
    with pytest.raises(InvalidRequestError, match=words):
        build_request_body(ChatRequest.create("q", **options), NEW)


@pytest.mark.parametrize("arguments", ['{"path": "/home/ann', "[1]", "x"])
async def test_a_call_that_was_cut_off_goes_back_as_it_was_written(wire: MessagesWire, arguments: str) -> None:
    """The API takes objects alone; what the model wrote is in one."""
    call = ToolCall("a", "f", arguments)
    history = [ChatMessage("user", "q"), ChatMessage("assistant", tool_calls=(call,)), tool_message("a")]
    body = await body_of(wire, history)
    assert body["messages"][1]["content"] == [
        {"type": "tool_use", "id": "a", "name": "f", "input": {"arguments": arguments}}
    ]


async def test_thinking_goes_back_with_its_signature(wire: MessagesWire) -> None:
    """Blocks come before what they led to; details of another API and text that was not signed do not."""
    events = [
        ReasoningDelta("thou"),
        ReasoningDelta("ght"),
        ReasoningDetail("messages", {"type": "signature_delta", "signature": "s1"}),
        ReasoningDetail("messages", {"type": "redacted_thinking", "data": "r"}),
        ReasoningDetail("chat", {"type": "reasoning.encrypted", "data": "x"}),
        ReasoningDelta("unsigned"),
    ]
    answer = ChatMessage(
        "assistant",
        "so",
        tool_calls=(ToolCall("a", "f", "{}"),),
        reasoning="thought",
        reasoning_details=merge_reasoning_details(events),
    )
    body = await body_of(wire, [ChatMessage("user", "q"), answer, tool_message("a")])
    assert body["messages"][1]["content"] == [
        {"type": "thinking", "thinking": "thought", "signature": "s1"},
        {"type": "redacted_thinking", "data": "r"},
        {"type": "text", "text": "so"},
        {"type": "tool_use", "id": "a", "name": "f", "input": {}},
    ]


def tool_message(call_id: str) -> ChatMessage:
    return ChatMessage("tool", "done", tool_call_id=call_id)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "tool", "content": "1"}, "no tool_call_id"),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "'input_audio'"),
        ({"role": "user", "content": [{"type": "file", "file": {"file_id": "f"}}]}, "file has no file_data"),
        (
            {"role": "user", "content": [{"type": "file", "file": {"file_data": "data:text/plain;base64,/w=="}}]},
            "not valid UTF-8",
        ),
        ({"role": "user", "content": [{"type": "image_url", "image_url": None}]}, "part 'image_url' is None"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "file:///a.png"}]}, "image_url is 'file"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "data:image/png,x"}]}, "base64 data URL"),
    ],
)
def test_messages_that_cannot_be_said(message: dict[str, Any], words: str) -> None:
    """Each is refused with what is wrong about it."""
    with pytest.raises(InvalidRequestError, match=words):
        build_request_body(ChatRequest.create([message]), NEW)


def test_whitespace_at_the_seam() -> None:
    """The API refuses it; so does this, before anything is sent."""
    with pytest.raises(InvalidRequestError, match="whitespace"):
        build_request_body(ChatRequest.create("q", prefix="one "), OLD)
