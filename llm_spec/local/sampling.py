"""Logits to probabilities, and probabilities to a token. The arrays are numpy's.

Filters apply in this order: constraint, logit bias, repetition penalty (prompt and answer),
presence and frequency penalty (answer alone), temperature, top-k, top-p, min-p. Draft and target
apply the same ones. Constraint and penalties take into account the drafted tokens before their
position (vLLM #42744 dropped the penalties on verified tokens).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llm_spec.contract.errors import InvalidRequestError, ModelOutputError
from llm_spec.contract.request import Sampling
from llm_spec.local.token_scores import DenseScorer, SparseScorer, TokenScorer

__all__ = [
    "Sampler",
    "TokenConstraint",
    "apply_bias_and_penalties",
    "check_best_logit_is_finite",
    "compute_sampling_logprobs",
    "is_greedy",
    "needs_no_penalties",
]

FloatArray: TypeAlias = NDArray[np.floating[Any]]  # float16, float32 or float64

# below this the division would overflow; the distribution is one-hot long before
_MIN_TEMPERATURE = 1e-30
_MAX_SORTED = 4096  # this many values are sorted quickly
_GROUP_SIZE = 64  # the largest value of each group gives a bound for the largest of all
_FIRST_SORTED = 64  # values of a large vocabulary that are sorted first to find the nucleus
_SORTED_FACTOR = 8  # the number of sorted values grows by this factor
# noise numbers computed in one call: numpy's overhead is gone and the work still fits in the L2
# cache
_BLOCK_NUMBERS = 2**15
_MAX_DENSE = 2**14  # the largest vocabulary whose noise is computed for all tokens
_SPARSE_POSITIONS = 16  # positions prepared at once for larger vocabularies
_CACHED_POSITIONS = 34  # the longest draft, its bonus and one more


class TokenConstraint(Protocol):
    """Restricts the tokens of one request's answer; used by one thread at a time."""

    def mask(self, answer_ids: Sequence[int]) -> NDArray[np.bool_]:
        """Return which tokens may follow `answer_ids`: [vocab_size], read-only.

        `answer_ids` may end with drafted tokens. The result depends only on `answer_ids`, not on
        the order of calls.
        """
        ...


def is_greedy(sampling: Sampling) -> bool:
    """Return True if the most likely token is taken: temperature 0, or not given."""
    return not sampling.temperature


def needs_no_penalties(sampling: Sampling) -> bool:
    """Return True if there is no bias and no penalty: a row then does not depend on the context."""
    return (
        not sampling.logit_bias
        and sampling.repetition_penalty in {None, 1.0}
        and not sampling.presence_penalty
        and not sampling.frequency_penalty
    )


def apply_bias_and_penalties(
    logits: FloatArray, sampling: Sampling, context_ids: Sequence[int], num_prompt_tokens: int
) -> FloatArray:
    """Return logits [vocab_size] after bias and penalties, in float64.

    Returns the same array if there are none.
    """
    if needs_no_penalties(sampling):
        return logits
    out = logits.astype(np.float64)
    for token_id, bias in sampling.logit_bias.items():
        out[token_id] += bias
    penalty = 1.0 if sampling.repetition_penalty is None else sampling.repetition_penalty
    if penalty != 1.0:
        seen_ids = list(set(context_ids))
        seen = out[seen_ids]
        out[seen_ids] = np.where(seen > 0, seen / penalty, seen * penalty)
    presence, frequency = sampling.presence_penalty or 0.0, sampling.frequency_penalty or 0.0
    if presence or frequency:
        for token_id, count in Counter(context_ids[num_prompt_tokens:]).items():
            out[token_id] -= presence + frequency * count
    return out


def compute_sampling_logprobs(
    logits: FloatArray, sampling: Sampling, context_ids: Sequence[int], num_prompt_tokens: int
) -> NDArray[np.float64]:
    """Return log-probabilities up to a constant, [vocab_size], -inf if filtered.

    If sampling is greedy, the best token has 0. `logits` is [vocab_size]. Raises ModelOutputError
    for logits that hold NaN or +inf, or nothing but -inf.
    """
    scores = apply_bias_and_penalties(logits, sampling, context_ids, num_prompt_tokens)
    check_best_logit_is_finite(float(scores.max()), len(context_ids))
    if not sampling.temperature:
        one_hot = np.full(scores.shape, -np.inf)
        one_hot[scores.argmax()] = 0.0
        return one_hot
    out = scores.astype(np.float64) / max(sampling.temperature, _MIN_TEMPERATURE)
    top_k = sampling.top_k if sampling.top_k is not None and sampling.top_k < out.shape[0] else None
    top_p = sampling.top_p if sampling.top_p is not None and sampling.top_p < 1.0 else None
    if top_k is not None or top_p is not None:
        out = _filter_top_k_and_top_p(out, top_k, top_p)
    if sampling.min_p:
        out = np.where(out >= out.max() + math.log(sampling.min_p), out, -np.inf)
    return out


