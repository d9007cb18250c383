"""pydantic-ai: an agent over chat completions, over responses, and over Anthropic's messages."""

from __future__ import annotations

import pytest

pytest.importorskip("pydantic_ai")

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from support.two_servers import MODEL

pytestmark = pytest.mark.filterwarnings("default")


class Sum(BaseModel):
    total: int


def get_weather(city: str) -> str:
    """The weather."""
    return f"sunny in {city}"


@pytest.fixture(params=["chat", "responses", "messages"])
def model(request: pytest.FixtureRequest, url: str) -> Model:
    if request.param == "messages":
        return AnthropicModel(MODEL, provider=AnthropicProvider(base_url=url, api_key="none-such"))
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none-such")
    kind = OpenAIChatModel if request.param == "chat" else OpenAIResponsesModel
    return kind(MODEL, provider=provider)


async def test_text(model: Model) -> None:
    answer = await Agent(model, instructions="Be kind").run("Good morning")
    assert (answer.output, answer.usage.output_tokens) == ("You said: Good morning", 5)


async def test_text_streamed(model: Model) -> None:
    async with Agent(model).run_stream("Good morning") as answer:
        pieces = [piece async for piece in answer.stream_text(delta=True, debounce_by=None)]
    assert "".join(pieces) == "You said: Good morning"
    assert len(pieces) > 1


async def test_tool_and_its_result(model: Model) -> None:
    answer = await Agent(model, tools=[get_weather]).run("What is the weather in 'Paris'?")
    assert answer.output == "The tool said: sunny in Paris"


async def test_tool_streamed(model: Model) -> None:
    async with Agent(model, tools=[get_weather]).run_stream("What is the weather in 'Paris'?") as answer:
        pieces = [piece async for piece in answer.stream_text(delta=True, debounce_by=None)]
    assert "".join(pieces) == "The tool said: sunny in Paris"


async def test_json(model: Model) -> None:
    answer = await Agent(model, output_type=_wanted(model)).run("The sum is 42")
    assert answer.output == Sum(total=42)


async def test_json_streamed(model: Model) -> None:
    async with Agent(model, output_type=_wanted(model)).run_stream("The sum is 42") as answer:
        values = [value async for value in answer.stream_output(debounce_by=None)]
    assert values[-1] == Sum(total=42)


def _wanted(model: Model) -> type[Sum] | NativeOutput[Sum]:
    """By the API's own format; Anthropic's profile knows none for an unknown model and takes a tool."""
    return Sum if isinstance(model, AnthropicModel) else NativeOutput(Sum)
