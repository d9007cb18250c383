"""A run on SpeculativeModel beside one on the SDK's own model: the user and the server see the same."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import openai
import pytest

pytest.importorskip("agents")

from agents import (
    Agent,
    Model,
    ModelRetrySettings,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    UserError,
    WebSearchTool,
    function_tool,
    retry_policies,
)
from aiohttp import web
from openai import AsyncOpenAI
from pydantic import BaseModel
from support.agents_runs import HOWS, QUIET, run_agent
from support.wire import chunk, served

from llm_spec import LlmSpecError, RetryPolicy, SpeculativeConfig
from llm_spec.integrations.openai_agents import SpeculativeModel

AT_ONCE = SpeculativeConfig(retry=RetryPolicy(first_wait_s=0.0, max_wait_s=0.0))
USAGE = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}
CACHED = {"prompt_tokens_details": {"cached_tokens": 40, "cache_write_tokens": 50}}
COUNTED = {"prompt_tokens": 100, "completion_tokens": 7, "total_tokens": 107, **CACHED}
DONE: dict[str, Any] = {"content": "done"}


class City(BaseModel):
    name: str


class Server:
    """Answers with its replies in order, the last again and again, whole or in pieces."""

    def __init__(self, replies: list[dict[str, Any]]) -> None:
        self.replies = replies
        self.bodies: list[dict[str, Any]] = []
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        reply = self.replies[min(len(self.bodies), len(self.replies) - 1)]
        self.bodies.append(await request.json())
        if "status" in reply:
            error = {"error": {"message": "no", "code": reply.get("code"), "type": "e"}}
            return web.json_response(error, status=reply["status"], headers=reply.get("headers", {}))
        message = {name: value for name, value in reply.items() if name not in ("finish", "usage", "deltas")}
        finish = reply.get("finish", "tool_calls" if "tool_calls" in reply else "stop")
        usage = reply.get("usage", USAGE)
        if not self.bodies[-1].get("stream"):
            choice = {"index": 0, "message": {"role": "assistant", "content": None, **message}, "finish_reason": finish}
            return web.json_response({"id": "c1", "object": "chat.completion", "choices": [choice], "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for delta in reply.get("deltas") or split_message(message):
            await response.write(chunk(delta))
        await response.write(chunk(finish=finish))
        await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


def split_message(message: dict[str, Any]) -> list[dict[str, Any]]:
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    for name in ("reasoning_content", "content", "refusal"):
        text = message.get(name) or ""
        deltas += [{name: text[at : at + 5]} for at in range(0, len(text), 5)]
    deltas += [{name: message[name]} for name in ("annotations",) if name in message]
    for index, call in enumerate(message.get("tool_calls", ())):
        function, arguments = call["function"], call["function"]["arguments"]
        deltas.append({"tool_calls": [{**call, "index": index, "function": {**function, "arguments": ""}}]})
        pieces = [arguments[at : at + 5] for at in range(0, len(arguments), 5)]
        deltas += [{"tool_calls": [{"index": index, "function": {"arguments": piece}}]} for piece in pieces]
    return deltas


def call_of(arguments: str, name: str = "delete", call_id: str = "call_a") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


@asynccontextmanager
async def serve(*replies: dict[str, Any]) -> AsyncGenerator[Server]:
    server = Server(list(replies))
    async with served("/v1/chat/completions", server.answer) as root:
        server.url = f"{root}/v1"
        yield server


class Outcome(NamedTuple):
    """What came of a run: its output or error, its items and its counts, and the messages that the server got."""

    output: str
    items: list[Any]
    usage: Any
    messages: list[Any]
    deltas: list[str]


@asynccontextmanager
async def make_model(kind: str, url: str) -> AsyncGenerator[Model]:
    if kind == "own":
        async with AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
            yield OpenAIChatCompletionsModel("m", client)
        return
    model = SpeculativeModel(f"generic:m@{url}", config=AT_ONCE)
    try:
        yield model
    finally:
        await model.close()


async def observe_run(kind: str, is_streamed: bool, replies: list[dict[str, Any]], **options: Any) -> Outcome:
    called: list[Any] = []

    @function_tool
    def delete(path: str = "/") -> str:
        called.append(path)
        return f"deleted {path}"

    handlers = options.pop("error_handlers", None)
    deltas: list[str] = []
    async with serve(*replies) as server, make_model(kind, server.url) as model:
        agent = Agent(name="a", model=model, **{"tools": [delete], **options})
        given: Any = {"run_config": QUIET, "error_handlers": handlers}
        result: Any = None
        try:
            if is_streamed:
                result = Runner.run_streamed(agent, "hi", **given)
                async for event in result.stream_events():
                    is_delta = event.type == "raw_response_event" and "delta" in event.data.type
                    deltas += [event.data.type] if is_delta else []
            else:
                result = await Runner.run(agent, "hi", **given)
            output = repr(result.final_output)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is compared
            output = type(error).__name__
        responses = [] if result is None else result.raw_responses
        items = [
            item.model_dump(exclude={"provider_data", "id", "logprobs"}, exclude_none=True)
            for response in responses
            for item in response.output
        ]
        usage = None if result is None else result.context_wrapper.usage
    counts = None if usage is None else (usage.requests, usage.input_tokens, usage.output_tokens)
    details = None if usage is None else (usage.input_tokens_details, len(usage.request_usage_entries))
    return Outcome(
        output, [*items, called], (counts, details), [b["messages"] for b in server.bodies], sorted(set(deltas))
    )


NAMED = {"index": 0, "id": "call_a", "type": "function", "function": {"name": "delete", "arguments": ""}}
REPEATED = [
    {"tool_calls": [NAMED]},
    {"tool_calls": [{"index": 0, "function": {"name": "delete", "arguments": '{"path": '}}]},
    {"tool_calls": [{"index": 0, "function": {"name": "delete", "arguments": '"/a"}'}}]},
]
CITATION = {"type": "url_citation", "url_citation": {"url": "http://a", "title": "A", "start_index": 0, "end_index": 2}}
WHOLE_CALL = {"tool_calls": [call_of('{"path": "/a"}')]}
# Kinds of answers: what the server replies, and what the agent is given.
CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "a text": ([{"content": "hello"}], {}),
    "a call": ([WHOLE_CALL, DONE], {}),
    "a text and a call": ([{"content": "Now.", **WHOLE_CALL}, DONE], {}),
    "broken arguments": ([{"tool_calls": [call_of('{"path": ann')]}, DONE], {}),
    "arguments that are a list": ([{"tool_calls": [call_of("[1]")]}, DONE], {}),
    "arguments that are empty": ([{"tool_calls": [call_of("")]}, DONE], {}),
    "a call that was cut": ([{"tool_calls": [call_of('{"path": "/home/ann')], "finish": "length"}, DONE], {}),
    "a call of no tool": ([{"tool_calls": [call_of("{}", "other")]}, DONE], {}),
    "a name in every piece": ([{**WHOLE_CALL, "deltas": REPEATED}, DONE], {}),
    "a refusal": ([{"refusal": "I cannot do that"}], {}),
    "a refusal of structured output": ([{"refusal": "I cannot do that"}], {"output_type": City}),
    "a refusal that is handled": (
        [{"refusal": "I cannot do that"}],
        {"output_type": City, "error_handlers": {"model_refusal": lambda _: City(name="none")}},
    ),
    "a text and a refusal": ([{"content": "Well.", "refusal": "No."}], {}),
    "a filter without a text": ([{"finish": "content_filter"}], {}),
    "a filter behind a text": ([{"content": "half", "finish": "content_filter"}], {}),
    "a limit without a text": ([{"finish": "length"}], {}),
    "a limit behind a text": ([{"content": "half", "finish": "length"}], {}),
    "a limit in structured output": ([{"content": '{"name": "San', "finish": "length"}], {"output_type": City}),
    "structured output": ([{"content": '{"name": "Rome"}'}], {"output_type": City}),
    "text in place of structured output": ([{"content": "Rome"}], {"output_type": City}),
    "cached tokens": ([{"content": "hello", "usage": COUNTED}], {}),
    "cached tokens in two turns": ([{**WHOLE_CALL, "usage": COUNTED}, {**DONE, "usage": COUNTED}], {}),
    "citations": ([{"content": "It is.", "annotations": [CITATION]}], {}),
}


@HOWS
@pytest.mark.parametrize("name", CASES)
async def test_a_run_is_as_on_the_own_model(name: str, is_streamed: bool) -> None:
    """The same output or error, items, counts, messages to the server and kinds of events."""
    replies, options = CASES[name]
    own = await observe_run("own", is_streamed, copy.deepcopy(replies), **options)
    ours = await observe_run("ours", is_streamed, copy.deepcopy(replies), **options)
    assert ours._asdict() == own._asdict()


# ------------------------------------------------------------------------------------------------ errors

STATUSES = [400, 401, 403, 404, 408, 409, 413, 422, 429, 500, 503]


async def fail(kind: str, is_streamed: bool, status: int, **settings: Any) -> tuple[Exception, int]:
    """What a run raises where the server answers with this status, and how often the server was asked."""
    async with serve({"status": status, "code": "c"}) as server, make_model(kind, server.url) as model:
        agent = Agent(name="a", model=model, model_settings=ModelSettings(**settings))
        with pytest.raises(Exception) as caught:  # noqa: PT011 - which one is looked at below
            await run_agent(agent, "hi", is_streamed)
        return caught.value, len(server.bodies)


@HOWS
@pytest.mark.parametrize("status", STATUSES)
async def test_an_error_is_also_the_one_of_openais_client(status: int, is_streamed: bool) -> None:
    """Whoever catches that of the own model catches ours, and finds status and code in it."""
    own, _ = await fail("own", is_streamed, status)
    ours, _ = await fail("ours", is_streamed, status)
    assert isinstance(own, openai.APIStatusError)
    assert isinstance(ours, LlmSpecError)
    assert isinstance(ours, type(own))
    assert isinstance(ours, openai.APIStatusError)
    assert (ours.status_code, ours.response.status_code) == (status, status)
    assert ours.code == own.code or status == 404  # of an address that is not there, whatever the server says
    again = pickle.loads(pickle.dumps(ours))  # noqa: S301 - our own
    assert (type(again), str(again), again.status_code) == (type(ours), str(ours), status)


@HOWS
@pytest.mark.parametrize("kind", ["own", "ours"])
async def test_who_cannot_be_reached(kind: str, is_streamed: bool) -> None:
    """A server that is not there is openai's APIConnectionError."""
    async with serve(DONE) as server:
        url = server.url
    async with make_model(kind, url) as model:
        with pytest.raises(openai.APIConnectionError):
            await run_agent(Agent(name="a", model=model), "hi", is_streamed)


