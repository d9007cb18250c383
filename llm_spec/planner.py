"""Planner: which strategy pays, by what each has been worth so far. One per decoder, kept across its requests.

A strategy's worth is what plain decoding would have taken, for as many tokens, divided by what it took; plain is worth
1. The first request is plain, so that there is something to compare with; then every strategy that a request allows is
tried, and from then on the worthiest is used. The others are tried again now and then, since servers and drafts change:
later and later, and so seldom that it costs no more than a hundredth of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from llm_spec.figures import PairFigures
from llm_spec.result import SpeculativeResult
from llm_spec.tokens.statistics import ExponentialMovingAverage

__all__ = ["Planner"]

_REQUESTS: Final = 4.0  # half-life of what is known of a strategy
_NUM_TRIALS: Final = 2  # a first request also pays for words and speeds that are not known yet
_MIN_WORTH: Final = 1.02  # a gain below this is within the noise of the measurement
_MAX_REGRET: Final = 0.01  # of the time: what trying one again may cost
_FIRST_PAUSE: Final = 16  # requests until a strategy that did not pay is tried again; twice as many each time
_LAST_PAUSE: Final = 512
_PLAIN_EVERY: Final = 64  # requests
_MIN_TOKENS: Final = 8  # of an answer, for its time to say something


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
        self._records: dict[str, _Record] = {}
        self._plain_first_s = ExponentialMovingAverage(half_life=_REQUESTS)
        self._plain_token_s = ExponentialMovingAverage(half_life=_REQUESTS)
        self._since_plain = 0

    @property
    def has_plain_figures(self) -> bool:
        """Whether there is something to compare with."""
        return self._plain_token_s.value is not None

    def choose(self, names: Sequence[str]) -> str:
        """The strategy to use, out of those that the request allows; "plain" where none of them pays."""
        if not names or not self.has_plain_figures:
            return "plain"
        records = {name: self._records.setdefault(name, _Record()) for name in names}
        for name, record in records.items():
            if record.num_trials < _NUM_TRIALS:
                record.num_trials += 1
                return name
        best = max(names, key=lambda name: records[name].worth.value or 0.0)
        best = best if (records[best].worth.value or 0.0) >= _MIN_WORTH else "plain"
        worth = 1.0 if best == "plain" else records[best].worth.value or 1.0
        if self._since_plain >= max(_PLAIN_EVERY, (worth - 1.0) / _MAX_REGRET):
            return "plain"
        for name, record in records.items():
            if name != best:
                record.rest += 1
                regret = max(0.0, worth / (record.worth.value or 1.0) - 1.0)
                if record.rest > max(record.pause, regret / _MAX_REGRET):
                    record.pause = min(2 * record.pause, _LAST_PAUSE)
                    record.rest = 0
                    return name
        return best

    def learn(self, result: SpeculativeResult) -> None:
        """Take in an answer that came to its end."""
        usage, timings = result.usage, result.timings
        num_tokens = 0
        if usage is not None:
            num_tokens = usage.output_tokens - usage.cancelled_output_tokens - usage.rejected_prediction_tokens
        if num_tokens < _MIN_TOKENS or timings.first_text_s is None or result.stopped_by == "deadline":
            return
        if timings.total_s <= 0.0:  # by a coarse clock
            return
        if result.strategy == "plain":
            self._since_plain = 0
            self._plain_first_s.update(timings.first_text_s)
            self._plain_token_s.update((timings.total_s - timings.first_text_s) / (num_tokens - 1))
            return
        self._since_plain += 1
        first_s, token_s = self._plain_first_s.value, self._plain_token_s.value
        if first_s is None or token_s is None:
            return
        worth = (first_s + (num_tokens - 1) * token_s) / timings.total_s
        self._records.setdefault(result.strategy, _Record()).worth.update(worth)
