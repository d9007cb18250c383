"""DraftGate: when a draft may write although that makes the target slower. No clock, no task and no I/O of its own.

A draft on the target's machine, or at its server, takes the target's time, whether or not what it writes is of use. So
the target's stream is timed beside the draft and alone; where the draft would never pause, it is held for some tokens
once. A draft that makes the stream later writes where that pays, and otherwise within what may be lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from llm_spec.contract.draft import DraftProvider, get_draft_capabilities
from llm_spec.pair_stats import PairStats
from llm_spec.strategies.loss_budget import LossBudget

__all__ = ["DraftGate"]

_MIN_TOKENS: Final = 4  # that are worth a call
_MIN_SHARE: Final = 0.02  # of a stretch of time, in which a draft has to write to count
_MAX_GAP: Final = 3.0  # times its usual step that a token counts at most: more is a hiccup


class DraftGate:
    """One answer, and its draft. `measure_drafting_s`: for how many seconds the draft has been writing.

    `is_open`: the draft may always write, since it asks no model, or writes its answer once and cannot be restarted.
    """

    def __init__(
        self,
        draft: DraftProvider,
        pair_stats: PairStats,
        budget: LossBudget,
        measure_drafting_s: Callable[[], float],
        max_tokens: int | None,
    ) -> None:
        can = get_draft_capabilities(draft)
        self.measure_drafting_s = measure_drafting_s
        self.is_open = can.is_free or not can.continues_prefix
        self._pair_stats = pair_stats
        self._load = pair_stats.draft_load
        self._budget = budget
        self._max_tokens = max_tokens
        self._has_begun = False  # the target, to write

    @property
    def slows_target(self) -> bool:
        """Whether the draft is known to make the target slower."""
        return not self.is_open and self._load.is_harmful

    def may_disturb(self, drafting_s: float, seconds: float) -> bool:
        """Whether a stream is later since a draft wrote for `drafting_s` of so many seconds."""
        return self.slows_target and drafting_s > _MIN_SHARE * seconds

    def add_streamed(self, num_tokens: int, seconds: float, drafting_s: float, *, has_calls: bool = False) -> None:
        """A stream wrote so many tokens while the draft wrote for `drafting_s`. `has_calls`: beside other work, too."""
        if self.is_open or not num_tokens:
            return
        if not self._has_begun:  # the first token's time is that of the prompt, too
            self._has_begun = True
            return
        load, was_harmful = self._load, self._load.is_harmful
        if has_calls:
            load.add_beside_calls()
            return
        if load.alone_token_s is not None:
            seconds = min(seconds, _MAX_GAP * load.alone_token_s * num_tokens)
        if drafting_s <= _MIN_SHARE * seconds:
            load.add_alone(num_tokens, seconds)
        else:
            load.add_beside(num_tokens, seconds, drafting_s)
            if was_harmful and load.alone_token_s is not None:
                self._budget.add_lost_time(seconds - num_tokens * load.alone_token_s)
        if load.is_harmful and not was_harmful and load.alone_token_s is not None:
            self._pair_stats.forget_token_times(load.alone_token_s)

    def limit_draft_tokens(
        self,
        num_tokens: int,
        token_s: float,
        now_s: float,
        *,
        can_pause: bool,
        is_paying: bool,
        gained_s: float = 0.0,
    ) -> int:
        """How many of `num_tokens` may be drafted now, each in `token_s`; 0: none, and what is drafted is to end.

        `can_pause`: a stream is open that goes on meanwhile. `is_paying`: drafting is known to win more time than it
        costs. `gained_s`: that it has won in this answer.
        """
        if self.is_open:
            return num_tokens
        if can_pause and self._load.lacks_comparison:
            return 0
        if is_paying or not self._load.is_harmful:
            return num_tokens
        if not self._has_begun:
            return 0
        allowed_s = self._budget.estimate_left_s(now_s, self._max_tokens) + gained_s
        num_allowed = int(allowed_s / max(self._load.late_s_per_s * token_s, 1e-9))
        return min(num_tokens, num_allowed) if num_allowed >= _MIN_TOKENS else 0
