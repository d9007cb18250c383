"""SpeculativeConfig: what a decoder may do. Frozen, keyword-only, validated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from llm_spec._checks import check_number
from llm_spec.errors import ConfigError
from llm_spec.tokens.lookahead import CostAware, LookaheadPolicy
from llm_spec.tokens.rules import AcceptanceName

__all__ = ["SpeculativeConfig", "StrategyName"]

StrategyName: TypeAlias = Literal["auto", "plain", "tokens", "probe", "score", "race", "regenerate"]


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """What a decoder may do.

    strategy: how the target verifies; `auto` takes the strongest exact one that pair and request allow, else plain.
    lookahead: how many tokens a draft proposes a round (`CostAware`, `Threshold`, `Ewma`, `Fixed`).
    acceptance: `coupled` (one seed, one text), `rejection` (the same law, no such text), or `lossy_typical`, which
        may change the answer and says so in the result.
    max_draft_tokens: tokens that may be drafted for one request; when they are spent the target goes on alone.
    max_total_tokens: tokens of one answer, over and above the request's own `max_tokens`.
    max_iterations: rounds of one answer, plain steps counted.
    max_concurrent_streams: requests to the target that may be open at once for one answer (`race`, `probe`).
    max_extra_cost: tokens that may be read and thrown away beside each token that the target alone would read or write
        (`race`); None: no bound.
    deadline_s: seconds after which a request ends with the text verified so far.
    draft_timeout_s: seconds that one call of a draft may take before the target goes on alone.
    seed: for requests that sample and bring none; None draws a new one each time (the result tells it).
    log_content: put message text into log events (off: only counts and times).
    """

    strategy: StrategyName = "auto"
    lookahead: LookaheadPolicy = field(default_factory=CostAware)
    acceptance: AcceptanceName = "coupled"
    max_draft_tokens: int | None = None
    max_total_tokens: int | None = None
    max_iterations: int | None = None
    max_concurrent_streams: int = 4
    max_extra_cost: float | None = None
    deadline_s: float | None = None
    draft_timeout_s: float = 30.0
    seed: int | None = None
    log_content: bool = False

    def __post_init__(self) -> None:
        _check_choice("strategy", self.strategy, get_args(StrategyName))
        _check_choice("acceptance", self.acceptance, get_args(AcceptanceName))
        if not callable(getattr(self.lookahead, "start", None)):
            raise ConfigError(f"lookahead is {self.lookahead!r}; it must be a policy such as CostAware() or Fixed(4)")
        check_number(ConfigError, "max_draft_tokens", self.max_draft_tokens, 0, integer=True)
        check_number(ConfigError, "max_total_tokens", self.max_total_tokens, 1, integer=True)
        check_number(ConfigError, "max_iterations", self.max_iterations, 1, integer=True)
        check_number(ConfigError, "max_concurrent_streams", self.max_concurrent_streams, 1, integer=True)
        check_number(ConfigError, "max_extra_cost", self.max_extra_cost, 0.0)
        check_number(ConfigError, "deadline_s", self.deadline_s, 0.0, above=True)
        check_number(ConfigError, "draft_timeout_s", self.draft_timeout_s, 0.0, above=True)
        check_number(ConfigError, "seed", self.seed, 0, 2**64 - 1, integer=True)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(choices)}")
