"""An agent of LangChain with a tool on a model in this process: the same transcript with a draft and without."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import pytest

pytest.importorskip("langchain")

from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, ModelResponse, wrap_model_call
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from support.tool_models import FORMATS_BY_NAME, write_tool_model

from llm_spec import InvalidRequestError
from llm_spec.contract.formats import FORMATS
from llm_spec.integrations.langchain import SpeculativeChatModel
from llm_spec.testing import ScriptedProvider

OPTIONS: Any = {"parallel_tool_calls": False, "user": "u", "reasoning_effort": "low", "service_tier": "auto"}


@tool
def get_weather(city: Literal["Rome", "Bern"]) -> str:
    """The weather of a city."""
    return f"It rains in {city}."


@wrap_model_call
async def choose_tool(
    request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
) -> ModelResponse[Any]:
    """A call first, then an answer; beside it what agents send."""
    has_result = isinstance(request.messages[-1], ToolMessage)
    settings = OPTIONS | ({"max_tokens": 12} if has_result else {})
    return await handler(request.override(tool_choice="none" if has_result else "any", model_settings=settings))


@pytest.mark.parametrize("row", FORMATS, ids=lambda row: row.name)
async def test_a_run_with_a_tool(tmp_path: Path, row: Any) -> None:
    folder = write_tool_model(tmp_path / "model", row)
    transcripts: list[Any] = []
    for draft in (None, "lookup+builtin:draft"):
        async with SpeculativeChatModel(target=f"onnx:{folder}", draft=draft, max_tokens=200) as model:
            agent = create_agent(model, tools=[get_weather], middleware=[choose_tool])
            state = await agent.ainvoke({"messages": [HumanMessage("Weather in Rome?", id="0")]})
        call, result, answer = state["messages"][1:]
        assert isinstance(call, AIMessage)
        assert [made["name"] for made in call.tool_calls] == ["get_weather"]
        assert result.text == f"It rains in {call.tool_calls[0]['args']['city']}."
        assert answer.text
        transcripts.append((call.content, call.tool_calls, result.content, result.tool_call_id, answer.content))
        strategies = {message.response_metadata["llm_spec"]["strategy"] for message in (call, answer)}
        assert strategies == {"plain" if draft is None else "tokens"}
    assert transcripts[0] == transcripts[1]


def test_fields_of_a_call_are_those_of_the_table() -> None:
    """What clients of OpenAI's API send goes along under its name; what nobody knows is still refused."""
    provider = ScriptedProvider("So.")
    model = SpeculativeChatModel(target=provider, extra={"priority": 1})
    model.invoke("Hi", **OPTIONS)
    assert provider.requests[0].extra == {"priority": 1} | OPTIONS
    with pytest.raises(InvalidRequestError, match="reasoning_effrt"):
        model.invoke("Hi", reasoning_effrt="low")


def test_what_a_model_here_cannot_serve_is_named(tmp_path: Path) -> None:
    folder = write_tool_model(tmp_path / "model", FORMATS_BY_NAME["hermes"])
    with (
        SpeculativeChatModel(target=f"onnx:{folder}", max_tokens=5) as model,
        pytest.raises(InvalidRequestError, match=r"n is set; .* cannot serve it"),
    ):
        model.invoke("Hi", n=2)
