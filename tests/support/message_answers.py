"""Requests with tools to a `MessageServer`, and their answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from llm_spec_http import DIALECTS, HttpProvider

from llm_spec import ChatRequest, ReferenceDraft, SpeculativeConfig, SpeculativeDecoder, SpeculativeResult
from llm_spec.contract.draft import DraftProvider
from llm_spec.decoder.choice import _StrategyPerformance
from support.message_server import MessageServer, serving_messages
from support.probing import make_patient

__all__ = ["TOOLS", "answer", "answer_plain", "ask", "learn_worth", "message", "opened", "speculate"]

TOOLS = [
    {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},
]


def ask(question: str, **options: Any) -> ChatRequest:
    given: dict[str, Any] = {"tools": TOOLS, "temperature": 0.0, **options}
    return ChatRequest.create(question, **given)


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
            learner = SpeculativeDecoder(
                target=target, draft=ReferenceDraft("nothing"), config=SpeculativeConfig(strategy="race")
            )
            for question in taught_by:
                await learner.decode(ask(question))
            yield target
        finally:
            await target.aclose()


async def answer(target: HttpProvider, strategy: str, draft: DraftProvider, request: ChatRequest) -> SpeculativeResult:
    return await speculate(target, strategy, draft).decode(request)


async def answer_plain(target: HttpProvider, request: ChatRequest) -> SpeculativeResult:
    config = SpeculativeConfig(strategy="plain", stream_always=True)
    return await SpeculativeDecoder(target=target, draft=None, config=config).decode(request)


def learn_worth(decoder: SpeculativeDecoder, value_ratio: float) -> None:
    """As if answers by `race` had been so many times as fast as plain ones."""
    record = _StrategyPerformance(num_trials=2)
    record.value_ratio.update(value_ratio)
    decoder._planner._strategy_records["race"] = record


def speculate(target: HttpProvider, strategy: str, draft: DraftProvider) -> SpeculativeDecoder:
    decoder = SpeculativeDecoder(target=target, draft=draft, config=SpeculativeConfig(strategy=strategy))
    make_patient(decoder)
    return decoder
