"""The scores that are computed hold the largest of all, and the sampled tokens follow their distribution."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from llm_spec.local import token_scores
from llm_spec.local.noise import NoiseGroups, make_gumbel_noise_of_tokens
from llm_spec.local.token_scores import DenseScorer, SparseScorer

VOCAB_SIZE = 1500
POSITIONS = range(32, 40)


@st.composite
def draw_logprobs(draw: st.DrawFn) -> NDArray[np.float64]:
    """Flat and steep ones, with ties, and with tokens that cannot be sampled."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    logprobs = rng.normal(size=VOCAB_SIZE) * draw(st.sampled_from([0.0, 0.1, 1.0, 5.0, 30.0]))
    if draw(st.booleans()):
        logprobs = np.round(logprobs)
    num_left = draw(st.sampled_from([1, 2, 3, 700, VOCAB_SIZE]))
    logprobs[rng.permutation(VOCAB_SIZE)[num_left:]] = -np.inf
    return logprobs + draw(st.sampled_from([0.0, -500.0]))


@settings(max_examples=300, deadline=None)
@given(draw_logprobs(), st.integers(0, 2**64 - 1), st.sampled_from(POSITIONS))
def test_sparse_scores_hold_the_largest(logprobs: NDArray[np.float64], seed: int, position: int) -> None:
    """The best two tokens and their scores are those of all tokens, whatever the distribution."""
    dense = DenseScorer(seed, POSITIONS, VOCAB_SIZE).score_likely_tokens(logprobs, position, 2)
    best = np.argsort(-dense.scores, kind="stable")[:2]
    for num_best in (1, 2):
        sparse = SparseScorer(seed, POSITIONS, VOCAB_SIZE).score_likely_tokens(logprobs, position, num_best)
        order = np.argsort(-sparse.scores, kind="stable")[:num_best]
        expected = best[:num_best][dense.scores[best[:num_best]] > -np.inf]
        assert dense.token_ids[expected].tolist() == sparse.token_ids[order][: len(expected)].tolist()
        np.testing.assert_allclose(sparse.scores[order][: len(expected)], dense.scores[expected], rtol=1e-12)


def test_few_scores_are_computed() -> None:
    """A hundredth of the tokens where the distribution is like those of models, and hardly more where it is flat."""
    rng = np.random.default_rng(1)
    scorer = SparseScorer(3, range(50), 50_000)
    for scale, most in ((3.0, 500), (1.0, 500), (0.0, 1000)):
        logprobs = rng.normal(size=50_000) * scale
        found = [len(scorer.score_likely_tokens(logprobs, position, 1).token_ids) for position in range(50)]
        assert np.median(found) < most


def count_samples(num_samples: int) -> tuple[list[int], NDArray[np.float64]]:
    """Of six outcomes: the largest tokens and, together, all others of a vocabulary of some groups."""
    rng = np.random.default_rng(2)
    logprobs = rng.normal(size=VOCAB_SIZE)
    favourites = [3, 300, 301, 777, 1499]
    logprobs[favourites] = np.log([120.0, 60.0, 600.0, 300.0, 900.0])
    probs = np.exp(logprobs) / np.exp(logprobs).sum()
    counts = [0] * 6
    for seed in range(num_samples // 100):
        scorer = SparseScorer(seed, range(100), VOCAB_SIZE)
        for position in range(100):
            token_ids, scores = scorer.score_likely_tokens(logprobs, position, 1)
            sampled = int(token_ids[scores.argmax()])
            counts[favourites.index(sampled) if sampled in favourites else 5] += 1
    return counts, np.append(probs[favourites], 1.0 - probs[favourites].sum())


def test_samples_follow_the_distribution() -> None:
    """Chi-square of 20,000 samples."""
    counts, probs = count_samples(20_000)
    assert stats.chisquare(counts, probs * 20_000).pvalue > 1e-4


def test_noise_that_is_no_gumbel_noise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the token with the largest noise of a group had less, unlikely tokens would be sampled too rarely."""

    def forget_leaders(
        seed: int, position: int, token_ids: NDArray[np.int64], groups: NoiseGroups, row: int
    ) -> NDArray[np.float64]:
        nobody = groups._replace(leaders=np.full_like(groups.leaders, -1))
        return make_gumbel_noise_of_tokens(seed, position, token_ids, nobody, row)

    monkeypatch.setattr(token_scores, "make_gumbel_noise_of_tokens", forget_leaders)
    counts, probs = count_samples(20_000)
    assert stats.chisquare(counts, probs * 20_000).pvalue < 1e-6
