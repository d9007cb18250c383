"""Every promise of a request, checked against what its consumer saw and what its target has logged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from promises.checks.answers import find_wrong_ends
from promises.checks.bounds import find_broken_bounds, find_broken_limits
from promises.checks.label import find_wrong_labels
from promises.checks.remains import find_open_calls, find_remains
from promises.checks.result import find_contradictions, find_wrong_stats
from promises.checks.text import find_wrong_text
from promises.checks.times import find_delays
from promises.checks.usage import find_wrong_spending, find_wrong_usage
from promises.run import Outcome, Shown

__all__ = ["Broken", "check"]

CaseCheck: TypeAlias = Callable[[Outcome], Iterator[str]]
RequestCheck: TypeAlias = Callable[[Outcome, Shown], Iterator[str]]


@dataclass(frozen=True)
class Broken:
    """A promise that was not kept: which, to which request ("": the case), by which strategy, and how."""

    promise: str
    tag: str
    strategy: str
    how: str

    def __str__(self) -> str:
        return f"{self.promise}: {self.tag} {self.how} ({self.strategy})"


def _find_breaches(outcome: Outcome) -> Iterator[str]:
    """What the target was sent although its contract excludes it."""
    yield from outcome.ledger.breaches[:2]


_OF_CASES: Final[Mapping[str, CaseCheck]] = {
    "open": find_remains,
    "bounds": find_broken_limits,
    "usage": find_wrong_spending,
    "requests": _find_breaches,
    "result": find_wrong_stats,
}
_OF_REQUESTS: Final[Mapping[str, RequestCheck]] = {
    "answers": find_wrong_ends,
    "text": find_wrong_text,
    "label": find_wrong_labels,
    "usage": find_wrong_usage,
    "bounds": find_broken_bounds,
    "time": find_delays,
    "open": find_open_calls,
    "result": find_contradictions,
}


def check(outcome: Outcome) -> list[Broken]:
    """Check all promises of all requests of a case."""
    strategy = outcome.case.strategy
    if outcome.crash:
        return [Broken("open", "", strategy, f"the case ended with {outcome.crash}")]
    found = [Broken(promise, "", strategy, how) for promise, find in _OF_CASES.items() for how in find(outcome)]
    for shown in outcome.shown:
        strategy = outcome.case.strategy if shown.result is None else shown.result.strategy
        for promise, find in _OF_REQUESTS.items():
            found += [Broken(promise, shown.tag, strategy, how) for how in find(outcome, shown)]
    return found
