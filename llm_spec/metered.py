"""A target and a draft whose calls are counted (`metering.py`), and cut where that says so; otherwise the same."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Final, Generic, TypeVar

from llm_spec.chat import ChatRequest, ChatResponse, Sampling, StreamEvent
from llm_spec.config import Timeouts
from llm_spec.counting import TokenCap
from llm_spec.discovery import Discovery
from llm_spec.errors import TransientError
from llm_spec.metering import Call, Meter
from llm_spec.provider import (
    Capabilities,
    DraftPiece,
    DraftProvider,
    Feature,
    LlmProvider,
    NextToken,
    ScoredToken,
    TokenEndpoint,
    TokenScorer,
    complete_from_stream,
    is_free,
    open_for_request,
)
from llm_spec.silence import Silence

__all__ = ["MeteredDraft", "MeteredTarget", "count_call"]

T = TypeVar("T")

_NO_TIMEOUTS: Final = Timeouts()


class MeteredTarget:
    """A target whose calls are counted, and fail after silence; otherwise the same: `LlmProvider`, `Discoverable`.

    What is found out of it serves all requests, and is not counted.
    """

    def __init__(
        self, target: LlmProvider, meter: Meter, discovery: Discovery, timeouts: Timeouts = _NO_TIMEOUTS
    ) -> None:
        self._target = target
        self._meter = meter
        self._discovery = discovery
        self._silence = Silence(target.name, timeouts)

    @property
    def name(self) -> str:
        return self._target.name

    @property
    def capabilities(self) -> Capabilities:
        can, meter = self._target.capabilities, self._meter
        if can.token_endpoint is None and can.token_scorer is None:
            return can
        endpoint = None if can.token_endpoint is None else _MeteredEndpoint(can.token_endpoint, meter, self._silence)
        scorer = None if can.token_scorer is None else _MeteredScorer(can.token_scorer, meter, self._silence)
        return replace(can, token_endpoint=endpoint, token_scorer=scorer)

    def stream(self, request: ChatRequest) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        return self.count(self._target.stream(request), request)

    def count(
        self,
        opened: AbstractAsyncContextManager[AsyncIterator[StreamEvent]],
        request: ChatRequest,
        *,
        counts_drafts: bool = False,
    ) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        """A call of the target, counted."""
        begin = partial(self._meter.open, request, counts_drafts=counts_drafts)
        return self._silence.stream(_counted(opened, begin, request))

    async def complete(self, request: ChatRequest) -> ChatResponse:
        return await complete_from_stream(self, request)

    async def discover(self, feature: Feature) -> None:
        if not await self._silence.first(self._discovery.wait_for(feature)):
            raise TransientError(f"{self.name} could not be tried: its decoder was closed")

    async def aclose(self) -> None:
        await self._target.aclose()


def count_call(
    target: LlmProvider,
    opened: AbstractAsyncContextManager[AsyncIterator[StreamEvent]],
    request: ChatRequest,
    *,
    counts_drafts: bool = False,
) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
    """Count a call of a target that was not made by its `stream`, where the target is metered.

    `counts_drafts`: the tokens drafted in its rounds are paid for, and nobody else counts them while it runs.
    """
    return target.count(opened, request, counts_drafts=counts_drafts) if isinstance(target, MeteredTarget) else opened


class _MeteredEndpoint:
    def __init__(self, endpoint: TokenEndpoint, meter: Meter, silence: Silence) -> None:
        self._endpoint = endpoint
        self._meter = meter
        self._silence = silence

    @property
    def context_length(self) -> int | None:
        return self._endpoint.context_length

    async def encode(self, text: str) -> list[int]:
        return await self._silence.first(self._endpoint.encode(text))

    async def decode(self, token_ids: Sequence[int]) -> str:
        return await self._silence.first(self._endpoint.decode(token_ids))

    async def encode_chat(self, request: ChatRequest) -> list[int]:
        token_ids = await self._silence.first(self._endpoint.encode_chat(request))
        self._meter.see_prompt(len(token_ids))
        return token_ids

    async def sample_next(self, prefixes: Sequence[Sequence[int]], sampling: Sampling) -> list[NextToken]:
        call = self._meter.open(num_input=sum(map(len, prefixes)), num_output=len(prefixes))
        return await self._silence.first(_result(call, self._endpoint.sample_next(prefixes, sampling)))

    def stream_chat(self, request: ChatRequest) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        counted = _counted(self._endpoint.stream_chat(request), partial(self._meter.open, request), request)
        return self._silence.stream(counted)

    def stream_after(
        self, token_ids: Sequence[int], request: ChatRequest
    ) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        opened = self._endpoint.stream_after(token_ids, request)
        return self._silence.stream(_counted(opened, partial(self._meter.open, num_input=len(token_ids)), request))


class _MeteredScorer:
    def __init__(self, scorer: TokenScorer, meter: Meter, silence: Silence) -> None:
        self._scorer = scorer
        self._meter = meter
        self._silence = silence

    @property
    def max_top(self) -> int:
        return self._scorer.max_top

    async def score(self, token_ids: Sequence[int], *, num_rows: int, top: int) -> list[ScoredToken]:
        call = self._meter.open(num_input=len(token_ids), num_output=1)  # a server always writes one
        scored = _result(call, self._scorer.score(token_ids, num_rows=num_rows, top=top))
        return await self._silence.first(scored)


class MeteredDraft:
    """A draft whose calls are counted; otherwise the same. `unmetered` is the draft itself."""

    def __init__(self, draft: DraftProvider, meter: Meter) -> None:
        self.unmetered = draft
        self._meter = meter

    @property
    def name(self) -> str:
        return self.unmetered.name

    @property
    def continues_prefix(self) -> bool:
        """As the draft itself."""
        return bool(getattr(self.unmetered, "continues_prefix", True))

    @property
    def is_free(self) -> bool:
        """As the draft itself."""
        return is_free(self.unmetered)

    def for_request(self) -> MeteredDraft:
        return MeteredDraft(open_for_request(self.unmetered), self._meter)

    def draft(self, request: ChatRequest, max_tokens: int) -> AbstractAsyncContextManager[AsyncIterator[DraftPiece]]:
        begin = partial(self._meter.open, request, max_output=max_tokens, is_free=self.is_free)
        return _Counted(self.unmetered.draft(request, max_tokens), begin, Call.add_piece, Call.fail_draft)

    async def aclose(self) -> None:
        await self.unmetered.aclose()


# ------------------------------------------------------------------------------------------ streams


def _counted(
    opened: AbstractAsyncContextManager[AsyncIterator[StreamEvent]],
    open_call: Callable[..., Call],
    request: ChatRequest,
) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
    """A stream of a target that answers `request`, counted; it is cut where it has its tokens, or no budget is left."""

    def begin() -> Call:
        call = open_call(max_output=request.max_tokens)
        call.cap = None if request.max_tokens is None else TokenCap(request.max_tokens)
        return call

    return _Counted(opened, begin, Call.add_event, Call.end)


class _Counted(AbstractAsyncContextManager[AsyncIterator[T]], Generic[T]):
    """A call's context, counted from when it is entered.

    `add` takes in what comes and says what is passed on; `end` is passed on in its place once the call is cut.
    """

    def __init__(
        self,
        opened: AbstractAsyncContextManager[AsyncIterator[T]],
        begin: Callable[[], Call],
        add: Callable[[Call, T], T],
        end: Callable[[Call], T],
    ) -> None:
        self._opened = opened
        self._begin = begin
        self._add = add
        self._end = end
        self._call: Call | None = None
        self._items: AsyncGenerator[T] | None = None

    async def __aenter__(self) -> AsyncIterator[T]:
        call = self._call = self._begin()
        try:
            items = await self._opened.__aenter__()
        except BaseException as error:
            if isinstance(error, Exception):
                call.fail(error)
            call.close()
            raise
        self._items = self._count(items, call)
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
                self._call.close()

    async def _count(self, items: AsyncIterator[T], call: Call) -> AsyncGenerator[T]:
        """What comes of a call."""
        next_item, add = items.__anext__, self._add
        while call.cut_by is None:
            try:
                item = await next_item()
            except StopAsyncIteration:
                return
            except Exception as error:
                call.fail(error)
                raise
            yield add(call, item)
        if not call.is_over:
            yield self._end(call)


async def _result(call: Call, awaitable: Awaitable[T]) -> T:
    """What a call that is not a stream gives."""
    try:
        return await awaitable
    except Exception as error:
        call.fail(error)
        raise
    finally:
        call.close()
