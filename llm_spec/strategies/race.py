"""`race`: the target runs against itself, from several places of a draft at once. See `stream_chain.py`."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Final

from llm_spec._clock import clock
from llm_spec.chat import (
    ChatRequest,
    Fallback,
    Finish,
    Guarantee,
    GuaranteeWeakened,
    ReasoningDelta,
    ReasoningDetail,
    Round,
    StreamEvent,
    TargetStream,
    TextDelta,
    ToolCallDelta,
    Usage,
)
from llm_spec.contract.draft import DraftProvider
from llm_spec.contract.endpoint import TokenEndpoint
from llm_spec.drafting.background_draft import BackgroundDraft
from llm_spec.drafting.text_pieces import count_prompt_pieces, split_pieces
from llm_spec.errors import TargetError, UnsupportedError
from llm_spec.strategies.base import Ready, Refusal, StrategyContext, TextGuarantee, find_multi_call_refusal
from llm_spec.strategies.stream_chain import RaceStream, StreamChain, find_stream_boundary
from llm_spec.text import StopMatcher

__all__ = ["prepare"]

_MIN_SEGMENT: Final = 2
_MAX_SEGMENT: Final = 64
_MAX_DRAFT_REACH: Final = 1024
_REACH_PER_SEGMENT: Final = 2.0  # the runners together reach so many times as far as the draft is expected to agree
_MIN_SURVIVAL: Final = 0.02  # a runner that is less likely to be of use is not worth its tokens
_MAX_FAILURES: Final = 3
_CHARACTERS_PER_TOKEN: Final = 4  # of a token, roughly
_READ_AHEAD: Final = 512  # events of all streams that may wait, beside as many that are being passed on
_MAX_REST_TOKENS: Final = 64  # tokens without a draft, after several that were wrong at once


def prepare(context: StrategyContext) -> Ready | Refusal:
    """Any target that continues a text, by token ids where it takes them. No slower than plain where it has room.

    By text, tokens are counted as the pieces of what streams write: for `max_tokens`, and in `usage`.
    """
    draft, name, can = context.draft, context.target.name, context.target.capabilities
    if draft is None:
        return Refusal("there is no draft")
    if can.token_model is not None:
        return Refusal(f"target {name} runs in this process and has no room for several streams")
    if context.untried:
        return Refusal(f"target {name} is still being discovered")
    if can.token_endpoint is None and not can.continue_prefix:
        return Refusal(f"target {name} can neither continue token ids nor an assistant's text")
    refusal = find_multi_call_refusal(context.request)
    if refusal is not None:
        return Refusal(refusal)
    guarantee: Guarantee = "exact-text" if can.token_endpoint is None else "exact"
    return Ready(TextGuarantee(guarantee, same_text=False), partial(_run, context, draft, can.token_endpoint))


@asynccontextmanager
async def _run(
    context: StrategyContext, draft: DraftProvider, endpoint: TokenEndpoint | None
) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
    race = _Race(context, draft, endpoint)
    try:
        async with aclosing(race.events()) as events:
            yield events
    finally:
        await race.aclose()


class _Race:
    """One request. `endpoint`: where the target is asked by token ids; None: by text."""

    def __init__(self, context: StrategyContext, draft: DraftProvider, endpoint: TokenEndpoint | None) -> None:
        request, config, pair_stats = context.request, context.config, context.pair_stats
        self._target = context.target
        self._endpoint = endpoint
        self._request = request
        self._config = config
        self._pair_stats = pair_stats
        self._clock = clock()
        self._news: asyncio.Queue[tuple[RaceStream, StreamEvent | Exception, float] | None] = asyncio.Queue(_READ_AHEAD)
        self._background_draft = BackgroundDraft(
            draft,
            request,
            max_tokens=config.max_draft_tokens,
            timeout_s=config.draft_timeout_s,
            changed=self._handle_draft_news,
        )
        self._random = random.Random(request.sampling.seed)  # noqa: S311 - seeds of streams, no secret
        self._root = self._make_stream("")
        self._chain = StreamChain(
            self._root,
            pair_stats,
            greedy=request.sampling.temperature == 0,
            max_tokens=request.max_tokens if self._endpoint is None else None,  # by ids every stream is told its own
            max_rounds=config.max_iterations,
            close=_cancel_stream,
        )
        self._tasks: set[asyncio.Task[None]] = set()  # of streams that are open, or being closed
        self._opened: list[RaceStream] = []
        self._num_prompt_tokens = count_prompt_pieces(request)
        self._num_extra_input_tokens = 0
        self._num_failures = 0
        self._is_draft_near_end = False  # of what may be written: nothing more is begun
        self._error: Exception | None = None
        self._fallback: Fallback | None = None
        self._has_reported_fallback = False
        self._num_expected_characters = 0  # characters of the draft's text that the chain knows …
        self._num_seen_draft_characters = 0  # … and that it was woken up for
        self._num_rest_tokens = 0  # tokens to wait before the draft begins anew …
        self._num_tokens_to_rest: RaceStream | None = None  # … while this one is the last …
        self._resume_at = 0  # … until it has written so many
        self._num_seen_takeovers = 0
        self._num_shown = 0  # characters of the answer …
        self._num_reported = 0  # … and tokens of its rounds

    async def events(self) -> AsyncGenerator[StreamEvent]:
        """The answer."""
        chain, matcher = self._chain, StopMatcher(self._request.stop)
        if self._endpoint is None:
            yield GuaranteeWeakened("exact-text", "the target goes on from text, which it tokenizes again")
        self._start_stream(self._root, None)
        self._background_draft.restart("", self._draft_reach())
        finish: Finish | None = None
        while finish is None:
            changed = await self._news.get()
            self._extend_expected()
            self._handle_news(changed)
            while not self._news.empty() and chain.finish is None and self._error is None:
                self._handle_news(self._news.get_nowait())
            self._start_draft_and_streams()
            if self._fallback is not None and not self._has_reported_fallback:
                self._has_reported_fallback = True
                chain.output_events.append(self._fallback)
            for event in chain.output_events:
                for shown in self._filter_event(event, matcher):
                    yield shown
            chain.output_events.clear()
            if self._error is not None:
                raise self._error
            finish = self._find_finish(matcher)
        for held in matcher.flush():
            yield held
        chain.drop_all_but_first()
        for stream in self._report_streams():
            yield stream
        yield finish

    def _filter_event(self, event: StreamEvent, matcher: StopMatcher) -> Iterator[StreamEvent]:
        for shown in matcher.filter_event(event):
            self._num_shown += len(shown.text) if isinstance(shown, TextDelta) else 0
            yield self._trim_round(shown, matcher) if isinstance(shown, Round) else shown

    def _trim_round(self, round_: Round, matcher: StopMatcher) -> Round:
        """A round without what lies behind a stop string."""
        num_emitted = round_.num_emitted_tokens
        if matcher.matched is not None:
            num_shown = self._chain.num_tokens_until(self._num_shown) - self._num_reported
            num_emitted = max(0, min(num_emitted, num_shown))
        self._num_reported += num_emitted
        num_accepted = min(round_.num_accepted_tokens, num_emitted)
        return replace(round_, num_accepted_tokens=num_accepted, num_emitted_tokens=num_emitted)

    def _find_finish(self, matcher: StopMatcher) -> Finish | None:
        """How the answer has ended, with the tokens that are its own; None: not yet."""
        chain = self._chain
        if matcher.matched is not None:
            return Finish("stop", Usage(output_tokens=chain.num_tokens_until(self._num_shown)), "stop_string")
        return None if chain.finish is None else replace(chain.finish, usage=chain.count_answer_usage())

    async def aclose(self) -> None:
        """End every stream and the draft, and wait until they are closed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, self._background_draft.aclose(), return_exceptions=True)

    # ----------------------------------------------------------------------------------------- streams

    def _make_stream(self, prefix: str) -> RaceStream:
        stream = RaceStream(prefix, self._pair_stats.open_stream())
        stream.token_ids = None if self._endpoint is None else []
        return stream

    def _start_stream(self, stream: RaceStream, parent: RaceStream | None) -> None:
        self._opened.append(stream)
        stream.task = asyncio.create_task(self._read_stream(stream, parent))
        self._tasks.add(stream.task)
        stream.task.add_done_callback(self._on_stream_closed)

    def _on_stream_closed(self, task: asyncio.Task[None]) -> None:
        """A stream is closed: there may be room for another one."""
        self._tasks.discard(task)
        self._wake()

    def _wake(self) -> None:
        """Have a look at the streams and the draft; where events are waiting, that is done with the next of them."""
        if not self._news.full():
            self._news.put_nowait(None)

    async def _read_stream(self, stream: RaceStream, parent: RaceStream | None) -> None:
        try:
            async with self._open_stream(stream, parent) as events:
                async for event in events:
                    if self._news.full():
                        stream.timer.stop()
                    await self._news.put((stream, event, self._clock()))
                    if isinstance(event, Finish):
                        return
            raise TargetError(f"{self._target.name} ended its stream without a finish reason")
        except Exception as error:  # noqa: BLE001 - judged where it is taken
            await self._news.put((stream, error, self._clock()))
        finally:
            stream.ended_s = self._clock()

    @asynccontextmanager
    async def _open_stream(
        self, stream: RaceStream, parent: RaceStream | None
    ) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        encoding: asyncio.Task[None] | None = None
        request = replace(self._request, stop=())
        try:
            if self._endpoint is None:
                if parent is not None:
                    request = replace(request, prefix=request.prefix + stream.prefix)
                    request = self._reseeded(self._limit_tokens(request, stream.min_prefix_tokens))
                    self._num_extra_input_tokens += self._num_prompt_tokens + stream.num_prefix_tokens
                opened = self._target.stream(request)
            elif parent is None:
                encoding = asyncio.create_task(self._encode_stream_prompt(stream, self._endpoint))
                opened = self._endpoint.stream_chat(request)
            else:
                opened = await self._open_stream_by_ids(stream, parent, self._endpoint, request)
            async with opened as events:
                yield events
        finally:
            if encoding is not None:
                encoding.cancel()
                await asyncio.wait([encoding])

    async def _encode_stream_prompt(self, stream: RaceStream, endpoint: TokenEndpoint) -> None:
        try:
            stream.prefix_ids = await endpoint.encode_chat(self._request)
            self._num_prompt_tokens = len(stream.prefix_ids)
        except Exception as error:  # noqa: BLE001 - only speculation needs it
            self._stop_racing(error)
        stream.encoded.set()

    async def _open_stream_by_ids(
        self, stream: RaceStream, parent: RaceStream, endpoint: TokenEndpoint, request: ChatRequest
    ) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        text, written_ids = parent.text, list(parent.token_ids or ())
        added_ids = await endpoint.encode(parent.expected[len(text) :])
        await parent.encoded.wait()
        if parent.prefix_ids is None:
            raise TargetError("the prompt could not be encoded")
        parent.expect_ids(written_ids + added_ids)
        stream.prefix_ids = parent.prefix_ids + written_ids + added_ids
        stream.num_prefix_tokens = len(stream.prefix_ids) - self._num_prompt_tokens
        stream.encoded.set()
        request = self._limit_tokens(request, stream.num_prefix_tokens)
        self._num_extra_input_tokens += len(stream.prefix_ids)
        return endpoint.stream_after(stream.prefix_ids, self._reseeded(request))

    def _limit_tokens(self, request: ChatRequest, num_before: int) -> ChatRequest:
        """With as many tokens as are left behind so many."""
        if request.max_tokens is not None:
            left = request.max_tokens - num_before
            if left < 1:
                self._is_draft_near_end = True
                raise UnsupportedError("the answer ends before it would begin")
            request = replace(request, max_tokens=left)
        return request

    def _reseeded(self, request: ChatRequest) -> ChatRequest:
        """With a seed of its own: two streams with one seed would draw the same noise at different places."""
        if request.sampling.temperature == 0:
            return request
        return replace(request, sampling=replace(request.sampling, seed=self._random.getrandbits(31)))

    # -------------------------------------------------------------------------------------------- news

    def _handle_news(self, changed: tuple[RaceStream, StreamEvent | Exception, float] | None) -> None:
        """Something was written, by a runner or (None) by the draft."""
        if changed is None:  # only a reason to look
            return
        stream, event, arrived_s = changed
        match event:
            case TextDelta():
                self._chain.add_delta(stream, event, arrived_s)
            case Finish():
                self._chain.end_stream(stream, event)
            case Exception():
                self._handle_stream_failure(stream, event)
            case ReasoningDelta() | ReasoningDetail() | ToolCallDelta() if stream is self._chain.streams[0]:
                self._stop_racing(UnsupportedError("the target does more than write text"))
                self._chain.output_events.append(event)
            case ReasoningDelta() | ReasoningDetail() | ToolCallDelta():
                self._handle_stream_failure(stream, UnsupportedError("a later stream does more than write text"))
            case _:
                pass

    def _handle_draft_news(self) -> None:
        """The draft wrote something: it waits for the target's next word, unless it is enough for another runner."""
        feed = self._background_draft
        if (
            feed.ended
            or feed.failure is not None
            or len(feed.text) >= self._num_seen_draft_characters + _CHARACTERS_PER_TOKEN * self._segment_length()
        ):
            self._num_seen_draft_characters = len(feed.text)
            self._wake()

    def _extend_expected(self) -> None:
        if self._background_draft.failure is not None and self._fallback is None:
            self._fallback = Fallback(self._background_draft.failure)
        if not self._chain.is_draft_wrong:
            text, start = self._background_draft.text, self._num_expected_characters
            self._num_expected_characters = len(text)
            if len(text) > start:
                times = [(at - start, seconds) for at, seconds in self._background_draft.piece_times(start, len(text))]
                self._chain.extend_expected(text[start:], times)

    def _handle_stream_failure(self, stream: RaceStream, error: Exception) -> None:
        if stream is self._chain.streams[0]:
            self._error = error
        elif stream in self._chain.streams:
            self._chain.drop_stream(stream)
            self._num_failures += not self._is_draft_near_end
            if self._num_failures >= _MAX_FAILURES:
                self._stop_racing(error)

    def _stop_racing(self, error: Exception) -> None:
        """Leave the rest to the first runner."""
        if self._fallback is None:
            self._fallback = Fallback.from_error(error)
        self._num_failures = _MAX_FAILURES
        self._chain.drop_all_but_first()

    # ---------------------------------------------------------------------------------------- planning

    def _start_draft_and_streams(self) -> None:
        """Begin what is worth beginning now: a new draft, new runners."""
        if self._num_failures >= _MAX_FAILURES or self._chain.tail.finish is not None:
            return
        self._restart_draft()
        while self._launch_stream():
            pass

    def _restart_draft(self) -> None:
        """Ask the draft for more, or anew where it went wrong; after it was of no use, later and later."""
        chain, feed, tail = self._chain, self._background_draft, self._chain.tail
        if feed.is_exhausted or not (chain.is_draft_wrong or feed.ended):
            return
        if not chain.is_draft_wrong and feed.is_cut:
            if len(tail.expected) - len(tail.text) < _CHARACTERS_PER_TOKEN * self._draft_reach():
                self._num_expected_characters = self._num_seen_draft_characters = 0
                feed.restart(tail.prefix + tail.expected, self._draft_reach())
            return
        if not chain.is_draft_wrong and len(tail.text) < len(tail.expected):
            return
        if self._num_tokens_to_rest is not tail:
            self._num_rest_tokens = (
                0
                if chain.num_takeovers > self._num_seen_takeovers
                else min(max(1, 2 * self._num_rest_tokens), _MAX_REST_TOKENS)
            )
            self._num_tokens_to_rest, self._num_seen_takeovers = tail, chain.num_takeovers
            self._resume_at = tail.num_tokens + self._num_rest_tokens
        if tail.num_tokens >= self._resume_at:
            self._num_tokens_to_rest = None
            self._num_expected_characters = self._num_seen_draft_characters = 0
            chain.reset_expected()
            feed.restart(tail.assumed_answer, self._draft_reach())

    def _launch_stream(self) -> bool:
        """Begin one more runner, where the draft reaches far enough and it is likely enough to be of use."""
        chain, pair_stats = self._chain, self._pair_stats
        tail = chain.tail
        if chain.is_draft_wrong or self._is_draft_near_end or len(self._tasks) >= self._config.max_concurrent_streams:
            return False
        # what the last runner will have written when a new one writes its first token
        lead = pair_stats.tokens_per_first_token
        if tail.timer.first_s is None:
            lead = (self._clock() - tail.timer.opened_s) / pair_stats.target_token_s
        num_pieces = math.ceil(lead) + self._segment_length()
        if pair_stats.acceptance.rate**num_pieces < _MIN_SURVIVAL:
            return False
        end = find_stream_boundary(tail.expected, len(tail.text), num_pieces)
        if end is None or not self._can_afford(end):
            return False
        child = self._make_stream(tail.prefix + tail.expected[:end])
        chain.append_stream(child, end)
        self._start_stream(child, tail)
        return True

    def _segment_length(self) -> int:
        """Tokens between two runners: together they should reach beyond where the draft is likely to go wrong."""
        reach = _REACH_PER_SEGMENT / max(1.0 - self._pair_stats.acceptance.rate, 1e-3)
        return min(max(math.ceil(reach / self._config.max_concurrent_streams), _MIN_SEGMENT), _MAX_SEGMENT)

    def _draft_reach(self) -> int:
        """Tokens that are worth drafting at once: as far as all runners together can reach."""
        lead = math.ceil(self._pair_stats.tokens_per_first_token)
        return min(lead + (self._config.max_concurrent_streams + 1) * self._segment_length(), _MAX_DRAFT_REACH)

    def _can_afford(self, end: int) -> bool:
        """Whether one more runner stays within `max_extra_cost`."""
        bound, chain = self._config.max_extra_cost, self._chain
        if bound is None:
            return True
        num_input = self._num_prompt_tokens + len(split_pieces(chain.tail.prefix + chain.tail.expected[:end]))
        extra = self._num_extra_input_tokens + num_input + chain.num_cancelled_tokens
        return extra <= bound * (self._num_prompt_tokens + chain.num_answer_tokens)

    def _report_streams(self) -> Iterator[TargetStream]:
        """What became of every stream; the last of them end now."""
        first_s, now_s = self._root.timer.opened_s, self._clock()
        for index, stream in enumerate(self._opened):
            yield TargetStream(
                index=index,
                begins_at=stream.num_prefix_tokens,
                num_tokens=stream.num_tokens,
                started_s=stream.timer.opened_s - first_s,
                ended_s=(now_s if stream.ended_s is None else stream.ended_s) - first_s,
                is_used=stream.is_shown,
            )


def _cancel_stream(stream: RaceStream) -> None:
    if stream.task is not None:
        stream.task.cancel()
