"""How the seconds of joined passes grow with their tokens.

So it is known what a request's part in one costs, and how long it is worth to wait for another's. By the clock a longer
proposal costs nothing where a pass takes as long as the others make it, and all would draft too much. So each bears one
part of what passes take whatever is in them, and pays for its own tokens.
"""

from __future__ import annotations

from typing import Final

__all__ = ["PassTimes"]

_KEEP: Final = 0.95  # of what is known, from one pass to the next
_KEEP_REQUESTS: Final = 0.8  # of how many requests shared passes, from one pass to the next
_PRIOR_SPREAD: Final = 1.0  # tokens²; as if passes with other numbers of tokens had taken just as long
_MAX_OUTLIER: Final = 2.0  # times what was expected; what a machine with other work takes longer is not learned


class PassTimes:
    """Learns from the passes of one kind, by a linear regression whose weights decay."""

    def __init__(self) -> None:
        self._weight = self._mean_tokens = self._mean_s = self._last_s = 0.0
        self._num_requests = 1.0  # in a pass, lately
        self._spread = self._slope_sum = 0.0  # of tokens about their mean, and with seconds

    @property
    def base_s(self) -> float:
        """What a pass takes whatever is in it: at least a tenth of the mean, at most the last; 0 before the first."""
        base_s = self._mean_s - self._estimate_token_s() * self._mean_tokens
        return min(max(0.1 * self._mean_s, base_s), self._last_s)

    def estimate_part_s(self, num_own_tokens: int, num_tokens: int, pass_s: float) -> float:
        """What a request with so many of a pass's tokens bears of it, now that so many requests share passes."""
        token_s = min(self._estimate_token_s(), pass_s / num_tokens)
        return (pass_s - token_s * num_tokens) / max(1.0, self._num_requests) + token_s * num_own_tokens

    def update(self, num_requests: int, num_tokens: int, pass_s: float) -> None:
        """Note what a pass took: West's weighted form of Welford's update."""
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
        """Seconds that a further token takes."""
        return max(0.0, self._slope_sum / (self._spread + _PRIOR_SPREAD))
