"""How many tokens to draft: a policy is a frozen configuration, its controller the running state of one request.

`CostAware`, the default, drafts one token more while that buys tokens at a better price than the rest of the round:

    survival * acceptance >= rate * (marginal draft cost + marginal verify cost)

survival: the probability that every token drafted so far is accepted. rate: tokens per second at the best lookahead,
0 included, by the current estimates. With constant acceptance this is the exact optimum: a round of g tokens emits
`(1 - a**(g + 1)) / (1 - a)` tokens on average (Leviathan et al., arXiv 2211.17192) for
`verify(g + 1) + start + g * draft` seconds. Of the tokens drafted, as many are verified as bring the most by their
confidences:

    max over g, 0 included, of sum(survival of the first 0 to g tokens) - rate * verify(g + 1)

A first token may cost more to verify than all that follow it: then a draft pays that is long and sure, and no other.
What was drafted but not verified is compared with the answer all the same, so that a draft's worth is known where it
was not believed. Which lookahead is used never changes what coupled or rejection sampling emit, only how fast.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple, Protocol

from llm_spec.contract.checks import check_number
from llm_spec.contract.errors import ConfigError
from llm_spec.contract.short_repr import format_short_repr
from llm_spec.contract.token_model import PassCosts
from llm_spec.local.calibration import NUM_CONFIDENCE_RANGES, CalibrationMemory, ConfidenceCalibration, ConfidenceRecord
from llm_spec.measure.estimates import ExponentialMovingAverage, ForwardCostLine, PassCostEstimate

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

    Seconds leave out the prompt's prefill, of draft and target both. `confidences` are those of all proposed tokens,
    also of those after the `num_draft_tokens` that were verified. `num_right`: how many of the first proposed tokens
    are those of the answer, as far as it goes after this round; None: as many as were accepted.
    """

    num_draft_tokens: int
    num_accepted_tokens: int
    draft_s: float
    verify_s: float
    confidences: Sequence[float | None] = ()
    num_right: int | None = None

    @property
    def num_proposed(self) -> int:
        """Tokens that were drafted, verified or not."""
        return max(self.num_draft_tokens, len(self.confidences))


class LookaheadController(Protocol):
    """Decides for one request; used by one thread at a time.

    A round is `limit`, `wants_more` per token, `choose_num_verified`, `update`.
    """

    def limit(self) -> int:
        """Most tokens to draft this round; 0: a plain step."""
        ...

    def wants_more(self, confidences: Sequence[float | None]) -> bool:
        """Draft one token more? Asked after each drafted token, with the confidences of this round's tokens."""
        ...

    def choose_num_verified(self, confidences: Sequence[float | None]) -> int:
        """How many of the drafted tokens to verify. Not asked where that could change what is emitted."""
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

    def choose_num_verified(self, confidences: Sequence[float | None]) -> int:
        return len(confidences)

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

    __repr__ = format_short_repr

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

    __repr__ = format_short_repr

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

