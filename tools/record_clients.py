"""Records what real clients send, for `speculating_share.py`: conversations, loops of agents, typed answers.

    tools/integrations/run.sh --install clients instructor litellm_client
    …/integrations/clients/bin/python tools/record_clients.py BODIES.jsonl openai anthropic pydantic-ai …
    …/integrations/instructor/bin/python tools/record_clients.py BODIES.jsonl instructor

Each client runs in the environment that has it, and its requests are added to the file. They go through a relay, which
writes them down, to a server of this library with a model that answers by rules. Every client does the same by what is
its default, streamed and whole. It talks: a system prompt, three turns. It runs an agent: three tools, of which two may
be called at once, and their results. It wants an answer of a type, by itself and of an agent with tools.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import aiohttp
from aiohttp import web

from llm_spec import ChatRequest, Finish, StreamEvent, ToolCallDelta
from llm_spec.server import ModelConfig, Server, ServerConfig
from llm_spec.testing import RuleBasedProvider

MODEL: Final = "gpt-4.1"  # a name that clients know: for others some leave out what they would send
SYSTEM: Final = "You help people to plan trips. Call a tool where one helps; answer briefly."
TALK: Final = ("Good morning", "Which season is best for a journey to Norway?", "And with children?")
TASKS: Final = (
    "What is the weather in 'Oslo'?",
    "What is the weather in 'Lima' and in 'Cairo'?",
    "Search my notes for 'visa'.",
    "Book a trip to 'Rome' for 2 people.",
    "Thank you, that is all.",
)
TYPED: Final = ("A trip to 'Oslo' for 3 people.", "A trip to 'Rome' for 2 people.")


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"In {city} it is sunny."


def search_notes(query: str, limit: int = 5) -> str:
    """Search the user's notes."""
    return f"Nothing about {query} in {limit} notes."


def book_trip(city: str, people: int, hotel: bool = False) -> str:
    """Book a trip."""
    return f"Booked: {city}, {people} people, {'with' if hotel else 'without'} a hotel."


TOOLS: Final = {function.__name__: function for function in (get_weather, search_notes, book_trip)}
Client = Callable[["Recorder"], Awaitable[None]]


