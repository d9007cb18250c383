"""Numbers from pairs of times: ratios, their median and how sure it is. No I/O.

The interval of a median is that of its order statistics (the sign test turned round): the k-th smallest to the k-th
largest ratio, with k so that they hold the true median in 95 % of all samples or more. It assumes nothing about the
noise and draws no random numbers. The percentile bootstrap of a median, the usual choice, ends at order statistics as
well, but too near ones: with 6 to 60 ratios of normal, heavy-tailed or spiky noise it held the true median in 91 to
95 % of simulated samples, this one in 96 to 98 %. Ratios of sums have no interval: where single answers take
much longer than the others, a studentized bootstrap over pairs held them in 87 %.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

__all__ = [
    "CONFIDENCE",
    "MIN_UNITS",
    "RatioEstimate",
    "compute_median_ratio",
    "estimate_median_ratio",
    "find_median_interval_rank",
    "percentile",
]

CONFIDENCE: Final = 0.95
MIN_UNITS: Final = 6  # of fewer, not even the least and the largest hold the median so surely


@dataclass(frozen=True, kw_only=True)
class RatioEstimate:
    """A median of ratios plain / contender (above 1: the contender is faster) and its 95 % interval.

    `low` and `high` are None where there are fewer than `MIN_UNITS` ratios.
    """

    ratio: float
    low: float | None
    high: float | None
    num_units: int

    @property
    def excludes_one(self) -> bool:
        """Whether the interval leaves no room for "as fast as plain"."""
        return self.low is not None and self.high is not None and not self.low <= 1.0 <= self.high


def estimate_median_ratio(ratios: Sequence[float]) -> RatioEstimate | None:
    """The median and its interval; None without ratios."""
    if not ratios:
        return None
    ordered, rank = sorted(ratios), find_median_interval_rank(len(ratios))
    low, high = (None, None) if rank is None else (ordered[rank - 1], ordered[-rank])
    return RatioEstimate(ratio=compute_median_ratio(ratios), low=low, high=high, num_units=len(ordered))


def compute_median_ratio(ratios: Sequence[float]) -> float:
    """The median; of two middle ones the geometric mean, so that the inverse ratios have the inverse median."""
    return math.exp(statistics.median(map(math.log, ratios)))


def find_median_interval_rank(num_values: int) -> int | None:
    """The k for which the k-th smallest to the k-th largest value hold the median with 95 %; None: there is none.

    They do not where fewer than k values lie on one side of it, and each lies there with probability 1/2.
    """
    num_outside, rank = 0, 0
    while True:
        num_outside += 2 * math.comb(num_values, rank)
        if num_outside / 2**num_values > 1 - CONFIDENCE:
            return rank or None
        rank += 1


def percentile(values: Sequence[float], percent: int) -> float | None:
    """The value that so many percent do not exceed, interpolated; None without values."""
    if len(values) < 2:
        return values[0] if values else None
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
