"""Rejection sampling on the device: what `RejectionAcceptance` does, with the same numbers, for CUDA graphs.

Leviathan et al., arXiv 2211.17192. Higher acceptance than coupled sampling, but the text depends on what was drafted.
Greedy requests use `DeviceSampler.choose_tokens` and `verify`: there the two rules are one.

Every tensor may have leading dimensions, as in `sampling`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from llm_spec.provider_kit import NoisePurpose
from llm_spec_torch.noise import make_uniform_tensor
from llm_spec_torch.sampling import DeviceSampler, DeviceVerifyResult, count_leading_true

__all__ = ["DeviceDraftTokens", "DeviceRejectionSampler", "compute_residual_tensor"]


class DeviceDraftTokens(NamedTuple):
    """Tokens, and the distributions that they were drawn from."""

    token_ids: Tensor  # [num_rows] int64
    p_draft: Tensor  # [num_rows, vocab_size] float64, each row sums to 1


class DeviceRejectionSampler:
    """Drafts and verifies one request that is not greedy, with its sampler's filters; `begin` before each request.

    `round_index` [] int64 counts verifications: a position that is drafted again must not meet the same noise.
    """

    def __init__(self, sampler: DeviceSampler) -> None:
        self._sampler = sampler
        self.round_index = torch.zeros((), dtype=torch.int64, device=sampler.valid.device)

    def begin_request(self) -> None:
        """Count rounds from 0; the sampler begins for itself."""
        self.round_index.zero_()

    def draw_draft_tokens(self, logits: Tensor, positions: Tensor, before_ids: Tensor) -> DeviceDraftTokens:
        """Draft tokens from a draft's distribution; the arguments are those of `DeviceSampler.choose`."""
        p_draft, finite = self._compute_probs(logits, before_ids)
        self._sampler.valid.logical_and_(finite.all())
        numbers = self._draw_uniform(positions, NoisePurpose.DRAFT)
        return DeviceDraftTokens(_sample_by_inverse_transform(p_draft, numbers), p_draft)

    def verify(self, logits: Tensor, position: Tensor, drafted_ids: Tensor, p_draft: Tensor) -> DeviceVerifyResult:
        """Accept each drafted token with probability `min(1, p_target / p_draft)`, else draw from what is left over.

        `logits` [num_drafted + 1, vocab_size] floating, `position` [] int64 that of the first row's token,
        `drafted_ids` [num_drafted] int64, `p_draft` [num_drafted, vocab_size] float64 those that they were drawn
        from: one-hot for a token that was given.
        """
        p_target, finite = self._compute_probs(logits, drafted_ids)
        positions = position[..., None] + torch.arange(logits.shape[-2], device=logits.device)
        accepted = self._decide_acceptance_of_each(p_target[..., :-1, :], p_draft, positions[..., :-1], drafted_ids)
        num_accepted = count_leading_true(accepted)
        self._sampler.mark_finite_rows(finite, num_accepted)
        next_id = self._sample_correction_or_bonus(p_target, p_draft, positions, num_accepted)
        self.round_index.add_(1)
        last = torch.arange(logits.shape[-2], device=logits.device) >= num_accepted[..., None]
        return DeviceVerifyResult(
            torch.where(last, next_id, torch.nn.functional.pad(drafted_ids, (0, 1))), num_accepted
        )

    def _decide_acceptance_of_each(
        self, p_target: Tensor, p_draft: Tensor, positions: Tensor, drafted_ids: Tensor
    ) -> Tensor:
        """Each drafted token judged for itself: [num_drafted] bool."""
        token = drafted_ids[..., None]
        numbers = self._draw_uniform(positions, NoisePurpose.ACCEPT)
        # strictly below: a token that the target cannot say is never accepted, whatever the uniform
        return numbers * p_draft.gather(-1, token).squeeze(-1) < p_target.gather(-1, token).squeeze(-1)

    def _sample_correction_or_bonus(
        self, p_target: Tensor, p_draft: Tensor, positions: Tensor, num_accepted: Tensor
    ) -> Tensor:
        """The correction from the residual, or the bonus from the target's distribution: [1] int64."""
        row = num_accepted[..., None]
        nothing = torch.nn.functional.pad(p_draft, (0, 0, 0, 1))  # a bonus: no draft to leave anything over
        probs = compute_residual_tensor(_select_row(p_target, row), _select_row(nothing, row))
        is_bonus = row == p_draft.shape[-2]
        purpose = torch.where(is_bonus, int(NoisePurpose.BONUS), int(NoisePurpose.RESIDUAL))
        return _sample_by_inverse_transform(probs, self._draw_uniform(positions.gather(-1, row), purpose))

    def _compute_probs(self, logits: Tensor, before_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities after all filters, [num_rows, vocab_size] float64; which rows are finite, [num_rows] bool."""
        probs, finite = self._sampler.compute_logprobs(logits, before_ids)
        return probs.softmax(dim=-1), finite

    def _draw_uniform(self, positions: Tensor, purpose: Tensor | NoisePurpose) -> Tensor:
        return make_uniform_tensor(self._sampler.key, positions, purpose, self.round_index)


def compute_residual_tensor(p_target: Tensor, p_draft: Tensor) -> Tensor:
    """What rejected tokens leave of the target's distributions, not normalised: `max(0, p_target - p_draft)`.

    All [num_rows, vocab_size]. The target's own where nothing is left: then only rounding rejected the token.
    """
    left = (p_target - p_draft).clamp_min_(0.0)
    return torch.where((left > 0.0).any(dim=-1, keepdim=True), left, p_target)


def _sample_by_inverse_transform(probs: Tensor, numbers: Tensor) -> Tensor:
    """The first token at which the cumulative `probs` ([num_rows, vocab_size]) exceed the uniform: [num_rows] int64.

    Never one of zero mass, although a device may add in such an order that the sum grows there in its last bit.
    """
    cumulated = probs.cumsum(dim=-1)
    exceeds = cumulated > numbers[..., None] * cumulated[..., -1:]
    return (exceeds & (probs > 0.0)).byte().argmax(dim=-1)


def _select_row(probs_rows: Tensor, row: Tensor) -> Tensor:
    """One row ([1] int64) of [num_rows, vocab_size]: [1, vocab_size]."""
    return probs_rows.gather(-2, row[..., None].expand(*row.shape, probs_rows.shape[-1]))
