"""A server's token endpoint and scorer, before it is known whether there are any."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

from llm_spec.chat import ChatRequest, Sampling, StreamEvent
from llm_spec.contract.chat import LlmProvider
from llm_spec.contract.endpoint import (
    Discoverable,
    Feature,
    SampledToken,
    TokenEndpoint,
    TokenIdStreaming,
    TokenScorer,
    TopTokens,
)
from llm_spec.counting import count_answer_tokens
from llm_spec.errors import UnsupportedError
from llm_spec.strategies.base import StrategyContext
from llm_spec.strategies.stream_reader import MIN_BASELINE_TOKENS

__all__ = ["UntriedEndpoint", "UntriedScorer", "find_token_endpoint", "find_token_scorer"]


class UntriedEndpoint:
    """A `TokenEndpoint` of a target that is being discovered.

    The chat's own stream begins at once, with token ids where the server tells them. Every other call waits until the
    endpoint has been tried, which begins once the stream has shown how fast it is by itself. Raises UnsupportedError
    where the target turns out to have none.
    """

    def __init__(self, target: LlmProvider) -> None:
        self._target = target
        self._may_try = asyncio.Event()

    @property
    def context_length(self) -> int | None:
        endpoint = self._target.capabilities.token_endpoint
        return None if endpoint is None else endpoint.context_length

    @property
    def is_being_tried(self) -> bool:
        """Whether the server may have calls of ours beside the stream, which find out what it can do."""
        return self._may_try.is_set() and self._target.capabilities.token_endpoint is None

    async def encode(self, text: str) -> list[int]:
        return await (await self._find()).encode(text)

    async def decode(self, token_ids: Sequence[int]) -> str:
        return await (await self._find()).decode(token_ids)

    async def encode_chat(self, request: ChatRequest) -> list[int]:
        return await (await self._find()).encode_chat(request)

    async def sample_next(self, prefixes: Sequence[Sequence[int]], sampling: Sampling) -> list[SampledToken]:
        return await (await self._find()).sample_next(prefixes, sampling)

    @asynccontextmanager
    async def stream_chat(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        target = self._target
        opened = (target.stream_with_token_ids if isinstance(target, TokenIdStreaming) else target.stream)(request)
        try:
            async with opened as events, aclosing(self._watch(events)) as watched_events:
                yield watched_events
        finally:
            self._may_try.set()

    async def _watch(self, events: AsyncIterator[StreamEvent]) -> AsyncGenerator[StreamEvent]:
        num_tokens = None  # after the first piece
        async for event in events:
            yield event
            num_tokens = 0 if num_tokens is None else num_tokens + count_answer_tokens(event)
            if num_tokens >= MIN_BASELINE_TOKENS:
                self._may_try.set()

    @asynccontextmanager
    async def stream_after(
        self, token_ids: Sequence[int], request: ChatRequest
    ) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        async with (await self._find()).stream_after(token_ids, request) as events:
            yield events

    async def _find(self) -> TokenEndpoint:
        await self._may_try.wait()
        await _discover(self._target, "token_endpoint")
        endpoint = self._target.capabilities.token_endpoint
        if endpoint is None:
            raise UnsupportedError(f"target {self._target.name} does not take token ids")
        return endpoint


class UntriedScorer:
    """A `TokenScorer` of a target that is being discovered; raises UnsupportedError where it turns out to have none.

    `max_top` is what every scorer reports.
    """

    def __init__(self, target: LlmProvider) -> None:
        self.max_top = 2
        self._target = target

    async def score(self, token_ids: Sequence[int], *, num_rows: int, top: int) -> list[TopTokens]:
        await _discover(self._target, "token_scorer")
        scorer = self._target.capabilities.token_scorer
        if scorer is None:
            raise UnsupportedError(f"target {self._target.name} does not score given tokens")
        return await scorer.score(token_ids, num_rows=num_rows, top=top)


async def _discover(target: LlmProvider, feature: Feature) -> None:
    can = target.capabilities
    has_feature = (can.token_endpoint if feature == "token_endpoint" else can.token_scorer) is not None
    if not has_feature and isinstance(target, Discoverable):
        await target.discover(feature)


def find_token_endpoint(context: StrategyContext) -> TokenEndpoint | None:
    """The target's token endpoint, be it known or still untried; None: it has none."""
    endpoint = context.target.capabilities.token_endpoint
    if endpoint is None and "token_endpoint" in context.untried:
        return UntriedEndpoint(context.target)
    return endpoint


def find_token_scorer(context: StrategyContext) -> TokenScorer | None:
    """The target's scorer, be it known or, of a greedy request, still untried; None: it has none."""
    scorer = context.target.capabilities.token_scorer
    if scorer is None and "token_scorer" in context.untried and context.request.sampling.temperature == 0:
        return UntriedScorer(context.target)
    return scorer