@HOWS
@pytest.mark.parametrize(
    ("retry", "num_asked"),
    [
        (None, 3),  # the decoder's own
        (ModelRetrySettings(max_retries=0), 1),
        # a first attempt has the decoder's retries, as with the client's of the own model; the runner's have none
        (
            ModelRetrySettings(max_retries=2, policy=retry_policies.provider_suggested(), backoff={"initial_delay": 0}),
            5,
        ),
        (ModelRetrySettings(max_retries=2, policy=retry_policies.http_status([503]), backoff={"initial_delay": 0}), 5),
        (ModelRetrySettings(max_retries=2, policy=retry_policies.never()), 3),
    ],
)
async def test_nothing_is_retried_twice_over(retry: Any, num_asked: int, is_streamed: bool) -> None:
    """ModelSettings.retry rules: what the runner sends again the decoder sends once."""
    error, num = await fail("ours", is_streamed, 503, retry=retry)
    assert (type(error).__name__, num) == ("TransientError", num_asked)


# ------------------------------------------------------------------------------------------------ tools


@HOWS
async def test_hosted_tools_are_refused(is_streamed: bool) -> None:
    """By name, before the server is asked, as the own model does."""
    for kind in ("own", "ours"):
        async with serve(DONE) as server, make_model(kind, server.url) as model:
            agent = Agent(name="a", model=model, tools=[WebSearchTool()])
            with pytest.raises(UserError, match="WebSearchTool"):
                await run_agent(agent, "hi", is_streamed)
            assert not server.bodies


