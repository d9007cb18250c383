"""AnswerRecorder: collects the events of one request and builds its SpeculativeResult."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Final, NamedTuple

from llm_spec.contract.events import (
    AnswerDetail,
    ChatResponse,
    Fallback,
    Finish,
    GuaranteeWeakened,
    LocalTimings,
    Progress,
    ReasoningDelta,
    Retry,
    Round,
    StreamEvent,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)
from llm_spec.contract.messages import ReasoningDetail, ToolCall
from llm_spec.contract.request import ChatRequest
from llm_spec.contract.response import append_tool_call_delta
from llm_spec.contract.stats import SpeculativeStats
from llm_spec.decoder.answer_order import AnswerOrder
from llm_spec.decoder.budget import AnswerReservation, CostTracker
from llm_spec.decoder.choice import StrategyChoice
from llm_spec.decoder.metering import TokenMeter
from llm_spec.decoder.pricing import get_billed_tier
from llm_spec.decoder.result import PlainReason, SpeculativeResult, Timings
from llm_spec.measure.baseline import SecondsRange, TargetSpeedBaseline, count_prompt_characters
from llm_spec.measure.clock import get_loop_clock
from llm_spec.measure.pair_stats import PairStats
from llm_spec.measure.tokens import count_answer_tokens_in_event, count_piece_tokens, split_into_pieces
from llm_spec.strategies.base import TextGuarantee, find_multi_call_refusal
from llm_spec.strategies.registry import PLAIN, StrategyEntry

__all__ = ["AnswerRecorder"]

_EXACT: Final = TextGuarantee("exact", same_text=True)
_NO_USAGE: Final = Usage()
_NO_TIMINGS: Final = LocalTimings(0.0, 0.0)


class _Comparison(NamedTuple):
    """The target's time alone for an answer: an estimate, its bounds, and its basis."""

    plain_s: float | None = None
    range_s: SecondsRange | None = None
    basis: str | None = None


