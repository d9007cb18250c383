"""Reasoning in pydantic-ai's history: what targets need back with the next turn, and who is sent it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("pydantic_ai")
pytest.importorskip("anthropic")

from pydantic_ai import Agent
from pydantic_ai.messages import (
    ModelMessage,
    ModelMessagesTypeAdapter,
    ModelRequest,
    ModelResponse,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    UserPromptPart,
)
from support.messages_wire import MessagesWire, begin, end, frame, text_frames
from support.scripted_chat import build_call, scripted_chat
from support.wire import served

from llm_spec import Finish, ReasoningDelta, ReasoningDetail, StreamEvent, TextDelta, ToolCallDelta
from llm_spec.contract.reasoning_details import merge_reasoning_details
from llm_spec.integrations.pydantic_ai import SpeculativeModel
from llm_spec.testing import ScriptedProvider

CALL = ToolCallDelta(0, "c1", "get", "{}")
SIGNATURE = ReasoningDetail("messages", {"type": "signature_delta", "signature": "s1"})
SECOND = ReasoningDetail("messages", {"type": "signature_delta", "signature": "s2"})
REDACTED = ReasoningDetail("messages", {"type": "redacted_thinking", "data": "r"})


def text(index: int, piece: str, **fields: Any) -> list[StreamEvent]:
    detail = {"type": "reasoning.text", "index": index, "text": piece, **fields}
    return [ReasoningDelta(piece), ReasoningDetail("chat", detail)]


SUMMARY = {"type": "reasoning.summary", "index": 0, "summary": "s", "format": "openai-responses-v1", "id": "rs_1"}
ENCRYPTED = {"type": "reasoning.encrypted", "index": 1, "data": "x", "id": "e", "own": [1]}
OTHER = {"type": "vendor.other", "value": 3}
# what the target says before its call, beside whose name it is called
ROWS: dict[str, tuple[str, list[StreamEvent]]] = {
    "a block": ("anthropic:m", [ReasoningDelta("a"), ReasoningDelta("b"), SIGNATURE]),
    "a block without its text": ("anthropic:m", [SIGNATURE]),
    "two blocks": ("anthropic:m", [ReasoningDelta("a"), SIGNATURE, ReasoningDelta("b"), SECOND]),
    "a block not to be read": ("anthropic:m", [ReasoningDelta("a"), SIGNATURE, REDACTED]),
    "a block that was not signed": ("anthropic:m", [ReasoningDelta("a"), REDACTED, ReasoningDelta("b"), SIGNATURE]),
    "blocks not to be read": ("anthropic:m", [REDACTED, REDACTED]),
    "a block behind text": (
        "anthropic:m",
        [ReasoningDelta("a"), SIGNATURE, TextDelta("so"), ReasoningDelta("b"), SECOND],
    ),
    "an item in pieces": ("openrouter:m", [*text(0, "a"), *text(0, "b", signature="s")]),
    "two items": ("openrouter:m", [*text(0, "a"), *text(1, "b")]),
    "a summary": ("openrouter:m", [ReasoningDelta("s"), ReasoningDetail("chat", SUMMARY)]),
    "what is encrypted": ("openrouter:m", [ReasoningDetail("chat", ENCRYPTED)]),
    "all kinds": ("openrouter:m", [*text(0, "a"), ReasoningDetail("chat", ENCRYPTED), ReasoningDetail("chat", OTHER)]),
    "text alone": ("generic:m", [ReasoningDelta("a"), ReasoningDelta("b")]),
    "text of a model in this process": ("onnx:m", [ReasoningDelta("a")]),
}


def get() -> str:
    return "sunny"


async def collect(
    name: str, events: Sequence[StreamEvent], *, is_streamed: bool
) -> tuple[ScriptedProvider, list[ModelMessage]]:
    """A run with a call behind these events, and its messages as they are when they were stored."""

    def script(request: Any) -> list[StreamEvent]:
        is_first = not any(message.role == "tool" for message in request.messages)
        return [*events, CALL, Finish("tool_calls")] if is_first else [TextDelta("done"), Finish("stop")]

    provider = ScriptedProvider(script)
    provider.name = name
    agent = Agent(SpeculativeModel(provider), tools=[get])
    if is_streamed:
        async with agent.run_stream("hi") as run:
            await run.get_output()
        return provider, ModelMessagesTypeAdapter.validate_json(run.all_messages_json())
    return provider, ModelMessagesTypeAdapter.validate_json((await agent.run("hi")).all_messages_json())


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("row", ROWS)
async def test_reasoning_goes_back_with_a_call(row: str, is_streamed: bool) -> None:
    """At once, and from a stored history: the text and each detail whole, in their order, in the call's own message."""
    name, events = ROWS[row]
    provider, history = await collect(name, events, is_streamed=is_streamed)
    await Agent(SpeculativeModel(provider), tools=[get]).run("and?", message_history=history)
    details = merge_reasoning_details([e for e in events if isinstance(e, ReasoningDelta | ReasoningDetail)])
    thought = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    for request in provider.requests[1:]:
        answer = next(message for message in request.messages if message.role == "assistant")
        assert answer.reasoning.replace("\n\n", "") == thought
        assert [(detail.api, dict(detail.value)) for detail in answer.reasoning_details] == [
            (detail.api, dict(detail.value)) for detail in details
        ]
        assert [call.name for call in answer.tool_calls] == ["get"]


