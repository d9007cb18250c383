"""A server's token endpoint and scorer, before it is known whether there are any."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

from llm_spec.baseline import MIN_BASELINE_TOKENS
from llm_spec.chat import ChatRequest, Sampling, StreamEvent
from llm_spec.contract.chat import LlmProvider
from llm_spec.contract.endpoint import (
    Discoverable,
    EarlyEncoding,
    EarlyStreaming,
    Feature,
    SampledToken,
    TokenEndpoint,
    TokenScorer,
    TopTokens,
)
from llm_spec.counting import count_answer_tokens_in_event
from llm_spec.discovery import stream_with_token_ids_if_possible
from llm_spec.errors import LlmSpecError, UnsupportedError
from llm_spec.strategies.base import StrategyContext

__all__ = ["UndiscoveredEndpoint", "UndiscoveredScorer", "find_scoring_endpoint", "find_token_endpoint"]


class UndiscoveredEndpoint:
    """A `TokenEndpoint` of a target that is being discovered.

    The chat's own stream begins at once, with token ids where the server tells them. Once it has shown how fast it is
    by itself, the endpoint is tried. Text is encoded meanwhile, so that the draft can be judged: a tokenizer does not
    slow a stream. Streams begin once the trial has shown that the server has room for them, and what they write comes
    after the trial. Every other call waits until the endpoint has been tried. Raises UnsupportedError where the target
    turns out to have none. `feature`: what is to be tried; a scorer is tried with its endpoint.
    """

    def __init__(self, target: LlmProvider, feature: Feature = "token_endpoint") -> None:
        self._target = target
        self._feature: Feature = feature
        self._may_try = asyncio.Event()
        self._has_been_tried = False
        self._can_encode_early = True  # as far as is known
        self._early_endpoint: TokenEndpoint | None = None  # what is being tried, once streams may begin

    @property
    def context_length(self) -> int | None:
        endpoint = self._target.capabilities.token_endpoint
        return None if endpoint is None else endpoint.context_length

    @property
    def is_being_tried(self) -> bool:
        """Whether the server may have calls of ours beside the stream, which find out what it can do."""
        return self._may_try.is_set() and not (self._has_been_tried or self._is_feature_found)

    async def encode(self, text: str) -> list[int]:
        await self._may_try.wait()
        target = self._target
        if self._can_encode_early and not self._is_feature_found and isinstance(target, EarlyEncoding):
            try:
                return await target.encode_early(text)
            except LlmSpecError:
                self._can_encode_early = False
        return await (await self._wait_for_endpoint()).encode(text)

    async def decode(self, token_ids: Sequence[int]) -> str:
        return await (await self._wait_for_endpoint()).decode(token_ids)

    async def encode_chat(self, request: ChatRequest) -> list[int]:
        return await (await self._wait_for_endpoint()).encode_chat(request)

    async def encode_chat_early(self, request: ChatRequest) -> list[int]:
        """The same, as soon as streams may begin."""
        return await (await self._wait_for_early_endpoint()).encode_chat(request)

    async def sample_next(self, prefixes: Sequence[Sequence[int]], sampling: Sampling) -> list[SampledToken]:
        return await (await self._wait_for_endpoint()).sample_next(prefixes, sampling)

    @asynccontextmanager
    async def stream_chat(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        try:
            async with (
                stream_with_token_ids_if_possible(self._target, request) as events,
                aclosing(self._allow_trial_once_stream_runs(events)) as watched_events,
            ):
                yield watched_events
        finally:
            self._may_try.set()

    async def _allow_trial_once_stream_runs(self, events: AsyncIterator[StreamEvent]) -> AsyncGenerator[StreamEvent]:
        num_tokens = None  # after the first piece
        async for event in events:
            yield event
            num_tokens = 0 if num_tokens is None else num_tokens + count_answer_tokens_in_event(event)
            if num_tokens >= MIN_BASELINE_TOKENS:
                self._may_try.set()

    @asynccontextmanager
    async def stream_after(
        self, token_ids: Sequence[int], request: ChatRequest
    ) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        async with (await self._wait_for_early_endpoint()).stream_after(token_ids, request) as events:
            await self.wait_until_found()
            yield events

    async def wait_until_found(self) -> None:
        """Wait until the endpoint has been tried; raises UnsupportedError where there is none."""
        await self._wait_for_endpoint()

    @property
    def _is_feature_found(self) -> bool:
        can = self._target.capabilities
        return (can.token_endpoint if self._feature == "token_endpoint" else can.token_scorer) is not None

    async def _wait_for_early_endpoint(self) -> TokenEndpoint:
        """The endpoint, tried or not, as soon as streams may begin."""
        await self._may_try.wait()
        target = self._target
        if not (self.is_being_tried and isinstance(target, EarlyStreaming)):
            return await self._wait_for_endpoint()
        if self._early_endpoint is not None:
            return self._early_endpoint
        trial, early = (
            asyncio.create_task(self._wait_for_endpoint()),
            asyncio.create_task(target.wait_for_early_endpoint()),
        )
        waits: list[asyncio.Task[Any]] = [trial, early]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            self._early_endpoint = None if trial.done() else early.result()
            return await trial if self._early_endpoint is None else self._early_endpoint
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _wait_for_endpoint(self) -> TokenEndpoint:
        await self._may_try.wait()
        if not self._is_feature_found and isinstance(self._target, Discoverable):
            try:
                await self._target.discover(self._feature)
            except Exception:
                self._has_been_tried = True
                raise
        self._has_been_tried = True
        endpoint = self._target.capabilities.token_endpoint
        if endpoint is None:
            raise UnsupportedError(f"target {self._target.name} does not take token ids")
        return endpoint


class UndiscoveredScorer:
    """A `TokenScorer` of a target whose `UndiscoveredEndpoint` is being discovered with it, and is waited for first.

    `max_top` is what every scorer reports. Raises UnsupportedError where the target turns out to have none.
    """

    def __init__(self, target: LlmProvider) -> None:
        self.max_top = 2
        self._target = target

    async def score(self, token_ids: Sequence[int], *, num_rows: int, top: int) -> list[TopTokens]:
        scorer = self._target.capabilities.token_scorer
        if scorer is None:
            raise UnsupportedError(f"target {self._target.name} does not score given tokens")
        return await scorer.score(token_ids, num_rows=num_rows, top=top)


def find_token_endpoint(context: StrategyContext) -> TokenEndpoint | None:
    """The target's token endpoint, be it known or still untried; None: it has none."""
    endpoint = context.target.capabilities.token_endpoint
    if endpoint is None and "token_endpoint" in context.untried:
        return UndiscoveredEndpoint(context.target)
    return endpoint


def find_scoring_endpoint(context: StrategyContext) -> tuple[TokenEndpoint, TokenScorer] | None:
    """The target's token endpoint and scorer, be they known or, of a greedy request, still untried; None: none."""
    can = context.target.capabilities
    if can.token_endpoint is not None and can.token_scorer is not None:
        return can.token_endpoint, can.token_scorer
    if "token_scorer" in context.untried and context.request.sampling.temperature == 0:
        return UndiscoveredEndpoint(context.target, "token_scorer"), UndiscoveredScorer(context.target)
    return None
