"""ExtraStreamStats: what is known of a target's streams that are open beside its first one."""

from __future__ import annotations

from typing import Final

from llm_spec.measure.estimates import ExponentialMovingAverage, TokenCostMean
from llm_spec.measure.retrial_pause import RetrialPause

__all__ = ["ExtraStreamStats"]

_HALF_LIFE: Final = 16.0  # of streams
_TOKEN_HALF_LIFE: Final = 64.0  # of tokens
_MIN_SLOWDOWN: Final = 0.02  # less cannot be told from noise, …
_MIN_OPENING_COST: Final = 0.25  # … in both
_MIN_GAIN: Final = 1.5  # times what it costs that a stream has to win


class ExtraStreamStats:
    """Figures of a target's later streams. Kept across requests, on one event loop.

    first_s: seconds from the decision to open one to its first token. num_extra: how many were open beside the first
    one and were worth what they cost it; 0: none was tried yet, or the server has no room.
    """

    def __init__(self) -> None:
        self.first_s = ExponentialMovingAverage(half_life=_HALF_LIFE)
        self.num_extra = 0
        self._retrial = RetrialPause()
        self._forget_costs()

    @property
    def is_measured(self) -> bool:
        """Whether one was timed beside the first one."""
        return bool(self._opening_cost.count or self._slowdown.num_tokens)

    @property
    def opening_cost(self) -> float:
        """Tokens that an answer is later by each stream that is opened beside it; 0 before it was measured."""
        cost = self._opening_cost.value or 0.0
        return cost if cost > _MIN_OPENING_COST else 0.0

    @property
    def slowdown(self) -> float:
        """Share of a token that each token is later by each stream beside it; 0 before it was measured."""
        slowdown = self._slowdown.value or 0.0
        return slowdown if slowdown > _MIN_SLOWDOWN else 0.0

    @property
    def are_free(self) -> bool:
        """Whether no stream was seen to slow another one down."""
        return self.opening_cost == 0.0 and self.slowdown == 0.0

    def record_answer_end(self, num_opened: int) -> None:
        """An answer has ended that opened so many streams: where none ever pays, what they cost may have changed."""
        if self._retrial.count_answer(was_tried=num_opened > 0 or self.are_free):
            self.num_extra = 0
            self._forget_costs()

    def _forget_costs(self) -> None:
        self._opening_cost = ExponentialMovingAverage(half_life=_HALF_LIFE)
        self._slowdown = TokenCostMean(half_life=_TOKEN_HALF_LIFE)

    def add_opening(self, num_streams: int, num_late_tokens: float) -> None:
        """So many streams were opened together, and the answer was so many tokens late when all had begun."""
        self._opening_cost.update(max(0.0, num_late_tokens) / num_streams)

    def add_token(self, num_streams: int, num_late_tokens: float) -> None:
        """A token came beside so many streams that had all begun, that much later than usual; earlier, if negative."""
        self._slowdown.update(1, num_late_tokens / num_streams)

    def is_worthwhile(self, num_won: float, num_tokens: int) -> bool:
        """Whether a stream pays that wins so many tokens on average, and is open for `num_tokens` of the answer."""
        return num_won >= _MIN_GAIN * (self.opening_cost + self.slowdown * num_tokens)