def check_best_logit_is_finite(value: float, position: int) -> None:
    """Raise ModelOutputError unless the largest logit of a row is finite.

    NaN and +inf count as the largest.
    """
    if not math.isfinite(value):
        fault = "hold NaN" if math.isnan(value) else "hold +inf" if value > 0 else "are all -inf"
        raise ModelOutputError(f"the model's logits at position {position} {fault}")


def _filter_top_k_and_top_p(scores: NDArray[np.float64], top_k: int | None, top_p: float | None) -> NDArray[np.float64]:
    """Keep the `top_k` largest scores, then the fewest whose mass reaches `top_p`: [vocab_size].

    At least one score is kept.
    """
    if top_k is None and top_p is not None and scores.shape[0] > _MAX_SORTED:
        ordered, num_kept = _sort_nucleus(scores, top_p)
    else:
        ordered = _sort_top_descending(scores, scores.shape[0] if top_k is None else top_k + 1)
        num_kept = ordered.shape[0] if top_k is None else top_k
        if top_p is not None:
            mass = _sum_weights(ordered[:num_kept])
            num_kept = 1 + int(np.count_nonzero(mass < top_p * mass[-1]))
    border = ordered[num_kept - 1]
    keep = scores >= border
    # a tie: exactly num_kept stay, lower ids first
    if num_kept < ordered.shape[0] and ordered[num_kept] == border:
        tied = scores == border
        room = num_kept - int(np.count_nonzero(scores > border))
        keep &= ~tied | (tied.cumsum() <= room)
    return np.where(keep, scores, -np.inf)


def _sort_nucleus(scores: NDArray[np.float64], top_p: float) -> tuple[NDArray[np.float64], int]:
    """Return the largest values in descending order, and how many have a mass of `top_p`.

    The array holds at least one more value than that, or all. The total mass is summed in float32,
    which is six times as fast and changes `top_p` by less than 1e-6.
    """
    weights = np.exp((scores - scores.max()).astype(np.float32))
    needed = top_p * float(weights.sum(dtype=np.float64))
    count = _FIRST_SORTED
    while True:
        ordered = _sort_top_descending(scores, count)
        num_kept = 1 + int(np.count_nonzero(_sum_weights(ordered) < needed))
        if num_kept < ordered.shape[0] or count >= scores.shape[0]:
            return ordered, min(num_kept, ordered.shape[0])
        count *= _SORTED_FACTOR


