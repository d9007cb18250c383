"""What becomes of pydantic-ai's messages, tools and settings on their way to a provider."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("pydantic_ai")

from pydantic import BaseModel
from pydantic_ai import (
    Agent,
    BinaryContent,
    ImageUrl,
    ModelRetry,
    ModelSettings,
    PromptedOutput,
    ToolReturn,
    UserError,
    VideoUrl,
)
from pydantic_ai.direct import model_request
from pydantic_ai.messages import ModelMessage, ModelRequest, ToolReturnPart, UserPromptPart
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.tools import ToolDefinition

from llm_spec import ChatRequest, Finish, StreamEvent, TextDelta, ToolCallDelta
from llm_spec.contract.provider import Capabilities
from llm_spec.integrations.pydantic_ai import SpeculativeModel
from llm_spec.testing import ScriptedProvider

ABLE = Capabilities(tools=True, response_format=True)
CALL: list[StreamEvent] = [ToolCallDelta(0, "c1", "look_up", '{"word": "cat"}'), Finish("tool_calls")]
TOOLS = ["look_up", "write", "shut_down"]
DONE: list[StreamEvent] = [TextDelta("done"), Finish("stop")]


class Answer(BaseModel):
    text: str


def calling_once() -> ScriptedProvider:
    """A model that calls a tool and then answers."""

    def script(request: ChatRequest) -> list[StreamEvent]:
        return DONE if any(message.role == "tool" for message in request.messages) else CALL

    return ScriptedProvider(script, capabilities=ABLE)


async def test_settings_are_the_requests_own_fields() -> None:
    """Sampling, limits and stop strings arrive under llm_spec's names, `extra_body` as it is."""
    provider = ScriptedProvider("Hi")
    settings = ModelSettings(
        temperature=0.5, top_p=0.9, top_k=7, max_tokens=9, seed=3, stop_sequences=["END"], presence_penalty=0.1,
        frequency_penalty=0.2, logit_bias={"5": 1}, extra_body={"mirostat": 1},
    )  # fmt: skip
    await Agent(SpeculativeModel(provider), model_settings=settings).run("Go")
    [request] = provider.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 7, 3)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.logit_bias) == (0.1, 0.2, {5: 1})
    assert (request.max_tokens, request.stop, request.extra) == (9, ("END",), {"mirostat": 1})


async def test_instructions_follow_the_system_prompt() -> None:
    """System prompt, instructions and user prompt are messages in this order, in each turn once."""
    provider = ScriptedProvider("Fine.")
    agent = Agent(SpeculativeModel(provider), system_prompt="You are kind.", instructions="Be short.")
    first = await agent.run("Hello")
    await agent.run("Again", message_history=first.all_messages())
    told = [(m.role, m.text) for m in provider.requests[-1].messages]
    assert told[:3] == [("system", "You are kind."), ("system", "Be short."), ("user", "Hello")]
    assert told[3:] == [("assistant", "Fine."), ("user", "Again")]


