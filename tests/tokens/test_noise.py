"""Noise is a pure function of seed, position and token, uniform, never 0 or 1, and independent between streams."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownLambdaType=false
# (pytest.approx and scipy are partly untyped)

import numpy as np
import pytest
from scipy import stats

from llm_spec.tokens import noise as noise_module
from llm_spec.tokens.noise import NoisePurpose, draw_uniform_number, make_gumbel_noise, make_uniform_noise

POSITIONS = np.arange(3, 11)


def test_rows_do_not_depend_on_what_is_computed_with_them() -> None:
    """A position's noise is the same alone, among others, and in a larger vocabulary."""
    together = make_uniform_noise(5, POSITIONS, 50, NoisePurpose.TOKEN)
    for index, position in enumerate(POSITIONS):
        assert np.array_equal(make_uniform_noise(5, np.array([position]), 50, NoisePurpose.TOKEN)[0], together[index])
    assert np.array_equal(make_uniform_noise(5, POSITIONS, 17, NoisePurpose.TOKEN), together[:, :17])
    assert together.shape == (8, 50)
    assert together.dtype == np.float64


def test_number_is_token_zero() -> None:
    """The single number is the array's first, for every purpose, round, and a seed and position above 32 bits."""
    seed, position = 2**64 - 3, 2**33 + 5
    for purpose in NoisePurpose:
        row = make_uniform_noise(seed, np.array([position]), 1, purpose, 77)
        assert draw_uniform_number(seed, position, purpose, 77) == row[0, 0]


@pytest.mark.parametrize("word", [0, 2**32 - 1])
def test_uniforms_are_never_zero_or_one(word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest and the largest word still give a uniform inside (0, 1) and finite Gumbel noise."""
    monkeypatch.setattr(noise_module, "philox4x32", lambda counter, key: (np.full((1, 1), word),) * 4)  # noqa: ARG005 # its signature
    found = make_uniform_noise(0, np.array([0]), 4, NoisePurpose.TOKEN)
    assert ((found > 0.0) & (found < 1.0)).all()
    assert np.isfinite(make_gumbel_noise(0, np.array([0]), 4, NoisePurpose.TOKEN)).all()


def test_uniforms_are_uniform_and_gumbels_gumbel() -> None:
    """Kolmogorov and Smirnov find nothing in 200,000 numbers."""
    positions = np.arange(50)
    assert stats.kstest(make_uniform_noise(1, positions, 4000, NoisePurpose.TOKEN).ravel(), "uniform").pvalue > 1e-4
    assert stats.kstest(make_gumbel_noise(2, positions, 4000, NoisePurpose.TOKEN).ravel(), "gumbel_r").pvalue > 1e-4


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
