"""DraftRunStats: how often a draft is right, by how many of its tokens before were right in a row.

A draft that copies is often wrong at first, and hardly ever once it has copied a line. One rate for both would open
streams too early and too late. A draft whose mistakes come at random has the same rate everywhere.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from llm_spec.measure.estimates import AcceptanceEstimate

__all__ = ["DraftRunStats"]

_RUN_LENGTHS: Final = (0, 2, 6, 16)  # from which on a range begins, in tokens
_HALF_LIFE: Final = 256.0  # tokens
_PRIOR: Final = 0.98  # a pair is given the benefit of the doubt, for a few tokens
_PRIOR_TOKENS: Final = 10.0
_RANGE_PRIOR_TOKENS: Final = 48.0  # of a range, that the rate of all ranges counts for


class DraftRunStats:
    """Figures of a pair's draft. Kept across requests, on one event loop."""

    def __init__(self) -> None:
        self._all = AcceptanceEstimate(half_life=_HALF_LIFE, prior=_PRIOR, prior_weight=_PRIOR_TOKENS)
        self._ranges = [
            AcceptanceEstimate(half_life=_HALF_LIFE, prior=_PRIOR, prior_weight=_RANGE_PRIOR_TOKENS)
            for _ in _RUN_LENGTHS
        ]

    @property
    def num_judged(self) -> float:
        """Tokens that were compared, older ones weighing less."""
        return self._all.accepted + self._all.rejected

    def estimate_rate(self, run_length: int) -> float:
        """The probability that a token is right which follows so many right ones."""
        return self._find_range(run_length).estimate_rate_with_prior(self._all.rate)

    def estimate_survival(self, run_length: int, num_tokens: int) -> float:
        """The probability that all of the next tokens are right, after so many right ones."""
        survival, num_left = 1.0, float(num_tokens)
        for rate, num_in_range in self._iterate_ranges(run_length):
            survival *= rate ** min(num_left, num_in_range)
            num_left -= num_in_range
            if num_left <= 0.0:
                break
        return survival

    def count_likely_tokens(self, run_length: int, min_survival: float, max_tokens: int) -> int:
        """How many of the next tokens, of `max_tokens` at most, are all right with a probability of `min_survival`."""
        left, num_likely = math.log(min_survival), 0.0
        for rate, num_in_range in self._iterate_ranges(run_length):
            log_rate = math.log(max(rate, 1e-9))
            num_likely += min(num_in_range, left / log_rate if log_rate < 0.0 else num_in_range)
            left -= num_in_range * log_rate
            if left >= 0.0 or num_likely >= max_tokens:
                break
        return min(max_tokens, math.ceil(num_likely))

    def _iterate_ranges(self, run_length: int) -> Iterator[tuple[float, float]]:
        """From a token on that follows so many right ones: the rate of a range, and how many tokens it has."""
        for begin, end in pairwise((*_RUN_LENGTHS, math.inf)):
            if run_length < end:
                yield self.estimate_rate(int(begin)), end - max(begin, run_length)

    def add_right_tokens(self, run_length: int, num_tokens: int) -> None:
        """So many tokens were right, after `run_length` others."""
        self._all.update(num_tokens, rejected=False)
        for run in range(run_length, run_length + num_tokens):
            self._find_range(run).update(1, rejected=False)

    def add_wrong_token(self, run_length: int) -> None:
        """A token was wrong, after so many right ones."""
        self._all.update(0, rejected=True)
        self._find_range(run_length).update(0, rejected=True)

    def _find_range(self, run_length: int) -> AcceptanceEstimate:
        return self._ranges[bisect_right(_RUN_LENGTHS, run_length) - 1]
