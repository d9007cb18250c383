"""From logits to probabilities, and from probabilities to a token. The arrays are numpy's.

Filters apply in this order: constraint, logit bias, repetition penalty (prompt and answer), presence and frequency
penalty (answer alone), temperature, top-k, top-p, min-p. Draft and target apply the same ones. Constraint and penalties
see the drafted tokens before their position (vLLM #42744 dropped the penalties on verified tokens).
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

_MIN_TEMPERATURE = 1e-30  # below this the division would overflow; the distribution is one-hot long before
_MAX_SORTED = 4096  # values that are quickly sorted
_GROUP_SIZE = 64  # values, whose largest ones say where the largest of all begin
_FIRST_SORTED = 64  # values of a large vocabulary that are sorted to find those with most of the mass, …
_SORTED_FACTOR = 8  # … and then so many times as many
_BLOCK_NUMBERS = 2**15  # noise computed in one call: numpy's overhead is gone and the work still fits in the L2 cache
_MAX_DENSE = 2**14  # tokens of a vocabulary whose noise is computed for all of them …
_SPARSE_POSITIONS = 16  # … and otherwise positions that are prepared at once
_CACHED_POSITIONS = 34  # the longest draft, its bonus and one more


class TokenConstraint(Protocol):
    """Which tokens an answer may hold; of one request, used by one thread at a time."""

    def mask(self, answer_ids: Sequence[int]) -> NDArray[np.bool_]:
        """Tell which tokens may follow `answer_ids`, drafted ones among them: [vocab_size], not to be written to.

        A function of `answer_ids` alone, whatever the order of calls.
        """
        ...


def is_greedy(sampling: Sampling) -> bool:
    """Whether the token is the most likely one: temperature 0, or not given."""
    return not sampling.temperature


def needs_no_penalties(sampling: Sampling) -> bool:
    """Whether logits are used as they come: no bias and no penalty, so that a row does not depend on the context."""
    return (
        not sampling.logit_bias
        and sampling.repetition_penalty in {None, 1.0}
        and not sampling.presence_penalty
        and not sampling.frequency_penalty
    )


def apply_bias_and_penalties(
    logits: FloatArray, sampling: Sampling, context_ids: Sequence[int], num_prompt_tokens: int
) -> FloatArray:
    """Logits [vocab_size] after bias and penalties: float64, or the same array where there are none."""
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
    """Log-probabilities up to a constant, [vocab_size], -inf where filtered; greedy: 0 at the best token.

    `logits`: [vocab_size]. Raises ModelOutputError for logits that hold NaN or +inf, or nothing but -inf.
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
    """Raise ModelOutputError unless the largest logit of a row is finite (NaN and +inf come out as the largest)."""
    if not math.isfinite(value):
        fault = "hold NaN" if math.isnan(value) else "hold +inf" if value > 0 else "are all -inf"
        raise ModelOutputError(f"the model's logits at position {position} {fault}")


def _filter_top_k_and_top_p(scores: NDArray[np.float64], top_k: int | None, top_p: float | None) -> NDArray[np.float64]:
    """Keep the `top_k` largest, and of those the fewest whose mass reaches `top_p` (at least one): [vocab_size]."""
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
    if num_kept < ordered.shape[0] and ordered[num_kept] == border:  # a tie: exactly num_kept stay, lower ids first
        tied = scores == border
        room = num_kept - int(np.count_nonzero(scores > border))
        keep &= ~tied | (tied.cumsum() <= room)
    return np.where(keep, scores, -np.inf)


def _sort_nucleus(scores: NDArray[np.float64], top_p: float) -> tuple[NDArray[np.float64], int]:
    """The largest values, largest first, and how many of them have a mass of `top_p`; one more, or all.

    The mass of all is summed in float32, six times as fast: it changes `top_p` by less than 1e-6.
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
    """The mass of the first value, of the first two, …, relative to the first one's: [num_values]."""
    return np.asarray(np.exp(ordered - ordered[0]).cumsum())


def _sort_top_descending(values: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """The `count` largest values, or all where there are fewer, largest first."""
    if count < values.shape[0]:  # a full sort of 4,096 takes 2.5 times as long
        values = np.partition(_drop_small_values(values, count), -count)[-count:]
    return np.sort(values)[::-1]


def _drop_small_values(values: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """Some of the values, the `count` largest among them: `count` groups of values have one as large as the least."""
    num_groups = values.shape[0] // _GROUP_SIZE
    if count > num_groups:
        return values
    largest = values[: num_groups * _GROUP_SIZE].reshape(_GROUP_SIZE, num_groups).max(axis=0)
    border = np.partition(largest, -count)[-count]
    return np.asarray(values[values >= border])


class Sampler:
    """Samples one request's tokens. Its draft and its target share it; one thread uses it at a time.

    The noise of a position is always the same. So draft and target sample the same token where their probabilities
    agree (Daliri et al., arXiv 2408.07978).
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
        """The token at position `len(context_ids)`, from its logits ([vocab_size])."""
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
        """The same token, and by how much its log-probability with its noise is above that of every other token."""
        token_ids, scores = self._get_scorer(position).score_likely_tokens(logprobs, position, 2)
        best = int(scores.argmax())
        best_score, scores[best] = float(scores[best]), -np.inf
        return int(token_ids[best]), best_score - float(scores.max())

    def adjust_and_constrain_logits(self, logits: FloatArray, context_ids: Sequence[int]) -> FloatArray:
        """`apply_bias_and_penalties` of this request, of the tokens that its constraint allows."""
        allowed = self._apply_constraint(logits, context_ids)
        return apply_bias_and_penalties(allowed, self.sampling, context_ids, self.num_prompt_tokens)

    def compute_logprobs(self, logits: FloatArray, context_ids: Sequence[int]) -> NDArray[np.float64]:
        """`compute_sampling_logprobs` of this request, over the tokens that its constraint allows."""
        allowed = self._apply_constraint(logits, context_ids)
        return compute_sampling_logprobs(allowed, self.sampling, context_ids, self.num_prompt_tokens)

    def compute_probs(self, logits: FloatArray, context_ids: Sequence[int]) -> NDArray[np.float64]:
        """The probabilities that a token is drawn with after all filters: [vocab_size], sums to 1."""
        probs = self.compute_logprobs(logits, context_ids)
        probs -= probs.max()
        np.exp(probs, out=probs)
        probs /= probs.sum()
        return probs

    def fit_vocabulary(self, logits: FloatArray) -> FloatArray:
        """A draft's logits in the target's vocabulary: padding columns differ between models (vLLM #10913)."""
        missing = self.vocab_size - logits.shape[0]
        if missing > 0:
            return np.concatenate([logits, np.full(missing, -np.inf, dtype=logits.dtype)])
        return logits[: self.vocab_size] if missing else logits

    def prepare_noise(self, position: int) -> None:
        """Have the noise from a position on ready: who happens to ask for it first should not look slow for it."""
        if not self.greedy:
            self._get_scorer(position)
            self._get_scorer(position + self._block_length)

    def _get_scorer(self, position: int) -> TokenScorer:
        """The one of a position; the noise of several is prepared at once, and the oldest dropped."""
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
        """Logits ([vocab_size]) with those of forbidden tokens at -inf."""
        if self.constraint is None:
            return logits
        return np.where(self.constraint.mask(context_ids[self.num_prompt_tokens :]), logits, -np.inf)
