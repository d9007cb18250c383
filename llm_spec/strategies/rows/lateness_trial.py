"""LatenessTrial: how late other work makes the stream that it is done beside. No clock, no task, no I/O."""

from __future__ import annotations

from llm_spec.measure.row_stats import LatenessStats

__all__ = ["LatenessTrial"]


class LatenessTrial:
    """So much work (tokens that are read, rows) beside a stream, whose last token came at `stream_last_s`.

    The first token after an answer of the work shows how late the stream is; that goes to `stats`.
    """

    def __init__(self, stats: LatenessStats, amount: int, stream_last_s: float) -> None:
        self.amount = amount
        self._stats = stats
        self._stream_last_s = stream_last_s
        self._num_streamed = 0
        self.is_answered = False  # whether the work, or a part of it, is done

    def add_streamed(self, num_tokens: int, arrived_s: float, step_s: float) -> float | None:
        """Tokens of the stream came, which has one each step; gives how late it is where the trial ends with them."""
        self._num_streamed += num_tokens
        if not (self.is_answered and num_tokens):
            return None
        late_s = max(0.0, arrived_s - self._stream_last_s - self._num_streamed * step_s)
        self._stats.add(self.amount, late_s)
        return late_s
