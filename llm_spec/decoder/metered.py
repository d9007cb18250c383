"""Wrappers that count the calls of a target and a draft, and cut an answer at its limit."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Final, Generic, TypeVar

from llm_spec.contract.draft import DraftPiece, DraftProvider
from llm_spec.contract.endpoint import (
    Feature,
    SampledToken,
    TokenEndpoint,
    TokenScorer,
    TopTokens,
)
from llm_spec.contract.errors import ClosedError
from llm_spec.contract.events import ChatResponse, StreamEvent
from llm_spec.contract.optional import (
    RequestOptionalDrafter,
    WrappedDraft,
    find_token_draft_refusal,
    open_draft_for_request,
    open_token_draft,
)
from llm_spec.contract.provider import Capabilities, LlmProvider
from llm_spec.contract.request import ChatRequest, Sampling
from llm_spec.contract.response import complete_from_stream
from llm_spec.contract.token_model import TokenDraft, TokenModel, TokenSampler
from llm_spec.decoder.chunk_timeouts import ChunkTimeouts
from llm_spec.decoder.config import Timeouts
from llm_spec.decoder.feature_discovery import FeatureDiscovery
from llm_spec.decoder.metering import MeteredCall, TokenMeter
from llm_spec.measure.tokens import MaxTokensCutter

__all__ = ["MeteredDraft", "MeteredTarget"]

T = TypeVar("T")

_NO_TIMEOUTS: Final = Timeouts()


class MeteredTarget:
    """A target whose calls are counted, and fail after silence; otherwise the same.

    An `LlmProvider` and `Discoverable`. Discovered features serve all requests, so discovery is not
    counted.
    """

    def __init__(
        self, target: LlmProvider, meter: TokenMeter, discovery: FeatureDiscovery, timeouts: Timeouts = _NO_TIMEOUTS
    ) -> None:
        self._target = target
        self._meter = meter
        self._discovery = discovery
        self._chunk_timeouts = ChunkTimeouts(target.name, timeouts, target.capabilities)
        # the target's, and the metered form of them
        self._capabilities: tuple[Capabilities, Capabilities] | None = None

    @property
    def name(self) -> str:
        return self._target.name

    @property
    def capabilities(self) -> Capabilities:
        can, known = self._target.capabilities, self._capabilities
        if known is None or known[0] != can:  # they are read for every token
            known = self._capabilities = can, self._meter_capabilities(can)
        return known[1]

    def _meter_capabilities(self, can: Capabilities) -> Capabilities:
        meter = self._meter
        if can.token_endpoint is None and can.token_scorer is None:
            return can
        endpoint = None if can.token_endpoint is None else self._meter_endpoint(can.token_endpoint)
        scorer = None if can.token_scorer is None else _MeteredScorer(can.token_scorer, meter, self._chunk_timeouts)
        return replace(can, token_endpoint=endpoint, token_scorer=scorer)

    def _meter_endpoint(self, endpoint: TokenEndpoint) -> _MeteredEndpoint:
        return _MeteredEndpoint(endpoint, self._meter, self._chunk_timeouts)

    def stream(self, request: ChatRequest) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        return self.count_external_call(self._target.stream(request), request)

    def count_external_call(
        self,
        opened: AbstractAsyncContextManager[AsyncIterator[StreamEvent]],
        request: ChatRequest,
        *,
        counts_drafts: bool = False,
    ) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        """Count a call of the target; see `ExternalCallMeter`."""
        begin = partial(self._meter.open_call, request, counts_drafts=counts_drafts)
        return self._chunk_timeouts.limit_waits_for_chunks(_meter_target_stream(opened, begin, request))

    async def complete(self, request: ChatRequest) -> ChatResponse:
        return await complete_from_stream(self, request)

    async def discover(self, feature: Feature) -> None:
        if not await self._chunk_timeouts.wait_for_first_chunk(self._discovery.wait_until_tried(feature)):
            raise ClosedError(f"{self.name} could not be tried, because its decoder was closed")

    async def aclose(self) -> None:
        await self._target.aclose()


class _MeteredEndpoint:
    def __init__(self, endpoint: TokenEndpoint, meter: TokenMeter, chunk_timeouts: ChunkTimeouts) -> None:
        self._endpoint = endpoint
        self._meter = meter
        self._chunk_timeouts = chunk_timeouts

    @property
    def context_length(self) -> int | None:
        return self._endpoint.context_length

    async def encode(self, text: str) -> list[int]:
        return await self._chunk_timeouts.wait_for_first_chunk(self._endpoint.encode(text))

    async def decode(self, token_ids: Sequence[int]) -> str:
        return await self._chunk_timeouts.wait_for_first_chunk(self._endpoint.decode(token_ids))

    async def encode_chat(self, request: ChatRequest) -> list[int]:
        token_ids = await self._chunk_timeouts.wait_for_first_chunk(self._endpoint.encode_chat(request))
        self._meter.record_prompt_tokens(len(token_ids))
        return token_ids

    async def sample_next(self, prefixes: Sequence[Sequence[int]], sampling: Sampling) -> list[SampledToken]:
        call = self._meter.open_call(num_input=sum(map(len, prefixes)), num_output=len(prefixes))
        return await self._chunk_timeouts.wait_for_first_chunk(
            _await_metered_call(call, self._endpoint.sample_next(prefixes, sampling))
        )

    def stream_chat(self, request: ChatRequest) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        counted = _meter_target_stream(
            self._endpoint.stream_chat(request), partial(self._meter.open_call, request), request
        )
        return self._chunk_timeouts.limit_waits_for_chunks(counted)

    def stream_after(
        self, token_ids: Sequence[int], request: ChatRequest
    ) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        opened = self._endpoint.stream_after(token_ids, request)
        return self._chunk_timeouts.limit_waits_for_chunks(
            _meter_target_stream(opened, partial(self._meter.open_call, num_input=len(token_ids)), request)
        )


class _MeteredScorer:
    def __init__(self, scorer: TokenScorer, meter: TokenMeter, chunk_timeouts: ChunkTimeouts) -> None:
        self._scorer = scorer
        self._meter = meter
        self._chunk_timeouts = chunk_timeouts

    @property
    def max_top(self) -> int:
        return self._scorer.max_top

    async def score(self, token_ids: Sequence[int], *, num_rows: int, top: int) -> list[TopTokens]:
        # a server always writes one token
        call = self._meter.open_call(num_input=len(token_ids), num_output=1)
        scored = _await_metered_call(call, self._scorer.score(token_ids, num_rows=num_rows, top=top))
        return await self._chunk_timeouts.wait_for_first_chunk(scored)


class MeteredDraft(WrappedDraft, RequestOptionalDrafter):
    """A draft whose calls are counted; otherwise the same.

    If it drafts as a `TokenDrafter`, its tokens are counted by the rounds that use them.
    """

    def __init__(self, draft: DraftProvider, meter: TokenMeter) -> None:
        super().__init__(draft)
        self._meter = meter

    def for_request(self) -> MeteredDraft:
        return MeteredDraft(open_draft_for_request(self._draft), self._meter)

    def draft(self, request: ChatRequest, max_tokens: int) -> AbstractAsyncContextManager[AsyncIterator[DraftPiece]]:
        begin = partial(self._meter.open_call, request, max_output=max_tokens, is_free=self.capabilities.is_free)
        return _MeteredStream(
            self._draft.draft(request, max_tokens),
            begin,
            MeteredCall.count_and_cut_draft_piece,
            MeteredCall.finish_cut_draft_call,
        )

    async def aclose(self) -> None:
        await self._draft.aclose()

    def token_draft_refusal(self, target: TokenModel) -> str | None:
        return find_token_draft_refusal(self._draft, target)

    def open_token_draft_for_request(
        self,
        request: ChatRequest | None,
        target: TokenModel,
        choose: TokenSampler,
        prompt_ids: Sequence[int],
    ) -> TokenDraft:
        return open_token_draft(self._draft, target, choose, prompt_ids, request)


# ------------------------------------------------------------------------------------------ streams


def _meter_target_stream(
    opened: AbstractAsyncContextManager[AsyncIterator[StreamEvent]],
    open_call: Callable[..., MeteredCall],
    request: ChatRequest,
) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
    """Count a target's stream for `request`; cut it at its tokens or the end of the budget."""

    def open_metered_call() -> MeteredCall:
        call = open_call(max_output=request.max_tokens)
        call.cap = None if request.max_tokens is None else MaxTokensCutter(request.max_tokens)
        return call

    return _MeteredStream(
        opened, open_metered_call, MeteredCall.count_and_cut_target_event, MeteredCall.finish_cut_target_call
    )


