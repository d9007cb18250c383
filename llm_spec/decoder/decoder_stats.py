"""DecoderStats: what a decoder's requests have given and taken so far."""

from __future__ import annotations

import dataclasses
from collections import Counter
from operator import add
from typing import Any, Final

from llm_spec.contract.events import Usage
from llm_spec.contract.stats import SpeculativeStats
from llm_spec.decoder.result import SpeculativeResult

__all__ = ["DecoderStats"]

_USAGE_FIELDS: Final = tuple(vars(Usage()))
_NO_TOKENS: Final = (0,) * len(_USAGE_FIELDS)


class DecoderStats:
    """Sums over the requests that a decoder has answered; one that failed or was left early is not among them.

    `strategies` and `plain_reasons` count requests. `rounds` adds up the rounds, `usage` and `draft_usage` the tokens
    of target and draft. `compared_s` is the time of the requests whose speedup is known, `plain_s` the target's alone
    for them. Costs are None once one of them is not known. For one event loop; `decoder.with_config` shares it.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Set all sums to zero."""
        self.num_requests = 0
        self.strategies = Counter[str]()
        self.plain_reasons = Counter[str]()
        self.rounds = SpeculativeStats()
        self._usage = self._draft_usage = _NO_TOKENS
        self.total_s = 0.0
        self.compared_s = 0.0
        self.plain_s = 0.0
        self.num_retries = 0
        self.cost: float | None = 0.0
        self.cost_saving: float | None = 0.0

    def add(self, result: SpeculativeResult) -> None:
        """Add an answer that came to its end."""
        self.num_requests += 1
        self.strategies[result.strategy] += 1
        if result.plain_reason is not None:
            self.plain_reasons[result.plain_reason] += 1
        if result.rounds or result.fallbacks:
            self.rounds += result.stats
        if result.usage is not None:
            self._usage = _add_usage_to_totals(self._usage, result.usage)
        if result.draft_usage is not None:
            self._draft_usage = _add_usage_to_totals(self._draft_usage, result.draft_usage)
        self.total_s += result.timings.total_s
        if result.plain_s is not None and result.speedup is not None:
            self.compared_s += result.timings.total_s
            self.plain_s += result.plain_s
        self.num_retries += len(result.retries)
        if self.cost is not None:
            self.cost = _add_unless_none(self.cost, result.cost.total)
        if self.cost_saving is not None:
            self.cost_saving = _add_unless_none(self.cost_saving, result.cost.saving)

    @property
    def usage(self) -> Usage:
        """Tokens of the target."""
        return Usage(**dict(zip(_USAGE_FIELDS, self._usage, strict=True)))

    @property
    def draft_usage(self) -> Usage:
        """Tokens of the draft."""
        return Usage(**dict(zip(_USAGE_FIELDS, self._draft_usage, strict=True)))

    @property
    def speedup(self) -> float | None:
        """The target's time alone / the time taken, over all requests where both are known; None: there are none."""
        return self.plain_s / self.compared_s if self.compared_s else None

    @property
    def time_saved_s(self) -> float:
        """Seconds saved against the target alone, negative when speculation lost time, over the same requests."""
        return self.plain_s - self.compared_s

    def to_dict(self) -> dict[str, Any]:
        """Everything, derived figures too, as JSON values."""
        sums = {
            "num_requests": self.num_requests,
            "num_retries": self.num_retries,
            "strategies": dict(self.strategies),
            "plain_reasons": dict(self.plain_reasons),
            "usage": dataclasses.asdict(self.usage),
            "draft_usage": dataclasses.asdict(self.draft_usage),
            "total_s": self.total_s,
            "plain_s": self.plain_s,
            "compared_s": self.compared_s,
            "speedup": self.speedup,
            "time_saved_s": self.time_saved_s,
            "cost": self.cost,
            "cost_saving": self.cost_saving,
        }
        return sums | self.rounds.to_dict()

    def summary(self) -> str:
        """A line for people."""
        speedup = "speedup not measured yet" if self.speedup is None else f"{self.speedup:.2f}x"
        return f"{self.num_requests} requests in {self.total_s:.3f} s ({speedup}): {self.rounds.summary()}"

    def __repr__(self) -> str:
        return f"<DecoderStats: {self.summary()}>"


def _add_usage_to_totals(totals: tuple[int, ...], usage: Usage) -> tuple[int, ...]:
    """The sums by field: to make a new `Usage` for each request would take ten times as long."""
    return tuple(map(add, totals, vars(usage).values()))


def _add_unless_none(total: float | None, value: float | None) -> float | None:
    return None if total is None or value is None else total + value
