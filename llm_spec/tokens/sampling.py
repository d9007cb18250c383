"""From logits to a law, and from a law to a token.

Filters apply in this order: constraint, logit bias, repetition penalty (prompt and answer), presence and frequency
penalty (answer alone), temperature, top-k, top-p, min-p. Draft and target apply the same ones, and constraint and
penalties see the drafted tokens before the position they are computed for (dropping them on verified tokens is vLLM
#42744).
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llm_spec.chat import Sampling
from llm_spec.errors import InvalidRequestError, ModelOutputError
from llm_spec.tokens.noise import Purpose, gumbel
from llm_spec.tokens.philox import Array, get_array_namespace

__all__ = [
    "Sampler",
    "TokenConstraint",
    "adjust_logits",
    "check_best_logit",
    "is_greedy",
    "logprobs",
    "needs_no_penalties",
    "random_seed",
]

_MIN_TEMPERATURE = 1e-30  # below this the division would overflow; the law is one-hot long before
_BLOCK_NUMBERS = 2**15  # noise computed in one call: numpy's overhead is gone and the work still fits in the L2 cache
_CACHED_POSITIONS = 34  # the longest draft, its bonus and one more


class TokenConstraint(Protocol):
    """Which tokens an answer may hold; of one request, used by one thread at a time."""

    def mask(self, answer_ids: Sequence[int]) -> NDArray[np.bool_]:
        """Tell which tokens may follow `answer_ids`, drafted ones among them: [vocab_size], not to be written to.

        A function of `answer_ids` alone, in whatever order it is asked.
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


def adjust_logits(logits: Array, sampling: Sampling, context_ids: Sequence[int], num_prompt_tokens: int) -> Array:
    """Logits [vocab_size] after bias and penalties: float64, or the same array where there are none."""
    if needs_no_penalties(sampling):
        return logits
    xp: Any = get_array_namespace(logits)
    out = xp.astype(logits, xp.float64)
    for token_id, bias in sampling.logit_bias.items():
        out[token_id] += bias
    if sampling.repetition_penalty not in {None, 1.0}:
        seen_ids = list(set(context_ids))
        seen = out[seen_ids]
        out[seen_ids] = xp.where(seen > 0, seen / sampling.repetition_penalty, seen * sampling.repetition_penalty)
    presence, frequency = sampling.presence_penalty or 0.0, sampling.frequency_penalty or 0.0
    if presence or frequency:
        for token_id, count in Counter(context_ids[num_prompt_tokens:]).items():
            out[token_id] -= presence + frequency * count
    return out


def logprobs(logits: Array, sampling: Sampling, context_ids: Sequence[int], num_prompt_tokens: int) -> Array:
    """Log-probabilities up to a constant, [vocab_size] float64, -inf where filtered; greedy: 0 at the best token.

    Raises ModelOutputError for logits that hold NaN or +inf, or nothing but -inf.
    """
    adjust = adjust_logits(logits, sampling, context_ids, num_prompt_tokens)
    xp: Any = get_array_namespace(adjust)
    check_best_logit(float(adjust.max()), len(context_ids))
    if not sampling.temperature:
        probs = xp.full_like(adjust, -math.inf, dtype=xp.float64)
        probs[int(xp.argmax(adjust))] = 0.0
        return probs
    probs = xp.astype(adjust, xp.float64) / max(sampling.temperature, _MIN_TEMPERATURE)
    top_k = sampling.top_k if sampling.top_k is not None and sampling.top_k < probs.shape[0] else None
    top_p = sampling.top_p if sampling.top_p is not None and sampling.top_p < 1.0 else None
    if top_k is not None or top_p is not None:
        probs = _filter_top(xp, probs, top_k, top_p)
    if sampling.min_p:
        probs = xp.where(probs >= xp.max(probs) + math.log(sampling.min_p), probs, -math.inf)
    return probs


def check_best_logit(value: float, position: int) -> None:
    """Raise ModelOutputError unless the largest logit of a row is finite (NaN and +inf come out as the largest)."""
    if not math.isfinite(value):
        fault = "hold NaN" if math.isnan(value) else "hold +inf" if value > 0 else "are all -inf"
        raise ModelOutputError(f"the model's logits at position {position} {fault}")


def _filter_top(xp: Any, probs: Array, top_k: int | None, top_p: float | None) -> Array:
    """Keep the `top_k` largest, and of those the fewest whose mass reaches `top_p` (at least one)."""
    num_kept = probs.shape[0] if top_k is None else top_k
    ordered = _sort_top_descending(xp, probs, min(num_kept + 1, probs.shape[0]))
    if top_p is not None:
        mass = xp.cumulative_sum(xp.exp(ordered[:num_kept] - ordered[0]))
        num_kept = 1 + int(xp.count_nonzero(mass < top_p * mass[-1]))
    border = ordered[num_kept - 1]
    keep = probs >= border
    if num_kept < ordered.shape[0] and bool(
        ordered[num_kept] == border
    ):  # a tie: exactly num_kept stay, lower ids first
        tied = probs == border
        room = num_kept - int(xp.count_nonzero(probs > border))
        keep = keep & (~tied | (xp.cumulative_sum(xp.astype(tied, xp.int64)) <= room))
    return xp.where(keep, probs, -math.inf)


