"""Scores of tokens: log-probability plus noise. The token with the largest score is sampled.

In a small vocabulary all scores are computed. In a large one, noise takes longer than the rest of
sampling, and most tokens are too unlikely to win with any noise. `SparseScorer` computes the scores
of the others.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from llm_spec.local.noise import (
    NOISE_GROUP_SIZE,
    compute_gumbel_number,
    draw_noise_groups,
    make_gumbel_noise,
    make_gumbel_noise_of_tokens,
)

__all__ = ["DenseScorer", "SparseScorer", "TokenScorer", "TokenScores"]

_ROUNDING: Final = 1e-9  # more than rounding can change a score


class TokenScores(NamedTuple):
    """Token ids, in ascending order, and their scores: [num_tokens] each."""

    token_ids: NDArray[np.int64]
    scores: NDArray[np.float64]


class TokenScorer(Protocol):
    """Scores tokens with the noise of some positions, for coupled sampling."""

    def score_likely_tokens(self, logprobs: NDArray[np.float64], position: int, num_best: int) -> TokenScores:
        """Score all tokens that may be among the `num_best` (1 or 2) best; others may be included.

        `logprobs` is [vocab_size], up to a constant, -inf for tokens that cannot be sampled.
        """
        ...


class DenseScorer:
    """Computes the noise of all tokens at once, which is faster in numpy."""

    def __init__(self, seed: int, positions: range, vocab_size: int) -> None:
        self._start = positions.start
        self._noise = make_gumbel_noise(seed, np.array(positions, dtype=np.int64), vocab_size)
        self._token_ids = np.arange(vocab_size)

    def score_likely_tokens(self, logprobs: NDArray[np.float64], position: int, num_best: int) -> TokenScores:  # noqa: ARG002 - all are scored
        return TokenScores(self._token_ids, logprobs + self._noise[position - self._start])


class SparseScorer:
    """Computes the largest noise of each group of tokens, and that of the tokens that can win."""

    def __init__(self, seed: int, positions: range, vocab_size: int) -> None:
        self._seed = seed
        self._start = positions.start
        self._vocab_size = vocab_size
        self._groups = draw_noise_groups(seed, np.array(positions, dtype=np.int64), vocab_size)
        self._largest = -np.log(self._groups.least)
        leaders = self._groups.leaders
        self._leaders = np.minimum(leaders, vocab_size - 1)
        self._leader_noise = np.where(leaders < vocab_size, self._largest, -np.inf)

    def score_likely_tokens(self, logprobs: NDArray[np.float64], position: int, num_best: int) -> TokenScores:
        row = position - self._start
        least = self._find_least_score(logprobs, position, num_best) - _ROUNDING
        # a token below this cannot win, even with the largest noise of its group
        needed = np.repeat(least - self._largest[row], NOISE_GROUP_SIZE)[: self._vocab_size]
        token_ids = np.flatnonzero(logprobs >= needed)
        noise = make_gumbel_noise_of_tokens(self._seed, position, token_ids, self._groups, row)
        return TokenScores(token_ids, logprobs[token_ids] + noise)

    def _find_least_score(self, logprobs: NDArray[np.float64], position: int, num_best: int) -> float:
        """Return a score that `num_best` tokens reach: the likeliest, or those of most noise."""
        row = position - self._start
        likeliest = [int(logprobs.argmax())] if num_best == 1 else np.argpartition(logprobs, -2)[-2:].tolist()
        least = min(
            float(logprobs[token_id]) + compute_gumbel_number(self._seed, position, token_id, self._groups, row)
            for token_id in likeliest
            if logprobs[token_id] > -np.inf
        )
        leader_scores = logprobs[self._leaders[row]] + self._leader_noise[row]
        if len(leader_scores) < num_best:
            return least
        return max(least, float(np.partition(leader_scores, -num_best)[-num_best]))
