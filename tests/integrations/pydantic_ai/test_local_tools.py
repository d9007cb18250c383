"""Agents of pydantic-ai with tools on a model in this process: the same transcript with a draft and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

pytest.importorskip("pydantic_ai")

from pydantic import BaseModel, ConfigDict
from pydantic_ai import Agent, ModelSettings, RunContext, ToolOutput
from pydantic_ai.exceptions import OutputTokenLimitExceeded
from pydantic_ai.messages import ModelResponse
from support.tool_models import FORMATS_BY_NAME, write_tool_model

from llm_spec.contract.formats import FORMATS
from llm_spec.integrations.pydantic_ai import SpeculativeModel


class Report(BaseModel):
    model_config = ConfigDict(extra="forbid")

    sunny: bool


def choose_settings(context: RunContext[None]) -> ModelSettings:
    """A call of the tool first, then one of the output tool."""
    choice = ["get_weather"] if context.run_step == 1 else ["report"]
    return ModelSettings(max_tokens=200, temperature=0.7, seed=4, parallel_tool_calls=False, tool_choice=choice)


def ignore_times(message: Any) -> Any:
    """What a message says."""
    parts = [{"kind": part.part_kind} | vars(part) for part in message.parts]
    return [{name: value for name, value in part.items() if name != "timestamp"} for part in parts]


@pytest.mark.parametrize("row", FORMATS, ids=lambda row: row.name)
async def test_a_run_with_a_tool(tmp_path: Path, row: Any) -> None:
    """A tool is called, its result read, and an output given, all of it drafted."""
    folder = write_tool_model(tmp_path / "model", row)
    transcripts: list[Any] = []
    for draft in (None, "lookup+builtin:draft"):
        async with SpeculativeModel(f"onnx:{folder}", draft=draft) as model:
            agent = Agent(model, output_type=ToolOutput(Report, name="report"), model_settings=choose_settings)

            @agent.tool_plain
            def get_weather(city: Literal["Rome", "Bern"]) -> str:
                """The weather of a city."""
                return f"It rains in {city}."

            result = await agent.run("Weather in Rome?")
            assert isinstance(result.output, Report)
            messages = result.all_messages()
            transcripts.append([ignore_times(message) for message in messages])
            responses = [message for message in messages if isinstance(message, ModelResponse)]
            assert len(responses) == 2, transcripts[-1]
            strategies = {(response.provider_details or {})["strategy"] for response in responses}
            assert strategies == {"plain" if draft is None else "tokens"}
            assert {response.finish_reason for response in responses} == {"tool_call"}
    assert transcripts[0] == transcripts[1]


@pytest.mark.parametrize("thinking", [True, False, "low"])
async def test_a_wish_to_think_reaches_the_template(tmp_path: Path, thinking: Any) -> None:
    """The model's template hears of it; reasoning is a part of its own."""
    folder = write_tool_model(tmp_path / "model", FORMATS_BY_NAME["hermes"])
    template = folder / "chat_template.jinja"
    template.write_text(
        template.read_text("utf-8") + "{{ enable_thinking }} {{ reasoning_effort }} </think><think>", "utf-8"
    )
    async with SpeculativeModel(f"onnx:{folder}", draft="lookup") as model:
        agent = Agent(model, model_settings=ModelSettings(max_tokens=16, thinking=thinking))
        with pytest.raises(OutputTokenLimitExceeded):  # the answer is reasoning alone
            await agent.run("Weather in Rome?")