@pytest.mark.parametrize(
    "row", [row for row, (_, events) in ROWS.items() if any(isinstance(e, ReasoningDetail) for e in events)]
)
async def test_details_go_to_their_own_provider_alone(row: str) -> None:
    """Another target gets the text that can be read, between tags."""
    name, events = ROWS[row]
    _, history = await collect(name, events, is_streamed=False)
    other = ScriptedProvider("yes")
    other.name = "generic:m"
    await Agent(SpeculativeModel(other), tools=[get]).run("and?", message_history=history)
    answer = other.requests[0].messages[1]
    assert (answer.reasoning, answer.reasoning_details) == ("", ())
    for event in events:
        if isinstance(event, ReasoningDelta):
            assert event.text in answer.text


async def test_parts_are_as_pydantic_ais_own_model_makes_them() -> None:
    """Whole or streamed; so that a history may go on with its model."""
    for is_streamed in (False, True):
        _, history = await collect("anthropic:m", ROWS["a block not to be read"][1], is_streamed=is_streamed)
        parts = history[1].parts
        assert [type(part) for part in parts] == [ThinkingPart, ThinkingPart, ToolCallPart]
        assert [(p.content, p.signature, p.provider_name) for p in parts if isinstance(p, ThinkingPart)] == [
            ("a", "s1", "anthropic"),
            ("", "r", "anthropic"),
        ]
        assert parts[1].id == "redacted_thinking"  # type: ignore[union-attr]


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_items_are_kept_with_the_text_that_they_are_of(is_streamed: bool) -> None:
    """In one part, from which pydantic-ai's own model for OpenRouter makes an item, too."""
    _, history = await collect("openrouter:m", ROWS["an item in pieces"][1], is_streamed=is_streamed)
    [part] = [part for part in history[1].parts if isinstance(part, ThinkingPart)]
    assert (part.content, part.signature, part.provider_name) == ("ab", "s", "openrouter")
    assert {name: (part.provider_details or {})[name] for name in ("type", "index")} == {
        "type": "reasoning.text",
        "index": 0,
    }


OWN_PARTS = [
    (
        "openrouter:m",
        ThinkingPart(
            "a", id="i", signature="s", provider_name="openrouter", provider_details={"type": "reasoning.text"}
        ),
        {"type": "reasoning.text", "id": "i", "text": "a", "signature": "s"},
    ),
    (
        "openrouter:m",
        ThinkingPart(
            "", signature="x", provider_name="openrouter", provider_details={"type": "reasoning.encrypted", "index": 1}
        ),
        {"type": "reasoning.encrypted", "index": 1, "data": "x"},
    ),
    (
        "openrouter:m",
        ThinkingPart("s", provider_name="openrouter", provider_details={"type": "reasoning.summary", "format": "f"}),
        {"type": "reasoning.summary", "format": "f", "summary": "s"},
    ),
    (
        "anthropic:m",
        ThinkingPart("a", signature="s", provider_name="anthropic"),
        {"type": "thinking", "thinking": "a", "signature": "s"},
    ),
    (
        "anthropic:m",
        ThinkingPart("", id="redacted_thinking", signature="r", provider_name="anthropic"),
        {"type": "redacted_thinking", "data": "r"},
    ),
]