class _MeteredStream(AbstractAsyncContextManager[AsyncIterator[T]], Generic[T]):
    """Counts the items of a call from when its context is entered.

    `add` counts an item and returns the one to pass on. Once the call is cut, `end` makes the last
    item.
    """

    def __init__(
        self,
        opened: AbstractAsyncContextManager[AsyncIterator[T]],
        begin: Callable[[], MeteredCall],
        add: Callable[[MeteredCall, T], T],
        end: Callable[[MeteredCall], T],
    ) -> None:
        self._opened = opened
        self._begin = begin
        self._add = add
        self._end = end
        self._call: MeteredCall | None = None
        self._items: AsyncGenerator[T] | None = None

    async def __aenter__(self) -> AsyncIterator[T]:
        call = self._call = self._begin()
        try:
            items = await self._opened.__aenter__()
        except BaseException as error:
            if isinstance(error, Exception):
                call.record_call_failure(error)
            call.close_call()
            raise
        self._items = self._iterate_metered_items(items, call)
        return self._items

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        try:
            if self._items is not None:
                await self._items.aclose()
            return await self._opened.__aexit__(kind, error, traceback)
        finally:
            if self._call is not None:
                self._call.close_call()

    async def _iterate_metered_items(self, items: AsyncIterator[T], call: MeteredCall) -> AsyncGenerator[T]:
        """Yield the counted items of a call, up to where it is cut."""
        next_item, add = items.__anext__, self._add
        while call.cut_by is None:
            try:
                item = await next_item()
            except StopAsyncIteration:
                return
            except Exception as error:
                call.record_call_failure(error)
                raise
            yield add(call, item)
        if not call.is_over:
            yield self._end(call)


async def _await_metered_call(call: MeteredCall, awaitable: Awaitable[T]) -> T:
    """Await a call that is not a stream; count its failure, and close it."""
    try:
        return await awaitable
    except Exception as error:
        call.record_call_failure(error)
        raise
    finally:
        call.close_call()
