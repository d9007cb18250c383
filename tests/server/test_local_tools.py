"""Tools on models in this process, asked by the official SDKs: each API, whole and streamed, drafted or not."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp
import anthropic
import openai
import pytest
from support.serving import ENDPOINTS, HANGS_S, Asking, ask, check_error, serving_in_thread
from support.tool_models import FORMATS_BY_NAME, TOOLS, write_model_without_tools, write_tool_model

from llm_spec.server import ModelConfig

MODELS: Final = ("plain", "drafted")
FUNCTIONS: Final[Any] = TOOLS
FLAT: Final[Any] = [{"type": "function", "strict": False, **tool["function"]} for tool in TOOLS]
NATIVE: Final[Any] = [
    {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in TOOLS
]
QUESTION: Final[Any] = [{"role": "user", "content": "Weather in Rome?"}]
MAX_TOKENS: Final = 200


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serves one model of Hermes' format, alone and with a draft, one that reasons, and one that knows no tools."""
    folder = tmp_path_factory.mktemp("models")
    hermes = f"onnx:{write_tool_model(folder / 'hermes', FORMATS_BY_NAME['hermes'])}"
    thinker = f"onnx:{write_tool_model(folder / 'thinker', FORMATS_BY_NAME['hermes'], reasoning='<think>')}"
    without = write_model_without_tools(folder / "without")
    models = {
        "plain": ModelConfig(target=hermes),
        "drafted": ModelConfig(target=hermes, draft="lookup+builtin:draft"),
        "thinker": ModelConfig(target=thinker, draft="lookup"),
        "without": ModelConfig(target=f"onnx:{without}", draft="lookup"),
    }
    with serving_in_thread(models) as url:
        yield url


@pytest.fixture
async def client(url: str) -> AsyncGenerator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def claude(url: str) -> AsyncGenerator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@asynccontextmanager
async def asking(url: str) -> AsyncGenerator[Asking]:
    """A client that sees every byte."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=HANGS_S)) as session:
        yield Asking(url, session)


def check_arguments(name: str, arguments: dict[str, Any]) -> None:
    """They keep to the tool's schema, although the model has never seen a tool."""
    assert name in ("get_weather", "now")
    if name == "get_weather":
        assert arguments.keys() == {"city", "days"}
        assert 1 <= arguments["days"] <= 7


class TestChatCompletions:
    async def test_a_tool_loop_is_the_same_with_and_without_a_draft(self, client: Any) -> None:
        """A call that is demanded, its result, and an answer that may not call."""
        transcripts = [await self.run_loop(client, model) for model in MODELS]
        assert transcripts[0] == transcripts[1]

    async def run_loop(self, client: Any, model: str) -> list[Any]:
        options: Any = {"model": model, "tools": FUNCTIONS, "max_tokens": MAX_TOKENS}
        first = await client.chat.completions.create(
            messages=QUESTION, tool_choice="required", parallel_tool_calls=False, **options
        )
        choice = first.choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        assert choice.message.tool_calls
        [call] = choice.message.tool_calls
        assert call.type == "function"
        check_arguments(call.function.name, json.loads(call.function.arguments))
        messages = [
            *QUESTION,
            choice.message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "sun"},
        ]
        second = await client.chat.completions.create(
            messages=messages, tool_choice="none", **options | {"max_tokens": 20}
        )
        assert second.choices[0].message.tool_calls is None
        assert second.choices[0].message.content
        return [choice.message.model_dump(), second.choices[0].message.model_dump()]

    @pytest.mark.parametrize(
        ("choice", "names"),
        [
            ("required", {"get_weather", "now"}),
            ({"type": "function", "function": {"name": "get_weather"}}, {"get_weather"}),
        ],
        ids=["required", "named"],
    )
    async def test_streamed_calls_are_those_of_the_whole_answer(
        self, client: Any, choice: Any, names: set[str]
    ) -> None:
        for model in MODELS:
            options: Any = {
                "model": model,
                "messages": QUESTION,
                "tools": FUNCTIONS,
                "tool_choice": choice,
                "parallel_tool_calls": False,
                "max_tokens": MAX_TOKENS,
            }
            whole = await client.chat.completions.create(**options)
            async with client.chat.completions.stream(**options, stream_options={"include_usage": True}) as stream:
                streamed = await stream.get_final_completion()
            assert whole.choices[0].message.tool_calls
            assert [c.id for c in streamed.choices[0].message.tool_calls or ()] == [
                c.id for c in whole.choices[0].message.tool_calls
            ]
            [call] = streamed.choices[0].message.tool_calls
            assert call.function.name in names
            assert call.function.arguments == whole.choices[0].message.tool_calls[0].function.arguments
            assert streamed.choices[0].finish_reason == whole.choices[0].finish_reason == "tool_calls"
            assert streamed.usage.completion_tokens == whole.usage.completion_tokens

    async def test_tools_that_nothing_demands_leave_text_free(self, client: Any) -> None:
        """`auto`, and `none`, which is the prompt without tools."""
        options: Any = {"model": "drafted", "messages": QUESTION, "max_tokens": 8}
        auto = await client.chat.completions.create(tools=FUNCTIONS, tool_choice="auto", **options)
        assert auto.choices[0].finish_reason == "length"
        without = await client.chat.completions.create(**options)
        none = await client.chat.completions.create(tools=FUNCTIONS, tool_choice="none", **options)
        assert none.choices[0].message.content == without.choices[0].message.content
        assert none.usage.prompt_tokens == without.usage.prompt_tokens

    async def test_reasoning_comes_in_its_own_field(self, client: Any) -> None:
        """And its tokens are counted."""
        options: Any = {"model": "thinker", "messages": QUESTION, "tools": FUNCTIONS, "max_tokens": 24}
        whole = await client.chat.completions.create(**options)
        message: Any = whole.choices[0].message
        assert message.reasoning_content
        assert not message.content
        assert whole.usage.completion_tokens_details.reasoning_tokens == whole.usage.completion_tokens == 24
        stream = await client.chat.completions.create(**options, stream=True)
        deltas: list[Any] = [chunk.choices[0].delta async for chunk in stream if chunk.choices]
        assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == message.reasoning_content