@function_tool
def add(a: int, b: int = 0) -> int:
    """Add."""
    return a + b


@function_tool(strict_mode=False)
def note(words: dict[str, str]) -> str:
    """Note."""
    return str(words)


@HOWS
@pytest.mark.parametrize("tool_choice", [None, "auto", "required", "none", "add"])
@pytest.mark.parametrize("is_parallel", [None, True, False])
async def test_tools_and_schemas_go_out_alike(tool_choice: Any, is_parallel: Any, is_streamed: bool) -> None:
    """Strict and not, handoffs, the choice, and the schema of the output."""
    sent: list[Any] = []
    settings = ModelSettings(tool_choice=tool_choice, parallel_tool_calls=is_parallel)
    for kind in ("own", "ours"):
        async with serve({"content": '{"name": "Rome"}'}) as server, make_model(kind, server.url) as model:
            other = Agent(name="Other", model=model)
            agent = Agent(
                name="a", model=model, tools=[add, note], handoffs=[other], output_type=City, model_settings=settings
            )
            await run_agent(agent, "hi", is_streamed)
            names = ("tools", "tool_choice", "parallel_tool_calls", "response_format")
            sent.append({name: server.bodies[0].get(name) for name in names})
    assert sent[0] == sent[1]
    assert [tool["function"]["strict"] for tool in sent[1]["tools"]] == [True, False, True]
