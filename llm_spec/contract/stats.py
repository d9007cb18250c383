"""SpeculativeStats: counts and times of the rounds of answers."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

from llm_spec.contract.events import Round
from llm_spec.contract.short_repr import format_short_repr

__all__ = ["SpeculativeStats"]


@dataclass(frozen=True, kw_only=True)
class SpeculativeStats:
    """Counts and times of rounds, under the field's usual names.

    Addition adds up the rounds of several requests.
    """

    num_rounds: int = 0
    num_spec_steps: int = 0  # rounds in which something was drafted
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_emitted_tokens: int = 0
    num_fallbacks: int = 0  # drafts that failed
    acceptance_histogram: tuple[int, ...] = ()  # [n]: speculative rounds that accepted n tokens
    draft_s: float = 0.0
    verify_s: float = 0.0
    num_plain_steps: int = 0
    plain_s: float = 0.0  # the part of verify_s that plain steps took

    __repr__ = format_short_repr

    def __add__(self, other: SpeculativeStats) -> SpeculativeStats:
        sums: dict[str, Any] = {
            f.name: getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(SpeculativeStats)
        }
        ours, theirs = self.acceptance_histogram, other.acceptance_histogram
        width = max(len(ours), len(theirs))
        padded = zip(ours + (0,) * (width - len(ours)), theirs + (0,) * (width - len(theirs)), strict=True)
        sums["acceptance_histogram"] = tuple(a + b for a, b in padded)
        return SpeculativeStats(**sums)

    @property
    def num_wasted_draft_tokens(self) -> int:
        """Drafted tokens that the target did not confirm."""
        return self.num_draft_tokens - self.num_accepted_draft_tokens

    @property
    def num_accepted_tokens_per_position(self) -> tuple[int, ...]:
        """At index i: the speculative rounds that accepted the drafted token at position i."""
        counts = accumulate(reversed(self.acceptance_histogram[1:]))
        return tuple(counts)[::-1]

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted / drafted tokens, or None if nothing was drafted."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted tokens / speculative rounds, or None if there were none.

        The 1 is the correction or bonus.
        """
        return 1 + self.num_accepted_draft_tokens / self.num_spec_steps if self.num_spec_steps else None

    @property
    def mean_lookahead(self) -> float | None:
        """Drafted tokens / speculative rounds, or None if there were none."""
        return self.num_draft_tokens / self.num_spec_steps if self.num_spec_steps else None

    @classmethod
    def from_rounds(cls, rounds: Sequence[Round], *, num_fallbacks: int = 0) -> SpeculativeStats:
        """Sum up some rounds."""
        if not rounds:
            return cls(num_fallbacks=num_fallbacks) if num_fallbacks else _NO_ROUNDS
        drafted = [r for r in rounds if r.num_draft_tokens]
        plain = [r for r in rounds if not r.num_draft_tokens]
        accepted = Counter(r.num_accepted_tokens for r in drafted)
        return cls(
            num_rounds=len(rounds),
            num_spec_steps=len(drafted),
            num_draft_tokens=sum(r.num_draft_tokens for r in drafted),
            num_accepted_draft_tokens=sum(r.num_accepted_tokens for r in drafted),
            num_emitted_tokens=sum(r.num_emitted_tokens for r in rounds),
            num_fallbacks=num_fallbacks,
            acceptance_histogram=tuple(accepted[n] for n in range(max(accepted, default=-1) + 1)),
            draft_s=sum(r.draft_s for r in rounds),
            verify_s=sum(r.verify_s for r in rounds),
            num_plain_steps=len(plain),
            plain_s=sum(r.verify_s for r in plain),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all figures, including the derived ones, as JSON values."""
        derived = ("num_wasted_draft_tokens", "draft_acceptance_rate", "mean_acceptance_length", "mean_lookahead")
        fields = dataclasses.asdict(self) | {name: getattr(self, name) for name in derived}
        return fields | {"acceptance_histogram": list(self.acceptance_histogram)}

    def summary(self) -> str:
        """Return a short text for people."""
        if not self.num_spec_steps:
            steps = "plain step" if self.num_rounds == 1 else "plain steps"
            return f"{self.num_emitted_tokens} tokens in {self.num_rounds} {steps}"
        return (
            f"{self.num_emitted_tokens} tokens in {self.num_rounds} rounds; "
            f"{self.num_accepted_draft_tokens} of {self.num_draft_tokens} drafted tokens accepted "
            f"({self.draft_acceptance_rate:.0%}), {self.mean_acceptance_length:.2f} tokens a speculative round"
        )


_NO_ROUNDS: Final = SpeculativeStats()
