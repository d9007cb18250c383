"""The token core on torch tensors: many samples at once, a rule that judges one request, and a fault for both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from llm_spec_torch import sampling
from llm_spec_torch.sampling import DeviceSampler, DeviceVerifyResult, SamplingSwitches
from numpy.typing import NDArray
from torch import Tensor

from llm_spec.contract.errors import ModelOutputError
from llm_spec.contract.token_model import DraftToken
from llm_spec.local.acceptance import AcceptanceRule, VerifyResult
from llm_spec.local.sampling import Sampler

from .pairs import DRAFT, PROMPT_ID, SAMPLING, VOCAB_SIZE, DraftName, Rows, RuleName, target_rows

Plant = Callable[[pytest.MonkeyPatch], None]

torch.set_num_threads(1)  # two that wait for each other are slower, where other work goes on


class TorchCore:
    """See TokenCore; its only rule is coupled sampling."""

    def make(self, name: RuleName, sampler: Sampler) -> AcceptanceRule:  # noqa: ARG002 - there is one
        return TorchCoupled(sampler)

    def plant(self, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
        FAULTS[fault](monkeypatch)

    def count_pairs(
        self,
        name: RuleName,  # noqa: ARG002 - there is one
        num_samples: int,
        *,
        draft: DraftName = "drawn",
        rows: Rows = target_rows,
        keep_above: float = 0.0,
    ) -> NDArray[np.int64]:
        counts = np.zeros((VOCAB_SIZE, VOCAB_SIZE), dtype=np.int64)
        for lookahead in (1, 2, 3):
            share = (num_samples + 3 - lookahead) // 3
            samples = _Samples(share, lookahead, draft=draft, rows=rows, keep_above=keep_above)
            np.add.at(counts, samples.two_tokens(), 1)
        return counts


class _Samples:
    """Independent requests, [num_samples, …] of everything, each with its own seed."""

    def __init__(self, num_samples: int, lookahead: int, *, draft: DraftName, rows: Rows, keep_above: float) -> None:
        self._lookahead, self._draft, self._rows = lookahead, draft, rows
        self._keep_above = keep_above
        index = torch.arange(num_samples)
        self._keys = torch.stack([index, torch.full_like(index, lookahead)], dim=-1)
        self._positions = 1 + 8 * (index % 100)
        self._sampler = _sampler(Sampler(SAMPLING, vocab_size=VOCAB_SIZE, num_prompt_tokens=1, seed=0))

    def two_tokens(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The first two tokens that each request emits, in one round or two."""
        last_ids = torch.full_like(self._positions, PROMPT_ID)
        once = self._round(last_ids, self._positions)
        last_ids = once.token_ids.gather(-1, once.num_accepted[:, None])[:, 0]
        again = self._round(last_ids, self._positions + once.num_accepted + 1)
        second = torch.where(once.num_accepted > 0, once.token_ids[:, 1], again.token_ids[:, 0])
        return once.token_ids[:, 0].numpy(), second.numpy()

    def _round(self, last_ids: Tensor, positions: Tensor) -> DeviceVerifyResult:
        drafted_ids, lengths = self._propose(last_ids, positions)
        token_ids = torch.zeros(len(lengths), self._lookahead + 1, dtype=torch.int64)
        num_accepted = torch.zeros_like(lengths)
        for length in lengths.unique().tolist():
            index = (lengths == length).nonzero()[:, 0]
            verdict = self._verify(index, last_ids, positions, drafted_ids[:, :length])
            token_ids[index, : length + 1] = verdict.token_ids
            num_accepted[index] = verdict.num_accepted
        return DeviceVerifyResult(token_ids, num_accepted)

    def _propose(self, last_ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Drafted tokens [num_samples, lookahead], and how many of them are kept."""
        self._sampler.key = self._keys
        ids, probs_rows = last_ids[:, None], torch.zeros(len(last_ids), 0, VOCAB_SIZE, dtype=torch.float64)
        for step in range(self._lookahead):
            token_ids, probs = self._next(ids, positions[:, None] + step)
            ids, probs_rows = torch.cat([ids, token_ids], dim=1), torch.cat([probs_rows, probs], dim=1)
        confidences = probs_rows.gather(-1, ids[:, 1:, None])[..., 0]
        return ids[:, 1:], (confidences >= self._keep_above).long().cumprod(dim=1).sum(dim=1)

    def _next(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The next drafted tokens, and the laws that they are of."""
        logits = torch.from_numpy(DRAFT)[ids[:, -1:]]
        probs = logits.softmax(dim=-1)
        if self._draft == "drawn":
            return self._sampler.choose_tokens(logits, positions, ids[:, 1:]), probs
        return logits.argmax(dim=-1), probs

    def _verify(self, index: Tensor, last_ids: Tensor, positions: Tensor, drafted_ids: Tensor) -> DeviceVerifyResult:
        self._sampler.key = self._keys[index]
        ids = torch.cat([last_ids[:, None], drafted_ids], dim=1)[index]
        logits = torch.from_numpy(self._rows(ids.numpy()))
        return self._sampler.verify(logits, positions[index], ids[:, 1:])


# ------------------------------------------------------------------------------------ one request, numpy in and out


class TorchCoupled:
    """An AcceptanceRule: one request on the device, told each time anew what has been said."""

    lossy = False

    def __init__(self, sampler: Sampler) -> None:
        self._num_prompt_tokens = sampler.num_prompt_tokens
        self._sampler = _sampler(sampler)

    def prepare_noise(self, position: int) -> None: ...

    def choose_draft_token(self, logits: NDArray[Any], context_ids: Sequence[int]) -> DraftToken:
        self._remember(context_ids)
        row, nothing = torch.from_numpy(logits)[None], torch.zeros(0, dtype=torch.int64)
        token_id = int(self._sampler.choose_tokens(row, torch.tensor([len(context_ids)]), nothing)[0])
        self._check()
        greedy = self._sampler.switches.greedy
        probs = (
            self._sampler.apply_bias_and_penalties(row, nothing)
            if greedy
            else self._sampler.compute_logprobs(row, nothing)[0]
        )
        return DraftToken(token_id, float(probs[0].double().softmax(dim=0)[token_id]))

    def verify_proposal(
        self, logits: NDArray[Any], context_ids: Sequence[int], proposal: Sequence[DraftToken]
    ) -> VerifyResult:
        self._remember(context_ids)
        verdict = self._verify(torch.from_numpy(logits), torch.tensor(len(context_ids)), proposal)
        self._check()
        num_accepted = int(verdict.num_accepted)
        return VerifyResult(num_accepted, int(verdict.token_ids[num_accepted]))

    def _verify(self, logits: Tensor, position: Tensor, proposal: Sequence[DraftToken]) -> DeviceVerifyResult:
        return self._sampler.verify(logits, position, _ids([token.token_id for token in proposal]))

    def _remember(self, context_ids: Sequence[int]) -> None:
        self._sampler.begin_answer(context_ids[: self._num_prompt_tokens])
        answer_ids = _ids(context_ids[self._num_prompt_tokens :])
        self._sampler.count_committed_tokens(answer_ids, torch.tensor(len(answer_ids)))

    def _check(self) -> None:
        if not self._sampler.valid:
            raise ModelOutputError("the model's logits are no law")


def _sampler(like: Sampler) -> DeviceSampler:
    sampler = DeviceSampler(
        SamplingSwitches.from_sampling(like.sampling, like.vocab_size), vocab_size=like.vocab_size, device="cpu"
    )
    sampler.load_request(like.sampling, like.seed)
    return sampler


def _ids(token_ids: Sequence[int]) -> Tensor:
    return torch.tensor(token_ids, dtype=torch.int64)


# --------------------------------------------------------------------------------------------------- faults

_gumbel = sampling.make_gumbel_tensor


def _same_noise_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise of every position is that of the prompt's end."""
    monkeypatch.setattr(
        sampling, "make_gumbel_tensor", lambda key, positions, size: _gumbel(key, positions - positions % 8, size)
    )


FAULTS: dict[str, Plant] = {"one position's noise": _same_noise_everywhere}
