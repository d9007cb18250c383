"""One answer of a strategy, without a decoder: what was measured of the pair stays in the test's hands."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeAlias

from llm_spec import ChatRequest, SpeculativeConfig, StreamEvent
from llm_spec.contract.draft import DraftProvider
from llm_spec.contract.provider import LlmProvider
from llm_spec.measure.pair_stats import PairStats
from llm_spec.strategies.base import ReadyStrategy, Refusal, StrategyContext

__all__ = ["open_strategy", "run_strategy"]


Prepare: TypeAlias = Callable[[StrategyContext], ReadyStrategy | Refusal]


def open_strategy(
    prepare: Prepare,
    draft: DraftProvider,
    target: LlmProvider,
    request: ChatRequest,
    pair_stats: PairStats,
    **options: Any,
) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
    """One answer, as its events come."""
    config = SpeculativeConfig(**options)
    context = StrategyContext(draft=draft, target=target, request=request, limits=config, pair_stats=pair_stats)
    ready = prepare(context)
    assert isinstance(ready, ReadyStrategy)
    return ready.run()


async def run_strategy(*arguments: Any, **options: Any) -> list[StreamEvent]:
    """All events of the answer."""
    async with open_strategy(*arguments, **options) as events:
        return [event async for event in events]
