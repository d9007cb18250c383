"""What the calls made for one answer read and wrote: its target and its draft are called through a meter.

A provider counts a call that comes to its end (`Finish.usage`). Many do not: a stream of a race that was overtaken, a
connection that broke, an answer that nobody read to its end. Of those the input is what was sent, the output what came,
both by token ids where they are known, else in pieces of text. What a server had written and not yet sent when it was
left cannot be known here and is missing. A call that was refused, or did not reach its server, counts nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Generic, TypeVar

from llm_spec.chat import (
    ChatRequest,
    ChatResponse,
    Finish,
    ReasoningDelta,
    Round,
    Sampling,
    StreamEvent,
    TextDelta,
    ToolCallDelta,
    Usage,
)
from llm_spec.discovery import Discovery
from llm_spec.drafting.pieces import check_piece, count_pieces, count_tokens, num_prompt_pieces, split_pieces
from llm_spec.errors import CircuitOpenError, TargetError, TransientError
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
    is_free,
    open_for_request,
)

__all__ = ["Meter", "MeteredDraft", "MeteredTarget", "count_answer_tokens", "count_call"]

T = TypeVar("T")


def count_answer_tokens(event: StreamEvent) -> int:
    """How many tokens of an answer came with an event: by ids, else in pieces."""
    match event:
        case TextDelta():
            return count_tokens(event)
        case ReasoningDelta():
            return len(split_pieces(event.text))
        case ToolCallDelta():
            return max(1, len(split_pieces(event.arguments)))
        case _:
            return 0


class Meter:
    """The calls of one model that were made to answer `request`."""

    def __init__(self, request: ChatRequest) -> None:
        self._request = request
        self._calls: list[_Call] = []
        self._num_encoded: int | None = None
        self._num_pieces: int | None = None

    def open(
        self,
        request: ChatRequest | None = None,
        *,
        num_input: int | None = None,
        num_output: int = 0,
        is_free: bool = False,
    ) -> _Call:
        """A call begins: one of a request, or (a batch) one of known numbers of tokens."""
        # counted now: at the end it would be counted for all calls in one go
        num_prefix = 0 if request is None else count_pieces(request.prefix)
        call = _Call(self, request, num_input, num_output, is_free, num_prefix)
        self._calls.append(call)
        return call

    def see_prompt(self, num_tokens: int) -> None:
        """The prompt was encoded, and has so many tokens."""
        self._num_encoded = num_tokens

    @property
    def num_calls(self) -> int:
        """Calls that were begun, without those that read nothing."""
        return sum(not call.is_unread for call in self._calls)

    @property
    def is_uncounted(self) -> bool:
        """Whether the answer came by one call, to its end, and its provider did not count it."""
        calls = [call for call in self._calls if not call.is_unread]
        return len(calls) == 1 and calls[0].has_ended and calls[0].counted is None

    @property
    def usage(self) -> Usage:
        """What all calls together have read and written so far."""
        return sum((call.usage for call in self._calls), Usage())

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the request itself: as the provider counted them, else as encoded, else in pieces."""
        counted = (call.counted for call in self._calls if call.is_of(self._request))
        found = next((usage.input_tokens for usage in counted if usage is not None), None)
        return self.count_input(self._request, count_pieces(self._request.prefix)) if found is None else found

    def count_input(self, request: ChatRequest, num_prefix: int) -> int:
        """How many tokens a request has, `num_prefix` of them in its prefix, where its provider does not count them."""
        if request.messages is not self._request.messages:
            return num_prompt_pieces(request) + num_prefix
        if self._num_encoded is not None and request.prefix == self._request.prefix:
            return self._num_encoded
        if self._num_pieces is None:  # the same for every stream of a race, and long
            self._num_pieces = num_prompt_pieces(request)
        return self._num_pieces + num_prefix