class AnswerRecorder:
    """Collects one request's events. The event loop's clock starts when it is made.

    The request's target and draft must be called through `target_meter` and `draft_meter`, which
    charge the allowance.
    """

    def __init__(self, request: ChatRequest, cost_tracker: CostTracker | None = None) -> None:
        self.request = request
        self.text_guarantee = _EXACT  # of the strategy, as it was chosen
        self.finish: Finish | None = None
        self.allowance: AnswerReservation | None = (
            None if cost_tracker is None else cost_tracker.open_answer_reservation()
        )
        self.target_meter = TokenMeter(
            request, self.allowance, None if cost_tracker is None else cost_tracker.target_price
        )
        self.draft_meter = TokenMeter(
            request, self.allowance, None if cost_tracker is None else cost_tracker.draft_price
        )
        self._clock = get_loop_clock()
        self._started_s = self._clock()
        self.draft_name: str | None = None  # the draft of this request, or None
        self.consumer_wait_s = 0.0  # the time that the consumer of the events took
        # True if rounds confirm tokens by scores instead of writing them
        self.is_read_from_scores = False
        self.choosing_strategy_s = 0.0  # feature discovery, before the target was called
        self._first_text_s: float | None = None
        self._texts: list[TextDelta] = []
        self._reasoning: list[ReasoningDelta | ReasoningDetail] = []
        self._details: list[AnswerDetail] = []
        self._calls: dict[int, ToolCall] = {}
        self._order = AnswerOrder()
        self._rounds: list[Round] = []
        self._fallbacks: list[Fallback] = []
        # by the target, which was then called without speculation
        self.was_speculation_refused = False
        self._retries: list[Retry] = []
        self._weakened: list[GuaranteeWeakened] = []
        self._other_deltas: list[StreamEvent] = []  # of the answer, but not text
        self._num_tokens_before_break = 0  # tokens that came before the answer last broke off
        self._local_timings = _NO_TIMINGS

    @property
    def content(self) -> str:
        """The text so far."""
        return "".join([delta.text for delta in self._texts])

    def _join_text_logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """Return the text's logprobs, or None if they were not requested or not sent."""
        if self.request.top_logprobs is None:
            return None
        found = [delta.logprobs for delta in self._texts if delta.logprobs is not None]
        if self._texts and not found:
            return None
        return tuple(logprob for logprobs in found for logprob in logprobs)

    @property
    def _num_emitted_tokens(self) -> int:
        return sum(map(count_piece_tokens, self._texts)) + sum(map(count_answer_tokens_in_event, self._other_deltas))

    @property
    def has_output(self) -> bool:
        """True if any part of the answer has been emitted."""
        return bool(self._texts or self._reasoning or self._calls or self._details)

    @property
    def is_refused_by_budget(self) -> bool:
        """True if it ended before any call was made, because no budget was left."""
        is_cut = self.finish is not None and self.finish.stopped_by == "budget"
        return is_cut and not self.target_meter.num_calls

    @property
    def billed_tier(self) -> str | None:
        """The tier that the server says it served, if its price may differ."""
        finish = self.finish
        return None if finish is None else get_billed_tier(finish.service_tier, finish.speed)

    @property
    def is_continued(self) -> bool:
        """True if the answer broke off and another call continued it."""
        return any(retry.is_continued for retry in self._retries)

    @property
    def num_counted_tokens(self) -> int | None:
        """Tokens of the answer, or None if they were not counted and some have no ids."""
        usage = None if self.finish is None else self.finish.usage
        if usage is not None:
            return self._num_tokens_before_break + usage.output_tokens + usage.approved_output_tokens
        has_ids = not self._other_deltas and all(delta.token_ids is not None for delta in self._texts)
        return self._num_emitted_tokens if has_ids else None

    @property
    def usage(self) -> Usage | None:
        """Tokens of all calls of the target, or None if the only call was not counted.

        It also has the tokens that the target alone would not have needed, and those of a
        prediction. A call that broke off is always counted.
        """
        usage = self._sum_target_usage()
        if usage is None or not self.request.prediction:
            return usage
        # the provider counted them
        if usage.accepted_prediction_tokens or usage.rejected_prediction_tokens:
            return usage
        stats = SpeculativeStats.from_rounds(self._rounds)
        return replace(
            usage,
            accepted_prediction_tokens=stats.num_accepted_draft_tokens,
            rejected_prediction_tokens=stats.num_wasted_draft_tokens,
        )

    def _sum_target_usage(self) -> Usage | None:
        meter = self.target_meter
        counted = None if self.finish is None else self.finish.usage
        if not meter.num_calls or (counted is None and not self.is_continued and meter.is_one_uncounted_call):
            return counted
        total, own = meter.usage, counted or _NO_USAGE
        num_own, num_approved = own.output_tokens, own.approved_output_tokens
        if counted is None:
            num_own = self._num_emitted_tokens - self._num_tokens_before_break
        if (self.text_guarantee.guarantee == "judged" or self.is_read_from_scores) and (
            counted is None or self.is_continued
        ):
            num_approved = sum(
                count_piece_tokens(delta) for delta in self._texts if self._is_unwritten_by_target(delta)
            )
            num_own -= num_approved
        # a verdict is not part of the answer
        is_whole = meter.num_calls == 1 and self.text_guarantee.guarantee != "judged"
        num_own = total.output_tokens if is_whole else self._num_tokens_before_break + num_own
        num_extra = own.extra_input_tokens + max(0, total.input_tokens - meter.num_prompt_tokens)
        num_cancelled = own.cancelled_output_tokens + max(0, total.output_tokens - num_own)
        found = (total.extra_input_tokens, total.cancelled_output_tokens, total.approved_output_tokens)
        if found == (num_extra, num_cancelled, num_approved):  # nearly always
            return total
        return replace(
            total,
            extra_input_tokens=num_extra,
            cancelled_output_tokens=num_cancelled,
            approved_output_tokens=num_approved,
        )

    def _is_unwritten_by_target(self, delta: TextDelta) -> bool:
        """Return True if the target did not write the text, for strategies that allow that."""
        return delta.origin != "plain" if self.is_read_from_scores else delta.origin == "accepted"

    @property
    def draft_usage(self) -> Usage | None:
        """Tokens that all calls of the draft read and wrote, or None if it was not called."""
        if self.draft_meter.num_calls:
            return self.draft_meter.usage
        if self.finish is not None and self.finish.draft_usage is not None:
            return self.finish.draft_usage
        # by a local model, for an answer that was cut off
        num_drafted = self.target_meter.num_drafted_tokens
        return Usage(output_tokens=num_drafted) if num_drafted else None

    @property
    def has_all_tokens(self) -> bool:
        """True if the answer has as many tokens as the request allows."""
        return self.request.max_tokens is not None and self._num_emitted_tokens >= self.request.max_tokens

    def build_rest_request(self) -> ChatRequest | None:
        """Return the request for the rest of the answer, or None if no request can ask for it.

        The text so far is not in it. Tokens without ids are counted as the pieces that came.
        """
        request = self.request
        if self._reasoning or self._calls or self.has_all_tokens or find_multi_call_refusal(request) is not None:
            return None
        left = None if request.max_tokens is None else request.max_tokens - self._num_emitted_tokens
        return replace(request, max_tokens=left)

    def discard_answer(self) -> None:
        """Forget the answer so far. The tokens of its calls stay counted.

        None of the answer may have been emitted.
        """
        self._first_text_s = None
        self._num_tokens_before_break = 0
        for kept in (self._texts, self._reasoning, self._other_deltas, self._rounds, self._weakened):
            kept.clear()
        self._calls.clear()
        self._order.clear()

    @property
    def _is_all_written_by_target(self) -> bool:
        return all(delta.origin == "plain" for delta in self._texts)

    def _find_approved_spans(self) -> tuple[tuple[int, int], ...]:
        """Return the ranges of accepted text, with neighbours joined."""
        spans: list[tuple[int, int]] = []
        end = 0
        for delta in self._texts:
            start, end = end, end + len(delta.text)
            if delta.origin != "accepted":
                continue
            if spans and spans[-1][1] == start:
                start = spans.pop()[0]
            spans.append((start, end))
        return tuple(spans)

    async def iterate_and_time_consumer(self, events: AsyncGenerator[StreamEvent]) -> AsyncGenerator[StreamEvent]:
        """Yield `events` and add up the time that their consumer takes; closes them at the end."""
        seconds = self._clock
        async with aclosing(events):
            async for event in events:
                given_s = seconds()
                yield event
                self.consumer_wait_s += seconds() - given_s

    def add_event(self, event: StreamEvent) -> None:
        """Add an event."""
        if isinstance(event, TextDelta):  # nearly always
            if self._first_text_s is None:
                self._first_text_s = self._clock() - self._started_s
            self._texts.append(event)
            return
        match event:
            case ReasoningDelta():
                self._other_deltas.append(event)
                self._reasoning.append(event)
                self._order.note_reasoning(len(self._texts), len(event.text))
            case ReasoningDetail():
                self._reasoning.append(event)
            case AnswerDetail():
                self._other_deltas.append(event)
                self._details.append(event)
            case ToolCallDelta():
                self._other_deltas.append(event)
                if event.index not in self._calls:
                    self._order.note_call(len(self._texts), event.index)
                self._calls[event.index] = append_tool_call_delta(self._calls.get(event.index), event)
            case Finish():
                self.finish = event
            case _:
                self._add_progress_event(event)

    def _add_progress_event(self, event: Progress) -> None:
        match event:
            case Round():
                self._rounds.append(event)
            case Fallback():
                self._fallbacks.append(event)
                self.was_speculation_refused = self.was_speculation_refused or (
                    event.cause == "refused" and not self.has_output
                )
            case Retry():
                self._retries.append(event)
                self._num_tokens_before_break = self._num_emitted_tokens
            case GuaranteeWeakened():
                self._weakened.append(event)
            case LocalTimings():
                self._local_timings = event
            case _:
                pass

    def add_response(self, response: ChatResponse) -> None:
        """Add an answer that came whole."""
        if response.reasoning:
            self.add_event(ReasoningDelta(response.reasoning))
        if response.content:
            self.add_event(TextDelta(response.content, logprobs=response.logprobs))
        self._calls = dict(enumerate(response.message.tool_calls))
        self._details = list(response.details)
        self.finish = Finish(
            response.finish_reason,
            response.usage,
            response.stopped_by,
            stop_string=response.stop_string,
            service_tier=response.service_tier,
            speed=response.speed,
            response_id=response.response_id,
        )

    def add_plain_steps_to_baseline(self, baseline: TargetSpeedBaseline) -> None:
        """Add this answer's plain steps, which a model in this process made, to the baseline."""
        if self.finish is not None and self.finish.usage is not None:
            num_concurrent = self._local_timings.num_concurrent
            baseline.add_plain_steps(self.finish.usage.input_tokens, self._rounds, num_concurrent=num_concurrent)

    def _find_kept_guarantee(self) -> TextGuarantee:
        """Return the guarantee that holds for the text."""
        text_guarantee = self.text_guarantee
        if text_guarantee.guarantee == "judged" and self._is_all_written_by_target:
            # the target got the caller's request, and nothing else
            text_guarantee = TextGuarantee("exact", same_text=False)
        for event in self._weakened:
            text_guarantee = text_guarantee.weaken_to(event.guarantee)
        return text_guarantee

    def build_result(
        self,
        finish: Finish,
        *,
        strategy_choice: StrategyChoice,
        target: str,
        draft: str | None,
        cost_tracker: CostTracker,
        pair_stats: PairStats,
    ) -> SpeculativeResult:
        """Build the result of the ended answer."""
        total_s = self._clock() - self._started_s
        stats = SpeculativeStats.from_rounds(self._rounds, num_fallbacks=len(self._fallbacks))
        text_guarantee = self._find_kept_guarantee()
        usage, draft_usage = self.usage, self.draft_usage
        reason, detail = self._find_plain_reason(strategy_choice, pair_stats)
        comparison = self._compare_with_plain(strategy_choice, usage, total_s, pair_stats.baseline)
        return SpeculativeResult(
            content=self.content,
            finish_reason=finish.finish_reason,
            stopped_by=finish.stopped_by,
            stop_string=finish.stop_string,
            details=tuple(self._details),
            order=self._order.list_parts(self._texts, sorted(self._calls)),
            service_tier=finish.service_tier,
            speed=finish.speed,
            response_id=finish.response_id,
            strategy=strategy_choice.strategy.name,
            guarantee=text_guarantee.guarantee,
            same_text=text_guarantee.same_text,
            target=target,
            draft=draft,
            seed=self.request.sampling.seed,
            stats=stats,
            rounds=tuple(self._rounds),
            timings=Timings(
                total_s=total_s,
                first_text_s=self._first_text_s,
                draft_s=stats.draft_s,
                verify_s=stats.verify_s,
            ),
            usage=usage,
            draft_usage=draft_usage,
            fallbacks=tuple([fallback.reason for fallback in self._fallbacks]),
            retries=tuple([retry.reason for retry in self._retries]),
            logprobs=self._join_text_logprobs(),
            tool_calls=tuple([call for _, call in sorted(self._calls.items())]),
            reasoning="".join([event.text for event in self._reasoning if isinstance(event, ReasoningDelta)]),
            reasoning_events=tuple(self._reasoning),
            approved_spans=self._find_approved_spans() if text_guarantee.guarantee == "judged" else (),
            cost=cost_tracker.compute_cost(usage, draft_usage, has_drafted=draft is not None, tier=self.billed_tier),
            plain_s=comparison.plain_s,
            plain_range_s=comparison.range_s,
            speedup_basis=comparison.basis,
            plain_reason=reason,
            plain_detail=detail,
            lookahead=self._local_timings.lookahead,
        )

    def _find_plain_reason(
        self, strategy_choice: StrategyChoice, pair_stats: PairStats
    ) -> tuple[PlainReason | None, str | None]:
        """Return why nothing was speculated, and the detail; both None if something was."""
        if strategy_choice.plain_reason is not None or strategy_choice.strategy.only_measures:
            return strategy_choice.plain_reason, strategy_choice.plain_detail
        if any(report.num_draft_tokens for report in self._rounds):
            return None, None
        if any(not retry.is_continued for retry in self._retries):
            return "retried", self._retries[0].reason
        if self._fallbacks:
            return self._fallbacks[-1].cause, self._fallbacks[-1].reason
        return self._find_unverified_reason(strategy_choice.strategy, pair_stats), None

    def _find_unverified_reason(self, strategy: StrategyEntry, pair_stats: PairStats) -> PlainReason | None:
        """Return why no drafted token was verified, or none drafted; None if that is not known."""
        drafted = self.draft_usage
        if not strategy.reports_drafts:
            return None
        if strategy.target != "server":
            return "nothing_drafted"
        if pair_stats.draft_load.is_harmful:
            return "not_worthwhile"
        if drafted is None or not drafted.output_tokens:
            return "nothing_drafted"
        verification = pair_stats.streams if strategy.simulation == "streams" else pair_stats.rows
        # if it is measured, the answer itself has compared it with the target alone
        return "not_worthwhile" if verification.is_measured else "not_verified"

    def _compare_with_plain(
        self, strategy_choice: StrategyChoice, usage: Usage | None, total_s: float, baseline: TargetSpeedBaseline
    ) -> _Comparison:
        """Estimate the target's time alone for this answer."""
        if strategy_choice.plain_reason in ("configured", "no_draft"):
            return _Comparison()  # there was nothing to gain
        if strategy_choice.strategy is PLAIN:
            own_s = max(0.0, total_s - self.choosing_strategy_s)
            return _Comparison(own_s, (own_s, own_s), "this answer is its own")
        num_tokens, num_characters = (
            self._count_tokens_to_compare(usage, baseline),
            count_prompt_characters(self.request),
        )
        if strategy_choice.strategy.is_local:
            found = self._compare_with_plain_steps(num_tokens, total_s, baseline)
        else:
            found = _Comparison(
                baseline.estimate_answer_s(num_characters, num_tokens),
                baseline.find_answer_range_s(num_characters, num_tokens),
                f"measured on {baseline.num_answers} of its own answers",
            )
        if found.plain_s is None:
            return _Comparison()
        # with a slow consumer the target alone has to wait for it, too
        least_s = (baseline.estimate_answer_s(num_characters, 1) or 0.0) + self.consumer_wait_s
        range_s = None if found.range_s is None else (max(found.range_s[0], least_s), max(found.range_s[1], least_s))
        return _Comparison(max(found.plain_s, least_s), range_s, found.basis)

    def _count_tokens_to_compare(self, usage: Usage | None, baseline: TargetSpeedBaseline) -> int:
        """Count this answer's tokens in the way of the target's own answers."""
        if not baseline.is_counted:
            return len(split_into_pieces(self.content)) + sum(map(count_answer_tokens_in_event, self._other_deltas))
        if usage is None:
            return self._num_emitted_tokens
        num_tokens = usage.answer_tokens - (usage.reasoning_tokens if not self._reasoning else 0)
        if self.text_guarantee.guarantee == "judged":  # approved text is counted in pieces
            num_tokens += round((baseline.tokens_per_piece - 1.0) * usage.approved_output_tokens)
        return num_tokens

    def _compare_with_plain_steps(self, num_tokens: int, total_s: float, baseline: TargetSpeedBaseline) -> _Comparison:
        """Estimate the same answer in plain steps.

        Time that belongs neither to a round nor to the draft stays the same.
        """
        num_prompt = 0 if self.finish is None or self.finish.usage is None else self.finish.usage.input_tokens
        local, num_rounds = self._local_timings, max(1, len(self._rounds))
        steps_s = baseline.estimate_plain_steps_s(num_prompt, num_tokens, num_concurrent=local.num_concurrent)
        if steps_s is None:
            return _Comparison()
        range_s = baseline.find_plain_steps_range_s(num_prompt, num_tokens, num_concurrent=local.num_concurrent)
        rounds_s = sum(report.draft_s + report.verify_s for report in self._rounds) + local.between_s
        others_s = max(0.0, total_s - self.consumer_wait_s - local.open_draft_s - rounds_s)
        others_s += num_tokens * local.between_s / num_rounds
        return _Comparison(
            others_s + steps_s,
            None if range_s is None else (others_s + range_s[0], others_s + range_s[1]),
            f"measured on {baseline.num_steps} of its own tokens",
        )
