"""langchain-openai: ChatOpenAI over chat completions, and over responses."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("langchain_openai")

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from support.two_servers import MODEL

# its HTTP client is kept for all models of an address, and with it the event loop
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.filterwarnings("default")]


@tool
def get_weather(city: str) -> str:
    """The weather."""
    return f"sunny in {city}"


class Sum(BaseModel):
    total: int


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def model(request: pytest.FixtureRequest, url: str) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL, base_url=f"{url}/v1", api_key="none-such", use_responses_api=request.param, max_retries=0
    )


async def test_text(model: ChatOpenAI) -> None:
    answer = await model.ainvoke("Good morning")
    assert answer.text == "You said: Good morning"
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == 5


async def test_text_streamed(model: ChatOpenAI) -> None:
    pieces = [piece.text async for piece in model.astream("Good morning")]
    assert "".join(pieces) == "You said: Good morning"
    assert sum(map(bool, pieces)) == 5


async def test_tool_and_its_result(model: ChatOpenAI) -> None:
    bound, asked = model.bind_tools([get_weather]), HumanMessage("What is the weather in 'Paris'?")
    answer = await bound.ainvoke([asked])
    call = answer.tool_calls[0]
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    result: ToolMessage = await get_weather.ainvoke(call)
    assert (await bound.ainvoke([asked, answer, result])).text == "The tool said: sunny in Paris"


async def test_tool_streamed(model: ChatOpenAI) -> None:
    whole: Any = None
    async for piece in model.bind_tools([get_weather]).astream("What is the weather in 'Paris'?"):
        whole = piece if whole is None else whole + piece
    assert whole.tool_calls[0]["args"] == {"city": "Paris"}


async def test_json(model: ChatOpenAI) -> None:
    assert await model.with_structured_output(Sum).ainvoke("The sum is 42") == Sum(total=42)


async def test_json_streamed(model: ChatOpenAI) -> None:
    values = [value async for value in model.with_structured_output(Sum).astream("The sum is 42")]
    assert values[-1] == Sum(total=42)