@dataclass(eq=False, slots=True)
class _Call:
    """One call. `counted` is what its provider said of it; `is_free`: no model was asked."""

    meter: Meter
    request: ChatRequest | None
    num_input: int | None
    num_output: int
    is_free: bool
    num_prefix: int  # tokens of the answer so far that were sent
    events: list[StreamEvent] = field(default_factory=list["StreamEvent"])
    num_free: int = 0  # tokens drafted without a model …
    num_paid: int = 0  # … and by one
    has_drafted: bool = False
    counted: Usage | None = None
    has_ended: bool = False
    is_unread: bool = False

    def is_of(self, request: ChatRequest) -> bool:
        """Whether it was this request, not one about a part of its answer."""
        own = self.request
        return own is not None and own.messages is request.messages and own.prefix == request.prefix

    def add_event(self, event: StreamEvent) -> None:
        """Something came from a target."""
        self.events.append(event)
        if isinstance(event, Finish):
            self.counted, self.has_ended = event.usage, True

    def add_piece(self, piece: DraftPiece) -> None:
        """Something came from a draft; raises DraftError for what is not a piece."""
        piece, self.has_drafted = check_piece(piece), True
        num_tokens = count_tokens(piece)
        if self.is_free or piece.is_free:
            self.num_free += num_tokens
        else:
            self.num_paid += num_tokens
        if piece.usage is not None:
            self.counted = piece.usage if self.counted is None else self.counted + piece.usage

    def fail(self, error: Exception) -> None:
        """It failed: before anything came, only an answer in a form of no use shows that it was read."""
        is_answer = isinstance(error, TargetError) and error.status is None
        was_read = is_answer and not isinstance(error, TransientError | CircuitOpenError)
        self.is_unread = not (self.events or self.has_drafted or was_read)

    @property
    def usage(self) -> Usage:
        """What it has read and written so far."""
        if self.is_unread:
            return Usage()
        free = Usage(output_tokens=self.num_free, free_output_tokens=self.num_free)
        if self.is_free or (self.num_free and not self.num_paid):
            return free
        num_output = self.num_output + self.num_paid + self._count_output()
        return free + (self.counted or Usage(input_tokens=self._count_input(), output_tokens=num_output))

    def _count_input(self) -> int:
        if self.num_input is not None:
            return self.num_input
        return 0 if self.request is None else self.meter.count_input(self.request, self.num_prefix)

    def _count_output(self) -> int:
        """The rounds of a model in this process tell exactly."""
        rounds = [event.num_emitted_tokens for event in self.events if isinstance(event, Round)]
        return sum(rounds) if rounds else sum(map(count_answer_tokens, self.events))


# ------------------------------------------------------------------------------------------ streams


class _Counted(AbstractAsyncContextManager[AsyncIterator[T]], Generic[T]):
    """A call's context, counted from when it is entered."""

    def __init__(
        self,
        opened: AbstractAsyncContextManager[AsyncIterator[T]],
        begin: Callable[[], _Call],
        add: Callable[[_Call, T], None],
    ) -> None:
        self._opened = opened
        self._begin = begin
        self._add = add

    async def __aenter__(self) -> AsyncIterator[T]:
        call = self._begin()
        try:
            return _Counting(await self._opened.__aenter__(), call, self._add)
        except Exception as error:
            call.fail(error)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return await self._opened.__aexit__(kind, error, traceback)


class _Counting(AsyncIterator[T]):
    """What comes of a call."""

    def __init__(self, items: AsyncIterator[T], call: _Call, add: Callable[[_Call, T], None]) -> None:
        self._next = items.__anext__
        self._call = call
        self._add = add

    async def __anext__(self) -> T:
        try:
            item = await self._next()
        except StopAsyncIteration:
            raise
        except Exception as error:
            self._call.fail(error)
            raise
        self._add(self._call, item)
        return item


async def _result(call: _Call, awaitable: Awaitable[T]) -> T:
    """What a call that is not a stream gives."""
    try:
        return await awaitable
    except Exception as error:
        call.fail(error)
        raise


# ------------------------------------------------------------------------------------------ target and draft


