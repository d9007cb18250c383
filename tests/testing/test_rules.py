"""The rule-based model does what its docstring says."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from llm_spec import ChatRequest, InvalidRequestError
from llm_spec.contract.provider import ChunkStreaming
from llm_spec.testing import RuleBasedProvider, check_provider_conformance

ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add_numbers",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


async def test_it_is_a_provider() -> None:
    await check_provider_conformance(RuleBasedProvider)


@pytest.mark.parametrize("choice", [None, "required", {"type": "function", "function": {"name": "add_numbers"}}])
async def test_it_calls_a_tool_with_what_the_text_holds(choice: Any) -> None:
    request = ChatRequest.create("Add the numbers 3 and 4.", tools=[ADD], tool_choice=choice)
    response = await RuleBasedProvider().complete(request)
    assert response.finish_reason == "tool_calls"
    assert json.loads(response.message.tool_calls[0].arguments) == {"a": 3, "b": 4}


async def test_a_tool_that_is_not_meant_is_not_called() -> None:
    request = ChatRequest.create("Good morning.", tools=[ADD])
    assert (await RuleBasedProvider().complete(request)).content == "You said: Good morning."
    request = ChatRequest.create("Add the numbers 3 and 4.", tools=[ADD], tool_choice="none")
    assert not (await RuleBasedProvider().complete(request)).message.tool_calls


@pytest.mark.parametrize(
    ("function", "shown_name"), [({"name": "other"}, "other"), (True, "True"), ({}, "None"), (None, "None")]
)
async def test_a_choice_of_a_tool_that_is_not_there_is_refused(function: object, shown_name: str) -> None:
    choice = {"type": "function", "function": function}
    with pytest.raises(InvalidRequestError, match=f"tool_choice names '?{shown_name}'?, which is not"):
        await RuleBasedProvider().complete(ChatRequest.create("Hi", tools=[ADD], tool_choice=choice))


async def test_it_returns_json_by_a_schema() -> None:
    schema = {
        "type": "object",
        "$defs": {"Kind": {"enum": ["cat", "dog"]}},
        "properties": {
            "name": {"type": "string"},
            "kind": {"$ref": "#/$defs/Kind"},
            "ages": {"type": "array", "items": {"type": "number"}},
            "note": {"anyOf": [{"type": "null"}, {"type": "string"}]},
        },
    }
    asked = ChatRequest.create(
        "A dog named 'Rex', 2.5 years old.",
        response_format={"type": "json_schema", "json_schema": {"name": "pet", "schema": schema}},
    )
    answer = json.loads((await RuleBasedProvider().complete(asked)).content)
    assert answer == {"name": "Rex", "kind": "dog", "ages": [2.5], "note": None}


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("Anything.", ["answer"]),
        ("JSON with 'a' and 'b' keys", ["a", "b"]),
        ('The "x", "y", "z" keys.', ["x", "y", "z"]),
    ],
)
async def test_it_returns_the_json_keys_that_are_asked_for(text: str, keys: list[str]) -> None:
    asked = ChatRequest.create(text, response_format={"type": "json_object"})
    answer = json.loads((await RuleBasedProvider().complete(asked)).content)
    assert answer == dict.fromkeys(keys, text)


async def chunks_of(request: ChatRequest) -> list[Any]:
    async with RuleBasedProvider().stream_chunks(request) as chunks:
        return [chunk async for chunk in chunks]


def test_it_passes_chunks_on() -> None:
    """It is a ChunkStreaming, so that a server can ask it for what events cannot say."""
    assert isinstance(RuleBasedProvider(), ChunkStreaming)


async def test_its_choices_are_equal_and_counted() -> None:
    """`n` choices come, each with the same text and an end, and the usage counts all of them."""
    chunks = await chunks_of(ChatRequest.create("Good morning", extra={"n": 3}))
    texts, finished = ["", "", ""], [0, 0, 0]
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        texts[choice["index"]] += choice["delta"].get("content", "")
        finished[choice["index"]] += choice["finish_reason"] == "stop"
    assert texts == ["You said: Good morning"] * 3
    assert finished == [1, 1, 1]
    one = await RuleBasedProvider().complete(ChatRequest.create("Good morning"))
    assert one.usage is not None
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 3 * one.usage.output_tokens


@pytest.mark.parametrize("top", [0, 1, 5])
async def test_every_piece_of_chat_is_certain(top: int) -> None:
    """Each piece has logprob 0.0 and its own bytes; among the likeliest it is alone, if any were asked for."""
    extra = {"logprobs": True, "top_logprobs": top}
    chunks = await chunks_of(ChatRequest.create("Grüße", extra=extra))
    pieces = [choice for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"] is None]
    assert pieces
    for piece in pieces:
        (told,) = piece["logprobs"]["content"]
        assert told["token"] == piece["delta"]["content"]
        assert told["logprob"] == 0.0
        assert bytes(told["bytes"]).decode() == told["token"]
        assert [rival["token"] for rival in told["top_logprobs"]] == [told["token"]][:top]


async def test_a_raw_prompt_gets_chunks_of_a_completion() -> None:
    """A completion's chunks have `text`, and its own form of log-probabilities."""
    chunks = await chunks_of(ChatRequest.create("Good morning", raw=True, extra={"logprobs": 2}))
    pieces = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(piece["text"] for piece in pieces) == "You said: Good morning"
    told = pieces[0]["logprobs"]
    assert told == {"tokens": [pieces[0]["text"]], "token_logprobs": [0.0], "top_logprobs": [{pieces[0]["text"]: 0.0}]}


