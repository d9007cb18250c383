"""anthropic: messages, asked at once and streamed, through its helpers too."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from anthropic import AsyncAnthropic, BadRequestError, beta_async_tool
from pydantic import BaseModel
from support.two_servers import MODEL

HELLO: Any = {"model": MODEL, "max_tokens": 100, "messages": [{"role": "user", "content": "Good morning"}]}
QUESTION: Any = {"role": "user", "content": "What is the weather in 'Paris'?"}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {**HELLO, "messages": [QUESTION], "tools": [{"name": "get_weather", "input_schema": CITY}]}
SUM: Any = {**HELLO, "messages": [{"role": "user", "content": "The sum is 42"}]}


class Sum(BaseModel):
    total: int


@pytest.fixture
async def client(url: str) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=url, api_key="none-such", max_retries=0) as client:
        yield client


async def test_text(client: AsyncAnthropic) -> None:
    answer = await client.messages.create(**HELLO, system="Be kind")
    assert answer.content[0].text == "You said: Good morning"
    assert (answer.stop_reason, answer.usage.output_tokens) == ("end_turn", 5)


async def test_text_streamed(client: AsyncAnthropic) -> None:
    async with client.messages.stream(**HELLO) as stream:
        pieces = [piece async for piece in stream.text_stream]
        answer = await stream.get_final_message()
    assert (len(pieces), "".join(pieces)) == (5, "You said: Good morning")
    assert (answer.stop_reason, answer.usage.output_tokens) == ("end_turn", 5)


async def test_tool_and_its_result(client: AsyncAnthropic) -> None:
    answer = await client.messages.create(**WEATHER)
    call: Any = answer.content[0]
    assert (answer.stop_reason, call.type, call.input) == ("tool_use", "tool_use", {"city": "Paris"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    said = [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    answer = await client.messages.create(**{**WEATHER, "messages": [QUESTION, *said]})
    assert answer.content[0].text == "The tool said: sunny"


async def test_tool_streamed(client: AsyncAnthropic) -> None:
    async with client.messages.stream(**WEATHER) as stream:
        pieces = [event.partial_json async for event in stream if event.type == "input_json"]
        answer = await stream.get_final_message()
    assert len(pieces) > 1
    assert (answer.stop_reason, answer.content[0].input) == ("tool_use", {"city": "Paris"})


async def test_json(client: AsyncAnthropic) -> None:
    answer = await client.messages.parse(**SUM, output_format=Sum)
    assert answer.parsed_output == Sum(total=42)


async def test_json_streamed(client: AsyncAnthropic) -> None:
    async with client.messages.stream(**SUM, output_format=Sum) as stream:
        async for _ in stream:
            pass
        answer = await stream.get_final_message()
    assert answer.parsed_output == Sum(total=42)


async def test_error(client: AsyncAnthropic) -> None:
    with pytest.raises(BadRequestError, match="messages is empty"):
        await client.messages.create(**{**HELLO, "messages": []})


@beta_async_tool
async def get_weather(city: str) -> str:
    """Tell the weather.

    Args:
        city: where
    """
    return f"sunny in {city}"


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_runner(client: AsyncAnthropic, stream: bool) -> None:
    """It first asks for a thread of messages that the server would keep, and goes on with all of them."""
    asked: Any = {"model": MODEL, "max_tokens": 100, "messages": [QUESTION], "tools": [get_weather]}
    runner = client.beta.messages.tool_runner(**asked, stream=stream)
    answers = [await turn.get_final_message() if stream else turn async for turn in runner]
    assert [answer.stop_reason for answer in answers] == ["tool_use", "end_turn"]
    assert answers[-1].content[0].text == "The tool said: sunny in Paris"
