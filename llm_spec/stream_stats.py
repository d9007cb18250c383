"""ExtraStreamStats: what is known of a target's streams that are open beside its first one."""

from __future__ import annotations

from typing import Final

from llm_spec.tokens.statistics import ExponentialMovingAverage

__all__ = ["ExtraStreamStats"]

_HALF_LIFE: Final = 16.0  # of streams


class ExtraStreamStats:
    """Figures of a target's later streams. Kept across requests, on one event loop.

    first_s: seconds from the decision to open one to its first token. num_extra: how many were open beside the first
    one without slowing it down; 0: none was tried yet, or the server has no room.
    """

    def __init__(self) -> None:
        self.first_s = ExponentialMovingAverage(half_life=_HALF_LIFE)
        self.num_extra = 0
