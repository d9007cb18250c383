"""The token-level core: pure functions and small objects over arrays, no model, no I/O."""

from __future__ import annotations

from llm_spec.tokens.lookahead import (
    MAX_LOOKAHEAD,
    CostAware,
    Ewma,
    Fixed,
    LookaheadController,
    LookaheadPolicy,
    RoundReport,
    Threshold,
)
from llm_spec.tokens.noise import Purpose, gumbel, uniform, uniform_number
from llm_spec.tokens.philox import philox4x32
from llm_spec.tokens.rules import (
    AcceptanceName,
    AcceptanceRule,
    Coupled,
    LossyTypical,
    Rejection,
    Verdict,
    make_rule,
    residual,
)
from llm_spec.tokens.sampling import Sampler, TokenConstraint, adjusted_logits, is_greedy, is_plain, log_law
from llm_spec.tokens.statistics import AcceptanceEstimate, CostAverage, CostLine, ExponentialMovingAverage

__all__ = [
    "MAX_LOOKAHEAD",
    "AcceptanceEstimate",
    "AcceptanceName",
    "AcceptanceRule",
    "CostAverage",
    "CostAware",
    "CostLine",
    "Coupled",
    "Ewma",
    "ExponentialMovingAverage",
    "Fixed",
    "LookaheadController",
    "LookaheadPolicy",
    "LossyTypical",
    "Purpose",
    "Rejection",
    "RoundReport",
    "Sampler",
    "Threshold",
    "TokenConstraint",
    "Verdict",
    "adjusted_logits",
    "gumbel",
    "is_greedy",
    "is_plain",
    "log_law",
    "make_rule",
    "philox4x32",
    "residual",
    "uniform",
    "uniform_number",
]
