"""What models of `llm` keep for the next turn, count and refuse."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("llm")

import llm
from llm.parts import ReasoningPart

from llm_spec import AnswerDetail, Finish, ReasoningDelta, ReasoningDetail, TextDelta, ToolCallDelta, Usage
from llm_spec.integrations.llm_plugin import AsyncSpeculativeModel, ModelSpec, SpeculativeModel
from llm_spec.testing import ScriptedProvider

DOORS = ("prompt", "prompt streamed", "async prompt")
SIGNED = {"type": "thinking", "thinking": "think", "signature": "s1"}
HIDDEN = {"type": "redacted_thinking", "data": "x"}
ITEM = {"type": "reasoning.text", "index": 0, "text": "think"}
REASONING: dict[str, tuple[list[Any], list[Any]]] = {
    # events; the details that go back beside the text
    "text alone": ([ReasoningDelta("th"), ReasoningDelta("ink")], []),
    "thinking": (
        [
            ReasoningDelta("think"),
            ReasoningDetail("messages", {"type": "signature_delta", "signature": "s1"}),
            ReasoningDetail("messages", HIDDEN),
        ],
        [("messages", SIGNED), ("messages", HIDDEN)],
    ),
    "items": (
        [
            ReasoningDelta("think"),
            ReasoningDetail("chat", {**ITEM, "text": "th"}),
            ReasoningDetail("chat", {**ITEM, "text": "ink"}),
        ],
        [("chat", ITEM)],
    ),
}
CALL = ToolCallDelta(0, "a", "get", "{}")


def get() -> str:
    """Get it."""
    return "got"


async def ask(door: str, provider: ScriptedProvider, **options: Any) -> Any:
    """The response by one of the doors, read to its end."""
    spec = ModelSpec(name="scripted", target=provider)
    if door == "async prompt":
        response = AsyncSpeculativeModel(spec).prompt("Go", **options)
        await response.text()
        return await response.to_sync_response()
    answer = SpeculativeModel(spec).prompt("Go", stream=door == "prompt streamed", **options)
    answer.text()
    return answer


@pytest.mark.parametrize("kind", REASONING)
@pytest.mark.parametrize("ending", ["an answer", "a call"])
def test_reasoning_goes_back_in_a_conversation(kind: str, ending: str) -> None:
    """In chains with tools, and with the next prompt."""
    events, details = REASONING[kind]
    end: list[Any] = [CALL, Finish("tool_calls")] if ending == "a call" else [TextDelta("so"), Finish("stop")]
    provider = ScriptedProvider([*events, *end])
    conversation = SpeculativeModel(ModelSpec(name="scripted", target=provider)).conversation(tools=[get])
    first = conversation.prompt("Go")
    first.text()
    results = first.execute_tool_calls() if ending == "a call" else []
    conversation.prompt("More", tool_results=results).text()
    (answer,) = [message for message in provider.requests[-1].messages if message.role == "assistant"]
    assert answer.reasoning == "think"
    assert [(detail.api, detail.value) for detail in answer.reasoning_details] == details
    assert first.messages()[0].parts[0].text == "think"


def test_reasoning_of_another_plugin_is_text() -> None:
    """Metadata of others is not ours to send."""
    provider = ScriptedProvider("So.")
    parts = [ReasoningPart("hm", provider_metadata={"anthropic": {"signature": "s"}}), llm.parts.TextPart("so")]
    history = [llm.parts.Message("assistant", parts)]
    SpeculativeModel(ModelSpec(name="scripted", target=provider)).prompt("Go", messages=history).text()
    answer = next(message for message in provider.requests[0].messages if message.role == "assistant")
    assert (answer.reasoning, answer.reasoning_details) == ("hm", ())


@pytest.mark.parametrize("door", DOORS)
async def test_a_refusal_is_an_error(door: str) -> None:
    """It is no text of an answer, and `llm` has no other place for it."""
    pieces = [AnswerDetail("chat", {"refusal": "I can"}), AnswerDetail("chat", {"refusal": "not"})]
    with pytest.raises(llm.ModelError, match="refused to answer: I cannot"):
        await ask(door, ScriptedProvider([*pieces, Finish("content_filter")]))


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [('{"path": "/home', "length"), ("", "length"), ('{"path": x', "tool_calls"), ("[1]", "tool_calls")],
)
async def test_half_a_call_is_never_run(door: str, arguments: str, reason: Any) -> None:
    """Nor is another call of the same answer."""
    calls = [CALL, ToolCallDelta(1, "b", "get", arguments)]
    with pytest.raises(llm.ModelError, match="the model called get with"):
        await ask(door, ScriptedProvider([*calls, Finish(reason)]), tools=[get])


@pytest.mark.parametrize("door", DOORS)
async def test_a_name_in_every_piece_is_one_name(door: str) -> None:
    pieces = [ToolCallDelta(0, "a", "get", "{"), ToolCallDelta(0, "a", "get", "}"), Finish("tool_calls")]
    response = await ask(door, ScriptedProvider(pieces), tools=[get])
    assert [(call.name, call.arguments) for call in response.tool_calls()] == [("get", {})]
    assert response.messages()[0].parts[0].name == "get"


@pytest.mark.parametrize("door", DOORS)
async def test_tokens_of_caches_are_counted(door: str) -> None:
    usage = Usage(input_tokens=100, output_tokens=7, cached_input_tokens=40, cache_write_input_tokens=50)
    response = await ask(door, ScriptedProvider([TextDelta("a"), Finish("stop", usage)]))
    assert response.token_details == {"cached_tokens": 40, "cache_write_tokens": 50}