class TestResponses:
    async def test_a_tool_loop_is_the_same_with_and_without_a_draft(self, client: Any) -> None:
        transcripts = [await self.run_loop(client, model) for model in MODELS]
        assert transcripts[0] == transcripts[1]

    async def run_loop(self, client: Any, model: str) -> list[Any]:
        options: Any = {"model": model, "tools": FLAT, "max_output_tokens": MAX_TOKENS}
        items: list[Any] = [{"role": "user", "content": "Weather in Rome?"}]
        first = await client.responses.create(
            input=items, tool_choice="required", parallel_tool_calls=False, store=False, **options
        )
        [call] = first.output
        assert call.type == "function_call"
        assert first.status == "completed"
        check_arguments(call.name, json.loads(call.arguments))
        items += [
            call.model_dump(exclude_none=True),
            {"type": "function_call_output", "call_id": call.call_id, "output": "sun"},
        ]
        second = await client.responses.create(input=items, tool_choice="none", **options | {"max_output_tokens": 20})
        assert second.output_text
        return [call.call_id, call.name, call.arguments, second.output_text]

    async def test_a_stream_has_the_same_calls(self, client: Any) -> None:
        named: Any = {"type": "function", "name": "get_weather"}
        options: Any = {"input": "Weather in Rome?", "tools": FLAT, "tool_choice": named}
        for model in MODELS:
            whole = await client.responses.create(model=model, **options)
            async with client.responses.stream(model=model, **options) as stream:
                events = [event.type async for event in stream]
                streamed = await stream.get_final_response()
            assert "response.function_call_arguments.done" in events
            [call], [again] = whole.output, streamed.output
            assert call.type == again.type == "function_call"
            assert (call.name, call.arguments, call.call_id) == (again.name, again.arguments, again.call_id)
            assert call.name == "get_weather"

    async def test_some_of_the_tools_may_be_allowed(self, client: Any) -> None:
        """`allowed_tools`, by both of OpenAI's APIs."""
        now = {"type": "function", "name": "now"}
        choice: Any = {"type": "allowed_tools", "mode": "required", "tools": [now]}
        options: Any = {"model": "drafted", "tools": FLAT, "parallel_tool_calls": False}
        answer = await client.responses.create(input="Weather?", tool_choice=choice, max_output_tokens=80, **options)
        assert answer.output[0].name == "now" or answer.status == "incomplete"
        named = {"mode": "required", "tools": [{"type": "function", "function": {"name": "get_weather"}}]}
        choice = {"type": "allowed_tools", "allowed_tools": named}
        options = {"model": "drafted", "tools": FUNCTIONS, "messages": QUESTION, "max_tokens": MAX_TOKENS}
        whole = await client.chat.completions.create(tool_choice=choice, **options)
        assert {call.function.name for call in whole.choices[0].message.tool_calls} == {"get_weather"}

    async def test_reasoning_is_an_item_and_may_be_sent_back(self, client: Any) -> None:
        options: Any = {"model": "thinker", "max_output_tokens": 24, "reasoning": {"effort": "low"}}
        first = await client.responses.create(input="Weather in Rome?", tools=FLAT, **options)
        assert first.output[0].type == "reasoning"
        assert first.usage.output_tokens_details.reasoning_tokens == 24
        async with client.responses.stream(input="Weather in Rome?", tools=FLAT, **options) as stream:
            *_, last = [event async for event in stream]
        assert last.type == "response.incomplete"
        assert [item.type for item in last.response.output] == [item.type for item in first.output] == ["reasoning"]
        items: Any = [*QUESTION, *(item.model_dump(exclude_none=True) for item in first.output), *QUESTION]
        assert (await client.responses.create(input=items, tools=FLAT, **options)).output


