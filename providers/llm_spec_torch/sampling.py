"""One request's sampling on the device, for CUDA graphs.

It does what `llm_spec.local.Sampler` and `CoupledAcceptance` do. Nothing between `begin_answer` and
the end of a request asks the device for a value, so a whole round (draft steps, verification,
commit) can be recorded. A request's own values are in tensors that `load_request` overwrites in
place. `SamplingSwitches` says which operations there are, and a recorded round serves every request
with the same switches.

Every tensor may have leading dimensions, the same for all: independent requests with a `key` each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from llm_spec import InvalidRequestError, Sampling
from llm_spec.local.sampling import is_greedy, needs_no_penalties
from llm_spec_torch.noise import make_gumbel_tensor, split_seed_into_words

__all__ = ["DeviceSampler", "DeviceVerifyResult", "SamplingSwitches"]

_MIN_TEMPERATURE: Final = 1e-30  # as in llm_spec.local.sampling
# More than the whole mass: 1.0 would drop tokens whose mass is lost in rounding.
_NO_TOP_P: Final = 2.0


@dataclass(frozen=True, slots=True)
class SamplingSwitches:
    """The operations that sampling needs; requests with the same ones share a recorded round."""

    greedy: bool
    filtered: bool  # top-k or top-p: a sort
    penalised: bool  # logit bias or any penalty

    @classmethod
    def from_sampling(cls, sampling: Sampling, vocab_size: int) -> SamplingSwitches:
        """Return the switches of one request."""
        greedy = is_greedy(sampling)
        top_k = sampling.top_k is not None and sampling.top_k < vocab_size
        top_p = sampling.top_p is not None and sampling.top_p < 1.0
        return cls(greedy=greedy, filtered=not greedy and (top_k or top_p), penalised=not needs_no_penalties(sampling))


class DeviceVerifyResult(NamedTuple):
    """The tokens of a round: `token_ids[: num_accepted + 1]`; those after them have no meaning."""

    token_ids: Tensor  # [num_drafted + 1] int64
    num_accepted: Tensor  # [] int64


class DeviceSampler:
    """Draws one request's tokens, for its draft and its target.

    Call `load_request` and `begin_answer` before each request. Constraints are not supported: the
    host works out what a grammar allows, token by token.

    `valid` [] bool stays true while every row that counted had a finite best logit. It becomes
    false after NaN, +inf, or a row of -inf alone.
    """

    def __init__(self, switches: SamplingSwitches, *, vocab_size: int, device: torch.device | str) -> None:
        self.switches = switches
        self.vocab_size = vocab_size
        self.key = torch.zeros(2, dtype=torch.int64, device=device)
        self.valid = torch.ones((), dtype=torch.bool, device=device)
        # How often the answer holds each token, and if the prompt holds it.
        self.counts = torch.zeros(vocab_size, dtype=torch.float64, device=device)
        self.seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self._bias = torch.zeros(vocab_size, dtype=torch.float64, device=device)
        self._parameters = torch.zeros(7, dtype=torch.float64, device=device)
        numbers = self._parameters.unbind()
        self._temperature, self._top_k, self._top_p, self._log_min_p = numbers[:4]
        self._repetition, self._presence, self._frequency = numbers[4:]

    def load_request(self, sampling: Sampling, seed: int) -> None:
        """Load another request's parameters, in place.

        Raises ValueError if it needs other switches, InvalidRequestError if a bias is outside the
        vocabulary.
        """
        switches = SamplingSwitches.from_sampling(sampling, self.vocab_size)
        if switches != self.switches:
            raise ValueError(f"sampling needs {switches}; this sampler has {self.switches}")
        outside = [token_id for token_id in sampling.logit_bias if token_id >= self.vocab_size]
        if outside:
            raise InvalidRequestError(
                f"logit_bias names token {outside[0]}; the model has tokens 0 to {self.vocab_size - 1}"
            )
        self.key.copy_(torch.tensor(split_seed_into_words(seed)).expand_as(self.key))
        self._parameters.copy_(torch.tensor(_list_sampling_parameters(sampling, self.vocab_size), dtype=torch.float64))
        if self.switches.penalised:
            bias = torch.zeros(self.vocab_size, dtype=torch.float64)
            for token_id, value in sampling.logit_bias.items():
                bias[token_id] = value
            self._bias.copy_(bias)

    def begin_answer(self, prompt_ids: Sequence[int] | Tensor) -> None:
        """Forget the last answer; penalties count this prompt ([num_tokens])."""
        self.valid.fill_(value=True)
        self.counts.zero_()
        self.seen.zero_()
        if self.switches.penalised:
            ids = torch.as_tensor(prompt_ids, dtype=torch.int64, device=self.seen.device)
            self.seen.index_fill_(-1, ids, 1)

    def count_committed_tokens(self, token_ids: Tensor, num: Tensor) -> None:
        """Count the first `num` ([] int64) of `token_ids` ([num_tokens] int64) as the answer's."""
        if self.switches.penalised:
            index = torch.arange(token_ids.shape[-1], device=token_ids.device)
            self.counts.scatter_add_(-1, token_ids, (index < num[..., None]).double())

    # --------------------------------------------------------------------------------------- tokens

    def choose_tokens(self, logits: Tensor, positions: Tensor, before_ids: Tensor) -> Tensor:
        """Return the token at each position, [num_rows] int64.

        `logits` is floating [num_rows, any_vocab_size], `positions` int64 [num_rows]. `before_ids`
        is int64 [num_before], with num_before at least num_rows - 1: the tokens between the
        committed answer and the last row. The last row follows all of them, each earlier row one
        less.
        """
        token_ids, finite = self._choose_and_check_finite(logits, positions, before_ids)
        self.valid.logical_and_(finite.all())
        return token_ids

    def verify(self, logits: Tensor, position: Tensor, drafted_ids: Tensor) -> DeviceVerifyResult:
        """Accept drafted tokens ([num_drafted] int64) while they are the target's own.

        `logits` is floating [num_drafted + 1, vocab_size]; `position` is int64 [], the position of
        the first row's token.
        """
        positions = position[..., None] + torch.arange(logits.shape[-2], device=logits.device)
        token_ids, finite = self._choose_and_check_finite(logits, positions, drafted_ids)
        num_accepted = _count_leading_true(token_ids[..., :-1] == drafted_ids)
        self._mark_finite_rows(finite, num_accepted)
        return DeviceVerifyResult(token_ids, num_accepted)

    def _mark_finite_rows(self, finite: Tensor, num_accepted: Tensor) -> None:
        """Clear `valid` if a row that counts is not finite; `finite` is [num_rows] bool."""
        row = torch.arange(finite.shape[-1], device=finite.device)
        self.valid.logical_and_((finite | (row > num_accepted[..., None])).all())

    def _choose_and_check_finite(self, logits: Tensor, positions: Tensor, before_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens, int64, and True for rows with a finite best logit; [num_rows] both."""
        if self.switches.greedy:
            best, token_ids = self.apply_bias_and_penalties(logits, before_ids).max(dim=-1)
            return token_ids, best.isfinite()
        probs, finite = self.compute_logprobs(logits, before_ids)
        return (probs + make_gumbel_tensor(self.key, positions, self.vocab_size)).argmax(dim=-1), finite

    # -------------------------------------------------------------------------------- distributions

    def compute_logprobs(self, logits: Tensor, before_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities up to a constant, [num_rows, vocab_size] float64.

        Filtered tokens have -inf. Also returns which rows have a finite best logit, [num_rows]
        bool. Not for greedy sampling.
        """
        probs = self.apply_bias_and_penalties(logits, before_ids).double() / self._temperature
        best = probs.amax(dim=-1, keepdim=True)
        dropped = probs < best + self._log_min_p
        if self.switches.filtered:
            dropped |= self._find_filtered_out_tokens(probs)
        return probs.masked_fill_(dropped, -math.inf), best.squeeze(-1).isfinite()

    def apply_bias_and_penalties(self, logits: Tensor, before_ids: Tensor) -> Tensor:
        """Return logits after bias and penalties, [num_rows, vocab_size].

        They are float64, or have the dtype of `logits` if there is no bias or penalty.
        """
        fitted = self.fit_vocabulary(logits)
        if not self.switches.penalised:
            return fitted
        counts = self._count_answer_tokens(fitted.shape[-2], before_ids)
        seen = (counts > 0) | self.seen[..., None, :]
        out = fitted.double() + self._bias
        out = torch.where(seen, torch.where(out > 0, out / self._repetition, out * self._repetition), out)
        return out - ((counts > 0) * self._presence + counts * self._frequency)

    def fit_vocabulary(self, logits: Tensor) -> Tensor:
        """Cut or pad logits to the target's vocabulary: models differ in padding (vLLM #10913)."""
        missing = self.vocab_size - logits.shape[-1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=-math.inf)
        return logits[..., : self.vocab_size]

    def _count_answer_tokens(self, num_rows: int, before_ids: Tensor) -> Tensor:
        """Return how often the answer before each row holds each token.

        The result is [num_rows, vocab_size] float64.
        """
        num_before = before_ids.shape[-1]
        if num_before < num_rows - 1:
            raise ValueError(f"before_ids has {num_before} tokens; {num_rows} rows need {num_rows - 1} or more")
        follows = torch.ones(num_rows, num_before, dtype=torch.float64, device=before_ids.device)
        follows = follows.tril_(num_before - num_rows)
        sizes = (*before_ids.shape[:-1], num_rows)
        ids = before_ids[..., None, :].expand(*sizes, num_before)
        counts = self.counts[..., None, :].expand(*sizes, self.vocab_size).clone(memory_format=torch.contiguous_format)
        return counts.scatter_add_(-1, ids, follows.expand_as(ids))

    def _find_filtered_out_tokens(self, probs: Tensor) -> Tensor:
        """Return True for tokens that top-k and top-p drop: [num_rows, vocab_size].

        Top-k keeps the `top_k` largest and, of those, top-p the fewest whose mass reaches `top_p`.
        A stable sort puts lower ids first if tokens tie, so exactly the right number stays.
        """
        ordered, token_ids = probs.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(self.vocab_size, device=probs.device)
        mass = (ordered - ordered[..., :1]).exp().masked_fill_(rank >= self._top_k, 0.0).cumsum(dim=-1)
        below = (mass < self._top_p * mass[..., -1:]).sum(dim=-1, keepdim=True)
        outside = (rank > below) | (rank >= self._top_k)
        return torch.empty_like(outside).scatter_(-1, token_ids, outside)


def _count_leading_true(accepted: Tensor) -> Tensor:
    """Count the true values before the first false one: [num_drafted] bool -> [] int64."""
    return accepted.long().cumprod(dim=-1).sum(dim=-1)


def _list_sampling_parameters(sampling: Sampling, vocab_size: int) -> list[float]:
    """Return temperature, top-k, top-p, log min-p, and the three penalties.

    Values that are not set become values that change nothing.
    """
    top_p = _NO_TOP_P if sampling.top_p is None or sampling.top_p >= 1.0 else sampling.top_p
    return [
        max(sampling.temperature or 0.0, _MIN_TEMPERATURE),
        min(sampling.top_k or vocab_size, vocab_size),
        top_p,
        math.log(sampling.min_p) if sampling.min_p else -math.inf,
        sampling.repetition_penalty or 1.0,
        sampling.presence_penalty or 0.0,
        sampling.frequency_penalty or 0.0,
    ]
