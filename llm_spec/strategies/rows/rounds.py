"""Rounds against a server: what `probe` and `score` share. The deciding is `RowScheduler`'s; here calls are made.

The server's own stream is open from the start, so that nothing is later than without speculation. The draft writes
ahead in the background, and its text is encoded with the server's own tokenizer. Calls ask for the server's own token
after several prefixes at once; every token that comes out is the server's own, after exactly the tokens before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import replace
from typing import Final, TypeAlias

from llm_spec.contract.draft import DraftProvider
from llm_spec.contract.endpoint import SampledToken, TokenEndpoint
from llm_spec.contract.errors import BudgetError, LlmSpecError, TargetError, TransientError, UnsupportedError
from llm_spec.contract.events import (
    Fallback,
    Finish,
    GuaranteeWeakened,
    Origin,
    Progress,
    Round,
    StoppedBy,
    StreamEvent,
    TextDelta,
    Usage,
)
from llm_spec.contract.request import ChatRequest
from llm_spec.drafting.background_draft import BackgroundDraft
from llm_spec.local.detokenizing import REPLACEMENT_CHARACTER, StopMatcher
from llm_spec.local.lookahead import MAX_LOOKAHEAD
from llm_spec.measure.baseline import count_prompt_characters
from llm_spec.measure.clock import get_loop_clock
from llm_spec.measure.tokens import count_answer_tokens_in_event, count_piece_tokens
from llm_spec.strategies.base import StrategyContext
from llm_spec.strategies.draft_gate import DraftGate
from llm_spec.strategies.resume_plain import sample_one_token_by_stream, stream_remainder_plain
from llm_spec.strategies.rows.draft_ids import EncodedDraft
from llm_spec.strategies.rows.prompt_trial import choose_prompt_stretch
from llm_spec.strategies.rows.schedule import RowCall, RowScheduler
from llm_spec.strategies.rows.token_answer import TokenAnswer
from llm_spec.strategies.stream_reader import StreamArrival, StreamReader

__all__ = ["VerifyRound", "answer_in_rounds"]

# The target's own token after `context_ids` and after each of the drafted ids that follow: one more than were drafted.
VerifyRound: TypeAlias = Callable[[list[int], list[int]], Awaitable[list[SampledToken]]]

_DRAFT_TOKENS: Final = 64  # asked of the draft at a time
_MAX_REST_TOKENS: Final = 32  # tokens without a draft, after several that were wrong at once


async def answer_in_rounds(
    context: StrategyContext,
    *,
    draft: DraftProvider,
    endpoint: TokenEndpoint,
    verify: VerifyRound,
    max_calls: int,
    is_read_from_scores: bool = False,
) -> AsyncGenerator[StreamEvent]:
    """Answer a request; `max_calls` calls may overlap.

    `is_read_from_scores`: what they confirm the target did not write.

    Whatever fails, and when rounds do not pay, the target goes on alone from what was confirmed.
    """
    rounds = _ServerRounds(
        context,
        draft=draft,
        endpoint=endpoint,
        verify=verify,
        max_calls=max_calls,
        is_read_from_scores=is_read_from_scores,
    )
    matcher = StopMatcher(context.request.stop)
    finish: Finish | None = None
    num_shown = 0
    try:
        async with aclosing(rounds.stream_answer_events()) as events:
            async for event in events:
                if isinstance(event, Finish):
                    finish = event
                    for held_event in matcher.flush():
                        yield held_event
                    break
                for shown_event in matcher.filter_event(event):
                    num_shown += count_answer_tokens_in_event(shown_event)
                    yield shown_event
                if matcher.matched is not None:
                    usage = rounds.count_answer_usage(num_shown)
                    finish = Finish("stop", usage, "stop_string", stop_string=matcher.matched)
                    break
        last_events: list[StreamEvent] = [*rounds.take_unreported_failures()]
        last_events += [] if finish is None else [finish]  # none if the target's own stream broke off
        for last_event in last_events:
            yield last_event
    except Exception:
        is_sampled = context.request.sampling.temperature != 0  # what was sampled stays; greedily it is written again
        for last_event in (*(matcher.flush() if is_sampled else ()), *rounds.take_unreported_failures()):
            yield last_event
        raise
    finally:
        await rounds.aclose()


class _ServerRounds:
    """One request."""

    def __init__(
        self,
        context: StrategyContext,
        *,
        draft: DraftProvider,
        endpoint: TokenEndpoint,
        verify: VerifyRound,
        max_calls: int,
        is_read_from_scores: bool,
    ) -> None:
        request, limits = context.request, context.limits
        self._target = context.target
        self._endpoint = endpoint
        self._request = replace(request, stop=())  # a stop string may begin in one call and end in another
        self._pair_stats = context.pair_stats
        self._verify = verify
        self._is_read_from_scores = is_read_from_scores
        self._max_rounds = limits.max_iterations
        self._max_open = limits.max_concurrent_streams
        self._clock = get_loop_clock()
        self._changed = asyncio.Event()
        self._background_draft = BackgroundDraft(
            draft,
            _make_draft_request(request),
            max_tokens=limits.max_draft_tokens,
            timeout_s=limits.draft_timeout_s,
            changed=self._changed.set,
        )
        self._encoded_draft = EncodedDraft(
            self._background_draft, endpoint, context.pair_stats.shared_vocabulary, self._changed.set
        )
        self._answer = TokenAnswer(endpoint)
        self._scheduler = RowScheduler(
            context.pair_stats,
            is_greedy=request.sampling.temperature == 0,
            max_open=limits.max_concurrent_streams,
            max_calls=max_calls,
            max_rows=min(MAX_LOOKAHEAD, limits.lookahead.start().limit()) + 1,
            max_tokens=request.max_tokens,
            now_s=self._clock(),
            # a server that is to score a prompt reads all of it
            is_cache_shared=self._target.capabilities.shares_prompt_cache and not is_read_from_scores,
        )
        self._gate = DraftGate(
            draft,
            context.pair_stats,
            self._scheduler.budget,
            self._background_draft,
            max_tokens=request.max_tokens,
            changed=self._changed.set,
        )
        self._prompt_ids: list[int] | None = None
        self._stream: StreamReader | None = None
        self._tasks: dict[RowCall, asyncio.Task[None]] = {}
        self._prompt_trial: asyncio.Task[None] | None = None
        self._encoding: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()  # calls and streams that are not needed, and still open
        self._output: list[StreamEvent] = []  # that was not given yet
        self._error: Exception | None = None  # that ends the answer
        self._has_given_up = False  # speculation: from here the target goes on alone
        self._is_plain = False  # the stream's events are the answer, whatever they are
        self._is_over = self._is_ended_by_stream = False
        self._finish: Finish | None = None
        self._num_rounds = self._num_from_rows = 0
        self._num_rest_tokens = 0  # tokens without a draft …
        self._resume_at = 0  # … until the answer has so many

    async def stream_answer_events(self) -> AsyncGenerator[StreamEvent]:
        """The answer; the last event is its `Finish`, unless the target broke off without one."""
        self._open_stream(self._endpoint.stream_chat(self._request))
        self._encoding = asyncio.create_task(self._encode_prompt())
        num_draft_tokens = self._limit_draft_tokens()
        if num_draft_tokens:
            self._restart_draft_after_answer(num_draft_tokens)
        wait_s: float | None = 0.0
        while not self._is_over and self._error is None:
            await self._wait_for_change(wait_s)
            self._changed.clear()
            await self._handle_arrivals()
            if not self._is_over and self._error is None:
                wait_s = await self._apply_scheduler_decision()
            while self._output:
                yield self._output.pop(0)
        if self._error is not None:
            raise self._error
        await self._end_answer()
        while self._output:
            yield self._output.pop(0)

    async def aclose(self) -> None:
        """End the draft, the stream and every call, and wait until they are closed."""
        self._scheduler.record_answer_end()
        self._gate.record_answer_end()
        self._background_draft.stop()  # whatever closing a call takes
        self._close_stream()
        for call in list(self._tasks):
            self._cancel_call(call)
        others = [*self._closing, *filter(None, [self._encoding, self._prompt_trial])]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._encoded_draft.aclose()
        await self._background_draft.aclose()

    def take_unreported_failures(self) -> list[Fallback]:
        """The failures that the answer's end came before: the draft's tokens may have lasted until then."""
        failure = self._encoded_draft.failure or self._background_draft.failure
        if failure is not None:
            self._give_up_rows(failure)
        output, self._output = self._output, []
        return [event for event in output if isinstance(event, Fallback)]

    def count_answer_usage(self, num_tokens: int) -> Usage:
        """An answer's tokens; those that were read from scores the target did not write."""
        num_read = min(num_tokens, self._num_from_rows) if self._is_read_from_scores else 0
        return Usage(output_tokens=num_tokens - num_read, approved_output_tokens=num_read)

    # ---------------------------------------------------------------------------------------- deciding

    async def _apply_scheduler_decision(self) -> float | None:
        """Do what is due; seconds until something will be, None where that depends on what comes."""
        self._encode_and_extend_draft()
        encoded, scheduler = self._encoded_draft, self._scheduler
        now_s, is_exhausted = self._clock(), self._background_draft.is_exhausted
        scheduler.add_late_token_counts(*encoded.take_late_token_counts())
        scheduler.draft.update(encoded.ids, encoded.seconds, now_s, is_idle=encoded.is_idle, is_exhausted=is_exhausted)
        scheduler.can_leave = not self._answer.held_ids
        scheduler.num_closing = len(self._closing)
        scheduler.max_tokens = self._find_max_answer_tokens()
        decision = scheduler.decide_next_actions(now_s)
        if decision.closes_stream:
            self._close_stream()
        for call in decision.calls:
            self._send_row_call(call)
        if decision.num_trial_tokens is not None:
            self._prompt_trial = asyncio.create_task(self._run_prompt_trial(decision.num_trial_tokens))
        self._report_rounds(scheduler.take_dropped_calls())
        if decision.opens_stream:
            await self._open_remainder_stream()
        return decision.wait_s

    async def _wait_for_change(self, wait_s: float | None) -> None:
        """Wait until something comes, or so many seconds: then the next call is due."""
        timer = None if wait_s is None else asyncio.get_running_loop().call_later(wait_s, self._changed.set)
        try:
            await self._changed.wait()
        finally:
            if timer is not None:
                timer.cancel()

    def _find_max_answer_tokens(self) -> int | None:
        """Most tokens that the answer can have; None: nobody knows."""
        length, limit = self._endpoint.context_length, self._request.max_tokens
        if length is None:
            return limit
        room = length - len(self._prompt_ids or ())
        return room if limit is None else min(room, limit)

    def _encode_and_extend_draft(self) -> None:
        """Encode what the draft has written; ask it for more, or anew where it was wrong or has nothing to say."""
        encoded, background = self._encoded_draft, self._background_draft
        if encoded.failure is not None:
            self._give_up_rows(encoded.failure)
        elif background.failure is not None and encoded.is_idle and not encoded.ids:
            self._give_up_rows(background.failure)
        if self._has_given_up:
            return
        num_tokens = self._limit_draft_tokens()
        if not num_tokens:
            if encoded.ids or not background.ended:
                encoded.stop()
        elif encoded.is_wrong and self._scheduler.is_draft_promising():
            self._restart_draft_after_answer(num_tokens)
        elif encoded.is_wrong:
            self._restart_draft_later(num_tokens)
        elif encoded.is_idle and not background.is_exhausted:
            self._extend_draft(num_tokens)
        encoded.encode_new_text()

    def _extend_draft(self, num_draft_tokens: int) -> None:
        """Ask the draft for more, or anew where it has nothing to say; after it was of no use, later and later."""
        encoded = self._encoded_draft
        if self._background_draft.is_cut and self._background_draft.text:
            if len(encoded.ids) < num_draft_tokens // 2:
                encoded.extend_guess(num_draft_tokens)
        elif not encoded.ids:
            self._restart_draft_later(num_draft_tokens)

    def _restart_draft_later(self, num_draft_tokens: int) -> None:
        """Begin the draft anew, each time after more tokens than the last time."""
        num_tokens = len(self._scheduler.ids)
        if num_tokens >= self._resume_at:
            self._num_rest_tokens = min(max(1, 2 * self._num_rest_tokens), _MAX_REST_TOKENS)
            self._resume_at = num_tokens + self._num_rest_tokens
            self._restart_draft_after_answer(num_draft_tokens)

    def _restart_draft_after_answer(self, num_tokens: int) -> None:
        self._scheduler.draft.record_restart(self._clock())
        self._encoded_draft.restart(self._answer.text, num_tokens)

    def _limit_draft_tokens(self) -> int:
        """How many tokens may be drafted now; 0: none, since that makes the target slower, or may."""
        scheduler = self._scheduler
        if self._gate.is_open:  # the estimates below need not be made
            return _DRAFT_TOKENS
        return self._gate.limit_draft_tokens(
            _DRAFT_TOKENS,
            self._clock(),
            is_streaming=scheduler.stream_at is not None,
            has_calls=self._has_other_server_calls(),
            can_pause=scheduler.can_pause_draft(),
            is_paying=scheduler.is_draft_paying(),
        )

    # ------------------------------------------------------------------------------------------- calls

    async def _encode_prompt(self) -> None:
        try:
            self._prompt_ids = await self._endpoint.encode_chat(self._request)
            self._scheduler.num_prompt_tokens, self._scheduler.can_send = len(self._prompt_ids), True
        except Exception as error:  # noqa: BLE001 - only speculation needs it
            self._give_up_rows(error)
        self._changed.set()

    def _list_context_ids(self) -> list[int]:
        """All that is confirmed, prompt included; raises UnsupportedError where the prompt could not be encoded."""
        if self._prompt_ids is None:
            raise UnsupportedError("the token ids of the prompt are not known")
        return [*self._prompt_ids, *self._scheduler.ids]

    def _has_other_server_calls(self) -> bool:
        """Whether the server has other work of ours beside its stream."""
        return bool(self._tasks) or self._scheduler.prompt_trial.is_running

    async def _run_prompt_trial(self, num_tokens: int) -> None:
        """Have some tokens of the prompt and the answer read, by a call like those of rows."""
        try:
            await self._verify(choose_prompt_stretch(self._list_context_ids(), num_tokens), [])
            self._scheduler.prompt_trial.note_answer()
        except Exception as error:  # noqa: BLE001 - the target goes on alone
            self._give_up_rows(error)

    def _send_row_call(self, call: RowCall) -> None:
        context_ids = self._list_context_ids()
        drafted_ids = list(call.assumed_ids[call.first :])
        context_ids += call.assumed_ids[: call.first]
        self._tasks[call] = asyncio.create_task(self._request_rows(call, context_ids, drafted_ids))

    async def _request_rows(self, call: RowCall, context_ids: list[int], drafted_ids: list[int]) -> None:
        sent_s = self._clock()
        try:
            tokens = await self._verify(context_ids, drafted_ids)
            if len(tokens) != call.num_rows:
                raise TargetError(f"the target gave {len(tokens)} tokens for {call.num_rows} prefixes")
            self._scheduler.record_call_answer(call, tokens, self._clock() - sent_s)
        except Exception as error:  # noqa: BLE001 - the target goes on alone
            if self._tasks.pop(call, None) is not None:
                self._give_up_rows(error)
        self._changed.set()

    def _cancel_call(self, call: RowCall) -> None:
        """Give up a call; how it ends is nobody's concern."""
        task = self._tasks.pop(call, None)
        if task is not None and not task.done():
            self._cancel_and_track_task(task)

    def _cancel_and_track_task(self, task: asyncio.Task[None]) -> None:
        task.cancel()
        self._closing.add(task)
        task.add_done_callback(self._forget_closed_task)

    def _forget_closed_task(self, task: asyncio.Task[None]) -> None:
        """It is closed: there may be room for another one."""
        self._closing.discard(task)
        self._changed.set()

    def _give_up_rows(self, failure: Exception | str) -> None:
        """The target goes on alone; the first reason is reported."""
        if self._has_given_up:
            return
        self._output.append(Fallback(failure) if isinstance(failure, str) else Fallback.from_error(failure))
        self._has_given_up = True
        for call in self._scheduler.stop_rows():
            self._cancel_call(call)
        self._changed.set()

    # ------------------------------------------------------------------------------------------ stream

    def _open_stream(self, opened: AbstractAsyncContextManager[AsyncIterator[StreamEvent]]) -> None:
        self._stream = StreamReader(
            opened,
            self._pair_stats.start_stream_timer(),
            begins_at=len(self._scheduler.ids),
            has_calls=self._has_other_server_calls,
            changed=self._changed.set,
            gate=self._gate,
        )

    def _close_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.add_times_to_baseline(self._pair_stats.baseline, count_prompt_characters(self._request))
            self._cancel_and_track_task(stream.task)

    async def _open_remainder_stream(self) -> None:
        """Have the target go on alone, after what is confirmed."""
        while len(self._closing) >= self._max_open:
            await asyncio.wait(self._closing, return_when=asyncio.FIRST_COMPLETED)
        limit = self._find_reached_answer_limit()
        if limit is not None:  # the stream broke off between its last token and its end
            self._finish, self._is_over = Finish("length", None, limit), True
            return
        if self._encoding is not None:
            await asyncio.wait([self._encoding])
        if self._prompt_ids is None and self._scheduler.ids:
            self._error = TransientError("the token ids of the prompt are not known")  # others go on, or begin anew
            return
        await self._sample_to_character_end()
        if self._is_over or self._error is not None:
            return
        rest = stream_remainder_plain(
            self._target,
            self._endpoint,
            self._request,
            prompt_ids=self._prompt_ids or (),
            answer_ids=list(self._scheduler.ids),
            text=self._answer.text,
        )
        self._open_stream(aclosing(rest))
        self._scheduler.record_stream_opened(self._clock())

    async def _handle_arrivals(self) -> None:
        """Take in what has come since the last time."""
        while (
            self._stream is not None and not self._is_over and self._error is None and not self._stream.arrivals.empty()
        ):
            await self._handle_stream_arrival(self._stream, self._stream.arrivals.get_nowait())
            if self._scheduler.stream_at is None and not self._is_plain:
                break
        while not self._is_over and (confirmed := self._scheduler.take_confirmed(self._clock())) is not None:
            self._num_from_rows += 1
            self._encoded_draft.confirm_token(confirmed.token.token_id)
            self._finish_if_answer_has_ended(confirmed.token)
            await self._emit_token_text(confirmed.token, confirmed.origin)
            self._report_rounds(self._scheduler.take_dropped_calls())
        if self._scheduler.stream_at is None and not self._is_plain:
            self._close_stream()

    async def _handle_stream_arrival(self, stream: StreamReader, arrival: StreamArrival) -> None:
        event = arrival.event
        scheduler = self._scheduler
        is_needed = self._is_plain or (scheduler.stream_at == len(scheduler.ids) and not scheduler.is_stream_at_rows)
        if isinstance(event, TextDelta):
            num_tokens = count_piece_tokens(event)
            if not self._is_plain:
                self._gate.add_streamed(num_tokens, arrival.seconds, arrival.drafting_s, has_calls=arrival.has_calls)
            stream.time_arrived_tokens(num_tokens, arrival)
        if isinstance(event, TextDelta) and event.token_ids is not None and not self._is_plain:
            await self._take_stream_tokens(stream, event, event.token_ids, arrival.arrived_s)
        elif isinstance(event, Progress):
            self._output.append(event)
        elif not is_needed or (isinstance(event, TextDelta) and self._can_rows_replace_stream()):
            self._scheduler.record_stream_ended(arrival.arrived_s)
        elif isinstance(event, TransientError) and self._scheduler.ids and not (self._is_plain or self._has_given_up):
            self._give_up_rows(event)  # a new stream goes on from the very tokens
            self._scheduler.record_stream_ended(arrival.arrived_s)
        elif isinstance(event, Exception):
            self._error = event
        elif event is None or isinstance(event, Finish):
            self._is_over = self._is_ended_by_stream = True
            self._finish = None if event is None else self._make_finish_of_whole_answer(event, stream)
        else:
            stream.stop_timing()
            self._pass_on_plain_stream(event)

    async def _take_stream_tokens(
        self, stream: StreamReader, delta: TextDelta, token_ids: Sequence[int], arrived_s: float
    ) -> None:
        """Text of the stream that says which tokens it is."""
        taken = self._scheduler.confirm_streamed_tokens(token_ids, arrived_s)
        for index in taken:
            self._encoded_draft.confirm_token(token_ids[index])
        text = await self._get_text_of_taken_tokens(stream, delta, token_ids, taken)
        stream.is_in_step, stream.is_at_boundary = text is not None, bool(delta.text)
        if text is not None:
            self._output.append(self._answer.add_delta(TextDelta(text, delta.origin, tuple(token_ids[taken.start :]))))
        else:
            for index in taken:
                await self._emit_token_text(SampledToken(token_ids[index], ""), "plain")
        self._report_rounds(self._scheduler.take_dropped_calls())

    async def _get_text_of_taken_tokens(
        self, stream: StreamReader, delta: TextDelta, token_ids: Sequence[int], taken: range
    ) -> str | None:
        """The text of those tokens of a piece that were taken; None: nobody can tell it from the rest.

        By its id alone the end's token would have a text, which is in no answer.
        """
        known_ids = token_ids[: taken.start]
        if stream.is_in_step and len(taken) == len(token_ids):
            return delta.text
        if not taken or taken.stop < len(token_ids) or not stream.is_at_boundary or self._answer.ends_inside_character:
            return None
        try:
            known_text = await self._endpoint.decode(known_ids) if known_ids else ""
        except LlmSpecError:
            return None
        is_beginning = delta.text.startswith(known_text) and REPLACEMENT_CHARACTER not in known_text
        return delta.text[len(known_text) :] if is_beginning else None

    def _can_rows_replace_stream(self) -> bool:
        """Whether rows can tell the tokens of a text that a stream gives without their ids."""
        return not self._is_plain and self._scheduler.are_rows_faster_than_stream()

    def _pass_on_plain_stream(self, event: StreamEvent) -> None:
        """The stream gives something else than tokens: what follows is its own, and nothing is speculated."""
        if not self._is_plain:
            what = "does not tell its token ids" if isinstance(event, TextDelta) else "does more than write text"
            self._give_up_rows(UnsupportedError(f"{self._target.name} {what}"))
        self._is_plain = True
        if isinstance(event, TextDelta):
            self._answer.text += event.text
        self._output.append(event)

    # ------------------------------------------------------------------------------------------ tokens

    async def _emit_token_text(self, token: SampledToken, origin: Origin) -> None:
        """Give the text of a confirmed token.

        Whatever becomes of it, the token stays: to draw it again because of what it is would change the distribution.
        """
        try:
            delta = await self._answer.add_token(token, origin)
        except LlmSpecError as error:
            self._give_up_rows(error)
            self._scheduler.record_stream_ended(self._clock())  # a new one goes on from what has text
            return
        if delta is not None:
            self._output.append(delta)

    def _finish_if_answer_has_ended(self, token: SampledToken) -> None:
        limit = self._find_reached_answer_limit()
        if token.is_end:
            self._finish = Finish("stop", None, "eos")
        elif limit is not None:
            self._finish = Finish("length", None, limit)
        self._is_over = self._finish is not None

    def _find_reached_answer_limit(self) -> StoppedBy | None:
        num_tokens, length = len(self._scheduler.ids), self._endpoint.context_length
        if self._request.max_tokens is not None and num_tokens >= self._request.max_tokens:
            return "max_tokens"
        is_full = length is not None and len(self._prompt_ids or ()) + num_tokens >= length
        return "context_length" if is_full else None

    def _report_rounds(self, calls: Iterable[RowCall]) -> None:
        """Report the calls that are over, where they gave tokens of the answer."""
        for call in calls:
            self._cancel_call(call)
            if not call.num_emitted:
                continue
            report = Round(
                index=self._num_rounds,
                num_draft_tokens=max(call.num_accepted, call.num_drafted - call.num_skipped),
                num_accepted_tokens=call.num_accepted,
                num_emitted_tokens=call.num_emitted,
                next_token_id=None if call.num_accepted == call.num_emitted else self._scheduler.ids[call.last_at],
                draft_s=sum(call.draft_s[call.num_skipped :]),
                verify_s=call.verify_s,
            )
            self._output.append(report)
            self._num_rounds += 1
            if call.num_accepted:
                self._num_rest_tokens = 0
            if not self._is_over and self._max_rounds is not None and self._num_rounds >= self._max_rounds:
                self._finish, self._is_over = Finish("length", None, "max_iterations"), True

    async def _end_answer(self) -> None:
        scheduler = self._scheduler
        self._report_rounds([*scheduler.take_dropped_calls(), *scheduler.calls])
        if self._finish is None:
            return
        if not self._is_ended_by_stream or not (self._stream is None or self._stream.is_in_step):
            delta = await self._answer.flush("plain")
            if delta is not None:  # its text was not known when it came
                self._output.append(delta)
        if not self._is_ended_by_stream:
            self._finish = replace(self._finish, usage=self.count_answer_usage(len(scheduler.ids)))
        self._output.append(self._finish)

    def _make_finish_of_whole_answer(self, finish: Finish, stream: StreamReader) -> Finish:
        """A stream's end, with the tokens of all of the answer where its own were counted, and the limit it came to."""
        if finish.finish_reason == "length" and finish.stopped_by is None and not self._is_plain:
            finish = replace(finish, stopped_by=self._find_reached_answer_limit())
        if finish.usage is None or not stream.begins_at:
            return finish
        return replace(finish, usage=self.count_answer_usage(stream.begins_at + finish.usage.output_tokens))

    async def _sample_to_character_end(self) -> None:
        """Token by token up to the end of a character, so that the text of all that follows begins with a whole one.

        Where no call gives the next token the beginning of the character is given up, and written anew.
        """
        try:
            await self._answer.check_for_cut_character()
            while self._answer.ends_inside_character and not self._is_over:
                token = await self._sample_one_token()
                self._scheduler.confirm_single_token(token.token_id)
                self._finish_if_answer_has_ended(token)
                delta = await self._answer.add_token(token, "plain")
                if delta is not None:
                    self._output.append(delta)
        except LlmSpecError as error:
            if isinstance(error, BudgetError) or self._is_over:  # it ends the answer
                self._error = error
                return
            self._scheduler.forget_last_tokens(self._answer.drop_held_ids())
            if self._request.sampling.temperature != 0:  # greedily the same tokens come again
                reason = "the beginning of a character was lost, and drawn again"
                self._output.append(GuaranteeWeakened("lossy", reason))

    async def _sample_one_token(self) -> SampledToken:
        """The target's own token after all that is confirmed."""
        context_ids = self._list_context_ids()
        sampling = replace(self._request.sampling, seed=None)  # with one seed all of these calls draw the same noise
        try:
            return (await self._endpoint.sample_next([context_ids], sampling))[0]
        except LlmSpecError:
            request = replace(self._request, sampling=sampling, max_tokens=1)
            return await sample_one_token_by_stream(self._endpoint, context_ids, request)


def _make_draft_request(request: ChatRequest) -> ChatRequest:
    """What the draft is asked: its likeliest tokens, which a sample of the target equals more often than its samples.

    A temperature that is left to the server stays so: some models take none.
    """
    if not request.sampling.temperature:
        return request
    return replace(request, sampling=replace(request.sampling, temperature=0.0))