def _sum_weights(ordered: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the cumulated mass of the values, relative to the first one: [num_values]."""
    return np.asarray(np.exp(ordered - ordered[0]).cumsum())


def _sort_top_descending(values: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """Return the `count` largest values in descending order, or all if there are fewer."""
    if count < values.shape[0]:  # a full sort of 4,096 takes 2.5 times as long
        values = np.partition(_drop_small_values(values, count), -count)[-count:]
    return np.sort(values)[::-1]


def _drop_small_values(values: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """Drop values that cannot be among the `count` largest.

    The border is the `count`-th largest of the groups' maxima, so at least `count` values reach it.
    """
    num_groups = values.shape[0] // _GROUP_SIZE
    if count > num_groups:
        return values
    largest = values[: num_groups * _GROUP_SIZE].reshape(_GROUP_SIZE, num_groups).max(axis=0)
    border = np.partition(largest, -count)[-count]
    return np.asarray(values[values >= border])


class Sampler:
    """Samples one request's tokens. Draft and target share it; one thread uses it at a time.

    The noise of a position is always the same. So draft and target sample the same token if their
    probabilities agree (Daliri et al., arXiv 2408.07978).
    """

    def __init__(
        self,
        sampling: Sampling,
        *,
        vocab_size: int,
        num_prompt_tokens: int,
        seed: int,
        constraint: TokenConstraint | None = None,
    ) -> None:
        outside = [token_id for token_id in sampling.logit_bias if token_id >= vocab_size]
        if outside:
            raise InvalidRequestError(
                f"logit_bias names token {outside[0]}; the model has tokens 0 to {vocab_size - 1}"
            )
        self.sampling = sampling
        self.vocab_size = vocab_size
        self.num_prompt_tokens = num_prompt_tokens
        self.seed = seed
        self.greedy = is_greedy(sampling)
        self.uses_raw_logits = needs_no_penalties(sampling) and constraint is None
        self.constraint = constraint
        self._make_scorer = DenseScorer if vocab_size <= _MAX_DENSE else SparseScorer
        self._block_length = _BLOCK_NUMBERS // vocab_size if vocab_size <= _MAX_DENSE else _SPARSE_POSITIONS
        self._num_blocks = _CACHED_POSITIONS // self._block_length + 2
        self._scorers: dict[int, TokenScorer] = {}

    def choose_token(self, logits: FloatArray, context_ids: Sequence[int]) -> int:
        """Choose the token at position `len(context_ids)` from its logits ([vocab_size])."""
        if self.greedy:
            scores = self.adjust_and_constrain_logits(logits, context_ids)
            best = int(scores.argmax())
            check_best_logit_is_finite(float(scores[best]), len(context_ids))
            return best
        return self.sample_token(self.compute_logprobs(logits, context_ids), len(context_ids))

    def sample_token(self, logprobs: NDArray[np.float64], position: int) -> int:
        """Sample a token at a position from log-probabilities ([vocab_size], up to a constant)."""
        token_ids, scores = self._get_scorer(position).score_likely_tokens(logprobs, position, 1)
        return int(token_ids[scores.argmax()])

    def sample_token_with_margin(self, logprobs: NDArray[np.float64], position: int) -> tuple[int, float]:
        """Sample the same token; also return its margin.

        The margin is by how much its log-probability plus noise exceeds that of every other token.
        """
        token_ids, scores = self._get_scorer(position).score_likely_tokens(logprobs, position, 2)
        best = int(scores.argmax())
        best_score, scores[best] = float(scores[best]), -np.inf
        return int(token_ids[best]), best_score - float(scores.max())

    def adjust_and_constrain_logits(self, logits: FloatArray, context_ids: Sequence[int]) -> FloatArray:
        """Return `apply_bias_and_penalties` for this request; forbidden tokens have -inf."""
        allowed = self._apply_constraint(logits, context_ids)
        return apply_bias_and_penalties(allowed, self.sampling, context_ids, self.num_prompt_tokens)

    def compute_logprobs(self, logits: FloatArray, context_ids: Sequence[int]) -> NDArray[np.float64]:
        """Return `compute_sampling_logprobs` for this request, over the allowed tokens."""
        allowed = self._apply_constraint(logits, context_ids)
        return compute_sampling_logprobs(allowed, self.sampling, context_ids, self.num_prompt_tokens)

    def compute_probs(self, logits: FloatArray, context_ids: Sequence[int]) -> NDArray[np.float64]:
        """Return the probabilities after all filters: [vocab_size], sum 1."""
        probs = self.compute_logprobs(logits, context_ids)
        probs -= probs.max()
        np.exp(probs, out=probs)
        probs /= probs.sum()
        return probs

    def fit_vocabulary(self, logits: FloatArray) -> FloatArray:
        """Fit a draft's logits to the target's vocabulary; padding columns differ (vLLM #10913)."""
        missing = self.vocab_size - logits.shape[0]
        if missing > 0:
            return np.concatenate([logits, np.full(missing, -np.inf, dtype=logits.dtype)])
        return logits[: self.vocab_size] if missing else logits

    def prepare_noise(self, position: int) -> None:
        """Prepare the noise from a position on, so that its first user is not timed as slow."""
        if not self.greedy:
            self._get_scorer(position)
            self._get_scorer(position + self._block_length)

    def _get_scorer(self, position: int) -> TokenScorer:
        """Return the scorer of a position. It covers a block of them; the oldest is dropped."""
        index = position // self._block_length
        scorer = self._scorers.get(index)
        if scorer is None:
            positions = range(index * self._block_length, (index + 1) * self._block_length)
            scorer = self._make_scorer(self.seed, positions, self.vocab_size)
            if len(self._scorers) >= self._num_blocks:
                del self._scorers[next(iter(self._scorers))]
            self._scorers[index] = scorer
        return scorer

    def _apply_constraint(self, logits: FloatArray, context_ids: Sequence[int]) -> FloatArray:
        """Return the logits ([vocab_size]) with those of forbidden tokens at -inf."""
        if self.constraint is None:
            return logits
        return np.where(self.constraint.mask(context_ids[self.num_prompt_tokens :]), logits, -np.inf)
