"""Agents of other frameworks at a real vLLM, ten tool loops each: on and off the same transcript, and how fast.

    python benchmarks/server_agents.py --url http://127.0.0.1:8000/v1 [--frameworks pydantic-ai langchain openai-agents]
        [--strategy race] [--draft lookup]

`server_tools.py` says how the server is started. Each question is a loop of its own: the agent's model calls a tool as
it likes (`tool_choice` is auto), the tool answers, and the model ends with words, or calls again. It is asked with a
draft and without, in turns. Transcripts are compared byte for byte, but for ids and times. Seconds are of whole loops.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from llm_spec import LlmProvider, SpeculativeConfig, open_provider

SYSTEM: Final = "You answer by calling tools."
EXAMPLE: Final = (
    "What is the weather in Berlin?",
    "get_weather",
    {"city": "Berlin"},
    "sunny, 20 degrees",
    "It is sunny.",
)
QUESTIONS: Final = (
    "What is the weather in Paris?",
    "What is the weather in Lima?",
    "What is the weather in São Paulo?",
    "What is the weather in Oslo?",
    "What is the weather in Cairo and in Rome?",
    "Read the file notes.txt.",
    "Read the file src/app/main.py.",
    "What is the weather in Kraków?",
    "What is the weather in 東京?",
    "What is the weather in New York City?",
)
_RANDOM: Final = re.compile(
    r'"(id|tool_call_id|call_id|timestamp|run_id|conversation_id|provider_response_id|message_id|response_id)": "[^"]*"'
)
Ask = Callable[[str], Awaitable[tuple[Any, list[dict[str, Any]]]]]


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"In {city} it is sunny, with {len(city) + 12} degrees and a light wind from the west."


def read_file(path: str) -> str:
    """The text of a file."""
    return f"{path}: first line, second line, and a third one."


def open_pydantic_ai(target: LlmProvider, draft: str | None, config: SpeculativeConfig) -> Ask:
    from pydantic_ai import Agent, ModelSettings
    from pydantic_ai.messages import (
        ModelMessagesTypeAdapter,
        ModelRequest,
        ModelResponse,
        SystemPromptPart,
        TextPart,
        ToolCallPart,
        ToolReturnPart,
        UserPromptPart,
    )

    from llm_spec.integrations.pydantic_ai import SpeculativeModel

    question, name, given, result, words = EXAMPLE
    history: list[Any] = [
        ModelRequest(parts=[SystemPromptPart(SYSTEM), UserPromptPart(question)]),
        ModelResponse(parts=[ToolCallPart(name, given, "call_0")]),
        ModelRequest(parts=[ToolReturnPart(name, result, "call_0")]),
        ModelResponse(parts=[TextPart(words)]),
    ]
    model = SpeculativeModel(target, draft=draft, config=config)
    settings = ModelSettings(max_tokens=64, temperature=0.0)
    agent = Agent(model, tools=[get_weather, read_file], model_settings=settings, retries=3)

    async def ask(text: str) -> tuple[Any, list[dict[str, Any]]]:
        answered = await agent.run(text, message_history=history)
        new = answered.new_messages()
        dumped = ModelMessagesTypeAdapter.dump_python(new, mode="json")
        for name in ("provider_details", "usage", "model_name", "model_id", "failed_attempts"):
            for message in dumped:
                message.pop(name, None)
        return dumped, [m.provider_details or {} for m in new if isinstance(m, ModelResponse)]

    return ask


def open_langchain(target: LlmProvider, draft: str | None, config: SpeculativeConfig) -> Ask:
    from langchain.agents import create_agent
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage, message_to_dict
    from langchain_core.tools import StructuredTool

    from llm_spec.integrations.langchain import SpeculativeChatModel

    question, name, given, result, words = EXAMPLE
    call: Any = {"name": name, "args": given, "id": "call_0"}
    history: list[Any] = [
        SystemMessage(SYSTEM),
        HumanMessage(question),
        AIMessage("", tool_calls=[call]),
        ToolMessage(result, tool_call_id="call_0"),
        AIMessage(words),
    ]
    model = SpeculativeChatModel(target=target, draft=draft, config=config, max_tokens=64, temperature=0.0)
    agent: Any = create_agent(model, tools=[StructuredTool.from_function(tool) for tool in (get_weather, read_file)])

    async def ask(text: str) -> tuple[Any, list[dict[str, Any]]]:
        answered = await agent.ainvoke({"messages": [*history, HumanMessage(text)]}, {"recursion_limit": 40})
        new = answered["messages"][len(history) + 1 :]
        dumped = [message_to_dict(message) for message in new]
        for message in dumped:
            message["data"].pop("response_metadata", None)
            message["data"].pop("usage_metadata", None)
        return dumped, [m.response_metadata["llm_spec"] for m in new if isinstance(m, AIMessage)]

    return ask


def open_openai_agents(target: LlmProvider, draft: str | None, config: SpeculativeConfig) -> Ask:
    from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled

    from llm_spec.integrations.openai_agents import SpeculativeModel

    set_tracing_disabled(disabled=True)
    question, name, given, result, words = EXAMPLE
    history: list[Any] = [
        {"role": "user", "content": question},
        {"type": "function_call", "name": name, "arguments": json.dumps(given), "call_id": "call_0"},
        {"type": "function_call_output", "call_id": "call_0", "output": result},
        {"role": "assistant", "content": words},
    ]
    tools: Any = [function_tool(tool, strict_mode=False) for tool in (get_weather, read_file)]
    model = SpeculativeModel(target, draft=draft, config=config)
    settings = ModelSettings(max_tokens=64, temperature=0.0)
    agent = Agent(name="Assistant", instructions=SYSTEM, model=model, tools=tools, model_settings=settings)

    async def ask(text: str) -> tuple[Any, list[dict[str, Any]]]:
        answered = await Runner.run(agent, [*history, {"role": "user", "content": text}], max_turns=12)
        items = [item for response in answered.raw_responses for item in response.output]
        figures = [
            (getattr(r.output[0], "provider_data", None) or {}).get("llm_spec", {}) for r in answered.raw_responses
        ]
        dumped = [item.model_dump(mode="json", exclude={"provider_data"}) for item in items]
        return [*dumped, answered.final_output], figures

    return ask


FRAMEWORKS: Final = {
    "pydantic-ai": open_pydantic_ai,
    "langchain": open_langchain,
    "openai-agents": open_openai_agents,
}


async def run_loop(ask: Ask, question: str) -> tuple[str, list[dict[str, Any]], float]:
    """A loop's transcript, or how the framework ended it; the figures of its requests; its seconds."""
    started_s = time.perf_counter()
    try:
        messages, figures = await ask(question)
    except Exception as error:  # noqa: BLE001 - a framework gives a model up that calls what is not there
        messages, figures = f"{type(error).__name__}: {error}", []
    text = json.dumps(messages, ensure_ascii=False, default=str)
    return _RANDOM.sub("", text), figures, time.perf_counter() - started_s


