"""What a sequence's part in a joined pass costs: what the lookahead is to weigh, where others wait for the same model.

By the clock a longer proposal costs nothing where a pass takes as long as the others make it, and all would draft too
much. So a joined pass is divided: each sequence bears one part of what a pass takes whatever is in it, and pays for its
own tokens. Where not all that waited found room, a token takes the room of another, and bears as much as any.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

__all__ = ["PassTimes"]

_KEEP: Final = 0.95  # of what is known, from one pass to the next
_PRIOR_SPREAD: Final = 1.0  # tokens²; as if passes with other numbers of tokens had taken just as long


class PassTimes:
    """Learns from the passes of one kind how their seconds grow with their tokens, by a decaying linear regression."""

    def __init__(self) -> None:
        self._weight = self._mean_tokens = self._mean_s = 0.0
        self._spread = self._slope_sum = 0.0  # of tokens about their mean, and with seconds

    @property
    def base_s(self) -> float:
        """What a pass takes whatever is in it: at least a tenth of its time, and 0 before the first."""
        return max(0.1 * self._mean_s, self._mean_s - self._estimate_token_s() * self._mean_tokens)

    def divide(self, lengths: Sequence[int], pass_s: float, *, is_full: bool) -> list[float]:
        """Note that a pass of sequences of so many tokens took `pass_s`; what each of them bears of it."""
        num_tokens = sum(lengths)
        self._update(num_tokens, pass_s)
        if is_full:
            return [pass_s * length / num_tokens for length in lengths]
        token_s = min(self._estimate_token_s(), pass_s / num_tokens)
        base_s = (pass_s - token_s * num_tokens) / len(lengths)
        return [base_s + token_s * length for length in lengths]

    def _update(self, num_tokens: int, pass_s: float) -> None:
        """West's weighted form of Welford's update, with decaying weights."""
        self._weight = _KEEP * self._weight + 1.0
        above = num_tokens - self._mean_tokens
        self._mean_tokens += above / self._weight
        self._spread = _KEEP * self._spread + above * (num_tokens - self._mean_tokens)
        self._slope_sum = _KEEP * self._slope_sum + above * (pass_s - self._mean_s) * (1.0 - 1.0 / self._weight)
        self._mean_s += (pass_s - self._mean_s) / self._weight

    def _estimate_token_s(self) -> float:
        """Seconds that a further token takes."""
        return max(0.0, self._slope_sum / (self._spread + _PRIOR_SPREAD))
