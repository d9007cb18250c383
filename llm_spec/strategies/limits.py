"""Limits: what a strategy may do for one answer, by the user's settings. Frozen, keyword-only, validated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

from llm_spec.contract.checks import check_number
from llm_spec.contract.errors import ConfigError
from llm_spec.contract.short_repr import format_short_repr
from llm_spec.local.acceptance_name import AcceptanceName
from llm_spec.local.lookahead import CostAware, LookaheadPolicy

__all__ = ["JudgeConfig", "Limits"]


@dataclass(frozen=True, kw_only=True)
class JudgeConfig:
    """How far a target's approval of text that it has not written may go (`judge`).

    max_rounds: verdicts for one answer. min_accepted: share of the passages shown, below which the target goes on
    alone. max_share: the part of the answer, as far as it is known then, that may be approved only; the rest is the
    target's own.
    """

    max_rounds: int = 4
    min_accepted: float = 0.25
    max_share: float = 1.0

    __repr__ = format_short_repr

    def __post_init__(self) -> None:
        check_number(ConfigError, "max_rounds", self.max_rounds, 1, integer=True)
        check_number(ConfigError, "min_accepted", self.min_accepted, 0.0, 1.0)
        check_number(ConfigError, "max_share", self.max_share, 0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a strategy may do for one answer; `SpeculativeConfig` says what each of them means."""

    lookahead: LookaheadPolicy = field(default_factory=CostAware)
    acceptance: AcceptanceName = "coupled"
    baseline_every: int = 64
    max_draft_tokens: int | None = None
    max_iterations: int | None = None
    max_concurrent_streams: int = 4
    max_extra_cost: float | None = None
    draft_timeout_s: float = 30.0
    judge: JudgeConfig = JudgeConfig()

    def __post_init__(self) -> None:
        if self.acceptance not in (names := get_args(AcceptanceName)):
            raise ConfigError(f"acceptance is {self.acceptance!r}; it must be one of {', '.join(names)}")
        if not callable(getattr(self.lookahead, "start", None)):
            raise ConfigError(f"lookahead is {self.lookahead!r}; it must be a policy such as CostAware() or Fixed(4)")
        check_number(ConfigError, "baseline_every", self.baseline_every, 0, integer=True)
        check_number(ConfigError, "max_draft_tokens", self.max_draft_tokens, 0, integer=True)
        check_number(ConfigError, "max_iterations", self.max_iterations, 1, integer=True)
        check_number(ConfigError, "max_concurrent_streams", self.max_concurrent_streams, 1, integer=True)
        check_number(ConfigError, "max_extra_cost", self.max_extra_cost, 0.0)
        check_number(ConfigError, "draft_timeout_s", self.draft_timeout_s, 0.0, above=True)
