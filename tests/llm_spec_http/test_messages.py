"""Answers with tool calls and reasoning, speculated at a server: the message is the chat endpoint's own."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from llm_spec_http import DIALECTS, HttpProvider
from support.message_server import MessageServer, call, serving_messages
from support.probe_targets import Patient

from llm_spec import ChatRequest, ReferenceDraft, SpeculativeConfig, SpeculativeDecoder, SpeculativeResult
from llm_spec.contract.draft import DraftProvider

pytestmark = pytest.mark.virtual_clock

TOOLS = [
    {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},
]
ONE = call("read", '{"path": "src/app/main.py", "lines": [1, 20], "why": "it is the first file of all"}')
SUM = call("add", '{"a": 1, "b": 2}')
TWO = f"I read both of them, one after the other.\n{ONE}\n{SUM}"
UNICODE = call("read", '{"path": "größe/東京 😀.py", "text": "Schöne Grüße aus Köln"}')
BROKEN = '<tool_call>\n{"name": "read", "arguments": {"path": "a'
THOUGHT = f"<think>The user wants a file, so I read it.\n</think>\n{ONE}"
ANSWERS = {
    "one": ONE,
    "two": TWO,
    "unicode": UNICODE,
    "long": call("read", json.dumps({"lines": list(range(100))})),
    "text": "There is no file of that name, and there never was one; 3 < 4 and <tool is no mark.",
    "broken": BROKEN,
    "thought": THOUGHT,
}
STRATEGIES = ("race", "probe", "score")


def ask(question: str, **options: Any) -> ChatRequest:
    return ChatRequest.create(question, **{"tools": TOOLS, "temperature": 0.0, **options})


def message(result: SpeculativeResult) -> tuple[Any, ...]:
    calls = tuple((made.name, made.arguments) for made in result.tool_calls)
    return result.content, result.reasoning, calls, result.finish_reason


@asynccontextmanager
async def opened(server: MessageServer, *, taught_by: Sequence[str] = ("one",)) -> AsyncGenerator[HttpProvider]:
    """A provider of a served server whose parser was tried on answers to these questions."""
    async with serving_messages(server):
        target = HttpProvider("m", base_url=server.url, dialect=DIALECTS["vllm"])
        try:
            for feature in ("token_endpoint", "token_scorer"):
                await target.discover(feature)
            learner = SpeculativeDecoder(ReferenceDraft("nothing"), target, SpeculativeConfig(strategy="probe"))
            for question in taught_by:
                await learner.decode(ask(question))
            yield target
        finally:
            await target.aclose()


async def answer(target: HttpProvider, strategy: str, draft: DraftProvider, request: ChatRequest) -> SpeculativeResult:
    decoder = SpeculativeDecoder(draft, target, SpeculativeConfig(strategy=strategy))
    decoder._planner.pair_stats = Patient()
    return await decoder.decode(request)


async def answer_plain(target: HttpProvider, request: ChatRequest) -> SpeculativeResult:
    config = SpeculativeConfig(strategy="plain", stream_always=True)
    return await SpeculativeDecoder(None, target, config).decode(request)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("question", ANSWERS)
async def test_the_message_is_chats_own(strategy: str, question: str) -> None:
    """Whatever the draft is worth; the calls' arguments byte for byte."""
    async with opened(MessageServer(dict(ANSWERS), reasons=True), taught_by=("thought",)) as target:
        plain = await answer_plain(target, ask(question))
        for text in (ANSWERS[question], ANSWERS[question].replace("path", "file"), "nothing of the kind"):
            result = await answer(target, strategy, ReferenceDraft(text), ask(question))
            assert (message(result), result.fallbacks) == (message(plain), ())
            assert result.strategy == strategy
            if text == ANSWERS[question] and question == "long":
                assert result.stats.num_accepted_draft_tokens > 20
