"""A run of the OpenAI Agents SDK with a tool on a model in this process: the same transcript, drafted or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

pytest.importorskip("agents")

from agents import Agent, ModelSettings, Runner, function_tool
from openai.types.shared import Reasoning
from support.tool_models import write_tool_model

from llm_spec.contract.formats import FORMATS
from llm_spec.integrations.openai_agents import SpeculativeModel
from llm_spec.testing import ScriptedProvider

# no call has one of these texts, and what the model writes behind its call has one soon
STOP = ["(", ")", "=", ".", "#"]


@function_tool
def get_weather(city: Literal["Rome", "Bern"]) -> str:
    """The weather of a city."""
    return f"It rains in {city}."


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("row", [row for row in FORMATS if row.body == "json"], ids=lambda row: row.name)
async def test_a_run_with_a_tool(tmp_path: Path, row: Any, is_streamed: bool) -> None:
    """The SDK demands a call once, and then an answer. Its tools are strict."""
    folder = write_tool_model(tmp_path / "model", row)
    settings = ModelSettings(
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=300,
        store=False,
        metadata={"trace": "1"},
        reasoning=Reasoning(effort="low"),
        verbosity="low",
        extra_args={"stop": STOP},
    )
    transcripts: list[Any] = []
    for draft in (None, "lookup+builtin:draft"):
        model = SpeculativeModel(f"onnx:{folder}", draft=draft)
        agent = Agent(name="a", model=model, tools=[get_weather], model_settings=settings)
        if is_streamed:
            result: Any = Runner.run_streamed(agent, "Weather in Rome?")
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, "Weather in Rome?")
        await model.close()
        items: list[Any] = [*result.raw_responses[0].output, *result.raw_responses[1].output]
        assert items[0].type == "function_call"
        strategies = {item.provider_data["llm_spec"]["strategy"] for item in items}
        assert strategies == {"plain" if draft is None else "tokens"}
        transcripts.append([item.model_dump(exclude={"provider_data", "id"}) for item in items])
        assert "It rains in" in str(result.to_input_list())
    assert transcripts[0] == transcripts[1]


async def test_settings_go_along() -> None:
    """What the SDK's own models send of them."""
    provider = ScriptedProvider("So.")
    settings = ModelSettings(metadata={"a": "b"}, store=False, verbosity="low", reasoning=Reasoning(effort="high"))
    agent = Agent(name="a", model=SpeculativeModel(provider), model_settings=settings)
    await Runner.run(agent, "Hi")
    assert provider.requests[0].extra == {
        "metadata": {"a": "b"},
        "store": False,
        "verbosity": "low",
        "reasoning_effort": "high",
    }
