"""How many tokens to draft: a policy is a frozen configuration, its controller the running state of one request.

`CostAware`, the default, drafts one token more while that buys tokens at a better price than the rest of the round:

    survival * acceptance >= rate * (draft cost + marginal verify cost)

survival: the probability that every token drafted so far is accepted. rate: tokens per second at the best lookahead,
0 included, by the current estimates. With constant acceptance this is the exact optimum: a round of g tokens emits
`(1 - a**(g + 1)) / (1 - a)` tokens on average (Leviathan et al., arXiv 2211.17192) for `verify(g + 1) + g * draft`
seconds. Which lookahead is used never changes what coupled or rejection sampling emit, only how fast.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from llm_spec._checks import check_number
from llm_spec.errors import ConfigError
from llm_spec.tokens.statistics import (
    AcceptanceEstimate,
    ExponentialMovingAverage,
    ForwardCostLine,
    RobustTokenCostAverage,
)

__all__ = [
    "MAX_LOOKAHEAD",
    "CostAware",
    "Ewma",
    "Fixed",
    "LookaheadController",
    "LookaheadCostMemory",
    "LookaheadPolicy",
    "RoundFeedback",
    "Threshold",
]

MAX_LOOKAHEAD = 32


class RoundFeedback(NamedTuple):
    """What a round did and cost; a plain step is a round that drafted nothing.

    Seconds leave out the prompt's prefill, of draft and target both. `confidences` are the drafted tokens' own.
    """

    num_draft_tokens: int
    num_accepted_tokens: int
    draft_s: float
    verify_s: float
    confidences: Sequence[float | None] = ()


class LookaheadController(Protocol):
    """Decides for one request; used by one thread at a time. A round is `limit`, `wants_more` per token, `update`."""

    def limit(self) -> int:
        """Most tokens to draft this round; 0: a plain step."""
        ...

    def wants_more(self, confidences: Sequence[float | None]) -> bool:
        """Draft one token more? Asked after each drafted token, with the confidences of this round's tokens."""
        ...

    def update(self, report: RoundFeedback) -> None:
        """Learn from a finished round."""
        ...

    def describe(self) -> Mapping[str, float]:
        """The state in numbers, for logs and results; seconds end in `_s`."""
        ...

    def reset(self) -> None:
        """Forget everything learned."""
        ...


class LookaheadPolicy(Protocol):
    """A frozen configuration that starts one controller per request."""

    def start(self) -> LookaheadController: ...


