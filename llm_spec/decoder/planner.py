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

from llm_spec.decoder.result import PlainReason, SpeculativeResult
from llm_spec.local.lookahead import LookaheadCostMemory
from llm_spec.measure.estimates import ExponentialMovingAverage
from llm_spec.measure.pair_stats import PairStats
from llm_spec.strategies.registry import PLAIN

__all__ = ["PlannerChoice", "StrategyPlanner"]

_REQUEST_HALF_LIFE: Final = 4.0  # half-life of what is known of a strategy
_MAX_TRIALS: Final = 2  # a first request also pays for words and speeds that are not known yet
_MIN_VALUE_RATIO: Final = 1.02  # a gain below this is within the noise of the measurement
_MAX_REGRET: Final = 0.01  # of the time: what trying one again may cost
_FIRST_PAUSE: Final = 16  # requests until a strategy that did not pay is tried again; twice as many each time
_LAST_PAUSE: Final = 512
_BASELINE_RETRY_INTERVAL: Final = 8  # requests after the first baseline, which may have met a cold server
_MIN_TOKENS: Final = 8  # of an answer, for its time to say something


class PlannerChoice(NamedTuple):
    """The strategy to use; `plain_reason` says why it is plain."""

    name: str
    plain_reason: PlainReason | None = None


@dataclass(slots=True)
class _StrategyPerformance:
    """What is known of one strategy."""

    value_ratio: ExponentialMovingAverage = field(
        default_factory=lambda: ExponentialMovingAverage(half_life=_REQUEST_HALF_LIFE)
    )
    num_trials: int = 0
    pause_length: int = _FIRST_PAUSE
    num_requests_to_skip: int = 0  # requests since it was tried


class StrategyPlanner:
    """Chooses among names of strategies, and learns from results."""

    def __init__(self) -> None:
        self.pair_stats = PairStats()
        self.baseline = self.pair_stats.baseline
        self.lookahead_costs = LookaheadCostMemory()
        self._strategy_records: dict[str, _StrategyPerformance] = {}
        self._since_plain = 0

    def choose_strategy_that_pays(self, names: Sequence[str], baseline_every: int) -> PlannerChoice:
        """The strategy to use, out of those that the request allows (at least one); plain where none of them pays.

        After `baseline_every` requests without one the target is measured again; 0: never again.
        """
        plan = self._choose_best_or_trial(names, baseline_every)
        self._since_plain = 0 if plan.name == PLAIN.name else self._since_plain + 1
        return plan

    def find_reason_not_paid(self, name: str) -> PlainReason | None:
        """Why a strategy was not worth more than plain so far; None: it was."""
        if self._get_value_ratio(name) >= _MIN_VALUE_RATIO:
            return None
        record = self._strategy_records.get(name)
        return "not_measured" if record is None or not record.value_ratio.count else "not_worthwhile"

    def choose_named_or_baseline(self, name: str, baseline_every: int) -> PlannerChoice:
        """The same for a strategy that the caller has named: plain for a baseline alone."""
        is_first = not self.baseline.num_answers and self._since_plain > 0
        is_due = baseline_every > 0 and (is_first or self._is_baseline_due(self._get_value_ratio(name), baseline_every))
        self._since_plain = 0 if is_due else self._since_plain + 1
        return PlannerChoice(PLAIN.name, "baseline") if is_due else PlannerChoice(name)

    def _choose_best_or_trial(self, names: Sequence[str], baseline_every: int) -> PlannerChoice:
        if not self.baseline.is_measured:
            return PlannerChoice(PLAIN.name, "baseline")
        records = {name: self._strategy_records.setdefault(name, _StrategyPerformance()) for name in names}
        for name, record in records.items():
            if record.num_trials < _MAX_TRIALS:
                record.num_trials += 1
                return PlannerChoice(name)
        best = PlannerChoice(max(names, key=self._get_value_ratio))
        if self._get_value_ratio(best.name) < _MIN_VALUE_RATIO:
            is_measured = any(record.value_ratio.count for record in records.values())
            best = PlannerChoice(PLAIN.name, "not_worthwhile" if is_measured else "not_measured")
        value_ratio = 1.0 if best.name == PLAIN.name else self._get_value_ratio(best.name)
        if baseline_every and self._is_baseline_due(value_ratio, baseline_every):
            return PlannerChoice(PLAIN.name, "baseline")
        for name, record in records.items():
            if name != best.name:
                record.num_requests_to_skip += 1
                regret = max(0.0, value_ratio / (record.value_ratio.value or 1.0) - 1.0)
                if record.num_requests_to_skip > max(record.pause_length, regret / _MAX_REGRET):
                    record.pause_length = min(2 * record.pause_length, _LAST_PAUSE)
                    record.num_requests_to_skip = 0
                    return PlannerChoice(name)
        return best

    def _get_value_ratio(self, name: str) -> float:
        record = self._strategy_records.get(name)
        return 0.0 if record is None else record.value_ratio.value or 0.0

    def _is_baseline_due(self, value_ratio: float, baseline_every: int) -> bool:
        pause_length = max(baseline_every, (value_ratio - 1.0) / _MAX_REGRET)
        if self.baseline.num_answers < 2:
            pause_length = min(pause_length, _BASELINE_RETRY_INTERVAL)
        return self._since_plain >= pause_length

    def record_failure(self, name: str) -> None:
        """An attempt by this strategy gave nothing, so the target had to be called again."""
        self._strategy_records.setdefault(name, _StrategyPerformance()).value_ratio.update(0.0)

    def record_result(self, result: SpeculativeResult) -> None:
        """Take in an answer that came to its end."""
        self.lookahead_costs.observe(result.lookahead)
        if result.strategy != PLAIN.name and result.plain_reason in ("refused", "retried"):
            self.record_failure(result.strategy)
            return
        if result.strategy == PLAIN.name or result.retries or result.stopped_by == "deadline":
            return
        plain_s, total_s = result.plain_s, result.timings.total_s  # an estimate decides also where none is told
        if plain_s is None or not total_s:
            return
        if result.num_tokens is not None and result.num_tokens >= _MIN_TOKENS:
            self._strategy_records.setdefault(result.strategy, _StrategyPerformance()).value_ratio.update(
                plain_s / total_s
            )