class _RuledAgent(RuleBasedProvider):
    """Answers by rules; calls a tool again only where it must, and two at once where two things are quoted."""

    @asynccontextmanager
    async def stream(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        last_question = max((at for at, message in enumerate(request.messages) if message.role == "user"), default=0)
        called = {call.name for message in request.messages[last_question:] for call in message.tool_calls}
        tools = sorted(request.tools, key=lambda tool: tool.get("function", {}).get("name") in called)
        async with (
            super().stream(replace(request, tools=tuple(tools))) as events,
            aclosing(self._call_twice(request, events)) as twice,
        ):
            yield twice

    async def _call_twice(
        self, request: ChatRequest, events: AsyncIterator[StreamEvent]
    ) -> AsyncGenerator[StreamEvent]:
        quoted = re.findall(r"'([^']+)'", request.messages[-1].text)
        name, arguments = "", ""
        async for event in events:
            if isinstance(event, ToolCallDelta):
                name, arguments = event.name or name, arguments + event.arguments
            if isinstance(event, Finish) and name and len(quoted) == 2:
                yield ToolCallDelta(1, "call_1", name, arguments.replace(quoted[0], quoted[1]))
            yield event


class Recorder:
    """The address for a client, and the file for what it sends; `kind` is what it does."""

    def __init__(self, url: str, client: str, file: Path) -> None:
        self.url = ""  # without /v1
        self.client = client
        self.kind = ""
        self.num_bodies = 0
        self._upstream = url
        self._file = file

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Write a body down, and pass it on."""
        data = await request.read()
        line = {"source": f"{self.client}, {self.kind}", "path": request.path, "body": json.loads(data)}
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self.num_bodies += 1
        headers = {name: value for name, value in request.headers.items() if name.lower() in ("content-type", "accept")}
        async with (
            aiohttp.ClientSession() as session,
            session.post(self._upstream + request.path, data=data, headers=headers) as upstream,
        ):
            response = web.StreamResponse(status=upstream.status)
            response.content_type = upstream.content_type
            await response.prepare(request)
            async for chunk in upstream.content.iter_any():
                await response.write(chunk)
            return response


@asynccontextmanager
async def recording(client: str, file: Path) -> AsyncGenerator[Recorder]:
    """A relay that is open, before a server that is."""
    config = ServerConfig(models={"m": ModelConfig(target="builtin:target")}, default_model="m", port=0)
    async with AsyncExitStack() as stack:
        stack.enter_context(patch("llm_spec.server.models.open_provider", lambda *_: _RuledAgent()))
        server = await stack.enter_async_context(Server(config))
        recorder = Recorder(server.url, client, file)
        app = web.Application(client_max_size=2**24)
        app.router.add_post("/{path:.*}", recorder.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        recorder.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield recorder


def describe_tools(**options: Any) -> list[dict[str, Any]]:
    """The tools as a program writes them that uses OpenAI's client by itself."""
    text, number = {"type": "string"}, {"type": "integer"}
    fields: dict[str, dict[str, Any]] = {
        "get_weather": {"city": text},
        "search_notes": {"query": text, "limit": number},
        "book_trip": {"city": text, "people": number, "hotel": {"type": "boolean"}},
    }
    return [
        {
            "name": name,
            "description": TOOLS[name].__doc__,
            "parameters": {"type": "object", "properties": given, "required": [*given][:1]},
            **options,
        }
        for name, given in fields.items()
    ]


def call_tool(name: str, arguments: str) -> str:
    """The result of a call."""
    return TOOLS[name](**json.loads(arguments))


# ------------------------------------------------------------------------------------------ the clients


async def run_openai(recorder: Recorder) -> None:
    """Chat completions and responses, by hand, as the documentation has it."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=f"{recorder.url}/v1", api_key="none") as client:
        await _run_openai_chat(client, recorder)
        await _run_openai_responses(client, recorder)


async def _run_openai_chat(client: Any, recorder: Recorder) -> None:
    from openai import pydantic_function_tool

    plain = [{"type": "function", "function": tool} for tool in describe_tools()]
    strict = [pydantic_function_tool(made, name=made.__name__) for made in _make_argument_types()]
    for kind, questions, ask, options in (
        ("conversation", TALK, _complete_openai_chat, {}),
        ("conversation", TALK, _stream_openai_chat, {}),
        ("agent", TASKS, _complete_openai_chat, {"tools": plain}),
        ("agent", TASKS, _stream_openai_chat, {"tools": plain}),
        ("agent with the SDK's own (strict) tools", TASKS, _complete_openai_chat, {"tools": strict}),
    ):
        recorder.kind = kind
        messages: list[Any] = [{"role": "system", "content": SYSTEM}]
        for text in questions:
            messages.append({"role": "user", "content": text})
            calls: list[Any] = [None]
            while calls:
                message = await ask(client, model=MODEL, messages=messages, **options)
                messages.append(message)
                calls = message.get("tool_calls") or []
                for call in calls:
                    result = call_tool(call["function"]["name"], call["function"]["arguments"])
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    recorder.kind = "typed answer"
    for text in TYPED:
        await client.chat.completions.parse(
            model=MODEL, messages=[{"role": "user", "content": text}], response_format=_make_trip_type()
        )


async def _complete_openai_chat(client: Any, **options: Any) -> dict[str, Any]:
    """The assistant's message, as it goes back into the conversation."""
    answer = await client.chat.completions.create(**options)
    message: dict[str, Any] = answer.choices[0].message.model_dump(exclude_none=True)
    return message


async def _stream_openai_chat(client: Any, **options: Any) -> dict[str, Any]:
    """The same from its deltas, put together as agents do it."""
    content, calls = "", dict[int, dict[str, Any]]()
    stream = await client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **options)
    async for chunk in stream:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for delta in choice.delta.tool_calls or ():
                function = {"name": delta.function.name, "arguments": ""}
                call = calls.setdefault(delta.index, {"id": delta.id, "type": "function", "function": function})
                call["function"]["arguments"] += delta.function.arguments or ""
    called = {"tool_calls": list(calls.values())} if calls else {}
    return {"role": "assistant", "content": content or None, **called}


async def _run_openai_responses(client: Any, recorder: Recorder) -> None:
    for is_streamed in (False, True):
        for kind, questions, options in (
            ("conversation", TALK, {}),
            (
                "agent, responses API",
                TASKS,
                {"tools": [{"type": "function", **t} for t in describe_tools(strict=False)]},
            ),
        ):
            recorder.kind = kind
            given: list[Any] = []
            for text in questions:
                given.append({"role": "user", "content": text})
                calls: list[Any] = [None]
                while calls:
                    stream: Any = {"stream": True} if is_streamed else {}
                    answer = await client.responses.create(
                        model=MODEL, instructions=SYSTEM, input=given, **options, **stream
                    )
                    if is_streamed:
                        events = [event async for event in answer]
                        answer = events[-1].response
                    given += [item.model_dump(exclude_none=True) for item in answer.output]
                    calls = [item for item in answer.output if item.type == "function_call"]
                    for call in calls:
                        output = call_tool(call.name, call.arguments)
                        given.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
    recorder.kind = "typed answer"
    for text in TYPED:
        await client.responses.parse(model=MODEL, input=text, text_format=_make_trip_type())