async def test_logprobs_come_only_where_they_are_asked_for() -> None:
    """Without `logprobs` no chunk has any."""
    chunks = await chunks_of(ChatRequest.create("Good morning", extra={"n": 2}))
    assert all(choice["logprobs"] is None for chunk in chunks for choice in chunk["choices"])


async def test_a_call_comes_in_chunks_too() -> None:
    """A tool's id and name come with its first chunk, its arguments add up."""
    chunks = await chunks_of(ChatRequest.create("Add the numbers 3 and 4.", tools=[ADD], extra={"n": 2}))
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"] if choice["index"] == 1]
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert (calls[0]["id"], calls[0]["function"]["name"]) == ("call_0", "add_numbers")
    assert all("id" not in call and "name" not in call["function"] for call in calls[1:])
    assert json.loads("".join(call["function"]["arguments"] for call in calls)) == {"a": 3, "b": 4}


@pytest.mark.parametrize(
    "tool", [{"type": "function"}, {"type": "function", "function": 3}, {"type": "function", "function": {}}]
)
async def test_a_tool_without_a_name_is_refused(tool: Any) -> None:
    """A tool that is none is the request's fault, as it would be for any server."""
    with pytest.raises(InvalidRequestError, match="tools"):
        await RuleBasedProvider().complete(ChatRequest.create("Hi", tools=[tool]))


async def test_it_says_that_a_stop_string_ended_it() -> None:
    """As a server that tells why it stopped."""
    response = await RuleBasedProvider().complete(ChatRequest.create("Good morning", stop="morning"))
    assert (response.content, response.stopped_by) == ("You said: Good ", "stop_string")
    response = await RuleBasedProvider().complete(ChatRequest.create("Good morning", stop="evening"))
    assert response.stopped_by is None


@pytest.mark.parametrize("tools", [[], [ADD]])
async def test_a_long_text_is_cut_as_it_is_read(tools: list[dict[str, Any]]) -> None:
    """Whoever wants four words, or leaves after four, makes nobody cut the other million."""
    text = "'" + "a " * 1_000_000 + "'"
    choice = "required" if tools else None
    request = ChatRequest.create(text, max_tokens=4, tools=tools, tool_choice=choice)
    tracemalloc.start()
    try:
        async with RuleBasedProvider().stream(request) as events:
            for _ in range(4):
                await anext(events)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 6 * len(text)
