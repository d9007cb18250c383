"""`race`: the target runs against itself, from several places of a draft at once. See `chain.py`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Final

from llm_spec.contract.draft import DraftProvider
from llm_spec.contract.endpoint import TokenEndpoint
from llm_spec.contract.errors import TargetError, UnsupportedError
from llm_spec.contract.events import (
    AnswerDetail,
    Fallback,
    Finish,
    Guarantee,
    GuaranteeWeakened,
    ReasoningDelta,
    Round,
    StreamEvent,
    TargetStreamReport,
    TextDelta,
    ToolCallDelta,
    Usage,
)
from llm_spec.contract.messages import ReasoningDetail
from llm_spec.drafting.background_draft import BackgroundDraft
from llm_spec.local.detokenizing import StopMatcher
from llm_spec.measure.baseline import count_prompt_characters
from llm_spec.measure.clock import get_loop_clock
from llm_spec.measure.tokens import count_piece_tokens
from llm_spec.strategies.base import (
    ConstraintBegunError,
    ReadyStrategy,
    Refusal,
    StrategyContext,
    TextGuarantee,
    find_multi_call_refusal,
)
from llm_spec.strategies.draft_gate import DraftGate
from llm_spec.strategies.race.chain import RaceStream, StreamChain
from llm_spec.strategies.race.schedule import MAX_DRAFT_REACH, DraftRequest, StreamScheduler
from llm_spec.strategies.race.target import RaceTarget
from llm_spec.strategies.stream_reader import StreamArrival, StreamReader

__all__ = ["prepare_or_refuse"]

_MAX_FAILURES: Final = 3
_CHARACTERS_PER_TOKEN: Final = 4  # of a token, roughly
_BY_TEXT: Final = GuaranteeWeakened("exact-text", "the target goes on from text, which it tokenizes again")
_READ_AHEAD: Final = 512  # events of all streams that may wait, beside as many that are being passed on


def prepare_or_refuse(context: StrategyContext) -> ReadyStrategy | Refusal:
    """Any target that continues a text, by token ids where it takes them. No slower than plain where it has room.

    By text, tokens are counted as the pieces of what streams write: for `max_tokens`, and in `usage`.
    """
    draft, name, can = context.draft, context.target.name, context.target.capabilities
    if draft is None:
        return Refusal("there is no draft")
    if can.token_model is not None:
        return Refusal(f"target {name} runs in this process and has no room for several streams")
    endpoint = can.token_endpoint
    if endpoint is None and not can.continue_prefix:
        return Refusal(f"target {name} can neither continue token ids nor an assistant's text")
    refusal = find_multi_call_refusal(
        context.request, writes_raw_text=context.writes_raw_text, keeps_constraints=context.keeps_constraints
    )
    if refusal is not None:
        return Refusal(refusal)
    guarantee: Guarantee = "exact-text" if endpoint is None else "exact"
    return ReadyStrategy(TextGuarantee(guarantee, same_text=False), partial(_open_race, context, draft, endpoint))


@asynccontextmanager
async def _open_race(
    context: StrategyContext, draft: DraftProvider, endpoint: TokenEndpoint | None
) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
    race = _Race(context, draft, endpoint)
    try:
        async with aclosing(race.stream_answer_events()) as events:
            yield events
    finally:
        await race.aclose()


class _Race:
    """One request. `endpoint`: where the target is asked by token ids; None: by text."""

    def __init__(self, context: StrategyContext, draft: DraftProvider, endpoint: TokenEndpoint | None) -> None:
        request, limits = context.request, context.limits
        self._name = context.target.name
        self._race_target = RaceTarget(context, endpoint)
        self._request = request
        self._pair_stats = context.pair_stats
        self._clock = get_loop_clock()
        self._changed = asyncio.Event()
        self._background_draft = BackgroundDraft(
            draft,
            request,
            max_tokens=limits.max_draft_tokens,
            timeout_s=limits.draft_timeout_s,
            changed=self._handle_new_draft_text,
        )
        self._root = self._make_stream("")
        self._chain = StreamChain(
            self._root,
            self._pair_stats,
            greedy=request.sampling.temperature == 0,
            max_tokens=request.max_tokens if endpoint is None else None,  # by ids every stream has its own
            max_rounds=limits.max_iterations,
            close=self._close_stream,
        )
        self._scheduler = StreamScheduler(
            self._chain,
            self._pair_stats,
            self._race_target.costs,
            make_stream=self._make_stream,
            max_streams=limits.max_concurrent_streams,
            max_extra_cost=limits.max_extra_cost,
            max_tokens=request.max_tokens,
            now_s=self._clock(),
            is_cache_shared=context.target.capabilities.shares_prompt_cache,
        )
        self._gate = DraftGate(
            draft,
            context.pair_stats,
            self._scheduler.budget,
            self._background_draft,
            max_tokens=request.max_tokens,
            changed=self._changed.set,
        )
        self._arrivals: asyncio.Queue[StreamArrival] = asyncio.Queue(_READ_AHEAD)
        self._readers: dict[RaceStream, StreamReader] = {}
        self._num_open_streams = 0  # with those that are being closed
        self._streams: dict[StreamReader, RaceStream] = {}
        self._preparing: asyncio.Task[None] | None = None
        self._trying_prompt: asyncio.Task[None] | None = None
        self._opened: list[RaceStream] = []
        self._num_failures = 0
        self._error: Exception | None = None
        self._fallback: Fallback | None = None
        self._has_reported_fallback = False
        self._num_expected_characters = 0  # characters of the draft's text that the chain knows …
        self._num_seen_draft_characters = 0  # … and that it was woken up for
        self._num_shown = 0  # characters of the answer …
        self._num_reported = 0  # … and tokens of its rounds

    async def stream_answer_events(self) -> AsyncGenerator[StreamEvent]:
        """The answer."""
        chain, matcher = self._chain, StopMatcher(self._request.stop)
        if not self._race_target.is_by_ids:
            yield _BY_TEXT
        self._start_stream(self._root, None)
        self._preparing = asyncio.create_task(self._prepare_further_streams())
        num_draft_tokens = self._limit_draft_tokens()
        if num_draft_tokens:
            num_draft_tokens = min(num_draft_tokens, self._scheduler.max_useful_draft_tokens)
            self._restart_draft_at_answer(DraftRequest("", num_draft_tokens))
        finish: Finish | None = None
        while finish is None:
            await self._changed.wait()
            self._changed.clear()
            self._extend_expected_text()
            self._handle_arrivals()
            self._start_draft_and_streams()
            output = [*chain.output_events, *self._take_fallback_event()]
            chain.output_events.clear()
            for event in output:
                for shown in self._apply_stop_strings(event, matcher):
                    yield shown
            if self._error is not None and matcher.matched is None:
                raise self._error
            finish = self._find_finish(matcher)
        for held in matcher.flush():
            yield held
        chain.drop_all_but_first_stream()
        for stream in self._report_what_became_of_streams():
            yield stream
        yield finish

    def _apply_stop_strings(self, event: StreamEvent, matcher: StopMatcher) -> Iterator[StreamEvent]:
        for shown in matcher.filter_event(event):
            self._num_shown += len(shown.text) if isinstance(shown, TextDelta) else 0
            yield self._trim_round(shown, matcher) if isinstance(shown, Round) else shown

    def _trim_round(self, round_: Round, matcher: StopMatcher) -> Round:
        """A round without what follows a stop string, and without a draft while no stream was begun by it."""
        num_emitted = round_.num_emitted_tokens
        if matcher.matched is not None:
            num_shown = self._chain.count_tokens_until_character(self._num_shown) - self._num_reported
            num_emitted = max(0, min(num_emitted, num_shown))
        self._num_reported += num_emitted
        if not self._scheduler.num_opened:
            return replace(
                round_, num_draft_tokens=0, num_accepted_tokens=0, num_emitted_tokens=num_emitted, draft_s=0.0
            )
        num_accepted = min(round_.num_accepted_tokens, num_emitted)
        return replace(round_, num_accepted_tokens=num_accepted, num_emitted_tokens=num_emitted)

    def _find_finish(self, matcher: StopMatcher) -> Finish | None:
        """How the answer has ended, with the tokens that are its own; None: not yet."""
        chain = self._chain
        if matcher.matched is not None:
            usage = Usage(output_tokens=chain.count_tokens_until_character(self._num_shown))
            return Finish("stop", usage, "stop_string", stop_string=matcher.matched)
        return None if chain.finish is None else replace(chain.finish, usage=chain.count_answer_usage())

    async def aclose(self) -> None:
        """End every stream and the draft, and wait until they are closed."""
        root = self._readers.get(self._root)
        if root is not None:
            root.add_times_to_baseline(
                self._pair_stats.baseline,
                count_prompt_characters(self._request),
                token_s=self._pair_stats.token_s.value,
                num_measured=self._pair_stats.token_s.num_tokens,
                tokens_per_piece=self._root.measure_tokens_per_piece(),
            )
        self._scheduler.record_answer_end()
        self._gate.record_answer_end()
        self._background_draft.stop()  # whatever closing a stream takes
        others = filter(None, [self._preparing, self._trying_prompt])
        tasks = [*(reader.task for reader in self._readers.values()), *others]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._race_target.aclose()
        await self._background_draft.aclose()

    # ----------------------------------------------------------------------------------------- streams

    def _make_stream(self, prefix: str) -> RaceStream:
        stream = RaceStream(prefix, self._pair_stats.start_stream_timer())
        stream.token_ids = [] if self._race_target.is_by_ids else None
        return stream

    def _start_stream(self, stream: RaceStream, parent: RaceStream | None) -> None:
        self._opened.append(stream)
        target = self._race_target
        reader = StreamReader(
            target.open_first_stream() if parent is None else target.open_further_stream(stream, parent),
            stream.timer,
            begins_at=stream.num_prefix_tokens,
            has_calls=self._has_server_other_calls,
            changed=self._changed.set,
            gate=self._gate,
            arrivals=self._arrivals,
        )
        self._readers[stream], self._streams[reader] = reader, stream
        self._num_open_streams += 1
        reader.task.add_done_callback(partial(self._handle_stream_closed, stream))

    def _handle_stream_closed(self, stream: RaceStream, _: asyncio.Task[None]) -> None:
        """A stream is closed: there may be room for another one."""
        self._num_open_streams -= 1
        stream.ended_s = self._clock()
        self._changed.set()

    def _close_stream(self, stream: RaceStream) -> None:
        """Nobody needs a stream any more."""
        self._readers[stream].task.cancel()
        self._race_target.cancel_prompt_encoding(stream)

    def _has_server_other_calls(self) -> bool:
        """Whether the server has other work of ours beside a stream."""
        return self._num_open_streams > 1 or self._scheduler.prompt_trial.is_running

    def _is_pace_undisturbed(self, stream: RaceStream) -> bool:
        """Whether a stream tells the target's pace although others are open beside it."""
        streams = self._pair_stats.streams
        is_first = stream is self._chain.streams[0] and stream.timer.first_s is not None
        has_room = streams.are_free and self._num_open_streams - 1 <= streams.num_extra
        return is_first and has_room

    async def _prepare_further_streams(self) -> None:
        """Find out how further streams are begun."""
        try:
            await self._race_target.encode_prompt(self._root)
        except Exception as error:  # noqa: BLE001 - only speculation needs it
            self._stop_racing(error)
            return
        scheduler = self._scheduler
        scheduler.can_begin, scheduler.can_read_prompt_part = True, self._race_target.is_by_ids
        self._changed.set()

    async def _run_prompt_trial(self, num_tokens: int) -> None:
        """Have some tokens of the prompt read beside the first stream."""
        try:
            await self._race_target.read_prompt_tokens(self._root, num_tokens)
            self._scheduler.prompt_trial.note_answer()
        except Exception as error:  # noqa: BLE001 - only speculation needs it
            self._stop_racing(error)

    # -------------------------------------------------------------------------------------------- arrivals

    def _handle_arrivals(self) -> None:
        """Take what the streams wrote, in the order in which it came."""
        while self._chain.finish is None and self._error is None and not self._arrivals.empty():
            arrival = self._arrivals.get_nowait()
            self._handle_stream_arrival(self._streams[arrival.reader], arrival)

    def _handle_stream_arrival(self, stream: RaceStream, arrival: StreamArrival) -> None:
        chain, has_begun = self._chain, stream.timer.first_s is not None
        match arrival.event:
            case TextDelta() as delta:
                num_tokens = count_piece_tokens(delta)
                if stream is chain.streams[0]:
                    has_calls = arrival.has_calls
                    self._gate.add_streamed(num_tokens, arrival.seconds, arrival.drafting_s, has_calls=has_calls)
                arrival.reader.count_undisturbed_tokens(num_tokens, arrival)
                is_beside_calls = arrival.has_calls and not self._is_pace_undisturbed(stream)
                is_disturbed = arrival.is_beside_draft or is_beside_calls
                chain.add_delta(stream, delta, arrival.arrived_s, is_disturbed=is_disturbed)
            case Finish() as finish:
                chain.record_stream_end(stream, finish, arrival.arrived_s, is_disturbed=arrival.is_disturbed)
            case None:
                error = TargetError(f"{self._name} ended its stream without a finish reason")
                self._handle_stream_failure(stream, error)
            case Exception() as error:
                self._handle_stream_failure(stream, error)
            case ReasoningDelta() | ReasoningDetail() | AnswerDetail() | ToolCallDelta() as event if (
                stream is chain.streams[0]
            ):
                arrival.reader.stop_timing()
                self._stop_racing(UnsupportedError("the target does more than write text"))
                chain.output_events.append(event)
            case ReasoningDelta() | ReasoningDetail() | AnswerDetail() | ToolCallDelta():
                self._handle_stream_failure(stream, UnsupportedError("a later stream does more than write text"))
            case _:
                pass
        first_s = stream.timer.first_s
        if not (has_begun or stream is self._root or first_s is None):
            self._pair_stats.streams.first_s.update(first_s - stream.timer.opened_s)
        self._scheduler.record_progress(self._num_open_streams, arrival.arrived_s)

    def _handle_new_draft_text(self) -> None:
        """The draft wrote something: it waits for the target's next word, unless it is enough for another stream."""
        feed = self._background_draft
        num_needed = _CHARACTERS_PER_TOKEN * self._scheduler.num_tokens_between_streams
        if feed.ended or feed.failure is not None or len(feed.text) >= self._num_seen_draft_characters + num_needed:
            self._num_seen_draft_characters = len(feed.text)
            self._changed.set()

    def _extend_expected_text(self) -> None:
        feed = self._background_draft
        if feed.failure is not None and self._fallback is None:
            self._fallback = Fallback(feed.failure)
        if not self._chain.is_draft_wrong:
            text, start = feed.text, self._num_expected_characters
            self._num_expected_characters = len(text)
            if len(text) > start:
                times = [(at - start, seconds) for at, seconds in feed.list_piece_times(start, len(text))]
                self._chain.extend_expected_text(text[start:], times)

    def _handle_stream_failure(self, stream: RaceStream, error: Exception) -> None:
        if stream is self._chain.streams[0]:
            self._error = error
        elif stream in self._chain.streams:
            self._chain.drop_stream(stream)
            costs = self._race_target.costs
            if isinstance(error, ConstraintBegunError):  # it was not sent
                costs.is_at_end = True
                self._opened.remove(stream)
                self._scheduler.num_opened -= 1
            self._num_failures += not costs.is_at_end
            if self._num_failures >= _MAX_FAILURES:
                self._stop_racing(error)

    def _stop_racing(self, error: Exception) -> None:
        """Leave the rest to the first stream."""
        if self._fallback is None:
            self._fallback = Fallback.from_error(error)
        self._scheduler.is_off = True
        self._scheduler.prompt_trial.stop()
        self._chain.drop_all_but_first_stream()
        self._changed.set()

    def _take_fallback_event(self) -> Iterator[StreamEvent]:
        """Why speculation was given up; reported once."""
        if self._fallback is not None and not self._has_reported_fallback:
            self._has_reported_fallback = True
            yield self._fallback

    def _start_draft_and_streams(self) -> None:
        """Begin what is worth beginning now: a new draft, new streams."""
        feed, scheduler = self._background_draft, self._scheduler
        num_draft_tokens = self._limit_draft_tokens()
        if not num_draft_tokens and not feed.ended:
            feed.stop()
        elif num_draft_tokens and not feed.is_exhausted:
            request = scheduler.choose_draft_request(num_draft_tokens, has_ended=feed.ended, is_cut=feed.is_cut)
            if request is not None:
                self._restart_draft_at_answer(request)
        num_tokens = scheduler.choose_prompt_trial(self._clock())
        if num_tokens is not None:
            self._trying_prompt = asyncio.create_task(self._run_prompt_trial(num_tokens))
        while self._error is None:
            parent = self._chain.last_stream
            is_whole = feed.ended and feed.is_complete
            stream = scheduler.choose_stream_to_open(self._num_open_streams, self._clock(), is_draft_whole=is_whole)
            if stream is None:
                return
            self._start_stream(stream, parent)

    def _limit_draft_tokens(self) -> int:
        """How many tokens may be drafted now; 0: none, since that makes the target slower, or may."""
        has_room = self._pair_stats.streams.num_extra > 0
        return self._gate.limit_draft_tokens(
            MAX_DRAFT_REACH,
            self._clock(),
            is_streaming=True,
            has_calls=self._has_server_other_calls(),
            can_pause=not has_room,
            gained_s=self._scheduler.gained_s,
        )

    def _restart_draft_at_answer(self, request: DraftRequest) -> None:
        self._num_expected_characters = self._num_seen_draft_characters = 0
        self._background_draft.restart(request.answer, request.num_tokens)

    def _report_what_became_of_streams(self) -> Iterator[TargetStreamReport]:
        """What became of every stream; the last of them end now."""
        first_s, now_s = self._root.timer.opened_s, self._clock()
        for index, stream in enumerate(self._opened):
            yield TargetStreamReport(
                index=index,
                begins_at=stream.num_prefix_tokens,
                num_tokens=stream.num_tokens,
                started_s=stream.timer.opened_s - first_s,
                ended_s=(now_s if stream.ended_s is None else stream.ended_s) - first_s,
                is_used=stream.is_shown,
            )