async def test_images_are_content_parts() -> None:
    """An image by URL or by its bytes is sent as OpenAI's `image_url`, its detail too; other files are refused."""
    provider = ScriptedProvider("A dot.")
    agent = Agent(SpeculativeModel(provider))
    url = ImageUrl("https://example.com/dot.png", vendor_metadata={"detail": "low"})
    await agent.run(["What?", url, BinaryContent(b"dot", media_type="image/png")])
    assert provider.requests[0].messages[0].content == (
        {"type": "text", "text": "What?"},
        {"type": "image_url", "image_url": {"url": "https://example.com/dot.png", "detail": "low"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,ZG90"}},
    )
    with pytest.raises(UserError, match="VideoUrl"):
        await agent.run(["Look", VideoUrl("https://example.com/a.mp4")])


async def test_a_tool_result_answers_its_call() -> None:
    """Call and result go back as an assistant and a tool message of one id."""
    provider = calling_once()
    agent = Agent(SpeculativeModel(provider))

    @agent.tool_plain
    def look_up(word: str) -> dict[str, str]:
        return {word: "an animal"}

    await agent.run("What is a cat?")
    _, called, returned = provider.requests[1].messages
    assert [(call.id, call.name, call.arguments) for call in called.tool_calls] == [("c1", "look_up", '{"word":"cat"}')]
    assert (returned.role, returned.tool_call_id, returned.text) == ("tool", "c1", '{"cat":"an animal"}')


async def test_an_image_that_a_tool_returns_follows_as_user_content() -> None:
    """A tool message is text alone, so the file comes in a user message behind it."""
    provider = calling_once()
    agent = Agent(SpeculativeModel(provider))

    @agent.tool_plain
    def look_up(word: str) -> ToolReturn:
        return ToolReturn(return_value=[word, BinaryContent(b"dot", media_type="image/png")])

    await agent.run("Show")
    messages = provider.requests[1].messages
    assert [message.role for message in messages] == ["user", "assistant", "tool", "system", "user"]  # it is announced
    assert any(part["type"] == "image_url" for part in messages[-1].content or () if not isinstance(part, str))


async def test_a_retry_is_the_calls_result() -> None:
    """A tool that asks for another try answers its call with the reason."""
    provider = calling_once()
    agent = Agent(SpeculativeModel(provider))

    @agent.tool_plain
    def look_up(word: str) -> str:
        raise ModelRetry(f"no {word} here")

    await agent.run("What is a cat?")
    returned = provider.requests[1].messages[-1]
    assert (returned.role, returned.tool_call_id) == ("tool", "c1")
    assert "no cat here" in returned.text


@pytest.mark.parametrize(
    ("choice", "sent", "offered"),
    [
        (None, "auto", TOOLS),
        ("none", "none", TOOLS),
        ("required", "required", TOOLS),
        (["look_up"], {"type": "function", "function": {"name": "look_up"}}, TOOLS),
        (["look_up", "write"], "required", ["look_up", "write"]),
    ],
)
async def test_a_tool_choice_is_sent_as_chat_completions_have_it(choice: Any, sent: Any, offered: list[str]) -> None:
    """One tool is forced by name, all of them by `required`, some by offering no others."""
    provider = ScriptedProvider(lambda _: DONE, capabilities=ABLE)
    parameters = ModelRequestParameters(function_tools=[ToolDefinition(name=name) for name in TOOLS])
    settings = ModelSettings() if choice is None else ModelSettings(tool_choice=choice)
    asked = [ModelRequest.user_text_prompt("Go")]
    model = SpeculativeModel(provider)
    await model_request(model, asked, model_settings=settings, model_request_parameters=parameters)
    [request] = provider.requests
    assert request.tool_choice == sent
    assert [tool["function"]["name"] for tool in request.tools] == offered


async def test_prompted_output_is_held_to_json() -> None:
    """A schema in the prompt goes with the target's JSON mode, where it has one."""
    provider = ScriptedProvider('{"text": "yes"}', capabilities=ABLE)
    result = await Agent(SpeculativeModel(provider), output_type=PromptedOutput(Answer)).run("Go")
    assert result.output == Answer(text="yes")
    assert provider.requests[0].response_format == {"type": "json_object"}


async def test_prompted_output_needs_no_json_mode_at_anthropic() -> None:
    """Its API has a mode for schemas alone."""
    provider = ScriptedProvider('{"text": "yes"}', capabilities=ABLE)
    provider.name = "anthropic:claude-haiku-5-5"
    result = await Agent(SpeculativeModel(provider), output_type=PromptedOutput(Answer)).run("Go")
    assert result.output == Answer(text="yes")
    assert provider.requests[0].response_format is None


async def test_a_direct_request_needs_no_agent() -> None:
    """`Model.request` by hand: instructions of the request are sent, results without a call kept."""
    provider = ScriptedProvider("Hi")
    parts = [ToolReturnPart("look_up", "an animal", tool_call_id="c1"), UserPromptPart("And?")]
    history: list[ModelMessage] = [ModelRequest(parts=parts, instructions="Be short.")]
    response = await model_request(SpeculativeModel(provider), history)
    assert response.text == "Hi"
    assert [m.role for m in provider.requests[0].messages] == ["system", "tool", "user"]