async def compare(name: str, arguments: argparse.Namespace) -> bool:
    target = open_provider(f"vllm:{arguments.model}@{arguments.url}")
    plain = FRAMEWORKS[name](target, None, SpeculativeConfig(strategy="plain", stream_always=True))
    drafted = FRAMEWORKS[name](target, arguments.draft, SpeculativeConfig(strategy=arguments.strategy))
    for question in QUESTIONS[:2]:  # on these it is found out what the server can do
        await run_loop(drafted, question)
    ratios: list[float] = []
    figures: list[dict[str, Any]] = []
    num_same = num_ended = 0
    for question in QUESTIONS:
        off, _, off_s = await run_loop(plain, question)
        on, more, on_s = await run_loop(drafted, question)
        num_same += off == on
        num_ended += bool(more)
        ratios.append(off_s / on_s)
        figures += more
        if off != on:
            print(f"  DIFFERS: {question}\n    {off}\n    {on}")
    num_tokens = sum(f.get("accepted_tokens", 0) for f in figures)
    strategies = [f.get("strategy") for f in figures]
    speculated = sum(f.get("draft_tokens", 0) > 0 for f in figures)
    print(
        f"{name}: same transcript in {num_same} of {len(QUESTIONS)} loops ({num_ended} to their end); "
        f"{strategies.count(arguments.strategy)} of {len(figures)} requests by {arguments.strategy}, {speculated} with "
        f"drafted tokens ({num_tokens} accepted); median {statistics.median(ratios):.2f}x, worst {min(ratios):.2f}x"
    )
    await target.aclose()
    return num_same == len(QUESTIONS)


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", required=True, help="ends in /v1")
    parser.add_argument("--model", default="m")
    parser.add_argument("--frameworks", nargs="+", default=list(FRAMEWORKS), choices=FRAMEWORKS)
    parser.add_argument("--strategy", default="race")
    parser.add_argument("--draft", default="lookup")
    arguments = parser.parse_args()
    if not all([await compare(name, arguments) for name in arguments.frameworks]):
        raise SystemExit("the transcripts differ")


if __name__ == "__main__":
    asyncio.run(main())