async def run_anthropic(recorder: Recorder) -> None:
    """Messages, and its runner of tools."""
    from anthropic import AsyncAnthropic

    async with AsyncAnthropic(base_url=recorder.url, api_key="none") as client:
        for is_streamed in (False, True):
            recorder.kind = "conversation"
            messages: list[Any] = []
            for text in TALK:
                messages.append({"role": "user", "content": text})
                options: Any = {"model": MODEL, "max_tokens": 1024, "system": SYSTEM, "messages": messages}
                if is_streamed:
                    async with client.messages.stream(**options) as stream:
                        answer = await stream.get_final_message()
                else:
                    answer = await client.messages.create(**options)
                messages.append({"role": "assistant", "content": answer.content})
            await _run_anthropic_tools(client, recorder, is_streamed=is_streamed)
        recorder.kind = "typed answer"
        for text in TYPED:
            messages = [{"role": "user", "content": text}]
            await client.messages.parse(
                model=MODEL, max_tokens=1024, messages=messages, output_format=_make_trip_type()
            )


async def _run_anthropic_tools(client: Any, recorder: Recorder, *, is_streamed: bool) -> None:
    from anthropic import beta_async_tool

    async def weather(city: str) -> str:
        return get_weather(city)

    async def search(query: str, limit: int = 5) -> str:
        return search_notes(query, limit)

    async def book(city: str, people: int, hotel: bool = False) -> str:
        return book_trip(city, people, hotel)

    functions = {"get_weather": weather, "search_notes": search, "book_trip": book}
    tools = [beta_async_tool(made, name=name, description=TOOLS[name].__doc__) for name, made in functions.items()]
    recorder.kind = "agent, tool runner"
    for task in TASKS:
        messages = [{"role": "user", "content": task}]
        options: Any = {"model": MODEL, "max_tokens": 1024, "system": SYSTEM, "messages": messages}
        async for turn in client.beta.messages.tool_runner(**options, tools=tools, stream=is_streamed):
            if is_streamed:
                await turn.get_final_message()


async def run_langchain(recorder: Recorder) -> None:
    """ChatOpenAI with tools that are bound, as its agents have them."""
    from langchain_core.messages import HumanMessage, SystemMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=MODEL, base_url=f"{recorder.url}/v1", api_key="none")
    tools = {name: tool(function) for name, function in TOOLS.items()}
    for kind, questions, bound in (
        ("conversation", TALK, model),
        ("agent", TASKS, model.bind_tools(list(tools.values()))),
    ):
        for is_streamed in (False, True):
            recorder.kind = kind
            messages: list[Any] = [SystemMessage(SYSTEM)]
            for text in questions:
                messages.append(HumanMessage(text))
                calls: list[Any] = [None]
                while calls:
                    if is_streamed:
                        answer: Any = None
                        async for piece in bound.astream(messages):
                            answer = piece if answer is None else answer + piece
                    else:
                        answer = await bound.ainvoke(messages)
                    messages.append(answer)
                    calls = answer.tool_calls
                    messages += [await tools[call["name"]].ainvoke(call) for call in calls]
    recorder.kind = "typed answer"
    for text in TYPED:
        await model.with_structured_output(_make_trip_type()).ainvoke(text)
    recorder.kind = "typed answer by a named tool"
    for text in TYPED:
        await model.with_structured_output(_make_trip_type(), method="function_calling").ainvoke(text)


async def run_openai_agents(recorder: Recorder) -> None:
    """Its runner over responses, its default, and over chat completions."""
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    by_default = [function_tool(function) for function in TOOLS.values()]
    loose = [function_tool(function, strict_mode=False) for function in TOOLS.values()]
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind(model=MODEL, openai_client=AsyncOpenAI(base_url=f"{recorder.url}/v1", api_key="none"))
        for name, questions, tools, output_type in (
            ("conversation", TALK, [], None),
            ("agent with the SDK's own (strict) tools", TASKS, by_default, None),
            ("agent, strict_mode=False", TASKS, loose, None),
            ("typed answer", TYPED, [], _make_trip_type()),
            ("typed answer of an agent", TYPED, loose, _make_trip_type()),
        ):
            recorder.kind = name
            agent = Agent(name="Assistant", instructions=SYSTEM, model=model, tools=tools, output_type=output_type)
            for is_streamed in (False, True):
                given: Any = []
                for text in questions:
                    given = [*given, {"role": "user", "content": text}]
                    if is_streamed:
                        run = Runner.run_streamed(agent, given)
                        async for _ in run.stream_events():
                            pass
                    else:
                        run = await Runner.run(agent, given)
                    given = run.to_input_list()


