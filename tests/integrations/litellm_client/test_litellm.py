"""litellm: OpenAI's chat and responses, and Anthropic's messages, by a model's prefix."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("litellm")

import litellm
from support.two_servers import MODEL

pytestmark = pytest.mark.filterwarnings("ignore")  # it warns of its own models

HELLO: Any = [{"role": "user", "content": "Good morning"}]
WEATHER: Any = [{"role": "user", "content": "What is the weather in 'Paris'?"}]
SUM: Any = [{"role": "user", "content": "The sum is 42"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
SCHEMA: Any = {"type": "object", "properties": {"total": {"type": "integer"}}, "required": ["total"]}


@pytest.fixture(params=["openai", "anthropic"])
def where(request: pytest.FixtureRequest, url: str) -> dict[str, Any]:
    base = f"{url}/v1" if request.param == "openai" else url
    return {"model": f"{request.param}/{MODEL}", "api_base": base, "api_key": "none-such", "max_tokens": 100}


async def test_text(where: dict[str, Any]) -> None:
    answer = await litellm.acompletion(messages=HELLO, **where)
    assert answer.choices[0].message.content == "You said: Good morning"
    assert answer.usage.completion_tokens == 5


async def test_text_streamed(where: dict[str, Any]) -> None:
    stream = await litellm.acompletion(messages=HELLO, stream=True, **where)
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(pieces) == "You said: Good morning"
    assert sum(map(bool, pieces)) == 5


async def test_tool_and_its_result(where: dict[str, Any]) -> None:
    answer = await litellm.acompletion(messages=WEATHER, tools=[TOOL], **where)
    message = answer.choices[0].message
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Paris"}
    told = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    answer = await litellm.acompletion(messages=[*WEATHER, message, told], tools=[TOOL], **where)
    assert answer.choices[0].message.content == "The tool said: sunny"


async def test_tool_streamed(where: dict[str, Any]) -> None:
    chunks = [c async for c in await litellm.acompletion(messages=WEATHER, tools=[TOOL], stream=True, **where)]
    answer = litellm.stream_chunk_builder(chunks, messages=WEATHER)
    assert json.loads(answer.choices[0].message.tool_calls[0].function.arguments) == {"city": "Paris"}


@pytest.mark.parametrize("stream", [False, True])
async def test_json(where: dict[str, Any], stream: bool) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}
    answer = await litellm.acompletion(messages=SUM, response_format=wanted, stream=stream, **where)
    if stream:
        answer = litellm.stream_chunk_builder([chunk async for chunk in answer], messages=SUM)
    assert json.loads(answer.choices[0].message.content) == {"total": 42}


@pytest.mark.parametrize("stream", [False, True])
async def test_responses(url: str, stream: bool) -> None:
    answer = await litellm.aresponses(
        "Good morning", f"openai/{MODEL}", stream=stream, api_base=f"{url}/v1", api_key="none-such"
    )
    if stream:
        text = "".join([event.delta async for event in answer if event.type == "response.output_text.delta"])
    else:
        text = answer.output[0].content[0].text
    assert text == "You said: Good morning"