# --------------------------------------------------------------------------------------------- fixed


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always draft `lookahead` tokens."""

    lookahead: int

    def __post_init__(self) -> None:
        _check_lookahead_range("lookahead", self.lookahead)

    def start(self) -> LookaheadController:
        return _FixedController(self.lookahead)


class _FixedController:
    """A lookahead that only changes between rounds; subclasses say how."""

    def __init__(self, initial: int) -> None:
        self._initial = initial
        self.reset()

    def reset(self) -> None:
        self._lookahead = self._initial

    def limit(self) -> int:
        return self._lookahead

    def wants_more(self, confidences: Sequence[float | None]) -> bool:
        return len(confidences) < self._lookahead

    def update(self, report: RoundFeedback) -> None:
        pass

    def describe(self) -> Mapping[str, float]:
        return {"lookahead": self._lookahead}


# ----------------------------------------------------------------------------------------- threshold


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """One token more after a round that accepted above `high_acceptance_rate`, one less below the minimum."""

    initial: int = 4
    max_lookahead: int = 16
    min_acceptance_rate: float = 0.4
    high_acceptance_rate: float = 0.8

    def __post_init__(self) -> None:
        _check_lookahead_range("max_lookahead", self.max_lookahead)
        _check_lookahead_range("initial", self.initial, self.max_lookahead)
        check_number(ConfigError, "high_acceptance_rate", self.high_acceptance_rate, 0.0, 1.0)
        check_number(ConfigError, "min_acceptance_rate", self.min_acceptance_rate, 0.0, self.high_acceptance_rate)

    def start(self) -> LookaheadController:
        return _ThresholdController(self)


class _ThresholdController(_FixedController):
    def __init__(self, policy: Threshold) -> None:
        super().__init__(policy.initial)
        self._policy = policy

    def update(self, report: RoundFeedback) -> None:
        if not report.num_draft_tokens:
            return
        rate = report.num_accepted_tokens / report.num_draft_tokens
        if rate > self._policy.high_acceptance_rate:
            self._lookahead = min(self._lookahead + 1, self._policy.max_lookahead)
        elif rate < self._policy.min_acceptance_rate:
            self._lookahead = max(self._lookahead - 1, 1)


# ---------------------------------------------------------------------------------------------- ewma


@dataclass(frozen=True, slots=True, kw_only=True)
class Ewma:
    """One token more than rounds accept on average (half-life in rounds); after a change, `cooldown` rounds of rest."""

    initial: int = 4
    max_lookahead: int = 16
    half_life: float = 8.0
    cooldown: int = 4

    def __post_init__(self) -> None:
        _check_lookahead_range("max_lookahead", self.max_lookahead)
        _check_lookahead_range("initial", self.initial, self.max_lookahead)
        check_number(ConfigError, "half_life", self.half_life, 0.0, above=True)
        check_number(ConfigError, "cooldown", self.cooldown, 0, integer=True)

    def start(self) -> LookaheadController:
        return _EwmaController(self)


class _EwmaController(_FixedController):
    def __init__(self, policy: Ewma) -> None:
        self._policy = policy
        self._accepted = ExponentialMovingAverage(half_life=policy.half_life)
        super().__init__(policy.initial)

    def reset(self) -> None:
        super().reset()
        self._accepted.reset()
        self._rest = self._policy.cooldown

    def update(self, report: RoundFeedback) -> None:
        if not report.num_draft_tokens:
            return
        wanted = round(self._accepted.update(report.num_accepted_tokens)) + 1
        self._rest -= 1
        if self._rest < 0 and wanted != self._lookahead:
            self._lookahead = min(wanted, self._policy.max_lookahead)
            self._rest = self._policy.cooldown

    def describe(self) -> Mapping[str, float]:
        return {"lookahead": self._lookahead, "mean_accepted": self._accepted.value or 0.0}


# ---------------------------------------------------------------------------------------- cost aware

_CONFIDENCE_BUCKETS = (
    0.2,
    0.4,
    0.6,
    0.8,
    0.9,
    0.95,
    0.99,
)  # borders between confidences; finer where drafts are mostly sure
_COST_HALF_LIFE = 64.0  # rounds
_COST_MEMORY = 4.0  # requests after which what one of them has measured counts half
_PRIOR_WIDTH = 8.0  # tokens more than one, in the prior of what a forward costs
_PRIOR_WEIGHT = 2.0  # tokens
_BUCKET_WEIGHT = 4.0  # tokens
_FIRST_PAUSE = 8  # plain steps before speculation is tried again; twice as many each time that it fails
_LAST_PAUSE = 512
_TRIAL_LENGTH = 2  # tokens drafted to try again, whatever they cost
_SETTLED_ROUNDS = 16  # speculation that lasted this long was no mistake: the next pause is short again
_MIN_SPEEDUP = 1.02  # an expected gain below this is within the noise of the estimates: plain is the safe choice
_SLIM_SPEEDUP = 2.0  # below this, what a plain step really costs matters enough to take one now and then
_PLAIN_EVERY = 64  # rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class CostAware:
    """Draft one token more while it pays, by acceptance and costs measured in this request.

    prior_acceptance, prior_draft_cost, prior_verify_cost: what is believed before the first round. Costs are those of
    drafting a token and of verifying one token more, in plain steps of the target; from a decoder's second request on
    they are what its earlier ones measured. half_life: judged tokens after which a token's weight in the acceptance
    has halved.
    """

    max_lookahead: int = 16
    half_life: float = 48.0
    prior_acceptance: float = 0.7
    prior_draft_cost: float = 0.1
    prior_verify_cost: float = 0.0625

    def __post_init__(self) -> None:
        _check_lookahead_range("max_lookahead", self.max_lookahead)
        check_number(ConfigError, "half_life", self.half_life, 0.0, above=True)
        check_number(ConfigError, "prior_acceptance", self.prior_acceptance, 0.0, 1.0)
        check_number(ConfigError, "prior_draft_cost", self.prior_draft_cost, 0.0)
        check_number(ConfigError, "prior_verify_cost", self.prior_verify_cost, 0.0)

    def start(self) -> LookaheadController:
        return _CostAwareController(self)


class _CostAwareController:
    def __init__(self, policy: CostAware) -> None:
        self._policy = policy
        self.reset()

    def reset(self) -> None:
        self._acceptance = self._make_acceptance_estimate(_PRIOR_WEIGHT)
        self._buckets = [self._make_acceptance_estimate(_BUCKET_WEIGHT) for _ in range(len(_CONFIDENCE_BUCKETS) + 1)]
        self._draft = RobustTokenCostAverage(half_life=_COST_HALF_LIFE)
        self._verify = ForwardCostLine(
            half_life=_COST_HALF_LIFE, prior_ratio=1.0 + _PRIOR_WIDTH * self._policy.prior_verify_cost
        )
        self._plain_steps = 0  # still to take before the next trial
        self._pause = _FIRST_PAUSE // 2
        self._is_trial_due = False
        self._rounds = 0  # since speculation began or resumed
        self._since_plain: float = _PLAIN_EVERY
        self._plan_lookahead()

    def _make_acceptance_estimate(self, prior_weight: float) -> AcceptanceEstimate:
        policy = self._policy
        return AcceptanceEstimate(half_life=policy.half_life, prior=policy.prior_acceptance, prior_weight=prior_weight)

    def limit(self) -> int:
        if self._plain_steps:
            return 0
        return min(_TRIAL_LENGTH, self._policy.max_lookahead) if self._is_trial_due else self._policy.max_lookahead

    def wants_more(self, confidences: Sequence[float | None]) -> bool:
        if len(confidences) >= self.limit():
            return False
        if self._is_trial_due:
            return True
        survival = self._acceptance.rate
        for confidence in confidences:
            survival *= self._estimate_acceptance_at_confidence(confidence)
        return survival >= self._price

    def _estimate_acceptance_at_confidence(self, confidence: float | None) -> float:
        """How likely a token of this confidence is accepted; before there is evidence, half-way to its own word."""
        overall = self._acceptance.rate
        if confidence is None:
            return overall
        return self._buckets[bisect_right(_CONFIDENCE_BUCKETS, confidence)].estimate_rate_with_prior(
            (overall + confidence) / 2.0
        )

    def update(self, report: RoundFeedback) -> None:
        num_draft, num_accepted = report.num_draft_tokens, report.num_accepted_tokens
        self._verify.update(num_draft + 1, report.verify_s)
        if num_draft:
            self._draft.update(num_draft, report.draft_s)
            self._acceptance.update(num_accepted, rejected=num_accepted < num_draft)
            self._update_confidence_buckets(report)
        self._plan_lookahead()
        self._schedule_next_round(report)

    def _update_confidence_buckets(self, report: RoundFeedback) -> None:
        for index, confidence in enumerate(report.confidences[: report.num_accepted_tokens + 1]):
            if confidence is not None:
                accepted = index < report.num_accepted_tokens
                bucket = self._buckets[bisect_right(_CONFIDENCE_BUCKETS, confidence)]
                bucket.update(int(accepted), rejected=not accepted)

    def _plan_lookahead(self) -> None:
        """Find the best fixed lookahead and its rate, and what one token more must bring."""
        draft_cost = self._estimate_draft_cost()
        acceptance = self._acceptance.rate
        cost, tokens, survival = max(self._verify.base_s, 1e-12), 1.0, 1.0
        best, best_rate = 0, tokens / cost
        for lookahead in range(1, self._policy.max_lookahead + 1):
            survival *= acceptance
            tokens += survival
            cost += draft_cost + self._verify.per_token_s
            if tokens > best_rate * cost * (1.0 if best else _MIN_SPEEDUP):
                best, best_rate = lookahead, tokens / cost
        self._best, self._rate = best, best_rate
        self._price = best_rate * (draft_cost + self._verify.per_token_s)

    def _estimate_draft_cost(self) -> float:
        measured = self._draft.value
        return self._policy.prior_draft_cost * self._verify.base_s if measured is None else measured

    def _schedule_next_round(self, report: RoundFeedback) -> None:
        """Decide what the next round is: a draft, a trial of one, or a plain step."""
        self._since_plain = self._since_plain + 1 if report.num_draft_tokens else 0
        if self._plain_steps:
            self._plain_steps -= 1
            if self._best:
                self._plain_steps = 0  # a plain step turned out to cost more than was thought
            elif not self._plain_steps:
                self._is_trial_due = True
                self._acceptance.decay(self._pause)
        elif self._best:
            self._rounds += 1
            if self._since_plain >= _PLAIN_EVERY and self._rate * self._verify.base_s < _SLIM_SPEEDUP:
                self._plain_steps = 1
        elif not (self._is_trial_due and report.num_accepted_tokens == report.num_draft_tokens):
            self._begin_pause_of_plain_steps()
        self._is_trial_due = self._is_trial_due and not self._best

    def _begin_pause_of_plain_steps(self) -> None:
        self._pause = _FIRST_PAUSE if self._rounds >= _SETTLED_ROUNDS else min(2 * self._pause, _LAST_PAUSE)
        self._plain_steps = self._pause
        self._rounds = 0
        self._is_trial_due = False

    def describe(self) -> Mapping[str, float]:
        return {
            "acceptance": self._acceptance.rate,
            "lookahead": self._best,
            "tokens_per_s": self._rate,
            "draft_token_s": self._estimate_draft_cost(),
            "plain_step_s": self._verify.base_s,
            "verify_token_s": self._verify.per_token_s,
            "plain_steps_left": self._plain_steps,
        }


class LookaheadCostMemory:
    """What drafting and verifying cost in earlier requests of a target with a draft, for the next one to begin with.

    In plain steps: how busy the machine was matters less then. What was accepted is not kept, since it depends on what
    the request is about.
    """

    def __init__(self) -> None:
        self._draft = ExponentialMovingAverage(half_life=_COST_MEMORY)
        self._verify = ExponentialMovingAverage(half_life=_COST_MEMORY)

    def observe(self, state: Mapping[str, float]) -> None:
        """Take in what a controller says of itself at the end of a request (`describe`), if it has measured costs."""
        if state.get("plain_step_s") and "draft_token_s" in state and "verify_token_s" in state:
            self._draft.update(state["draft_token_s"] / state["plain_step_s"])
            self._verify.update(state["verify_token_s"] / state["plain_step_s"])

    def apply(self, policy: LookaheadPolicy) -> LookaheadPolicy:
        """The policy for the next request."""
        if not isinstance(policy, CostAware) or self._draft.value is None or self._verify.value is None:
            return policy
        return replace(policy, prior_draft_cost=self._draft.value, prior_verify_cost=self._verify.value)


def _check_lookahead_range(name: str, value: int, high: int = MAX_LOOKAHEAD) -> None:
    check_number(ConfigError, name, value, 1, high, integer=True)
