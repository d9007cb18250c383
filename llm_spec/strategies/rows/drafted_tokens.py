"""DraftedTokens: what a draft says follows the confirmed tokens, and how long it takes. No clock, task or I/O."""

from __future__ import annotations

from collections.abc import Sequence

from llm_spec.measure.row_stats import RowCallStats

__all__ = ["DraftedTokens"]


class DraftedTokens:
    """One answer's draft; times are seconds of any clock that never goes back, and go to `row_stats`.

    `ids`: the drafted tokens after those that are confirmed; `seconds`: that the draft took for each. `is_idle`:
    nothing more is on its way; `is_exhausted`: nor ever will be.
    """

    def __init__(self, row_stats: RowCallStats, now_s: float) -> None:
        self.ids: list[int] = []
        self.seconds: list[float] = []
        self.is_idle = self.is_exhausted = False
        self._row_stats = row_stats
        self._has_begun = False
        self._began_s: float | None = None  # None: its first token has come, or is an answer's very first
        self._grew_s = now_s

    def record_restart(self, now_s: float) -> None:
        """It begins anew, after the confirmed tokens."""
        self._began_s = now_s if self._has_begun else None
        self._has_begun = True

    def update(
        self, ids: Sequence[int], seconds: Sequence[float], now_s: float, *, is_idle: bool, is_exhausted: bool
    ) -> None:
        """What it says now."""
        num_new = len(ids) - len(self.ids)
        if num_new > 0 and self._began_s is not None:
            self._row_stats.draft_start_s.update(now_s - self._began_s)
        elif num_new > 0 and self.ids:
            self._row_stats.add_drafted_tokens_time(num_new, now_s - self._grew_s)
        if num_new > 0:
            self._grew_s, self._began_s = now_s, None
        self.ids, self.seconds = list(ids), list(seconds)
        self.is_idle, self.is_exhausted = is_idle, is_exhausted

    def confirm_token(self, token_id: int) -> int | None:
        """The answer's next token is known; gives what was drafted there, if anything."""
        drafted_id = self.ids.pop(0) if self.ids else None
        del self.seconds[:1]
        if drafted_id != token_id:
            self.ids.clear()  # what follows was guessed after another token
            self.seconds.clear()
        return drafted_id
