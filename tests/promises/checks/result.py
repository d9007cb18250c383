"""A result agrees with itself, with the events before it, and with the clock."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator

from llm_spec import Fallback, Finish, Retry, Round, SpeculativeFinish, SpeculativeResult, SpeculativeStats, Usage
from promises.checks.base import num_tokens
from promises.draw import Case
from promises.run import Outcome, Shown
from promises.target import REASONING, TRANSIENT

__all__ = ["find_contradictions", "find_wrong_stats"]


def find_contradictions(outcome: Outcome, shown: Shown) -> Iterator[str]:
    """Rounds, their sums, times, the JSON form, and what was shown."""
    result = shown.result
    if result is None:
        return
    try:
        json.dumps(result.to_dict(), allow_nan=False)
        result.summary()
    except (TypeError, ValueError, AttributeError) as error:
        yield f"to_dict() is not JSON: {error}"
    for item in result.rounds:
        yield from _round(result.strategy, item)
    yield from _sums(outcome, shown, result)
    yield from _times(outcome, shown, result)
    is_disturbed = outcome.case.odd or outcome.case.failing or any(other.ask.fault for other in outcome.shown)
    thoughts = REASONING if outcome.case.thinks and not shown.request.prefix else ""
    is_disturbed = is_disturbed or result.strategy in ("probe", "score", "judge")  # which ask for the answer alone
    if result.reasoning not in ("", thoughts) or (result.reasoning != thoughts and result.content and not is_disturbed):
        yield f"reasoning is {result.reasoning!r}; the target's is {thoughts!r}"
    yield from _silent_failures(outcome, shown, result)
    if not shown.ask.whole and not shown.has_left:
        yield from _events(outcome.case, shown, result)


def find_wrong_stats(outcome: Outcome) -> Iterator[str]:
    """A decoder's statistics are the sums of its results; answers that were not waited for may be among them."""
    answered = [s for s in outcome.shown if s.result is None or s.result.plain_reason != "budget"]  # not even begun
    results = [shown.result for shown in answered if shown.result is not None]
    stats, num_others = outcome.stats, sum(shown.result is None for shown in answered)
    if not 0 <= stats.num_requests - len(results) <= num_others:
        yield f"the decoder counts {stats.num_requests} answers; there are {len(results)}"
    if num_others or any(not isinstance(result.draft_usage, Usage | None) for result in results):
        return
    if Counter(result.strategy for result in results) != stats.strategies:
        yield f"the decoder counts {stats.strategies}"
    if sum((result.usage or Usage() for result in results), Usage()) != stats.usage:
        yield f"the decoder counts {stats.usage}"
    total = sum((result.stats for result in results), SpeculativeStats())
    if (stats.rounds.num_rounds, stats.rounds.num_draft_tokens) != (total.num_rounds, total.num_draft_tokens):
        yield f"the decoder counts {stats.rounds}"


def _silent_failures(outcome: Outcome, shown: Shown, result: SpeculativeResult) -> Iterator[str]:
    if result.fallbacks or result.stopped_by in ("deadline", "budget"):  # which may come together with a failure
        return
    has_time_after_end = bool(result.retries) and outcome.case.close_s > 0  # while the broken stream is being closed
    if outcome.draft.num_failed[shown.tag] and not has_time_after_end:
        yield "its draft failed, and no fallback says so"
    # a race goes on without a stream that fails; an answer that has all its tokens, or its stop string, needs no more
    is_excused = result.strategy == "race" or result.finish_reason == "length" or result.stopped_by == "stop_string"
    if _has_target_failed(outcome, shown) and not (result.retries or is_excused):
        yield "its target failed, and neither a fallback nor a retry says so"


def _has_target_failed(outcome: Outcome, shown: Shown) -> bool:
    """Whether a call failed. A silent one has not, unless it was waited for as long as the timeouts allow."""
    case, fault = outcome.case, shown.ask.fault
    if fault is None or fault.how != "silence":
        return outcome.ledger.faults[shown.tag] > 0
    patience_s = case.between_chunks_s if fault.at else case.first_chunk_s
    return patience_s is not None and outcome.ledger.silent_s[shown.tag] >= patience_s - case.round_trip_s


def _round(strategy: str, item: Round) -> Iterator[str]:
    if not 0 <= item.num_accepted_tokens <= item.num_draft_tokens:
        yield f"{item} accepted more than was drafted"
    by_tokens = strategy in ("tokens", "probe", "score")
    if item.num_emitted_tokens < 0 or (by_tokens and item.num_emitted_tokens > item.num_accepted_tokens + 1):
        yield f"{item} emitted more than it accepted and one"
    if item.draft_s < 0 or item.verify_s < 0:
        yield f"{item} took negative time"


def _sums(outcome: Outcome, shown: Shown, result: SpeculativeResult) -> Iterator[str]:
    stats, rounds = result.stats, result.rounds
    if [item.index for item in rounds] != list(range(len(rounds))):
        yield f"the rounds' indices are {[item.index for item in rounds]}"
    if stats.num_accepted_draft_tokens > stats.num_draft_tokens:
        yield f"{stats.num_accepted_draft_tokens} of {stats.num_draft_tokens} drafted tokens are accepted"
    if stats.num_emitted_tokens != sum(item.num_emitted_tokens for item in rounds):
        yield "the rounds' emitted tokens do not add up"
    # tokens of a stop string are in a round, and not in the answer
    if result.strategy in ("probe", "score") and not shown.ask.stop:
        _, most = num_tokens(outcome, shown, result.content)
        if stats.num_emitted_tokens > most + 1:
            yield f"rounds emitted {stats.num_emitted_tokens} tokens; the answer has {most}"


def _times(outcome: Outcome, shown: Shown, result: SpeculativeResult) -> Iterator[str]:
    timings, took_s = result.timings, shown.ended_s - shown.started_s
    if timings.first_text_s is not None and timings.first_text_s > timings.total_s:
        yield f"first text after {timings.first_text_s} s of {timings.total_s} s"
    if timings.first_text_s is None and result.content:
        yield "there is text, and no time of the first"
    if not outcome.case.is_local and timings.total_s > took_s + 1e-6:
        yield f"total_s is {timings.total_s}; the request took {took_s}"


def _events(case: Case, shown: Shown, result: SpeculativeResult) -> Iterator[str]:
    events = [event for _, event in shown.events]
    if not isinstance(events[-1], SpeculativeFinish) or sum(isinstance(event, Finish) for event in events) != 1:
        yield f"the last event is {events[-1]!r}"
    if tuple(event for event in events if isinstance(event, Round)) != result.rounds:
        yield "the rounds shown are not the result's"
    for kind, reasons in ((Fallback, result.fallbacks), (Retry, result.retries)):
        seen = [event for event in events if isinstance(event, kind)]
        if len(seen) != len(reasons):
            yield f"{reasons} in the result; shown {seen}"
    fault = shown.ask.fault
    is_refused = case.budget is not None or case.max_request_tokens is not None
    is_refused = is_refused or (fault is not None and fault.how not in TRANSIENT)
    if len(result.fallbacks) > 1 + is_refused:  # one for the draft, one where a call is refused
        yield f"that speculation was given up is told more than once: {result.fallbacks}"
