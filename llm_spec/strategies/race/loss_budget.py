"""LossBudget: how much later an answer may be because it is found out beside it what pays. No clock, no I/O."""

from __future__ import annotations

from typing import Final

from llm_spec.measure.pair_stats import PairStats

__all__ = ["LossBudget"]

_MAX_SHARE: Final = 0.1  # of one answer's time, whatever all answers together may lose
_MAX_GAP: Final = 1.5  # times a stream's usual step, beyond which it waits because of other work


class LossBudget:
    """One answer's part of what all answers of a pair may lose. Times are seconds of any clock."""

    def __init__(self, pair_stats: PairStats, began_s: float) -> None:
        self._pair_stats = pair_stats
        self._began_s = began_s
        self._lost_s = 0.0

    def add_lost_time(self, seconds: float) -> None:
        """The answer is later than the target's own by so much; earlier, if negative."""
        self._lost_s += seconds
        self._pair_stats.rows.add_lost_time(seconds)

    def add_late_tokens(self, num_tokens: int, seconds: float) -> bool:
        """So many tokens of the stream came beside other work, so long after the last; gives whether it is late."""
        step_s = num_tokens * self._pair_stats.target_token_s
        is_late = seconds > _MAX_GAP * step_s
        if is_late:
            self.add_lost_time(seconds - step_s)  # a hiccup counts as well: nobody can tell
        return is_late

    def estimate_left_s(self, now_s: float, max_tokens: int | None) -> float:
        """How much may still be lost now, in an answer of at most `max_tokens`."""
        rows, step_s = self._pair_stats.rows, self._pair_stats.target_token_s
        elapsed_s = now_s - self._began_s
        answer_s = max(elapsed_s, rows.estimate_answer_s(step_s, max_tokens))
        return min(
            rows.estimate_allowed_loss_s(elapsed_s, step_s, max_tokens), _MAX_SHARE * answer_s - max(0.0, self._lost_s)
        )