class TestMessages:
    async def test_a_tool_loop_is_the_same_with_and_without_a_draft(self, claude: Any) -> None:
        transcripts = [await self.run_loop(claude, model) for model in MODELS]
        assert transcripts[0] == transcripts[1]

    async def run_loop(self, claude: Any, model: str) -> list[Any]:
        options: Any = {"model": model, "tools": NATIVE, "max_tokens": MAX_TOKENS}
        choice: Any = {"type": "any", "disable_parallel_tool_use": True}
        first = await claude.messages.create(messages=QUESTION, tool_choice=choice, **options)
        [call] = first.content
        assert call.type == "tool_use"
        assert first.stop_reason == "tool_use"
        check_arguments(call.name, call.input)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "sun"}
        messages: Any = [
            *QUESTION,
            {"role": "assistant", "content": [call.model_dump(exclude_none=True)]},
            {"role": "user", "content": [result]},
        ]
        second = await claude.messages.create(
            messages=messages, tool_choice={"type": "none"}, **options | {"max_tokens": 20}
        )
        assert [block.type for block in second.content] == ["text"]
        return [call.model_dump(), second.content[0].model_dump()]

    async def test_a_stream_has_the_same_calls(self, claude: Any) -> None:
        choice: Any = {"type": "tool", "name": "get_weather"}
        for model in MODELS:
            options: Any = {"model": model, "tools": NATIVE, "tool_choice": choice, "max_tokens": MAX_TOKENS}
            whole = await claude.messages.create(messages=QUESTION, **options)
            async with claude.messages.stream(messages=QUESTION, **options) as stream:
                streamed = await stream.get_final_message()
            assert [block.model_dump(include={"type", "id", "name", "input"}) for block in streamed.content] == [
                block.model_dump(include={"type", "id", "name", "input"}) for block in whole.content
            ]
            assert streamed.stop_reason == whole.stop_reason == "tool_use"

    async def test_thinking_is_a_block(self, claude: Any) -> None:
        """With what agents of this API send beside it: marks for caches, labels and a budget."""
        body: Any = {
            "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            "tools": [NATIVE[0] | {"cache_control": {"type": "ephemeral"}}, NATIVE[1]],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "metadata": {"user_id": "u"},
            "max_tokens": 24,
        }
        answer = await claude.messages.create(model="thinker", messages=QUESTION, **body)
        assert answer.content[0].type == "thinking"
        assert answer.content[0].thinking
        async with claude.messages.stream(model="thinker", messages=QUESTION, **body) as stream:
            streamed = await stream.get_final_message()
        assert streamed.content == answer.content


