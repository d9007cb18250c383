"""Planner: which strategy pays, by what each has been worth so far. One per decoder, kept across its requests.

A strategy's worth is its speedup: what the target alone would have taken, divided by what it took; plain is worth 1.
The target alone is measured by answering a request plainly (a baseline request): the first one with `auto`, the second
one with a strategy chosen by name, then now and then. With `auto` every strategy that a request allows is tried, and
from then on the worthiest is used. The others are tried again now and then, since servers and drafts change: later and
later, and so seldom that it costs no more than a hundredth of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from llm_spec.figures import PairFigures
from llm_spec.result import PlainReason, SpeculativeResult
from llm_spec.tokens.statistics import ExponentialMovingAverage

__all__ = ["Plan", "Planner"]

_REQUESTS: Final = 4.0  # half-life of what is known of a strategy
_NUM_TRIALS: Final = 2  # a first request also pays for words and speeds that are not known yet
_MIN_WORTH: Final = 1.02  # a gain below this is within the noise of the measurement
_MAX_REGRET: Final = 0.01  # of the time: what trying one again may cost
_FIRST_PAUSE: Final = 16  # requests until a strategy that did not pay is tried again; twice as many each time
_LAST_PAUSE: Final = 512
_SECOND_BASELINE: Final = 8  # requests after the first baseline, which may have met a cold server
_MIN_TOKENS: Final = 8  # of an answer, for its time to say something


class Plan(NamedTuple):
    """The strategy to use; `plain_reason` says why it is plain."""

    name: str
    plain_reason: PlainReason | None = None


@dataclass(slots=True)
class _Record:
    """What is known of one strategy."""

    worth: ExponentialMovingAverage = field(default_factory=lambda: ExponentialMovingAverage(half_life=_REQUESTS))
    num_trials: int = 0
    pause: int = _FIRST_PAUSE
    rest: int = 0  # requests since it was tried


class Planner:
    """Chooses among names of strategies, and learns from results."""

    def __init__(self) -> None:
        self.figures = PairFigures()
        self.baseline = self.figures.baseline
        self._records: dict[str, _Record] = {}
        self._since_plain = 0

    def choose(self, names: Sequence[str], baseline_every: int) -> Plan:
        """The strategy to use, out of those that the request allows (at least one); "plain" where none of them pays.

        After `baseline_every` requests without one the target is measured again; 0: never again.
        """
        plan = self._choose(names, baseline_every)
        self._since_plain = 0 if plan.name == "plain" else self._since_plain + 1
        return plan

    def choose_named(self, name: str, baseline_every: int) -> Plan:
        """The same for a strategy that the caller has named: plain for a baseline alone."""
        is_first = not self.baseline.num_answers and self._since_plain > 0
        is_due = baseline_every > 0 and (is_first or self._is_baseline_due(self._worth(name), baseline_every))
        self._since_plain = 0 if is_due else self._since_plain + 1
        return Plan("plain", "baseline") if is_due else Plan(name)

    def _choose(self, names: Sequence[str], baseline_every: int) -> Plan:
        if not self.baseline.can_tell:
            return Plan("plain", "baseline")
        records = {name: self._records.setdefault(name, _Record()) for name in names}
        for name, record in records.items():
            if record.num_trials < _NUM_TRIALS:
                record.num_trials += 1
                return Plan(name)
        best = Plan(max(names, key=self._worth))
        best = best if self._worth(best.name) >= _MIN_WORTH else Plan("plain", "not_worthwhile")
        worth = 1.0 if best.name == "plain" else self._worth(best.name)
        if baseline_every and self._is_baseline_due(worth, baseline_every):
            return Plan("plain", "baseline")
        for name, record in records.items():
            if name != best.name:
                record.rest += 1
                regret = max(0.0, worth / (record.worth.value or 1.0) - 1.0)
                if record.rest > max(record.pause, regret / _MAX_REGRET):
                    record.pause = min(2 * record.pause, _LAST_PAUSE)
                    record.rest = 0
                    return Plan(name)
        return best

    def _worth(self, name: str) -> float:
        record = self._records.get(name)
        return 0.0 if record is None else record.worth.value or 0.0

    def _is_baseline_due(self, worth: float, baseline_every: int) -> bool:
        pause = max(baseline_every, (worth - 1.0) / _MAX_REGRET)
        if self.baseline.num_answers < 2:
            pause = min(pause, _SECOND_BASELINE)
        return self._since_plain >= pause

    def learn_failure(self, name: str) -> None:
        """An attempt by this strategy gave nothing: the target had to be asked once more."""
        self._records.setdefault(name, _Record()).worth.update(0.0)

    def learn(self, result: SpeculativeResult) -> None:
        """Take in an answer that came to its end."""
        if result.strategy != "plain" and result.plain_reason in ("refused", "retried"):
            self.learn_failure(result.strategy)
            return
        if result.strategy == "plain" or result.speedup is None or result.retries or result.stopped_by == "deadline":
            return
        if result.num_tokens is not None and result.num_tokens >= _MIN_TOKENS:
            self._records.setdefault(result.strategy, _Record()).worth.update(result.speedup)
