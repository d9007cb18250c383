"""The rule-based model does what its docstring says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llm_spec import ChatRequest, InvalidRequestError
from llm_spec.testing import RuleProvider, check_provider

ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add_numbers",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


async def test_it_is_a_provider() -> None:
    await check_provider(RuleProvider)


@pytest.mark.parametrize("choice", [None, "required", {"type": "function", "function": {"name": "add_numbers"}}])
async def test_it_calls_a_tool_with_what_the_text_holds(choice: Any) -> None:
    request = ChatRequest.create("Add the numbers 3 and 4.", tools=[ADD], tool_choice=choice)
    response = await RuleProvider().complete(request)
    assert response.finish_reason == "tool_calls"
    assert json.loads(response.message.tool_calls[0].arguments) == {"a": 3, "b": 4}


async def test_a_tool_that_is_not_meant_is_not_called() -> None:
    request = ChatRequest.create("Good morning.", tools=[ADD])
    assert (await RuleProvider().complete(request)).content == "You said: Good morning."
    request = ChatRequest.create("Add the numbers 3 and 4.", tools=[ADD], tool_choice="none")
    assert not (await RuleProvider().complete(request)).message.tool_calls


async def test_a_choice_of_a_tool_that_is_not_there_is_refused() -> None:
    choice = {"type": "function", "function": {"name": "other"}}
    with pytest.raises(InvalidRequestError, match="other"):
        await RuleProvider().complete(ChatRequest.create("Hi", tools=[ADD], tool_choice=choice))


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
    answer = json.loads((await RuleProvider().complete(asked)).content)
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
    answer = json.loads((await RuleProvider().complete(asked)).content)
    assert answer == dict.fromkeys(keys, text)
