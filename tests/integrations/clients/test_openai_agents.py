"""openai-agents: its runner over responses, its default, and over chat completions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("agents")

from agents import (
    Agent,
    Model,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel
from support.two_servers import MODEL

pytestmark = pytest.mark.filterwarnings("default")


class Sum(BaseModel):
    total: int


@function_tool
def get_weather(city: str) -> str:
    """The weather."""
    return f"sunny in {city}"


@pytest.fixture(autouse=True)
def _untraced() -> Iterator[None]:
    set_tracing_disabled(True)  # else traces go to OpenAI
    yield
    set_tracing_disabled(False)


@pytest.fixture(params=[OpenAIResponsesModel, OpenAIChatCompletionsModel], ids=["responses", "chat"])
def model(request: pytest.FixtureRequest, url: str) -> Model:
    return request.param(model=MODEL, openai_client=AsyncOpenAI(base_url=f"{url}/v1", api_key="none-such"))


async def test_text(model: Model) -> None:
    answer = await Runner.run(Agent(name="A", instructions="Be kind", model=model), "Good morning")
    assert answer.final_output == "You said: Good morning"


async def test_text_streamed(model: Model) -> None:
    answer = Runner.run_streamed(Agent(name="A", model=model), "Good morning")
    pieces = [
        event.data.delta
        async for event in answer.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    assert (len(pieces), "".join(pieces)) == (5, "You said: Good morning")
    assert answer.final_output == "You said: Good morning"


async def test_tool_and_its_result(model: Model) -> None:
    agent = Agent(name="A", model=model, tools=[get_weather])
    answer = await Runner.run(agent, "What is the weather in 'Paris'?")
    assert answer.final_output == "The tool said: sunny in Paris"


async def test_tool_streamed(model: Model) -> None:
    agent = Agent(name="A", model=model, tools=[get_weather])
    answer = Runner.run_streamed(agent, "What is the weather in 'Paris'?")
    async for _ in answer.stream_events():
        pass
    assert answer.final_output == "The tool said: sunny in Paris"


async def test_json(model: Model) -> None:
    answer = await Runner.run(Agent(name="A", model=model, output_type=Sum), "The sum is 42")
    assert answer.final_output == Sum(total=42)


async def test_json_streamed(model: Model) -> None:
    answer = Runner.run_streamed(Agent(name="A", model=model, output_type=Sum), "The sum is 42")
    async for _ in answer.stream_events():
        pass
    assert answer.final_output == Sum(total=42)