async def run_pydantic_ai(recorder: Recorder) -> None:
    """An agent over chat completions, responses and messages; answers of a type by its own default."""
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{recorder.url}/v1", api_key="none")
    for model in (
        OpenAIChatModel(MODEL, provider=provider),
        OpenAIResponsesModel(MODEL, provider=provider),
        AnthropicModel(MODEL, provider=AnthropicProvider(base_url=recorder.url, api_key="none")),
    ):
        for name, questions, tools, output_type in (
            ("conversation", TALK, [], str),
            ("agent", TASKS, list(TOOLS.values()), str),
            ("typed answer", TYPED, [], _make_trip_type()),
            ("typed answer of an agent", TYPED, list(TOOLS.values()), _make_trip_type()),
        ):
            recorder.kind = name
            agent: Any = Agent(model, instructions=SYSTEM, tools=tools, output_type=output_type)
            for is_streamed in (False, True):
                history: Any = None
                for text in questions:
                    if is_streamed:
                        async with agent.run_stream(text, message_history=history) as run:
                            await run.get_output()
                    else:
                        run = await agent.run(text, message_history=history)
                    history = run.all_messages()


async def run_instructor(recorder: Recorder) -> None:
    """Answers of a type, by its default."""
    import instructor
    from openai import AsyncOpenAI

    client = instructor.from_openai(AsyncOpenAI(base_url=f"{recorder.url}/v1", api_key="none"))
    recorder.kind = "typed answer by a named tool"
    for text in TYPED:
        messages: Any = [{"role": "user", "content": text}]
        await client.chat.completions.create(model=MODEL, messages=messages, response_model=_make_trip_type())


async def run_litellm(recorder: Recorder) -> None:
    """Chat completions and messages, by a model's prefix."""
    import litellm

    tools = [{"type": "function", "function": tool} for tool in describe_tools()]
    for prefix, base in (("openai", f"{recorder.url}/v1"), ("anthropic", recorder.url)):
        where: Any = {"model": f"{prefix}/{MODEL}", "api_base": base, "api_key": "none", "max_tokens": 1024}
        for kind, questions, options in (("conversation", TALK, {}), ("agent", TASKS, {"tools": tools})):
            recorder.kind = kind
            for is_streamed in (False, True):
                messages: list[Any] = [{"role": "system", "content": SYSTEM}]
                for text in questions:
                    messages.append({"role": "user", "content": text})
                    calls: Any = [None]
                    while calls:
                        answer: Any = await litellm.acompletion(
                            messages=messages, stream=is_streamed, **options, **where
                        )
                        if is_streamed:
                            chunks = [chunk async for chunk in answer]
                            answer = litellm.stream_chunk_builder(chunks, messages=messages)
                        message = answer.choices[0].message
                        messages.append(message.model_dump(exclude_none=True))
                        calls = message.tool_calls
                        for call in calls or ():
                            result = call_tool(call.function.name, call.function.arguments)
                            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        recorder.kind = "typed answer"
        for text in TYPED:
            messages = [{"role": "user", "content": text}]
            await litellm.acompletion(messages=messages, response_format=_make_trip_type(), **where)


def _make_trip_type() -> Any:
    """The type of a typed answer; the environments have pydantic, this library does not need it."""
    from pydantic import BaseModel

    class Trip(BaseModel):
        """A trip that somebody wants."""

        city: str
        people: int

    return Trip


def _make_argument_types() -> list[Any]:
    """The tools' arguments as types, for OpenAI's helper."""
    from pydantic import create_model

    return [
        create_model("get_weather", city=(str, ...)),
        create_model("search_notes", query=(str, ...), limit=(int, ...)),
        create_model("book_trip", city=(str, ...), people=(int, ...), hotel=(bool, ...)),
    ]


CLIENTS: Final[dict[str, Client]] = {
    "openai": run_openai,
    "anthropic": run_anthropic,
    "langchain": run_langchain,
    "openai-agents": run_openai_agents,
    "pydantic-ai": run_pydantic_ai,
    "instructor": run_instructor,
    "litellm": run_litellm,
}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bodies", type=Path)
    parser.add_argument("clients", nargs="+", choices=CLIENTS)
    arguments = parser.parse_args()
    for name in arguments.clients:
        async with recording(name, arguments.bodies) as recorder:
            await CLIENTS[name](recorder)
            print(f"{name}: {recorder.num_bodies} bodies", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