def _sort_top_descending(xp: Any, probs: Array, count: int) -> Array:
    """The `count` largest values, largest first."""
    if xp is np and count < probs.shape[0]:  # a full sort of 4,096 takes 2.5 times as long
        probs = np.partition(probs, -count)[-count:]
    return xp.flip(xp.sort(probs))[:count]


def random_seed() -> int:
    """A seed for a request that brings none."""
    return int.from_bytes(os.urandom(8), "little")


class Sampler:
    """Draws one request's tokens; shared by its draft and its target, used by one thread at a time.

    The noise of a position is the same whoever asks and however often, so draft and target draw the same token where
    their laws agree (Daliri et al., arXiv 2408.07978).
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
        self._block_length = max(1, _BLOCK_NUMBERS // vocab_size)
        self._num_blocks = _CACHED_POSITIONS // self._block_length + 2
        self._blocks: dict[int, NDArray[np.float64]] = {}

    def choose(self, logits: NDArray[np.floating[Any]], context_ids: Sequence[int]) -> int:
        """The token at position `len(context_ids)`, from its logits ([vocab_size])."""
        if self.greedy:
            scores = self.adjust(logits, context_ids)
            best = int(scores.argmax())
            check_best_logit(float(scores[best]), len(context_ids))
            return best
        return self.sample_token(self.logprobs(logits, context_ids), len(context_ids))

    def sample_token(self, probs: NDArray[np.float64], position: int) -> int:
        """The token that a law ([vocab_size] log-probabilities up to a constant) gives at a position."""
        return int((probs + self.noise(position)).argmax())

    def adjust(self, logits: NDArray[np.floating[Any]], context_ids: Sequence[int]) -> NDArray[np.floating[Any]]:
        """`adjust_logits` of this request, of the tokens that its constraint allows."""
        allowed = self._apply_constraint(logits, context_ids)
        scores: NDArray[np.floating[Any]] = adjust_logits(allowed, self.sampling, context_ids, self.num_prompt_tokens)
        return scores

    def logprobs(self, logits: NDArray[np.floating[Any]], context_ids: Sequence[int]) -> NDArray[np.float64]:
        """`logprobs` of this request, over the tokens that its constraint allows."""
        allowed = self._apply_constraint(logits, context_ids)
        probs: NDArray[np.float64] = logprobs(allowed, self.sampling, context_ids, self.num_prompt_tokens)
        return probs

    def probs(self, logits: NDArray[np.floating[Any]], context_ids: Sequence[int]) -> NDArray[np.float64]:
        """The probabilities that a token is drawn with after all filters: [vocab_size], sums to 1."""
        probs = self.logprobs(logits, context_ids)
        probs -= probs.max()
        np.exp(probs, out=probs)
        probs /= probs.sum()
        return probs

    def fit_vocabulary(self, logits: NDArray[np.floating[Any]]) -> NDArray[np.floating[Any]]:
        """A draft's logits in the target's vocabulary: padding columns differ between models (vLLM #10913)."""
        missing = self.vocab_size - logits.shape[0]
        if missing > 0:
            return np.concatenate([logits, np.full(missing, -np.inf, dtype=logits.dtype)])
        return logits[: self.vocab_size] if missing else logits

    def prepare_noise(self, position: int) -> None:
        """Have the noise from a position on ready: who happens to ask for it first should not look slow for it."""
        if not self.greedy:
            self.noise(position)
            self.noise(position + self._block_length)

    def noise(self, position: int) -> NDArray[np.float64]:
        """Gumbel noise of a position, [vocab_size]; several positions are computed ahead, and the oldest dropped."""
        index, offset = divmod(position, self._block_length)
        block = self._blocks.get(index)
        if block is None:
            positions = np.arange(index * self._block_length, (index + 1) * self._block_length, dtype=np.int64)
            block = gumbel(self.seed, positions, self.vocab_size, Purpose.TOKEN)
            if len(self._blocks) >= self._num_blocks:
                del self._blocks[next(iter(self._blocks))]
            self._blocks[index] = block
        row: NDArray[np.float64] = block[offset]
        return row

    def _apply_constraint(
        self, logits: NDArray[np.floating[Any]], context_ids: Sequence[int]
    ) -> NDArray[np.floating[Any]]:
        """Logits ([vocab_size]) with those of forbidden tokens at -inf."""
        if self.constraint is None:
            return logits
        return np.where(self.constraint.mask(context_ids[self.num_prompt_tokens :]), logits, -np.inf)
