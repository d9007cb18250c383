"""The token-level core: pure functions and small objects over numpy arrays. No model, no I/O."""

from __future__ import annotations

from llm_spec.tokens.acceptance import (
    AcceptanceName,
    AcceptanceRule,
    Coupled,
    LossyTypical,
    Rejection,
    VerifyResult,
    make_acceptance_rule,
    residual_probs,
)
from llm_spec.tokens.lookahead import (
    MAX_LOOKAHEAD,
    CostAware,
    Ewma,
    Fixed,
    LookaheadController,
    LookaheadPolicy,
    RoundFeedback,
    Threshold,
)
from llm_spec.tokens.noise import Purpose, gumbel, uniform, uniform_number
from llm_spec.tokens.philox import philox4x32
from llm_spec.tokens.sampling import Sampler, TokenConstraint, adjust_logits, is_greedy, logprobs, needs_no_penalties
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
    "RoundFeedback",
    "Sampler",
    "Threshold",
    "TokenConstraint",
    "VerifyResult",
    "adjust_logits",
    "gumbel",
    "is_greedy",
    "logprobs",
    "make_acceptance_rule",
    "needs_no_penalties",
    "philox4x32",
    "residual_probs",
    "uniform",
    "uniform_number",
]
