"""Estimates how the seconds of joined passes grow with their tokens.

The estimates say what a request's part in a pass costs, and how long it is worth to wait for
another request's pass. By the clock, a longer proposal would cost nothing while a pass takes as
long as the others make it, and all would draft too much. So each request bears an equal share of a
pass's constant time, and pays for its own tokens.
"""

from __future__ import annotations

from typing import Final

__all__ = ["PassTimes"]

_KEEP: Final = 0.95  # weight of earlier passes, from one pass to the next
_KEEP_REQUESTS: Final = 0.8  # weight of earlier numbers of requests in a pass
_PRIOR_SPREAD: Final = 1.0  # tokens²; as if passes with other numbers of tokens took just as long
_MAX_OUTLIER: Final = 2.0  # times the expected time; more comes from other work on the machine


class PassTimes:
    """A linear regression over the passes of one kind, with decaying weights."""

    def __init__(self) -> None:
        self._weight = self._mean_tokens = self._mean_s = self._last_s = 0.0
        self._num_requests = 1.0  # in a recent pass
        self._spread = self._slope_sum = 0.0  # squares about the mean, products with seconds

    @property
    def base_s(self) -> float:
        """The seconds of a pass whatever is in it; 0 before the first pass.

        They are at least a tenth of the mean, and at most the last pass's.
        """
        base_s = self._mean_s - self._estimate_token_s() * self._mean_tokens
        return min(max(0.1 * self._mean_s, base_s), self._last_s)

    def estimate_part_s(self, num_own_tokens: int, num_tokens: int, pass_s: float) -> float:
        """Return the seconds that a request with `num_own_tokens` of a pass's tokens bears."""
        token_s = min(self._estimate_token_s(), pass_s / num_tokens)
        return (pass_s - token_s * num_tokens) / max(1.0, self._num_requests) + token_s * num_own_tokens

    def update(self, num_requests: int, num_tokens: int, pass_s: float) -> None:
        """Learn a pass's seconds, by West's weighted form of Welford's update."""
        self._last_s = pass_s
        self._num_requests += (1.0 - _KEEP_REQUESTS) * (num_requests - self._num_requests)
        if self._weight:
            expected_s = self._mean_s + self._estimate_token_s() * (num_tokens - self._mean_tokens)
            pass_s = min(pass_s, _MAX_OUTLIER * max(expected_s, self._mean_s))
        self._weight = _KEEP * self._weight + 1.0
        above = num_tokens - self._mean_tokens
        self._mean_tokens += above / self._weight
        self._spread = _KEEP * self._spread + above * (num_tokens - self._mean_tokens)
        self._slope_sum = _KEEP * self._slope_sum + above * (pass_s - self._mean_s) * (1.0 - 1.0 / self._weight)
        self._mean_s += (pass_s - self._mean_s) / self._weight

    def _estimate_token_s(self) -> float:
        """Return the seconds of each further token."""
        return max(0.0, self._slope_sum / (self._spread + _PRIOR_SPREAD))