_COST_HALF_LIFE = 64.0  # rounds
_MAX_FIRST_SURPRISE = 3.0  # times what a draft is believed to take, that its first one counts as at most
_DRAFT_PRIOR_WEIGHT = 0.05  # drafts of nine tokens
_COST_MEMORY = 4.0  # requests after which what one of them has measured counts half
_MAX_REQUESTS_WITHOUT = 16  # that verify no draft, for what passes of several tokens cost; then that is forgotten
_FIRST_PAUSE = 8  # plain steps before speculation is tried again; twice as many each time that it fails
_LAST_PAUSE = 512
_TRIAL_LENGTH = 2  # tokens drafted to try again, whatever they cost
_TRIAL_SHARE = 0.03  # of the time of plain steps, which trials may lose
_FREE_TRIAL_SHARE = 0.005  # the same where trials only show anew what verifying costs, as a free draft is judged anyway
_SETTLED_ROUNDS = 16  # speculation that lasted this long was no mistake: the next pause is short again
_MIN_SPEEDUP = 1.02  # an expected gain below this is within the noise of the estimates: plain is the safe choice
_SLIM_SPEEDUP = 2.0  # below this, what a plain step really costs matters enough to take one now and then
_PLAIN_EVERY = 64  # rounds
_CAUTION = 0.3  # tokens that a draft must bring, beyond its price, for each plain step that it costs; fewer with time
_MAX_LOSS_STEPS = 2.0  # plain steps that an answer may lose by drafts,
_MAX_LOSS_SHARE = 0.02  # and so many for each of its tokens; what drafts have won may be lost again
_MIN_LOSS_STEPS = 0.5  # that one draft may still lose when those are used up, until as many again are
_LOSS_WEIGHT = 2.0  # of what a draft is likely to lose, against what may be lost
_PAUSE_DRAFT_SHARE = 0.005  # of the time of plain steps, in which a cheap draft may show that it is sure by now
_CHEAP_DRAFT_COST = 0.05  # plain steps, of a draft of one token
_FREE_DRAFT_COST = 0.01  # plain steps; a draft of one token that costs less may be drafted in every round


@dataclass(frozen=True, slots=True, kw_only=True)
class CostAware:
    """Draft one token more while it pays, and verify as many as pay, by acceptance and costs measured in this request.

    prior_acceptance, prior_draft_cost, prior_verify_cost, prior_wide_cost: what is believed before the first round.
    Costs are in plain steps of the target: of drafting a token, of verifying one token more, and what a pass of several
    takes longer however many they are; that may be below 0, but two take no less time than one. prior_draft_start: what
    a draft takes beside its tokens, for reading what was confirmed since its last one. From a decoder's second
    request on they are what its earlier ones measured, and before what the target measured when it was loaded.
    verify_deviations: how far passes of 2, 3, … tokens are above the line that these draw (`PassCosts.deviations`).
    half_life: judged tokens after which a token's weight in the acceptance has halved.
    prior_records: how often tokens of each range of confidence were right in a decoder's earlier requests, if any.
    """

    max_lookahead: int = 16
    half_life: float = 48.0
    prior_acceptance: float = 0.7
    prior_draft_cost: float = 0.1
    prior_draft_start: float = 0.0
    prior_verify_cost: float = 0.0625
    prior_wide_cost: float = 0.0
    verify_deviations: tuple[float, ...] = ()
    prior_records: tuple[ConfidenceRecord, ...] = ()

    __repr__ = format_short_repr

    def __post_init__(self) -> None:
        _check_lookahead_range("max_lookahead", self.max_lookahead)
        check_number(ConfigError, "half_life", self.half_life, 0.0, above=True)
        check_number(ConfigError, "prior_acceptance", self.prior_acceptance, 0.0, 1.0)
        check_number(ConfigError, "prior_draft_cost", self.prior_draft_cost, 0.0)
        check_number(ConfigError, "prior_draft_start", self.prior_draft_start, 0.0)
        check_number(ConfigError, "prior_verify_cost", self.prior_verify_cost, 0.0)
        check_number(ConfigError, "prior_wide_cost", self.prior_wide_cost, -self.prior_verify_cost)
        if len(self.prior_records) not in {0, NUM_CONFIDENCE_RANGES}:
            raise ConfigError(
                f"prior_records has {len(self.prior_records)} records; it must have one for each of the "
                f"{NUM_CONFIDENCE_RANGES} ranges of confidence, or none"
            )

    def start(self) -> LookaheadController:
        return _CostAwareController(self)


