"""At one server, SpeculativeModel and pydantic-ai's own chat model: what the program sees and what the server gets."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

pytest.importorskip("pydantic_ai")
pytest.importorskip("openai")

from pydantic import BaseModel
from pydantic_ai import Agent, BinaryContent, ImageUrl, ModelRetry, NativeOutput, PromptedOutput, Tool, ToolOutput
from pydantic_ai.exceptions import ContentFilterError, ModelAPIError, ModelHTTPError
from pydantic_ai.messages import (
    ModelMessage,
    ModelMessagesTypeAdapter,
    ModelRequest,
    ModelResponse,
    SystemPromptPart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    UserPromptPart,
)
from pydantic_ai.models import Model
from pydantic_ai.models.fallback import FallbackModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.models.test import TestModel
from pydantic_ai.providers.openai import OpenAIProvider
from support.scripted_chat import ScriptedChat, build_call, scripted_chat

from llm_spec.integrations.pydantic_ai import SpeculativeModel

DONE = {"content": "done"}
whole_and_streamed = pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])


class City(BaseModel):
    name: str
    size: int = 3


@asynccontextmanager
async def open_model(kind: str, chat: ScriptedChat, spec: str = "generic:m", **options: Any) -> AsyncGenerator[Model]:
    model: Model
    if kind == "own":
        provider = OpenAIProvider(base_url=chat.url, api_key="x")
        model = OpenAIChatModel(spec.partition(":")[2], provider=provider, **options)
    else:
        model = SpeculativeModel(f"{spec}@{chat.url}", **options)
    async with model:
        yield model


async def run_agent(agent: Agent[None, Any], prompt: Any, *, is_streamed: bool, **options: Any) -> Any:
    """The run: its output and messages; or its error, by its type and the types that it is caught as."""
    if not is_streamed:
        return await agent.run(prompt, **options)
    async with agent.run_stream(prompt, **options) as run:
        await run.get_output()
    return run


async def observe(
    kind: str,
    *replies: Mapping[str, Any],
    is_streamed: bool,
    prompt: Any = "hi",
    history: list[ModelMessage] | None = None,
    tools: Any = (),
    **options: Any,
) -> dict[str, Any]:
    """What a program sees of a run with one of the models, and what the server got."""
    seen: dict[str, Any] = {}
    async with scripted_chat(*replies) as chat, open_model(kind, chat) as model:
        agent = Agent(model, tools=tools, **options)
        try:
            run = await run_agent(agent, prompt, is_streamed=is_streamed, message_history=history)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is compared
            seen["error"] = (type(error).__name__, str(error)[:40])
        else:
            *_, response = (message for message in run.all_messages() if isinstance(message, ModelResponse))
            usage = response.usage
            seen |= {
                "text": "".join(part.content for part in response.parts if isinstance(part, TextPart)).strip(),
                "thinking": [part.content.strip() for part in response.parts if isinstance(part, ThinkingPart)],
                "finish": response.finish_reason,
                "usage": (usage.input_tokens, usage.output_tokens, usage.cache_read_tokens, usage.cache_write_tokens),
                "details": dict(usage.details),
            }
        seen["messages"] = [body["messages"] for body in chat.bodies]
    return seen


def get(city: str = "/") -> str:
    """Get the weather."""
    return f"sunny in {city}"


def retry(city: str) -> str:
    raise ModelRetry(f"no {city} here")


def read() -> Any:
    return FILES["text"]


FILES = {
    "text": BinaryContent(b"hello", media_type="text/plain"),
    "json": BinaryContent(b"{}", media_type="application/json"),
    "toml": BinaryContent(b"a = 1", media_type="application/toml"),
    "svg": BinaryContent(b"<svg/>", media_type="image/svg+xml"),
    "image": BinaryContent(b"dot", media_type="image/png"),
    "detail": BinaryContent(b"dot", media_type="image/png", vendor_metadata={"detail": "low"}),
    "wav": BinaryContent(b"sound", media_type="audio/wav"),
    "mp3": BinaryContent(b"sound", media_type="audio/mpeg"),
    "pdf": BinaryContent(b"%PDF", media_type="application/pdf"),
    "url": ImageUrl("http://127.0.0.1/dot.png"),
}
CACHED = {"cached_tokens": 40, "cache_write_tokens": 50}
COUNTED = {
    "prompt_tokens": 100,
    "completion_tokens": 9,
    "total_tokens": 109,
    "prompt_tokens_details": CACHED,
    "completion_tokens_details": {"reasoning_tokens": 4},
}


def calling(arguments: str, name: str = "get", **fields: Any) -> dict[str, Any]:
    return {"tool_calls": [build_call(name, arguments)], **fields}


# what is answered, and with what a run is made
ROWS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "reasoning before a call": (
        [calling('{"city": "Rome"}', reasoning_content="let me think"), DONE],
        {"tools": [get]},
    ),
    "reasoning by its other name": ([{"reasoning_content": "hm", "content": "yes"}], {}),
    "arguments that are cut off": ([calling('{"city": "/home/ann'), DONE], {"tools": [get]}),
    "arguments that are no JSON": ([calling('{"city": Rome}'), DONE], {"tools": [get]}),
    "arguments of another type": ([calling("[1]"), DONE], {"tools": [get]}),
    "arguments of a wrong field": ([calling('{"city": 3}'), DONE], {"tools": [get]}),
    "no arguments": ([calling(""), DONE], {"tools": [get]}),
    "a call of no tool": ([calling("{}", "delete"), DONE], {"tools": [get]}),
    "a call cut off by a limit": ([calling('{"city": "/home/ann', finish="length")], {"tools": [get]}),
    "an output tool cut off": ([calling('{"name": "San Fran', "final_result", finish="length")], {"output_type": City}),
    "two calls": (
        [{"tool_calls": [build_call("get", '{"city":"a"}', "c1"), build_call("get", '{"city":"b"}', "c2")]}, DONE],
        {"tools": [get]},
    ),
    "a refusal": ([{"refusal": "I will not"}], {}),
    "a refusal of an output": ([{"refusal": "I will not"}], {"output_type": NativeOutput(City)}),
    "a filtered answer": ([{"content": "", "finish": "content_filter"}], {}),
    "usage with caches": ([{"content": "yes", "usage": COUNTED}], {}),
    "an empty answer": ([{"content": ""}], {}),
    "reasoning alone": ([{"reasoning_content": "hm", "content": ""}, DONE], {}),
    "space alone": ([{"content": " "}], {}),
    "text before a call": ([calling('{"city": "a"}', content="Wait."), DONE], {"tools": [get]}),
    "an output by a tool": ([calling('{"name": "Rome"}', "final_result")], {"output_type": City}),
    "an output that is wrong": (
        [calling('{"size": 1}', "final_result"), calling('{"name": "Rome"}', "final_result")],
        {"output_type": City},
    ),
    "an output as text": ([{"content": '{"name": "Rome"}'}], {"output_type": NativeOutput(City)}),
    "an output as broken text": (
        [{"content": '{"name": "Ro'}, {"content": '{"name": "Rome"}'}],
        {"output_type": PromptedOutput(City)},
    ),
    "a tool that wants another try": ([calling('{"city": "x"}', "retry"), DONE], {"tools": [retry]}),
    "reasoning that is cut off": ([{"reasoning_content": "hm", "finish": "length"}], {}),
    "a limit": ([{"content": "yes", "finish": "length"}], {}),
    "instructions": ([DONE], {"system_prompt": "be kind", "instructions": "be short"}),
    **{f"a file: {name}": ([DONE], {"prompt": ["look", file, "well?"]}) for name, file in FILES.items()},
    "a file of a tool": ([calling("{}", "read"), DONE], {"tools": [read]}),
}


@whole_and_streamed
@pytest.mark.parametrize("row", ROWS)
async def test_a_run_is_as_with_the_own_model(row: str, is_streamed: bool) -> None:
    """The program sees the same answer or error, and the server gets the same messages in each request."""
    replies, options = ROWS[row]
    own = await observe("own", *replies, is_streamed=is_streamed, **options)
    ours = await observe("ours", *replies, is_streamed=is_streamed, **options)
    assert ours == own


THOUGHT_ROWS: dict[str, tuple[str, Any]] = {
    "text": ("<think>\nwell {}\n</think>\n\nhello", str),
    "prompted": ('<think>well {}</think>{"name": "Rome"}', PromptedOutput(City)),
    "native": ('<think>well {}</think>{"name": "Rome"}', NativeOutput(City)),
    "nothing thought": ("<think></think>hello", str),
    "twice": ("<think>a</think>so<think>b</think>hello", str),
    "a tag that stays open": ("so <think>on and on", str),
    "no tag": ("a < b <thinker> </think>", str),
}


@pytest.mark.parametrize("row", THOUGHT_ROWS)
async def test_text_between_tags_is_reasoning(row: str) -> None:
    """Whole, as the own model has it; it goes back as it came."""
    text, output = THOUGHT_ROWS[row]
    own = await observe("own", {"content": text}, is_streamed=False, output_type=output)
    ours = await observe("ours", {"content": text}, is_streamed=False, output_type=output)
    assert ours == own


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("output", [str, PromptedOutput(City), NativeOutput(City)], ids=["text", "prompted", "native"])
async def test_tags_in_a_stream_may_be_cut_anywhere(output: Any, size: int) -> None:
    """The own model sees tags that come as pieces of their own; here they may be cut in any way."""
    answer = "hello" if output is str else '{"name": "Rome"}'
    text = f"<think>\nwell <thi\n</think>\n\n{answer}"
    deltas = [{"content": text[at : at + size]} for at in range(0, len(text), size)]
    seen = await observe("ours", {"deltas": deltas}, is_streamed=True, output_type=output)
    assert (seen["text"], seen["thinking"]) == (answer, ["well <thi"])


async def test_tags_are_the_profiles() -> None:
    """Others than the usual ones, and what is open at the end of a stream."""
    profile: Any = {"thinking_tags": ("[[", "]]")}
    async with (
        scripted_chat({"content": "[[well]]hello <think> [[and"}) as chat,
        open_model("ours", chat, profile=profile) as model,
    ):
        whole = (await Agent(model).run("hi")).response
        async with Agent(model).run_stream("hi") as run:
            await run.get_output()
    assert [(type(p), p.content) for p in whole.parts if isinstance(p, TextPart | ThinkingPart)] == [
        (ThinkingPart, "well"),
        (TextPart, "hello <think> "),
        (TextPart, "and"),
    ]
    assert (run.response.thinking, run.response.text) == ("well\n\nand", "hello <think> ")


FOREIGN_PARTS = {
    "signed by another provider": ThinkingPart("hm", signature="s", provider_name="anthropic"),
    "of another server": ThinkingPart("hm", id="reasoning_content", provider_name="deepseek"),
    "of nobody": ThinkingPart("hm"),
    "between tags": ThinkingPart("hm", id="content", provider_name="SYSTEM"),
    "without a field": ThinkingPart("hm", provider_name="SYSTEM"),
    "own": ThinkingPart("hm", id="reasoning_content", provider_name="SYSTEM"),
}


@pytest.mark.parametrize("way", ["auto", "tags", False])
@pytest.mark.parametrize("row", FOREIGN_PARTS)
async def test_reasoning_of_a_history(row: str, way: Any) -> None:
    """What another provider wrote goes back as text between tags, its signature never; the profile may choose."""
    bodies: list[Any] = []
    for kind, system in (("own", "openai"), ("ours", "generic")):
        part = FOREIGN_PARTS[row]
        if part.provider_name == "SYSTEM":
            part = dataclasses.replace(part, provider_name=system)
        answer = ModelResponse(parts=[part, TextPart("yes")], provider_name=part.provider_name)
        history: list[ModelMessage] = [ModelRequest(parts=[UserPromptPart("q")]), answer]
        async with scripted_chat(DONE) as chat:
            async with open_model(kind, chat, profile={"openai_chat_send_back_thinking_parts": way}) as model:
                await Agent(model).run("and?", message_history=history)
            bodies.append(chat.bodies[0]["messages"])
    assert bodies[1] == bodies[0]


async def test_what_another_provider_has_encrypted_is_not_sent() -> None:
    """There is no text of it, so not even tags."""
    part = ThinkingPart("", id="redacted_thinking", signature="secret", provider_name="anthropic")
    history: list[ModelMessage] = [
        ModelRequest(parts=[UserPromptPart("q")]),
        ModelResponse(parts=[part, TextPart("yes")], provider_name="anthropic"),
    ]
    seen = await observe("ours", DONE, is_streamed=False, history=history)
    assert seen["messages"][0][1] == {"role": "assistant", "content": "yes"}


async def test_later_texts_of_the_system_keep_role_and_place() -> None:
    """As the own model sends them."""
    history: list[ModelMessage] = [
        ModelRequest(parts=[SystemPromptPart("be kind"), UserPromptPart("q")]),
        ModelResponse(parts=[TextPart("a")]),
        ModelRequest(parts=[SystemPromptPart("be brief"), UserPromptPart("q2")]),
        ModelResponse(parts=[TextPart("b")]),
    ]
    own = await observe("own", DONE, is_streamed=False, history=history, instructions="go")
    ours = await observe("ours", DONE, is_streamed=False, history=history, instructions="go")
    assert ours["messages"] == own["messages"]
    roles = ["system", "system", "user", "assistant", "system", "user", "assistant", "user"]
    assert [message["role"] for message in ours["messages"][0]] == roles


@whole_and_streamed
async def test_a_refusal_is_told_in_the_details(is_streamed: bool) -> None:
    """Whole, the text before it is no answer."""
    async with (
        scripted_chat({"content": "Well. ", "refusal": "I will not"}) as chat,
        open_model("ours", chat) as model,
    ):
        agent = Agent(model)
        if is_streamed:
            async with agent.run_stream("hi") as run:
                await run.get_output()
            response: Any = run.response
            assert response.text == "Well. "
        else:
            with pytest.raises(ContentFilterError, match="'I will not'") as raised:
                await agent.run("hi")
            [response] = ModelMessagesTypeAdapter.validate_json(raised.value.body or "")
            assert response.parts == []
    assert response.finish_reason == "content_filter"
    assert response.provider_details["refusal"] == "I will not"
    assert "finish_reason" not in response.provider_details


STRICT_ROWS: dict[str, dict[str, Any]] = {
    **{f"a tool, {strict}": {"tools": [Tool(get, strict=strict)]} for strict in (None, True, False)},
    **{f"an output, {s}": {"output_type": NativeOutput(City, strict=s)} for s in (None, True, False)},
    **{f"an output tool, {s}": {"output_type": ToolOutput(City, strict=s)} for s in (None, True, False)},
}


@pytest.mark.parametrize("row", STRICT_ROWS)
async def test_schemas_are_strict_as_with_the_own_model(row: str) -> None:
    """The same tools and the same form of the answer, to the letter."""
    sent: list[Any] = []
    for kind in ("own", "ours"):
        reply = calling('{"name": "a"}', "final_result") if "output tool" in row else {"content": '{"name": "a"}'}
        async with scripted_chat(reply) as chat, open_model(kind, chat) as model:
            await Agent(model, **STRICT_ROWS[row]).run("hi")
        sent.append({name: chat.bodies[0].get(name) for name in ("tools", "tool_choice", "response_format")})
    assert sent[1] == sent[0]


STATUSES = [
    (400, None),
    (400, "context_length_exceeded"),
    (401, None),
    (403, None),
    (404, "model_not_found"),
    (404, None),
]
STATUSES += [(422, None), (429, None), (429, "insufficient_quota"), (500, None), (503, None), (529, None)]


@whole_and_streamed
@pytest.mark.parametrize(("status", "code"), STATUSES)
async def test_errors_are_of_the_own_models_types(status: int, code: str | None, is_streamed: bool) -> None:
    """By status and code; a fallback model goes on with the next, as with the own model, and nothing asks twice."""
    raised: list[Any] = []
    body = {"error": {"message": "failed", "type": "e", "code": code}}
    for kind in ("own", "ours"):
        reply = {"status": status, "body": body, "headers": {"retry-after": "7"}}
        async with scripted_chat(reply) as chat, open_model(kind, chat) as model:
            settings: Any = {"max_retries": 0}
            with pytest.raises(ModelHTTPError) as error:
                await run_agent(Agent(model), "hi", is_streamed=is_streamed, model_settings=settings)
            assert len(chat.bodies) == 1
            fallback = Agent(FallbackModel(model, TestModel(custom_output_text="instead")))
            await run_agent(fallback, "hi", is_streamed=is_streamed, model_settings=settings)
        kinds = [name.__name__ for name in type(error.value).__mro__]
        error_code = None if status == 404 else error.value.provider_error_code  # the server's word is not told of it
        raised.append((kinds, error.value.status_code, error.value.model_name, error_code))
        assert error.value.retry_after == 7.0 or status not in (429, 503)
    assert raised[1] == raised[0]
    assert "failed" in str(error.value)


IN_STREAM = ["context_length_exceeded", "insufficient_quota", "rate_limit_exceeded", "server_error", "model_not_found"]


@pytest.mark.parametrize("code", IN_STREAM)
async def test_an_error_in_a_stream_has_the_same_type(code: str) -> None:
    """As before a stream: the status is that of the code. What came before is no answer."""
    kinds: list[str] = []
    for kind in ("own", "ours"):
        reply = {"content": "Well, ", "error": {"message": "failed", "type": "e", "code": code}}
        async with scripted_chat(reply) as chat, open_model(kind, chat) as model:
            with pytest.raises(ModelAPIError, match="failed") as error:
                await run_agent(Agent(model), "hi", is_streamed=True, model_settings={"max_retries": 0})
        kinds.append(type(error.value).__name__)
        assert error.value.in_stream
        assert error.value.provider_error_code == code
    assert kinds[1] == kinds[0]


@whole_and_streamed
async def test_a_lost_connection_has_no_status(is_streamed: bool) -> None:
    """Nobody listens there."""
    async with scripted_chat(DONE) as chat:
        pass
    types: list[str] = []
    for kind in ("own", "ours"):
        async with open_model(kind, chat) as model:
            with pytest.raises(ModelAPIError) as error:
                await run_agent(Agent(model), "hi", is_streamed=is_streamed, model_settings={"max_retries": 0})
        types.append(type(error.value).__name__)
    assert types == ["ModelConnectionError"] * 2
    assert not isinstance(error.value, ModelHTTPError)


async def test_a_history_survives_json() -> None:
    """The messages of a run, stored and read, are sent as before: calls that were broken, and reasoning."""
    replies = [calling('{"city": "/home', reasoning_content="hm"), {"content": "<think>so</think>yes"}, DONE]
    async with scripted_chat(*replies) as chat, open_model("ours", chat) as model:
        run = await Agent(model, tools=[get]).run("hi")
        history = ModelMessagesTypeAdapter.validate_json(run.all_messages_json())
        await Agent(model, tools=[get]).run("and?", message_history=history)
        await Agent(model, tools=[get]).run("and?", message_history=run.all_messages())
    calls = [part for message in history for part in message.parts if isinstance(part, ToolCallPart)]
    assert [part.args for part in calls] == ['{"city": "/home']
    assert chat.bodies[-1] == chat.bodies[-2]
    assert chat.bodies[-1]["messages"][1]["reasoning_content"] == "hm"
    assert chat.bodies[-1]["messages"][3]["content"] == "<think>\nso\n</think>\n\nyes"


ANNOTATION = {"type": "url_citation", "url_citation": {"url": "u", "title": "t", "start_index": 0, "end_index": 3}}


@whole_and_streamed
async def test_annotations_are_kept_where_that_is_requested(is_streamed: bool) -> None:
    """With the text, as the own model keeps them."""
    for is_kept in (True, False):
        kept: list[Any] = []
        for kind in ("own", "ours"):
            reply = {"content": "yes it is", "annotations": [ANNOTATION]}
            async with scripted_chat(reply) as chat, open_model(kind, chat) as model:
                settings: Any = {"openai_include_raw_annotations": is_kept}
                run = await run_agent(Agent(model), "hi", is_streamed=is_streamed, model_settings=settings)
            [part] = [part for part in run.response.parts if isinstance(part, TextPart)]
            kept.append((part.content, (part.provider_details or {}).get("annotations")))
        assert kept[1] == kept[0] == ("yes it is", [ANNOTATION] if is_kept else None)