BAD: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "no name": ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    "an empty name": ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
    "a number for a name": ({"tools": [{"type": "function", "function": {"name": 3}}]}, "tools[0].function.name"),
    "no function": ({"tools": [{"type": "function"}]}, "tools[0]"),
    "a hosted tool": ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    "a custom tool": ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0]"),
    "a schema that is a list": (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
        "tools[0].function.parameters",
    ),
    "a schema that cannot be compiled": (
        {
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "f", "parameters": {"properties": {"a": {"type": "odd"}}}},
                }
            ],
            "tool_choice": "required",
        },
        "tools cannot be used",
    ),
    "a schema that refers to itself without end": (
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}],
            "tool_choice": "required",
        },
        "tools cannot be used",
    ),
    "a schema with an odd pattern": (
        {
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "f",
                        "strict": True,
                        "parameters": {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}},
                    },
                }
            ]
        },
        "tools cannot be used",
    ),
    "an unknown choice": ({"tools": FUNCTIONS, "tool_choice": "sometimes"}, "tool_choice"),
    "an unknown tool": (
        {"tools": FUNCTIONS, "tool_choice": {"type": "function", "function": {"name": "rm"}}},
        "tool_choice names 'rm'",
    ),
    "allowed tools without a mode": (
        {"tools": FUNCTIONS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": []}}},
        "tool_choice.allowed_tools must have a mode",
    ),
    "an allowed tool that is unknown": (
        {
            "tools": FUNCTIONS,
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "rm"}}]},
            },
        },
        "tool_choice names 'rm'",
    ),
    "a choice of another kind": (
        {"tools": FUNCTIONS, "tool_choice": {"type": "custom", "custom": {"name": "x"}}},
        "tool_choice",
    ),
    "a result without a call": (
        {"messages": [{"role": "tool", "tool_call_id": "call_9", "content": "1"}], "tools": FUNCTIONS},
        "tool_call_id is 'call_9'",
    ),
    "a result without an id": ({"messages": [{"role": "tool", "content": "1"}], "tools": FUNCTIONS}, "tool_call_id"),
    "a call without a name": (
        {"messages": [*QUESTION, {"role": "assistant", "tool_calls": [{"id": "a", "function": {}}]}]},
        "messages[1]",
    ),
    "reasoning of another kind": ({"reasoning": "much"}, "reasoning"),
    "an effort of another kind": ({"reasoning": {"effort": 3}}, "reasoning.effort"),
    "variables of another kind": ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    "a form in an engine's words": ({"guided_json": {"type": "object"}}, "guided_json is set"),
    "other modalities": ({"modalities": ["text", "audio"]}, "modalities is set"),
    "several answers": ({"n": 2}, "n is set"),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", BAD)
async def test_what_cannot_be_served_is_one_clear_error(url: str, name: str, stream: bool) -> None:
    """A 400 that names the field."""
    fields, message = BAD[name]
    async with asking(url) as server:
        reply = await server.chat(**{"model": "drafted", "max_tokens": 20, "stream": stream, **fields})
    assert reply.status == 400, reply.data
    check_error("/v1/chat/completions", reply)
    assert message in reply.error["message"]
    assert "\n" not in reply.error["message"]


@pytest.mark.parametrize("path", [path for path in ENDPOINTS if path != "/v1/completions"])
async def test_a_template_without_a_place_for_tools_is_an_error(url: str, path: str) -> None:
    """By each API; without tools, or with `none` of them, the same model answers."""
    tools = {"/v1/responses": FLAT, "/v1/messages": NATIVE}.get(path, FUNCTIONS)
    none: Any = {"type": "none"} if path == "/v1/messages" else "none"
    async with asking(url) as server:
        reply = await server.post(path, ask(path, model="without", tools=tools))
        assert reply.status == 400, reply.data
        check_error(path, reply)
        assert "has no place for them" in reply.error["message"]
        assert "/without" not in reply.error["message"]
        limit = {"max_output_tokens": 3} if path == "/v1/responses" else {"max_tokens": 3}
        answered = await server.post(path, ask(path, model="without", tools=tools, tool_choice=none, **limit))
        assert answered.status == 200, answered.data


async def test_what_is_left_out_is_named(url: str) -> None:
    """What a model in this process does not know changes nothing, and its client hears of it."""
    fields: Any = {"user": "u", "mirostat": 1, "vendor": 2, "reasoning_effort": "low", "metadata": {"a": "b"}}
    async with asking(url) as server:
        bare = await server.chat(model="drafted", max_tokens=5)
        reply = await server.chat(model="drafted", max_tokens=5, **fields)
    assert reply.status == 200
    assert reply.headers["x-llm-spec-left-out"] == "mirostat, vendor"
    assert reply.headers["x-llm-spec-strategy"] == "tokens"
    assert reply.json["choices"] == bare.json["choices"]
    assert "x-llm-spec-left-out" not in bare.headers