class _CostAwareController:
    def __init__(self, policy: CostAware) -> None:
        self._policy = policy
        self.reset()

    def reset(self) -> None:
        policy = self._policy
        self._tokens = ConfidenceCalibration(
            half_life=policy.half_life, prior=policy.prior_acceptance, records=policy.prior_records
        )
        first_cost = policy.prior_draft_start + policy.prior_draft_cost
        self._draft_s = ForwardCostLine(
            half_life=_COST_HALF_LIFE,
            prior_ratio=1.0 + 8.0 * policy.prior_draft_cost / first_cost if first_cost else 9.0,
            prior_weight=_DRAFT_PRIOR_WEIGHT,
        )
        self._is_draft_measured = False
        self._passes = PassCostEstimate(
            half_life=_COST_HALF_LIFE,
            prior_wide_cost=policy.prior_wide_cost,
            prior_token_cost=policy.prior_verify_cost,
            deviations=policy.verify_deviations,
        )
        self._plain_steps = 0  # still to take before the next trial, …
        self._steps_without_draft = 0  # … and taken since there was a draft
        self._pause = _FIRST_PAUSE // 2
        self._is_trial_due = False
        self._rounds = 0  # since speculation began or resumed
        self._since_plain: float = _PLAIN_EVERY
        self._num_updates = self._num_tokens = 0
        self._num_wide = 0  # passes of several tokens that were measured
        self._won_steps = 0.0  # plain steps that drafts have saved, less those that they have cost
        self._plan_lookahead()

    def limit(self) -> int:
        if self._plain_steps and not self._is_draft_free:
            return self._policy.max_lookahead if self._is_pause_draft_due else 0
        return min(_TRIAL_LENGTH, self._policy.max_lookahead) if self._is_trial_due else self._policy.max_lookahead

    def wants_more(self, confidences: Sequence[float | None]) -> bool:
        if len(confidences) >= self.limit():
            return False
        if self._is_trial_due:
            return True
        price = self._rate * (self._draft_token_s + self._passes.estimate_token_s(len(confidences)))
        return self._acceptance * self._tokens.estimate_survivals(confidences)[-1] >= price

    def choose_num_verified(self, confidences: Sequence[float | None]) -> int:
        if self._is_trial_due:
            return len(confidences)
        if self._plain_steps and self._best:
            return 0  # a plain step is due, to see what it costs
        survivals, extra_s = self._tokens.estimate_survivals(confidences), self._extra_s
        caution = _CAUTION / (1.0 + self._num_updates / _COST_HALF_LIFE)
        price = self._rate + caution / max(self._passes.plain_s, 1e-12)
        gains = [tokens - price * extra for tokens, extra in zip(accumulate(survivals[1:]), extra_s[1:], strict=False)]
        while gains:
            count = gains.index(max(gains)) + 1
            if gains[count - 1] <= 0.0:
                break
            if self._may_lose(extra_s[count], survivals[: count + 1]):
                return count
            gains[count - 1] = 0.0
        return 0

    def _may_lose(self, extra_s: float, survivals: Sequence[float]) -> bool:
        """Whether a pass may take so much longer than a plain step, by how likely it brings fewer tokens than that."""
        extra_steps = extra_s / max(self._passes.plain_s, 1e-12)
        num_needed = math.ceil(extra_steps)
        loss_probability = 1.0 - (survivals[num_needed] if num_needed < len(survivals) else 0.0)
        max_loss = self._won_steps + _MAX_LOSS_STEPS + _MAX_LOSS_SHARE * self._num_tokens
        if max_loss < -_MAX_LOSS_STEPS:
            return False
        return _LOSS_WEIGHT * loss_probability * extra_steps <= max(max_loss, _MIN_LOSS_STEPS)

    def update(self, report: RoundFeedback) -> None:
        num_draft, num_accepted = report.num_draft_tokens, report.num_accepted_tokens
        self._steps_without_draft = 0 if self.limit() else self._steps_without_draft + 1
        self._num_updates += 1
        self._passes.update(num_draft + 1, report.verify_s)
        if report.num_proposed:
            self._draft_s.update(report.num_proposed, self._limit_first_draft_s(report))
            self._is_draft_measured = True
            num_right = num_accepted if report.num_right is None else report.num_right
            is_wrong = num_right < min(report.num_proposed, num_accepted + 1)
            self._tokens.add_draft(report.confidences, num_right, is_wrong=is_wrong)
            self._num_wide += bool(num_draft)
            self._won_steps += num_accepted - self._count_extra_steps(num_draft, report.num_proposed)
        self._num_tokens += num_accepted + 1
        self._plan_lookahead()
        self._schedule_next_round(report)

    def _plan_lookahead(self) -> None:
        """Find the best fixed lookahead and its rate, by what the next round's tokens are taken to cost."""
        plain_s, acceptance = self._passes.plain_s, self._tokens.rate
        first_s = self._estimate_draft_s(1)
        token_s = self._estimate_draft_s(2) - first_s
        self._acceptance, self._draft_token_s = acceptance, token_s
        self._extra_s = self._passes.list_extra_s(self._policy.max_lookahead)
        tokens, survival = 1.0, 1.0
        best, best_rate = 0, 1.0 / max(plain_s, 1e-12)
        round_s = plain_s + first_s - token_s  # without what each drafted token costs
        for lookahead, extra_s in enumerate(self._extra_s[1:], 1):
            survival *= acceptance
            tokens += survival
            cost = max(round_s + extra_s + lookahead * token_s, 1e-12)
            if tokens > best_rate * cost * (1.0 if best else _MIN_SPEEDUP):
                best, best_rate = lookahead, tokens / cost
        self._best, self._rate = best, best_rate

    def _estimate_draft_s(self, num_tokens: int) -> float:
        """Of drafting so many tokens, at least one."""
        if self._is_draft_measured:
            return self._draft_s.base_s + (num_tokens - 1) * self._draft_s.per_token_s
        policy = self._policy
        return (policy.prior_draft_start + num_tokens * policy.prior_draft_cost) * self._passes.plain_s

    def _limit_first_draft_s(self, report: RoundFeedback) -> float:
        """What a draft took; of the first one not much more than was believed, since a process may be cold then."""
        if self._is_draft_measured:
            return report.draft_s
        least_s = report.num_proposed * _CHEAP_DRAFT_COST * self._passes.plain_s
        return min(report.draft_s, _MAX_FIRST_SURPRISE * max(self._estimate_draft_s(report.num_proposed), least_s))

    @property
    def _is_draft_free(self) -> bool:
        """Whether a draft may be asked in every round, likely to be verified or not, as that costs next to nothing."""
        return self._estimate_draft_s(1) < _FREE_DRAFT_COST * self._passes.plain_s

    @property
    def _is_pause_draft_due(self) -> bool:
        """Whether a cheap draft that did not pay may draft in a pause, since it may be sure by now."""
        plain_s = max(self._passes.plain_s, 1e-12)
        if self._best or self._estimate_draft_s(1) >= _CHEAP_DRAFT_COST * plain_s:
            return False
        return self._steps_without_draft * _PAUSE_DRAFT_SHARE * plain_s >= self._estimate_draft_s(_TRIAL_LENGTH)

    def _schedule_next_round(self, report: RoundFeedback) -> None:
        """Decide what the next round is: a draft, a trial of one, or a plain step."""
        self._since_plain = self._since_plain + 1 if report.num_draft_tokens else 0
        if self._plain_steps:
            self._plain_steps -= 1
            if self._best:
                self._plain_steps = 0  # a plain step turned out to cost more than was thought
            elif not self._plain_steps:
                self._is_trial_due = True
                self._tokens.decay(self._pause)
        elif self._best:
            self._rounds += 1
            if self._since_plain >= _PLAIN_EVERY and self._rate * self._passes.plain_s < _SLIM_SPEEDUP:
                self._plain_steps = 1
        elif not (self._is_trial_due and report.num_accepted_tokens == report.num_draft_tokens):
            self._begin_pause_of_plain_steps()
        self._is_trial_due = self._is_trial_due and not self._best

    def _begin_pause_of_plain_steps(self) -> None:
        self._pause = _FIRST_PAUSE if self._rounds >= _SETTLED_ROUNDS else min(2 * self._pause, _LAST_PAUSE)
        share = _FREE_TRIAL_SHARE if self._is_draft_free else _TRIAL_SHARE
        self._plain_steps = max(self._pause, round(self._count_extra_steps(_TRIAL_LENGTH, _TRIAL_LENGTH) / share))
        self._rounds = 0
        self._is_trial_due = False

    def _count_extra_steps(self, num_verified: int, num_drafted: int) -> float:
        """The time by which a round is longer than a plain step, in plain steps."""
        plain_s = max(self._passes.plain_s, 1e-12)
        extra_s = self._passes.estimate_extra_s(num_verified)
        extra_s += self._estimate_draft_s(num_drafted) if num_drafted else 0.0
        return max(extra_s / plain_s, 0.0)

    def describe(self) -> Mapping[str, float]:
        return {
            "acceptance": self._tokens.rate,
            "lookahead": self._best,
            "tokens_per_s": self._rate,
            "draft_start_s": self._estimate_draft_s(1) - self._draft_token_s,
            "draft_token_s": self._draft_token_s,
            "plain_step_s": self._passes.plain_s,
            "wide_pass_s": self._passes.wide_s,
            "verify_token_s": self._passes.per_token_s,
            "num_wide_passes": self._num_wide,
            "plain_steps_left": self._plain_steps,
            **self._tokens.describe(),
        }


