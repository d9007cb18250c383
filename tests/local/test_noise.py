"""Noise is a pure function of seed, position and token, uniform, never 0 or 1, and independent between streams."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownLambdaType=false
# (pytest.approx and scipy are partly untyped)

import numpy as np
import pytest
from scipy import stats

from llm_spec.local import noise as noise_module
from llm_spec.local.noise import (
    NOISE_GROUP_SIZE,
    NoisePurpose,
    compute_gumbel_number,
    draw_noise_groups,
    draw_uniform_number,
    make_gumbel_noise,
    make_gumbel_noise_of_tokens,
    make_uniform_noise,
)

POSITIONS = np.arange(3, 11)


def test_rows_do_not_depend_on_what_is_computed_with_them() -> None:
    """A position's noise is the same alone, among others, and in a larger vocabulary."""
    together = make_uniform_noise(5, POSITIONS, 50, NoisePurpose.TOKEN)
    for index, position in enumerate(POSITIONS):
        assert np.array_equal(make_uniform_noise(5, np.array([position]), 50, NoisePurpose.TOKEN)[0], together[index])
    assert np.array_equal(make_uniform_noise(5, POSITIONS, 17, NoisePurpose.TOKEN), together[:, :17])
    assert together.shape == (8, 50)
    assert together.dtype == np.float64


def test_numbers_are_the_arrays() -> None:
    """The single number is the array's, for every purpose, round, and a seed and position above 32 bits."""
    seed, position = 2**64 - 3, 2**33 + 5
    for purpose in NoisePurpose:
        row = make_uniform_noise(seed, np.array([position]), 7, purpose, 77)[0].tolist()
        assert draw_uniform_number(seed, position, purpose, 77) == row[0]
        assert [draw_uniform_number(seed, position, purpose, 77, token_id=token_id) for token_id in range(7)] == row


@pytest.mark.parametrize("word", [0, 2**32 - 1])
def test_uniforms_are_never_zero_or_one(word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest and the largest word still give a uniform inside (0, 1) and finite Gumbel noise."""
    monkeypatch.setattr(noise_module, "philox4x32", lambda counter, key: (np.full((1, 1), word),) * 4)  # noqa: ARG005 # its signature
    found = make_uniform_noise(0, np.array([0]), 4, NoisePurpose.TOKEN)
    assert ((found > 0.0) & (found < 1.0)).all()
    noise = make_gumbel_noise(0, np.array([0]), 4)
    assert (noise > -3.3).all()
    assert (noise < 28.5).all()


def test_uniforms_are_uniform_and_gumbels_gumbel() -> None:
    """Kolmogorov and Smirnov find nothing in 200,000 numbers."""
    positions = np.arange(50)
    assert stats.kstest(make_uniform_noise(1, positions, 4000, NoisePurpose.TOKEN).ravel(), "uniform").pvalue > 1e-4
    assert stats.kstest(make_gumbel_noise(2, positions, 4000).ravel(), "gumbel_r").pvalue > 1e-4


# ------------------------------------------------------------------------------------------ groups of tokens


def test_gumbel_noise_of_a_position_is_the_same_alone_and_in_a_larger_vocabulary() -> None:
    """Also where the vocabulary ends within a group, and before the token that has its largest noise."""
    together = make_gumbel_noise(5, POSITIONS, 1000)
    for index, position in enumerate(POSITIONS):
        assert np.array_equal(make_gumbel_noise(5, np.array([position]), 1000)[0], together[index])
    for vocab_size in (1, 50, 256, 257, 600):
        assert np.array_equal(make_gumbel_noise(5, POSITIONS, vocab_size), together[:, :vocab_size])


def test_noise_of_some_tokens_is_that_of_all() -> None:
    """As an array and as numbers, with those that have the largest noise of their group among them."""
    seed, positions, vocab_size = 2**40 + 1, np.array([3, 2**33 + 5]), 1000
    groups = draw_noise_groups(seed, positions, vocab_size)
    for row, position in enumerate(positions.tolist()):
        noise = make_gumbel_noise(seed, positions, vocab_size)[row]
        leaders = groups.leaders[row]
        token_ids = np.union1d(leaders[leaders < vocab_size], [0, 1, 5, 255, 256, 511, 998, 999])
        found = make_gumbel_noise_of_tokens(seed, position, token_ids, groups, row)
        np.testing.assert_allclose(found, noise[token_ids], rtol=1e-15, atol=1e-15)
        numbers = [compute_gumbel_number(seed, position, token_id, groups, row) for token_id in token_ids.tolist()]
        np.testing.assert_allclose(numbers, found, rtol=1e-15, atol=1e-15)


def test_the_leader_of_a_group_has_its_largest_noise() -> None:
    """And no other token has as much."""
    positions = np.arange(200)
    groups = draw_noise_groups(7, positions, 1024)
    noise = make_gumbel_noise(7, positions, 1024).reshape(200, 4, NOISE_GROUP_SIZE)
    assert np.array_equal(noise.argmax(axis=2) + np.arange(0, 1024, NOISE_GROUP_SIZE), groups.leaders)
    assert np.array_equal(noise.max(axis=2), -np.log(groups.least))


def test_tokens_of_a_group_are_independent() -> None:
    """What is drawn first, the largest of a group and whose it is, does not show in the noise of its tokens."""
    noise = make_gumbel_noise(11, np.arange(20_000), NOISE_GROUP_SIZE)
    for token_id in (0, 1, 128, 255):
        assert stats.kstest(noise[:, token_id], "gumbel_r").pvalue > 1e-4
    correlations = np.corrcoef(np.exp(-np.exp(-noise)), rowvar=False)  # of uniforms
    others = correlations[~np.eye(NOISE_GROUP_SIZE, dtype=bool)]
    assert np.abs(others).max() < 0.04  # 65,280 of standard deviation .007
    assert abs(others.mean()) < 0.0005
    leaders = np.bincount(noise.argmax(axis=1), minlength=NOISE_GROUP_SIZE)
    assert stats.chisquare(leaders).pvalue > 1e-4
    pairs = np.bincount(noise[:, :3].argmax(axis=1) * 3 + noise[:, 3:6].argmax(axis=1), minlength=9)
    assert stats.chisquare(pairs).pvalue > 1e-4


def test_streams_differ_and_do_not_correlate() -> None:
    """Another seed, purpose, round or position is other noise."""
    base = make_uniform_noise(1, POSITIONS, 4000, NoisePurpose.TOKEN)
    others = [
        make_uniform_noise(1, POSITIONS, 4000, purpose) for purpose in NoisePurpose if purpose is not NoisePurpose.TOKEN
    ]
    others += [
        make_uniform_noise(1 + 2**32, POSITIONS, 4000, NoisePurpose.TOKEN),
        make_uniform_noise(2, POSITIONS, 4000, NoisePurpose.TOKEN),
    ]
    others += [
        make_uniform_noise(1, POSITIONS, 4000, NoisePurpose.TOKEN, 1),
        make_uniform_noise(1, POSITIONS + 8, 4000, NoisePurpose.TOKEN),
    ]
    others += [make_uniform_noise(1, POSITIONS + 2**32, 4000, NoisePurpose.TOKEN)]
    for other in others:
        assert abs(np.corrcoef(base.ravel(), other.ravel())[0, 1]) < 0.03
