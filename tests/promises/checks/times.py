"""A request takes no longer than the target alone and a bound, where nothing fails and nobody pauses.

The bounds, as README and DESIGN state them or let them be derived:

- `plain`, `race`: the target's own time ("no slower than plain while the target has spare capacity"), plus 2 % and four
  round trips for encoding and for going on;
- `predict`, `regenerate`: the same, and the one call of the draft that it waits for, at most `draft_timeout_s`;
- `probe`, `score`: a round emits at least one token and is one call (`score`: two) after one of the draft, so the
  tokens times the time of all, and `draft_timeout_s` once, after which the target goes on alone;
- `judge`: `max_rounds` verdicts, each after at most one wait of `draft_timeout_s`, and twice the target's own time;
- `auto`: that of the strategy which it chose; besides, what discovering takes, once for each feature.

What a result says of the target's own time (`plain_s`, on which `speedup` rests) is measured, so it is about right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from llm_spec.measure.tokens import split_into_pieces
from promises.checks.base import EPSILON_S, is_cut, is_sampled
from promises.draw import Case
from promises.run import Answer, Outcome, Shown

__all__ = ["find_delays"]

_VERDICT_TOKENS: Final = 30  # beside the text that is written there
_ENOUGH_TOKENS: Final = 10
_MEASURED: Final = 0.35  # of the target's own time: by how much `plain_s` may be wrong
_VERDICTS: Final = 5  # `JudgeConfig.max_rounds` and one more


def find_delays(outcome: Outcome, shown: Shown) -> Iterator[str]:
    """How much longer than its bound a request takes."""
    case, result, plain = outcome.case, shown.result, outcome.plain[shown.tag]
    if result is None or is_cut(shown) or is_sampled(shown) or not _is_undisturbed(outcome, shown):
        return
    took_s, longest_s = shown.ended_s - shown.started_s, _LONGEST.get(result.strategy, _alone_s)(case, plain)
    slack_s = (_MEASURED + _spread(outcome, plain)) * plain.seconds + 2 * case.token_s + 2 * case.round_trip_s
    alone_s = plain.seconds if result.plain_s is None else result.plain_s
    if _is_measurable(outcome) and abs(alone_s - plain.seconds) > slack_s:
        yield f"says that plain takes {alone_s:.3f} s; it takes {plain.seconds:.3f} s"
    if took_s > longest_s:
        yield f"took {took_s:.3f} s by {result.strategy}; plain {plain.seconds:.3f} s, the bound {longest_s:.3f} s"


def _spread(outcome: Outcome, plain: Answer) -> float:
    """By how much the pieces of a token differ among the answers: a server that counts no tokens is timed by pieces."""
    if outcome.case.counts:
        return 0.0
    own = _pieces_per_token(plain)
    return max(abs(own / _pieces_per_token(other) - 1.0) for other in outcome.plain.values())


def _pieces_per_token(answer: Answer) -> float:
    return max(1, len(split_into_pieces(answer.text))) / max(1, answer.num_tokens)


def _is_measurable(outcome: Outcome) -> bool:
    """Whether every answer is long enough, and all of it shown, to tell the target's speed from."""
    is_long = all(plain.num_tokens >= _ENOUGH_TOKENS for plain in outcome.plain.values())
    is_judged = outcome.case.strategy == "judge" and outcome.case.by == "ids"  # it goes on with another answer
    return is_long and not is_judged and not any(shown.ask.stop for shown in outcome.shown)


def _is_undisturbed(outcome: Outcome, shown: Shown) -> bool:
    case = outcome.case
    has_faults = any(other.ask.fault is not None for other in outcome.shown)
    if case.odd or case.failing:
        return False
    return not (case.is_local or shown.ask.pause_s or has_faults or case.limit is not None)


def _alone_s(case: Case, plain: Answer) -> float:
    discovering_s = (2 + case.num_failing_trials) * (case.discover_s or 0.0) + 2 * case.close_s
    framed_s = (case.frame - 1) * case.token_s  # what follows a stop string in its event is waited for
    return 1.02 * plain.seconds + 4 * case.round_trip_s + EPSILON_S + discovering_s + framed_s


def _with_a_draft_s(case: Case, plain: Answer) -> float:
    return _alone_s(case, plain) + case.draft_timeout_s


def _in_rounds_s(case: Case, plain: Answer, num_calls: int) -> float:
    drafted_s = min(case.draft_timeout_s, case.draft_first_s + 2 * case.draft_piece_s)
    round_s = num_calls * _call_s(case) + 2 * case.round_trip_s + drafted_s
    return max(_alone_s(case, plain), (plain.num_tokens + 4) * round_s) + case.draft_timeout_s


def _judged_s(case: Case, plain: Answer) -> float:
    num_written = _VERDICT_TOKENS + plain.num_tokens  # words of a verdict, the target's tokens
    verdict_s = _call_s(case) + num_written * case.token_s
    return 2 * _alone_s(case, plain) + _VERDICTS * (verdict_s + case.draft_timeout_s)


def _call_s(case: Case) -> float:
    return case.round_trip_s + case.first_token_s


_LONGEST: Final[Mapping[str, Callable[[Case, Answer], float]]] = {
    "predict": _with_a_draft_s,
    "regenerate": _with_a_draft_s,
    "probe": lambda case, plain: _in_rounds_s(case, plain, 1),
    "score": lambda case, plain: _in_rounds_s(case, plain, 2),
    "judge": _judged_s,
}