class LookaheadCostMemory:
    """What drafting and verifying cost in earlier requests of a target with a draft, for the next one to begin with.

    In plain steps: how busy the machine was matters less then. How much was accepted is not kept, since it depends on
    what the request is about; but how far a draft's confidence was to be believed.
    """

    def __init__(self) -> None:
        self._draft_start = ExponentialMovingAverage(half_life=_COST_MEMORY)
        self._draft = ExponentialMovingAverage(half_life=_COST_MEMORY)
        self._wide = ExponentialMovingAverage(half_life=_COST_MEMORY)
        self._verify = ExponentialMovingAverage(half_life=_COST_MEMORY)
        self._num_requests_without = 0  # since a pass of several tokens was measured
        self._calibration = CalibrationMemory()

    def observe(self, state: Mapping[str, float]) -> None:
        """Take in what a controller says of itself at the end of a request (`describe`), if it has measured costs."""
        self._calibration.observe(state)
        if state.get("plain_step_s") and "draft_token_s" in state and "verify_token_s" in state:
            self._draft_start.update(max(0.0, state.get("draft_start_s", 0.0)) / state["plain_step_s"])
            self._draft.update(state["draft_token_s"] / state["plain_step_s"])
            if state.get("num_wide_passes", 1):
                self._num_requests_without = 0
                self._wide.update(state.get("wide_pass_s", 0.0) / state["plain_step_s"])
                self._verify.update(state["verify_token_s"] / state["plain_step_s"])
            else:
                self._num_requests_without += 1
            if self._num_requests_without >= _MAX_REQUESTS_WITHOUT:  # what made passes dear may be over
                self._num_requests_without = 0
                self._wide.reset()
                self._verify.reset()

    def apply(self, policy: LookaheadPolicy, measured: PassCosts | None = None) -> LookaheadPolicy:
        """The policy for the next request; `measured` are the target's costs until there were requests."""
        if not isinstance(policy, CostAware):
            return policy
        policy = replace(policy, prior_records=self._calibration.records or policy.prior_records)
        if self._draft.value is not None:
            policy = replace(
                policy, prior_draft_cost=self._draft.value, prior_draft_start=self._draft_start.value or 0.0
            )
        if measured is not None:
            policy = replace(policy, verify_deviations=measured.deviations)
        if self._wide.value is not None and self._verify.value is not None:
            measured = PassCosts(self._wide.value, self._verify.value)
        if measured is not None:
            per_token = max(measured.per_token, 0.0)
            policy = replace(policy, prior_wide_cost=max(measured.wide, -per_token), prior_verify_cost=per_token)
        return policy


def _check_lookahead_range(name: str, value: int, high: int = MAX_LOOKAHEAD) -> None:
    check_number(ConfigError, name, value, 1, high, integer=True)
