"""Tools of `llm` on a model in this process: the same transcript with a draft and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llm")

import llm
from support.tool_models import write_tool_model

from llm_spec.contract.formats import FORMATS
from llm_spec.integrations.llm_plugin import ModelSpec, SpeculativeModel
from llm_spec.testing import ScriptedProvider

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Bern"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def get_weather(city: str) -> str:
    return f"It rains in {city}."


TOOL = llm.Tool(name="get_weather", description="The weather.", input_schema=SCHEMA, implementation=get_weather)


@pytest.mark.parametrize("row", FORMATS, ids=lambda row: row.name)
def test_a_conversation_with_a_tool(tmp_path: Path, row: Any) -> None:
    """A call that an option demands, its result, and an answer."""
    folder = write_tool_model(tmp_path / "model", row)
    transcripts: list[Any] = []
    for draft in (None, "lookup+builtin:draft"):
        model = SpeculativeModel(ModelSpec(name="here", target=f"onnx:{folder}", draft=draft))
        conversation = model.conversation(tools=[TOOL])
        first = conversation.prompt(
            "Weather in Rome?", tool_choice="get_weather", parallel_tool_calls=False, max_tokens=200
        )
        assert not first.text()
        [call] = first.tool_calls()
        [result] = first.execute_tool_calls()
        assert result.output == f"It rains in {call.arguments['city']}."
        second = conversation.prompt("", tool_results=[result], tool_choice="none", max_tokens=12)
        assert second.text()
        transcripts.append((call.name, call.arguments, call.tool_call_id, second.text()))
        strategies = {response.response_json["strategy"] for response in (first, second)}
        assert strategies == {"plain" if draft is None else "tokens"}
    assert transcripts[0] == transcripts[1]


@pytest.mark.parametrize(
    ("choice", "sent"),
    [("required", "required"), ("get_weather", {"type": "function", "function": {"name": "get_weather"}})],
)
def test_options_of_tools_reach_the_provider(choice: str, sent: Any) -> None:
    provider = ScriptedProvider("So.")
    model = SpeculativeModel(ModelSpec(name="scripted", target=provider))
    model.prompt("Go", tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, reasoning_effort="low").text()
    [request] = provider.requests
    assert request.tool_choice == sent
    assert request.extra == {"parallel_tool_calls": False, "reasoning_effort": "low"}
