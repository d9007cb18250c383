"""Caps hold, requests end by their deadline, and no more calls are open than may be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from llm_spec import SpeculativeResult, TextDelta
from promises.checks.base import EPSILON_S, has_by_text, has_one_text, is_cut, is_judged, num_shown, num_tokens
from promises.run import Outcome, Shown

__all__ = ["find_broken_bounds", "find_broken_limits"]

_BY_IDS: Final = ("provider", "provider from the start")  # others are counted in pieces of text
_READ_AHEAD: Final = 16  # pieces of a draft that may have come before it is left
_LOCAL_SLACK_S: Final = 5.0  # a local model's time is real
_LOCAL_PIECES: Final = 8  # that may be ready when its deadline comes
_FINISH_REASONS: Final = {
    "eos": "stop",
    "stop_string": "stop",
    **dict.fromkeys(("max_tokens", "max_total_tokens", "max_iterations", "budget", "deadline"), "length"),
    "context_length": "length",
}


def find_broken_limits(outcome: Outcome) -> Iterator[str]:
    """No more requests are at the target at once than the limit allows."""
    limit = outcome.case.limit
    if limit is not None and outcome.ledger.most_requests > limit:
        yield f"{outcome.ledger.most_requests} requests were at the target at once; the limit is {limit}"


def find_broken_bounds(outcome: Outcome, shown: Shown) -> Iterator[str]:
    """What a request may take."""
    case, most_open = outcome.case, outcome.ledger.most_open[shown.tag]
    most = case.max_concurrent_streams
    if most_open > most:
        yield f"{most_open} calls to the target were open at once; max_concurrent_streams is {most}"
    if case.deadline_s is not None:
        yield from _deadline(outcome, shown, case.deadline_s)
    yield from _drafted(outcome, shown)
    if shown.result is not None:
        yield from _caps(outcome, shown, shown.result)
        yield from _stopped_by(outcome, shown, shown.result)


def _deadline(outcome: Outcome, shown: Shown, deadline_s: float) -> Iterator[str]:
    """What comes later than the deadline: nothing but what pauses of the consumer held up.

    A consumer that is slow gets what was verified in time, late; a pause of its own may hold up the end of the work.
    """
    case, latest = outcome.case, shown.started_s + deadline_s
    late = shown.ended_s - latest - case.close_s - sum(end - start for start, end in shown.pauses)
    if late > (_LOCAL_SLACK_S if case.is_local else EPSILON_S):
        yield f"ends {late:.3f} s after its deadline of {deadline_s} s"
    latest = next((end for start, end in shown.pauses if start <= latest < end), latest)
    late = outcome.ledger.last_s[shown.tag] - latest
    if late > EPSILON_S:
        yield f"the target generates {late:.3f} s after the deadline of {deadline_s} s"
    late_s = [at for at, event in shown.events if isinstance(event, TextDelta) and at > latest + shown.ask.pause_s]
    if case.is_local and shown.ask.pause_s and len(late_s) > _LOCAL_PIECES:
        yield f"{len(late_s)} pieces of text come after the deadline of {deadline_s} s"


def _drafted(outcome: Outcome, shown: Shown) -> Iterator[str]:
    most, ledger, result = outcome.case.max_draft_tokens, outcome.draft, shown.result
    if most is not None:
        if ledger.most_requested[shown.tag] > most:
            yield f"a draft may write {ledger.most_requested[shown.tag]} tokens; max_draft_tokens is {most}"
        num_words, num_calls = ledger.num_words[shown.tag], ledger.num_calls[shown.tag]
        if num_words > most + num_calls:  # of each call it may have begun one more
            yield f"{num_words} words were drafted; max_draft_tokens is {most}"
        in_tokens = outcome.case.is_local or outcome.case.draft in _BY_IDS
        if in_tokens and result is not None and result.stats.num_draft_tokens > most:
            yield f"{result.stats.num_draft_tokens} tokens were drafted; max_draft_tokens is {most}"
    if ledger.most_read[shown.tag] > _READ_AHEAD:
        yield f"{ledger.most_read[shown.tag]} pieces more were read of a draft than it may write"


def _caps(outcome: Outcome, shown: Shown, result: SpeculativeResult) -> Iterator[str]:
    case = outcome.case
    if case.max_iterations is not None and len(result.rounds) > case.max_iterations:
        yield f"{len(result.rounds)} rounds; max_iterations is {case.max_iterations}"
    caps = [cap for cap in (shown.ask.max_tokens, case.max_total_tokens) if cap is not None]
    if caps and not case.is_local and not is_judged(case, shown):
        least, _ = num_tokens(outcome, shown, result.content)
        if has_by_text(outcome, shown):  # what is not seen of a text cannot be counted
            least = num_shown(outcome, shown, result.content)
        if least > min(caps):
            yield f"the answer has {least} tokens; it may have {min(caps)}"


def _stopped_by(outcome: Outcome, shown: Shown, result: SpeculativeResult) -> Iterator[str]:
    """`finish_reason` and `stopped_by` name what ended the answer."""
    case, plain, ask = outcome.case, outcome.plain[shown.tag], shown.ask
    by, reason = result.stopped_by, result.finish_reason
    if by is not None and _FINISH_REASONS.get(by) != reason:
        yield f"finish_reason {reason} and stopped_by {by}"
    is_set = {
        "max_tokens": ask.max_tokens is not None,
        "max_total_tokens": case.max_total_tokens is not None,
        "max_iterations": case.max_iterations is not None,
        "budget": case.budget is not None or case.max_request_tokens is not None,
        "deadline": case.deadline_s is not None,
        "stop_string": bool(ask.stop),
    }
    if not is_set.get(by or "", True):
        yield f"stopped_by {by}, which is not set"
    if case.by == "text" and has_one_text(case, shown) and not is_cut(shown) and not is_judged(case, shown):
        expected = "stop" if plain.is_ended else "length"
        if reason != expected:
            yield f"finish_reason is {reason} (stopped_by {by}); the answer's own is {expected}"
