"""openai: chat completions and responses, asked at once and streamed, through its helpers too."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai import AsyncOpenAI, NotFoundError, pydantic_function_tool
from pydantic import BaseModel
from support.two_servers import MODEL

HELLO: Any = [{"role": "user", "content": "Good morning"}]
WEATHER: Any = [{"role": "user", "content": "What is the weather in 'Paris'?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
CHAT_TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
TOOL: Any = {"type": "function", "name": "get_weather", "parameters": CITY, "strict": True}
FORMAT: Any = {"name": "sum", "schema": {"type": "object", "properties": {"total": {"type": "integer"}}}}


class GetWeather(BaseModel):
    city: str


class Sum(BaseModel):
    total: int


@pytest.fixture
async def client(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none-such", max_retries=0) as client:
        yield client


class TestChat:
    async def test_text(self, client: AsyncOpenAI) -> None:
        answer = await client.chat.completions.create(model=MODEL, messages=HELLO)
        assert answer.choices[0].message.content == "You said: Good morning"
        assert answer.usage is not None
        assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (5, "stop")

    async def test_text_streamed(self, client: AsyncOpenAI) -> None:
        options: Any = {"stream": True, "stream_options": {"include_usage": True}}
        stream = await client.chat.completions.create(model=MODEL, messages=HELLO, **options)
        chunks = [chunk async for chunk in stream]
        text = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert "".join(text) == "You said: Good morning"
        assert sum(map(bool, text)) == 5
        assert chunks[-1].usage.completion_tokens == 5

    async def test_tool_and_its_result(self, client: AsyncOpenAI) -> None:
        answer = await client.chat.completions.create(model=MODEL, messages=WEATHER, tools=[CHAT_TOOL])
        message = answer.choices[0].message
        assert answer.choices[0].finish_reason == "tool_calls"
        assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Paris"}
        told = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
        answer = await client.chat.completions.create(
            model=MODEL, messages=[*WEATHER, message.model_dump(exclude_none=True), told], tools=[CHAT_TOOL]
        )
        assert answer.choices[0].message.content == "The tool said: sunny"

    async def test_tool_streamed(self, client: AsyncOpenAI) -> None:
        tools = [pydantic_function_tool(GetWeather, name="get_weather")]
        async with client.chat.completions.stream(model=MODEL, messages=WEATHER, tools=tools) as stream:
            kinds = {event.type async for event in stream}
            answer = await stream.get_final_completion()
        assert "tool_calls.function.arguments.done" in kinds
        assert answer.choices[0].message.tool_calls[0].function.parsed_arguments == GetWeather(city="Paris")

    async def test_json(self, client: AsyncOpenAI) -> None:
        messages: Any = [{"role": "user", "content": "The sum is 42"}]
        answer = await client.chat.completions.parse(model=MODEL, messages=messages, response_format=Sum)
        assert answer.choices[0].message.parsed == Sum(total=42)

    async def test_json_streamed(self, client: AsyncOpenAI) -> None:
        messages: Any = [{"role": "user", "content": "The sum is 42"}]
        async with client.chat.completions.stream(model=MODEL, messages=messages, response_format=Sum) as stream:
            async for _ in stream:
                pass
            answer = await stream.get_final_completion()
        assert answer.choices[0].message.parsed == Sum(total=42)

    async def test_choices_and_logprobs_streamed(self, client: AsyncOpenAI) -> None:
        stream = await client.chat.completions.create(model=MODEL, messages=HELLO, n=2, logprobs=True, stream=True)
        texts = {0: "", 1: ""}
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == dict.fromkeys((0, 1), "You said: Good morning")


class TestResponses:
    async def test_text(self, client: AsyncOpenAI) -> None:
        answer = await client.responses.create(model=MODEL, input="Good morning", instructions="Be kind")
        assert answer.output_text == "You said: Good morning"
        assert answer.status == "completed"

    async def test_text_streamed(self, client: AsyncOpenAI) -> None:
        stream = await client.responses.create(model=MODEL, input="Good morning", stream=True)
        events = [event async for event in stream]
        text = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert (len(text), "".join(text)) == (5, "You said: Good morning")
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[-1].type == "response.completed"

    async def test_tool_and_its_result(self, client: AsyncOpenAI) -> None:
        answer = await client.responses.create(model=MODEL, input=WEATHER, tools=[TOOL])
        call: Any = answer.output[0]
        assert (call.type, json.loads(call.arguments)) == ("function_call", {"city": "Paris"})
        told: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        answer = await client.responses.create(model=MODEL, input=[*WEATHER, call, told], tools=[TOOL])
        assert answer.output_text == "The tool said: sunny"

    async def test_tool_streamed(self, client: AsyncOpenAI) -> None:
        async with client.responses.stream(model=MODEL, input=WEATHER, tools=[TOOL]) as stream:
            kinds = {event.type async for event in stream}
            answer = await stream.get_final_response()
        assert "response.function_call_arguments.done" in kinds
        assert json.loads(answer.output[0].arguments) == {"city": "Paris"}

    async def test_json(self, client: AsyncOpenAI) -> None:
        answer = await client.responses.parse(model=MODEL, input="The sum is 42", text_format=Sum)
        assert answer.output_parsed == Sum(total=42)

    async def test_json_streamed(self, client: AsyncOpenAI) -> None:
        async with client.responses.stream(model=MODEL, input="The sum is 42", text_format=Sum) as stream:
            async for _ in stream:
                pass
            answer = await stream.get_final_response()
        assert answer.output_parsed == Sum(total=42)


async def test_models_and_errors(client: AsyncOpenAI) -> None:
    """Models are listed, and what is not there is the SDK's own error."""
    assert [model.id async for model in client.models.list()] == [MODEL]
    with pytest.raises(NotFoundError):
        await client.embeddings.create(model=MODEL, input="x")
