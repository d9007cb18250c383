"""Medians and intervals: equal contenders are called different as rarely as promised, slower ones are found."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binom

from llm_spec.cli.bench.figures import MIN_UNITS, estimate_median_ratio, find_median_interval_rank, percentile

from .simulated import draw_noise, simulate


@pytest.mark.parametrize("num_values", [*range(1, 80), 200, 1500])
def test_the_rank_is_that_of_the_binomial_distribution(num_values: int) -> None:
    """The narrowest interval of order statistics that still holds the median with 95 %."""
    rank = find_median_interval_rank(num_values)
    assert (rank is None) == (num_values < MIN_UNITS)
    if rank is not None:
        assert 1 - 2 * binom.cdf(rank - 1, num_values, 0.5) >= 0.95
        assert 1 - 2 * binom.cdf(rank, num_values, 0.5) < 0.95


def test_a_median_and_its_interval() -> None:
    estimate = estimate_median_ratio([1.2, 0.9, 1.1, 1.3, 1.0, 1.25, 2.0])
    assert estimate is not None
    assert (estimate.ratio, estimate.low, estimate.high, estimate.num_units) == (pytest.approx(1.2), 0.9, 2.0, 7)
    assert not estimate.excludes_one
    assert estimate_median_ratio([]) is None


def test_inverse_ratios_have_the_inverse_median() -> None:
    """An even number included: nobody gains by being the numerator."""
    ratios = [0.5, 0.8, 1.3, 4.0]
    there, back = estimate_median_ratio(ratios), estimate_median_ratio([1 / ratio for ratio in ratios])
    assert there is not None
    assert back is not None
    assert there.ratio == pytest.approx(1 / back.ratio)


def test_too_few_ratios_have_no_interval() -> None:
    estimate = estimate_median_ratio([2.0] * (MIN_UNITS - 1))
    assert estimate is not None
    assert (estimate.low, estimate.excludes_one) == (None, False)


@pytest.mark.parametrize("percent", [10, 50, 90, 98])
def test_percentiles(percent: int) -> None:
    values = [float(value) for value in np.random.default_rng(1).exponential(size=37)]
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))
    assert percentile([3.0], percent) == 3.0
    assert percentile([], percent) is None


@pytest.mark.parametrize("num_values", [6, 10, 11, 20, 60])
@pytest.mark.parametrize("noise", ["normal", "heavy tails", "spikes"])
def test_the_interval_holds_the_median_as_often_as_it_says(num_values: int, noise: str) -> None:
    """Whatever the noise is: of 1,000 drawn samples, at least as many as 95 % can give by chance."""
    rng = np.random.default_rng(5)
    held = 0
    for _ in range(1000):
        if noise == "normal":
            logs = rng.normal(0, 0.03, (2, num_values))
        elif noise == "heavy tails":
            logs = 0.03 * rng.standard_t(2, (2, num_values))
        else:
            logs = np.array([[draw_noise(rng, 0.01) for _ in range(num_values)] for _ in range(2)])
        estimate = estimate_median_ratio([float(ratio) for ratio in np.exp(logs[0] - logs[1])])
        assert estimate is not None
        held += not estimate.excludes_one
    assert held >= 950


@pytest.mark.parametrize("num_prompts", [10, 24, 60])
def test_plain_against_plain(num_prompts: int) -> None:
    """In at least 95 of 100 measurements the interval holds 1."""
    verdicts = [simulate({"again": 1.0}, num_prompts=num_prompts, seed=seed)[0].verdict for seed in range(100)]
    assert verdicts.count("no difference") >= 95


def test_a_slowdown_of_three_percent_is_found() -> None:
    """With 60 prompts whose times vary by 2.5 %, and sometimes by much more."""
    verdicts = [simulate({"slow": 1.03}, num_prompts=60, seed=seed)[0].verdict for seed in range(100)]
    assert verdicts.count("slower") >= 95
    assert verdicts.count("faster") == 0


def test_repeated_runs_see_more() -> None:
    """A slowdown of 1.5 %, which one run of 60 prompts often misses."""
    once, often = (
        [simulate({"slow": 1.015}, num_prompts=60, seed=s, num_runs=runs)[0].verdict for s in range(40)]
        for runs in (1, 5)
    )
    assert once.count("slower") < 32
    assert often.count("slower") >= 38


@pytest.mark.parametrize("trouble", ["the first place", "drift"])
def test_rotation_takes_away_what_depends_on_the_place(trouble: str) -> None:
    """Who answers first warms what others find; a machine gets slower while it is measured."""

    def slow_down(place: int, prompt: int) -> float:
        return 0.05 * (place == 0) if trouble == "the first place" else 0.01 * (3 * prompt + place)

    def count_verdicts(*, rotates: bool) -> int:
        runs = [
            simulate({"again": 1.0, "third": 1.0}, num_prompts=30, seed=s, rotates=rotates, trouble=slow_down)
            for s in range(40)
        ]
        return sum(summary.verdict != "no difference" for run in runs for summary in run)

    assert count_verdicts(rotates=True) <= 7  # of 80, by chance
    assert count_verdicts(rotates=False) >= 25


def test_shared_noise_is_shown_by_plain_against_plain() -> None:
    """Plain's own noise moves all ratios together: contenders that are equal deviate in the same direction."""
    ratios = np.array(
        [
            [
                np.log(summary.ratios.totals or 0.0)
                for summary in simulate({"a": 1.0, "b": 1.0}, num_prompts=20, seed=seed)
            ]
            for seed in range(100)
        ]
    )
    assert 0.25 < np.corrcoef(ratios.T)[0, 1] < 0.75
