"""The rules that decide which drafted tokens the target accepts and which token follows them.

accepted    leading drafted tokens that the target confirmed
correction  the target's own token at the first position where it disagrees with the draft
bonus       the target's extra token after it has confirmed all of them

`CoupledAcceptance` and `RejectionAcceptance` leave the target's distribution unchanged. A rule that
can change it has `lossy` in its name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from llm_spec.contract.errors import ConfigError
from llm_spec.contract.token_model import DraftToken
from llm_spec.local.acceptance_name import AcceptanceName
from llm_spec.local.noise import NoisePurpose, draw_uniform_number
from llm_spec.local.sampling import FloatArray, Sampler, check_best_logit_is_finite

__all__ = [
    "AcceptanceRule",
    "CoupledAcceptance",
    "LossyTypicalAcceptance",
    "RejectionAcceptance",
    "VerifyResult",
    "compute_residual_probs",
    "make_acceptance_rule",
]


# Measured on the built-in pair at temperature 0.8: if a token's score (log-probability plus noise)
# exceeds all others by `margin`, it is accepted with a probability of about
# `1 - 0.7 * exp(-margin / 2)`. This predicts acceptance better than the token's probability (2,000
# tokens: area under the curve 0.81 against 0.79), because an unlikely token with much noise is
# often the target's token, too.
_TIED_REJECTION: Final = 0.7
_MARGIN_SLOPE: Final = 0.5


class VerifyResult(NamedTuple):
    """The first `num_accepted` drafted tokens stand; `next_token_id` is the correction or bonus."""

    num_accepted: int
    next_token_id: int


class AcceptanceRule(Protocol):
    """The drafting and verifying rule of one request; used by one thread at a time."""

    @property
    def lossy(self) -> bool:
        """True if the output's distribution can differ from the target's."""
        ...

    def prepare_noise(self, position: int) -> None:
        """Make the noise for a round from `position` on, before any time is measured."""
        ...

    def choose_draft_token(self, logits: FloatArray, context_ids: Sequence[int]) -> DraftToken:
        """Choose the draft's token after `context_ids` from its logits ([draft_vocab_size]).

        This is a `TokenSampler`.
        """
        ...

    def verify_proposal(
        self, logits: FloatArray, context_ids: Sequence[int], proposal: Sequence[DraftToken]
    ) -> VerifyResult:
        """Judge a proposal by the target's logits, [len(proposal) + 1, vocab_size].

        Row i follows `context_ids` and the first i drafted tokens. Rows after the first rejection
        are not used.
        """
        ...


class CoupledAcceptance:
    """The target samples its own token at every position; a drafted token must equal it.

    Draft and target sample with the same noise (Daliri et al., arXiv 2408.07978), so they often
    agree. One seed gives one text, whatever is drafted. Greedy decoding is the same rule at
    temperature 0.
    """

    lossy: bool = False

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def prepare_noise(self, position: int) -> None:
        self._sampler.prepare_noise(position)

    def choose_draft_token(self, logits: FloatArray, context_ids: Sequence[int]) -> DraftToken:
        return _sample_draft_token_coupled(self._sampler, logits, context_ids)

    def verify_proposal(
        self, logits: FloatArray, context_ids: Sequence[int], proposal: Sequence[DraftToken]
    ) -> VerifyResult:
        return _verify_proposal_coupled(self._sampler, logits, context_ids, proposal)


class RejectionAcceptance:
    """Accept a token with probability `min(1, p_target / p_draft)`, else sample the residual.

    This is speculative sampling (Leviathan et al., arXiv 2211.17192). Both distributions are those
    after all filters. A token without `probs` was not sampled: its p_draft is 1. The rule accepts
    more tokens than `CoupledAcceptance`, but the text depends on the drafted tokens.
    """

    lossy: bool = False

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._round_index = 0

    def prepare_noise(self, position: int) -> None:
        """Do nothing: the rule needs few random numbers, and they belong to one round."""

    def choose_draft_token(self, logits: FloatArray, context_ids: Sequence[int]) -> DraftToken:
        if self._sampler.greedy:
            return _sample_draft_token_coupled(self._sampler, logits, context_ids)
        probs = self._sampler.compute_probs(self._sampler.fit_vocabulary(logits), context_ids)
        token_id = self._sample_from_probs(probs, len(context_ids), NoisePurpose.DRAFT)
        return DraftToken(token_id, float(probs[token_id]), probs)

    def verify_proposal(
        self, logits: FloatArray, context_ids: Sequence[int], proposal: Sequence[DraftToken]
    ) -> VerifyResult:
        if self._sampler.greedy:
            return _verify_proposal_coupled(self._sampler, logits, context_ids, proposal)
        verdict = self._verify_sampled_proposal(logits, [*context_ids], proposal)
        self._round_index += 1
        return verdict

    def _verify_sampled_proposal(
        self, logits: FloatArray, context: list[int], proposal: Sequence[DraftToken]
    ) -> VerifyResult:
        for index, token in enumerate(proposal):
            p_target = self._sampler.compute_probs(logits[index], context)
            p_draft = 1.0 if token.probs is None else float(token.probs[token.token_id])
            # Strictly below: a token that the target cannot emit is never accepted.
            if not self._draw_uniform(len(context), NoisePurpose.ACCEPT) * p_draft < p_target[token.token_id]:
                return VerifyResult(
                    index,
                    self._sample_from_probs(
                        compute_residual_probs(p_target, token), len(context), NoisePurpose.RESIDUAL
                    ),
                )
            context.append(token.token_id)
        p_target = self._sampler.compute_probs(logits[len(proposal)], context)
        return VerifyResult(len(proposal), self._sample_from_probs(p_target, len(context), NoisePurpose.BONUS))

    def _draw_uniform(self, position: int, purpose: NoisePurpose) -> float:
        return draw_uniform_number(self._sampler.seed, position, purpose, self._round_index)

    def _sample_from_probs(self, probs: NDArray[np.float64], position: int, purpose: NoisePurpose) -> int:
        """Return the first token whose cumulated mass exceeds the uniform; its mass is not zero."""
        cumulated: NDArray[np.float64] = probs.cumsum()
        mass = self._draw_uniform(position, purpose) * float(cumulated[-1])
        return int(np.searchsorted(cumulated, mass, side="right"))


class LossyTypicalAcceptance:
    """Accept a drafted token if `p_target > min(epsilon, delta * exp(-entropy))`. LOSSY.

    This is typical acceptance (Medusa, arXiv 2401.10774, section 3.3.1). The token after the
    accepted ones is sampled from the target.
    """

    lossy: bool = True

    def __init__(self, sampler: Sampler, *, epsilon: float = 0.3, delta: float = 0.09) -> None:
        self._sampler = sampler
        self._epsilon = epsilon
        self._delta = delta

    def prepare_noise(self, position: int) -> None:
        self._sampler.prepare_noise(position)

    def choose_draft_token(self, logits: FloatArray, context_ids: Sequence[int]) -> DraftToken:
        return _sample_draft_token_coupled(self._sampler, logits, context_ids)

    def verify_proposal(
        self, logits: FloatArray, context_ids: Sequence[int], proposal: Sequence[DraftToken]
    ) -> VerifyResult:
        context = [*context_ids]
        for index, token in enumerate(proposal):
            probs = self._sampler.compute_probs(logits[index], context)
            if not probs[token.token_id] > min(self._epsilon, self._delta * math.exp(-_compute_entropy(probs))):
                break
            context.append(token.token_id)
        num_accepted = len(context) - len(context_ids)
        return VerifyResult(num_accepted, self._sampler.choose_token(logits[num_accepted], context))


def make_acceptance_rule(name: AcceptanceName, sampler: Sampler) -> AcceptanceRule:
    """Make the rule that `SpeculativeConfig.acceptance` names, for one request."""
    rules: dict[AcceptanceName, Callable[[Sampler], AcceptanceRule]] = {
        "coupled": CoupledAcceptance,
        "rejection": RejectionAcceptance,
        "lossy_typical": LossyTypicalAcceptance,
    }
    if name not in rules:
        raise ConfigError(f"acceptance is {name!r}; it must be one of {', '.join(rules)}")
    return rules[name](sampler)


def compute_residual_probs(p_target: NDArray[np.float64], token: DraftToken) -> NDArray[np.float64]:
    """Return `max(0, p_target - p_draft)`, [vocab_size], not normalised.

    Returns `p_target` itself if nothing is left: the two are then equal, and only rounding rejected
    the token.
    """
    if token.probs is None:
        left = p_target.copy()
        left[token.token_id] = 0.0
    else:
        left = np.maximum(p_target - token.probs, 0.0)
    return left if left.any() else p_target


def _sample_draft_token_coupled(sampler: Sampler, logits: FloatArray, context_ids: Sequence[int]) -> DraftToken:
    """Sample the draft's token, and estimate how likely the target accepts it.

    If sampling is greedy, the estimate is the token's probability at temperature 1.
    """
    fitted = sampler.fit_vocabulary(logits)
    if not sampler.greedy:
        logprobs = sampler.compute_logprobs(fitted, context_ids)
        token_id, margin = sampler.sample_token_with_margin(logprobs, len(context_ids))
        return DraftToken(token_id, 1.0 - _TIED_REJECTION * math.exp(-_MARGIN_SLOPE * margin))
    scores = sampler.adjust_and_constrain_logits(fitted, context_ids)
    token_id = int(scores.argmax())
    check_best_logit_is_finite(float(scores[token_id]), len(context_ids))
    # Relative to the chosen token: this needs one subtraction and no search for the maximum.
    # float32 suffices for an estimate.
    relative = (scores - scores[token_id]).astype(np.float32, copy=False)
    with np.errstate(over="ignore"):
        return DraftToken(token_id, float(1 / np.exp(relative, out=relative).sum()))


def _verify_proposal_coupled(
    sampler: Sampler, logits: FloatArray, context_ids: Sequence[int], proposal: Sequence[DraftToken]
) -> VerifyResult:
    """Accept drafted tokens while the sampler draws the same ones from the target's logits."""
    if sampler.greedy and sampler.uses_raw_logits:
        return _verify_proposal_greedy(logits, len(context_ids), proposal)
    if not proposal:
        return VerifyResult(0, sampler.choose_token(logits[0], context_ids))
    context = [*context_ids]
    for index, token in enumerate(proposal):
        token_id = sampler.choose_token(logits[index], context)
        if token_id != token.token_id:
            return VerifyResult(index, token_id)
        context.append(token_id)
    return VerifyResult(len(proposal), sampler.choose_token(logits[len(proposal)], context))


def _verify_proposal_greedy(logits: FloatArray, position: int, proposal: Sequence[DraftToken]) -> VerifyResult:
    for index in range(len(logits)):  # rows after the first that differs are not needed
        best_id = int(logits[index].argmax())
        check_best_logit_is_finite(float(logits[index, best_id]), position + index)
        if index == len(proposal) or proposal[index].token_id != best_id:
            return VerifyResult(index, best_id)
    raise ValueError(f"logits has {len(logits)} rows; {len(proposal)} drafted tokens need one more than that")


def _compute_entropy(probs: NDArray[np.float64]) -> float:
    """Return the entropy in nats."""
    mass = probs[probs > 0.0]
    return float(-(mass * np.log(mass)).sum())
