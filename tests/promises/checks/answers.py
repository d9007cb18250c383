"""A request ends with an answer wherever the target alone would have given one, and only in documented ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from llm_spec import CircuitOpenError, InvalidRequestError, Retry, TargetError, UnsupportedError
from promises.checks.base import EPSILON_S, can_be_plain, has_by_text
from promises.draw import Case
from promises.run import Outcome, Shown
from promises.target import TRANSIENT, Fault

__all__ = ["find_wrong_ends"]

_FAILURES_OF_A_CIRCUIT: Final = 5
_TOPS: Final = 4  # what the target reports for a position
_BY_IDS: Final = ("ids", "ids only", "scorer")


def find_wrong_ends(outcome: Outcome, shown: Shown) -> Iterator[str]:
    """Errors are the library's own, and only for a target that failed, never for a draft."""
    yield from _cancellation(shown)
    yield from _attempts(outcome, shown)
    error = shown.error
    if isinstance(error, UnsupportedError):
        yield from _refusal(outcome, shown, error)
    elif isinstance(error, TargetError | InvalidRequestError):
        yield from _failure(outcome, shown, error)
    elif error is not None:
        yield f"raises {type(error).__name__}: {error}"
    elif shown.result is None and not (shown.has_left or shown.is_cancelled or shown.has_hung):
        yield "ends without a result"


def _cancellation(shown: Shown) -> Iterator[str]:
    if shown.has_hung:
        yield "hangs"
    if shown.is_cancelled and shown.cancel_sent_s is None:
        yield "ends with CancelledError although nobody cancelled it"
    sent_s = shown.cancel_sent_s
    if sent_s is not None and not shown.is_cancelled and shown.ended_s > sent_s + EPSILON_S:
        yield "swallows the caller's cancellation"


def _attempts(outcome: Outcome, shown: Shown) -> Iterator[str]:
    """No more attempts than the policy allows; an answer without speculation is one call for each."""
    case, num_calls = outcome.case, outcome.ledger.num_calls[shown.tag, "any"]
    num_retries = sum(isinstance(event, Retry) for _, event in shown.events)
    if num_retries >= case.max_attempts:
        yield f"is tried {num_retries} times again; max_attempts is {case.max_attempts}"
    if case.strategy == "plain" and num_calls > case.max_attempts:
        yield f"takes {num_calls} calls without speculation; max_attempts is {case.max_attempts}"


def _refusal(outcome: Outcome, shown: Shown, error: UnsupportedError) -> Iterator[str]:
    case = outcome.case
    is_lost = any(other.ask.fault is not None and other.ask.fault.how == "lost" for other in outcome.shown)
    if case.strategy in ("auto", "plain"):
        yield f"raises {error!r}"
    elif not is_lost and case.draft != "none" and not can_be_plain(case, shown) and _SERVES[case.strategy](case, shown):
        yield f"raises {error!r} for a pair and a request that the strategy can serve"


def _can_score(case: Case, shown: Shown) -> bool:
    ask = shown.ask
    has_few = ask.temperature is not None and ask.top_k is not None and ask.top_k <= _TOPS
    return case.kind == "scorer" and (ask.temperature == 0.0 or has_few)


# What README's table says of the strategies that are given by name.
_SERVES: Final[Mapping[str, Callable[[Case, Shown], bool]]] = {
    "race": lambda case, _: (case.kind == "text" and case.continues) or case.kind in _BY_IDS,
    "probe": lambda case, _: case.kind in _BY_IDS,
    "score": _can_score,
    "predict": lambda case, _: case.takes_prediction,
    "judge": lambda case, shown: not case.is_local and not shown.request.prefix,
    "regenerate": lambda case, _: not case.is_local,
    "tokens": lambda case, _: case.is_local,
}


def _failure(outcome: Outcome, shown: Shown, error: TargetError | InvalidRequestError) -> Iterator[str]:
    num_faults = outcome.ledger.faults.total()
    if _would_answer_alone(outcome, shown):
        yield f"raises {type(error).__name__} where the target alone would have answered: {error}"
    if isinstance(error, CircuitOpenError) and num_faults < _FAILURES_OF_A_CIRCUIT:
        yield f"is refused after {num_faults} faults: {error}"
    if isinstance(error, TargetError) and not shown.ask.whole and error.partial_text != shown.text:
        yield f"its error's partial text is {error.partial_text!r}; it showed {shown.text!r}"


def _would_answer_alone(outcome: Outcome, shown: Shown) -> bool:
    """Whether the target alone would have answered this request, with as many attempts as the policy allows."""
    case, fault = outcome.case, shown.ask.fault
    silent_s = max(case.frame * case.token_s, case.first_token_s if case.thinks else 0.0)  # behind its thoughts
    if case.between_chunks_s is not None and silent_s >= case.between_chunks_s:
        return False  # it is that slow
    if case.by == "ids" and has_by_text(outcome, shown):
        return False  # after the same text in other tokens it writes another one, also other whitespace at the seam
    num_others = sum(other.ask.fault is not None for other in outcome.shown) - (fault is not None)
    if num_others and outcome.ledger.faults.total() >= _FAILURES_OF_A_CIRCUIT:
        return False  # they have opened the circuit
    return fault is None or _would_survive(case, shown, fault)


def _would_survive(case: Case, shown: Shown, fault: Fault) -> bool:
    is_given_up = fault.how in TRANSIENT and fault.count >= case.max_attempts
    match fault.scope:
        case "verdict":
            return not (is_given_up and case.max_attempts == 1)
        case "ids":  # the first stream by ids is the target's own answer
            may_break = case.strategy in ("race", "auto", "probe", "score") or bool(shown.text)
            is_lost = is_given_up or (fault.how not in TRANSIENT and fault.at > 0)  # before it, it is asked plainly
            return not (is_lost and may_break) and not (case.kind == "ids only" and shown.text)
        case "continued":  # `probe`, `score` and `judge` are nothing but calls that go on, and `race` after a takeover
            is_alone = case.strategy in ("plain", "predict", "regenerate")
            return is_alone or (case.strategy == "race" and not is_given_up)
        case _:
            goes_on = case.kind in ("text", "ids", "scorer") and case.continues and not case.thinks
            can_go_on = fault.at == 0 or goes_on
            return fault.how in TRANSIENT and not is_given_up and not fault.first and can_go_on
