"""The token core on numpy arrays: the rules themselves, one sample after the other, and faults to plant in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llm_spec.contract.token_model import DraftToken
from llm_spec.local import acceptance
from llm_spec.local.acceptance import AcceptanceRule, CoupledAcceptance, RejectionAcceptance, VerifyResult
from llm_spec.local.noise import NoisePurpose
from llm_spec.local.sampling import Sampler
from llm_spec.local.token_scores import DenseScorer

from .pairs import DRAFT, PROMPT_ID, SAMPLING, VOCAB_SIZE, DraftName, Floats, Rows, RuleName, softmax, target_rows

Plant = Callable[[pytest.MonkeyPatch], None]


class NumpyCore:
    """See TokenCore. A rule serves 100 samples, each at positions of its own."""

    def make(self, name: RuleName, sampler: Sampler) -> AcceptanceRule:
        return {"coupled": CoupledAcceptance, "rejection": RejectionAcceptance}[name](sampler)

    def plant(self, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
        FAULTS[fault](monkeypatch)

    def count_pairs(
        self,
        name: RuleName,
        num_samples: int,
        *,
        draft: DraftName = "drawn",
        rows: Rows = target_rows,
        keep_above: float = 0.0,
    ) -> NDArray[np.int64]:
        counts = np.zeros((VOCAB_SIZE, VOCAB_SIZE), dtype=np.int64)
        for seed in range(-(-num_samples // 100)):
            rule = self.make(name, Sampler(SAMPLING, vocab_size=VOCAB_SIZE, num_prompt_tokens=1, seed=seed))
            for slot in range(min(100, num_samples - 100 * seed)):
                context = [PROMPT_ID] * (1 + 8 * slot)
                pair = _two_tokens(rule, context, 1 + slot % 3, draft=draft, rows=rows, keep_above=keep_above)
                counts[pair] += 1
        return counts


def _two_tokens(
    rule: AcceptanceRule, context_ids: list[int], lookahead: int, *, draft: DraftName, rows: Rows, keep_above: float
) -> tuple[int, int]:
    """The first two tokens that rounds of this lookahead emit after a context."""
    emitted: list[int] = []
    while len(emitted) < 2:
        base = context_ids + emitted
        proposal: list[DraftToken] = []
        for _ in range(lookahead):
            context = base + [token.token_id for token in proposal]
            token = _propose(rule, draft, context)
            if token.confidence is not None and token.confidence < keep_above:
                break
            proposal.append(token)
        ids = [token.token_id for token in proposal]
        verdict = rule.verify_proposal(rows(np.array([base[-1], *ids])), base, proposal)
        emitted += [*ids[: verdict.num_accepted], verdict.next_token_id]
    return emitted[0], emitted[1]


def _propose(rule: AcceptanceRule, draft: DraftName, context_ids: list[int]) -> DraftToken:
    logits = DRAFT[context_ids[-1]]
    if draft == "drawn":
        return rule.choose_draft_token(logits, context_ids)
    return DraftToken(int(logits.argmax()), None, None if draft == "given" else softmax(logits))


# --------------------------------------------------------------------------------------------------- faults

_draw_uniform, _verify = (
    RejectionAcceptance._draw_uniform,
    RejectionAcceptance.verify_proposal,
)  # pyright: ignore[reportPrivateUsage] # to change


def _share_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        RejectionAcceptance,
        "_draw_uniform",
        lambda self, position, _purpose: _draw_uniform(self, position, NoisePurpose.DRAFT),
    )


def _share_residual_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    def uniform(self: RejectionAcceptance, position: int, purpose: NoisePurpose) -> float:
        return _draw_uniform(self, position, NoisePurpose.DRAFT if purpose is NoisePurpose.RESIDUAL else purpose)

    monkeypatch.setattr(RejectionAcceptance, "_draw_uniform", uniform)


def _accept_above_half(monkeypatch: pytest.MonkeyPatch) -> None:
    def uniform(self: RejectionAcceptance, position: int, purpose: NoisePurpose) -> float:
        return 0.5 if purpose is NoisePurpose.ACCEPT else _draw_uniform(self, position, purpose)

    monkeypatch.setattr(RejectionAcceptance, "_draw_uniform", uniform)


def _take_bonus_from_row_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def verify(
        self: RejectionAcceptance, logits: Any, context_ids: Sequence[int], proposal: Sequence[DraftToken]
    ) -> VerifyResult:
        rows = logits.copy()
        rows[-1] = rows[max(len(proposal) - 1, 0)]
        return _verify(self, rows, context_ids, proposal)

    monkeypatch.setattr(RejectionAcceptance, "verify_proposal", verify)


def _draw_residual_from_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "compute_residual_probs", lambda p_target, _token: p_target)


def _same_noise_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise of every position is that of the prompt's end."""
    score = DenseScorer.score_likely_tokens
    monkeypatch.setattr(
        DenseScorer,
        "score_likely_tokens",
        lambda self, logprobs, position, num_best: score(self, logprobs, position - position % 8, num_best),
    )


def _draw_first_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inverse transform that takes the first token whose cumulated mass reaches the uniform, be it zero."""

    def draw(self: Any, probs: Floats, position: int, purpose: NoisePurpose) -> int:
        cumulated = probs.cumsum()
        return int(cumulated.searchsorted(self._draw_uniform(position, purpose) * cumulated[-1], side="left"))

    monkeypatch.setattr(RejectionAcceptance, "_sample_from_probs", draw)


def _make_uniforms_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """No fault: the least that a uniform can be, and a little less."""
    monkeypatch.setattr(acceptance, "draw_uniform_number", lambda *_: 0.0)


FAULTS: dict[str, Plant] = {
    "one stream of noise": _share_noise,
    "residual with the draft's noise": _share_residual_noise,
    "accept above one half": _accept_above_half,
    "bonus from the row before": _take_bonus_from_row_before,
    "correction from the target": _draw_residual_from_target,
    "one position's noise": _same_noise_everywhere,
    "first token reached": _draw_first_reached,
    "uniforms of zero": _make_uniforms_zero,
}