class MeteredTarget:
    """A target whose calls are counted; otherwise the same. It is an `LlmProvider`, and `Discoverable`.

    What is found out of it serves all requests, and is not counted.
    """

    def __init__(self, target: LlmProvider, meter: Meter, discovery: Discovery) -> None:
        self._target = target
        self._meter = meter
        self._discovery = discovery

    @property
    def name(self) -> str:
        return self._target.name

    @property
    def capabilities(self) -> Capabilities:
        can, meter = self._target.capabilities, self._meter
        if can.token_endpoint is None and can.token_scorer is None:
            return can
        endpoint = None if can.token_endpoint is None else _MeteredEndpoint(can.token_endpoint, meter)
        scorer = None if can.token_scorer is None else _MeteredScorer(can.token_scorer, meter)
        return replace(can, token_endpoint=endpoint, token_scorer=scorer)

    def stream(self, request: ChatRequest) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        return self.count(self._target.stream(request), request)

    def count(
        self, opened: AbstractAsyncContextManager[AsyncIterator[StreamEvent]], request: ChatRequest
    ) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        """A call of the target, counted."""
        return _Counted(opened, partial(self._meter.open, request), _Call.add_event)

    async def complete(self, request: ChatRequest) -> ChatResponse:
        call = self._meter.open(request)
        response = await _result(call, self._target.complete(request))
        call.add_event(TextDelta(response.content))
        call.add_event(Finish(response.finish_reason, response.usage))
        return response

    async def discover(self, feature: Feature) -> None:
        if not await self._discovery.wait_for(feature):
            raise TransientError(f"{self.name} could not be tried: its decoder was closed")

    async def aclose(self) -> None:
        await self._target.aclose()


def count_call(
    target: LlmProvider, opened: AbstractAsyncContextManager[AsyncIterator[StreamEvent]], request: ChatRequest
) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
    """Count a call of a target that was not made by its `stream`, where the target is metered."""
    return target.count(opened, request) if isinstance(target, MeteredTarget) else opened


class _MeteredEndpoint:
    def __init__(self, endpoint: TokenEndpoint, meter: Meter) -> None:
        self._endpoint = endpoint
        self._meter = meter

    @property
    def context_length(self) -> int | None:
        return self._endpoint.context_length

    async def encode(self, text: str) -> list[int]:
        return await self._endpoint.encode(text)

    async def decode(self, token_ids: Sequence[int]) -> str:
        return await self._endpoint.decode(token_ids)

    async def encode_chat(self, request: ChatRequest) -> list[int]:
        token_ids = await self._endpoint.encode_chat(request)
        self._meter.see_prompt(len(token_ids))
        return token_ids

    async def sample_next(self, prefixes: Sequence[Sequence[int]], sampling: Sampling) -> list[NextToken]:
        call = self._meter.open(num_input=sum(map(len, prefixes)), num_output=len(prefixes))
        return await _result(call, self._endpoint.sample_next(prefixes, sampling))

    def stream_chat(self, request: ChatRequest) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        return _Counted(self._endpoint.stream_chat(request), partial(self._meter.open, request), _Call.add_event)

    def stream_after(
        self, token_ids: Sequence[int], request: ChatRequest
    ) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        opened = self._endpoint.stream_after(token_ids, request)
        return _Counted(opened, partial(self._meter.open, num_input=len(token_ids)), _Call.add_event)


class _MeteredScorer:
    def __init__(self, scorer: TokenScorer, meter: Meter) -> None:
        self._scorer = scorer
        self._meter = meter

    @property
    def max_top(self) -> int:
        return self._scorer.max_top

    async def score(self, token_ids: Sequence[int], *, num_rows: int, top: int) -> list[ScoredToken]:
        call = self._meter.open(num_input=len(token_ids), num_output=1)  # a server always writes one
        return await _result(call, self._scorer.score(token_ids, num_rows=num_rows, top=top))


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
        begin = partial(self._meter.open, request, is_free=self.is_free)
        return _Counted(self.unmetered.draft(request, max_tokens), begin, _Call.add_piece)

    async def aclose(self) -> None:
        await self.unmetered.aclose()