@pytest.mark.parametrize(("name", "part", "value"), OWN_PARTS)
async def test_a_history_of_pydantic_ais_own_model_goes_on(name: str, part: ThinkingPart, value: Any) -> None:
    """What its models keep of reasoning is what the same provider gets here."""
    provider = ScriptedProvider("yes")
    provider.name = name
    answer = ModelResponse(parts=[part, TextPart("so")], provider_name=part.provider_name)
    history: list[ModelMessage] = [ModelRequest(parts=[UserPromptPart("q")]), answer]
    await Agent(SpeculativeModel(provider)).run("and?", message_history=history)
    assert [dict(detail.value) for detail in provider.requests[0].messages[1].reasoning_details] == [value]


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_thinking_goes_back_to_anthropic(is_streamed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its API: each block whole before the call that it led to."""
    monkeypatch.setenv("ANTHROPIC_API_KEY", "x")
    thinking = {"type": "thinking", "thinking": "", "signature": ""}
    call = {"type": "tool_use", "id": "c1", "name": "get", "input": {}}
    frames = [
        *begin(),
        frame("content_block_start", index=0, content_block=thinking),
        frame("content_block_delta", index=0, delta={"type": "thinking_delta", "thinking": "let me"}),
        frame("content_block_delta", index=0, delta={"type": "signature_delta", "signature": "s1"}),
        frame("content_block_stop", index=0),
        frame("content_block_start", index=1, content_block={"type": "redacted_thinking", "data": "r"}),
        frame("content_block_stop", index=1),
        frame("content_block_start", index=2, content_block=call),
        frame("content_block_stop", index=2),
        *end("tool_use"),
    ]
    wire = MessagesWire()

    async def answer(request: Any) -> Any:
        wire.frames = [*begin(), *text_frames("done"), *end()] if wire.bodies else frames
        return await wire.answer(request)

    async with served("/v1/messages", answer) as root, SpeculativeModel(f"anthropic:claude-haiku-5-5@{root}") as model:
        agent = Agent(model, tools=[get], model_settings={"max_tokens": 50})
        if is_streamed:
            async with agent.run_stream("hi") as run:
                await run.get_output()
        else:
            await agent.run("hi")
    assert wire.bodies[1]["messages"][1]["content"] == [
        {"type": "thinking", "thinking": "let me", "signature": "s1"},
        {"type": "redacted_thinking", "data": "r"},
        call,
    ]


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_items_go_back_to_a_server(is_streamed: bool) -> None:
    """`reasoning_details` beside the text, as they came."""
    item = {"type": "reasoning.text", "index": 0, "text": "hm", "signature": "s", "format": "anthropic-claude-v1"}
    reply = {"reasoning": "hm", "reasoning_details": [item], "tool_calls": [build_call("get", "{}")]}
    async with scripted_chat(reply, {"content": "done"}) as chat, SpeculativeModel(f"openrouter:m@{chat.url}") as model:
        agent = Agent(model, tools=[get])
        if is_streamed:
            async with agent.run_stream("hi") as run:
                await run.get_output()
        else:
            await agent.run("hi")
    answer = chat.bodies[1]["messages"][1]
    assert answer["reasoning_details"] == [item]
    assert "hm" in (answer.get("reasoning"), answer.get("reasoning_content"))


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_tags_are_text_where_reasoning_has_blocks(is_streamed: bool) -> None:
    """Anthropic's models write tags only where they are asked to show some."""
    provider = ScriptedProvider("<thinking>a</thinking>b<think>c</think>")
    provider.name = "anthropic:m"
    agent = Agent(SpeculativeModel(provider))
    if is_streamed:
        async with agent.run_stream("hi") as run:
            output = await run.get_output()
    else:
        output = (await agent.run("hi")).output
    assert output == "<thinking>a</thinking>b<think>c</think>"


async def test_foreign_reasoning_does_not_stand_in_the_turn_of_a_model_that_imitates_it() -> None:
    """It is carried by a message of the user before, in pydantic-ai's frame."""
    part = ThinkingPart("deep thought", id="reasoning_content", provider_name="deepseek")
    history: list[ModelMessage] = [
        ModelRequest(parts=[UserPromptPart("q")]),
        ModelResponse(parts=[part, TextPart("so")], provider_name="deepseek"),
    ]
    provider = ScriptedProvider("yes")
    provider.name = "anthropic:claude-opus-5"
    await Agent(SpeculativeModel(provider)).run("and?", message_history=history)
    messages = [message for message in provider.requests[0].messages if message.role != "system"]
    assert [message.role for message in messages] == ["user", "user", "assistant", "user"]
    assert "deep thought" in messages[1].text
    assert messages[2].text == "so"


async def test_text_that_something_interrupts_is_in_parts() -> None:
    """In the order in which they came."""
    events: list[StreamEvent] = [
        ReasoningDelta("a"),
        TextDelta("b"),
        TextDelta("c"),
        ReasoningDelta("d"),
        TextDelta("e"),
    ]
    _, history = await collect("generic:m", events, is_streamed=True)
    assert [getattr(part, "content", "call") for part in history[1].parts] == ["a", "bc", "d", "e", "call"]
