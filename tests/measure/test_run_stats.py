"""How often a draft is right, by how many of its tokens before were."""

from __future__ import annotations

import random

import pytest

from llm_spec.measure.run_stats import DraftRunStats


def copying() -> DraftRunStats:
    """Of two starts one is wrong at once, and the other right for a hundred tokens."""
    runs = DraftRunStats()
    for _ in range(40):
        runs.add_wrong_token(0)
        runs.add_right_tokens(0, 100)
        runs.add_wrong_token(100)
    return runs


def test_a_copy_that_has_begun_goes_on() -> None:
    """One rate for all would be .98 here: too much at a start, and too little later."""
    runs = copying()
    assert runs.estimate_rate(0) < 0.94
    assert runs.estimate_rate(30) > 0.985
    assert runs.estimate_survival(0, 20) < 0.9 * runs.estimate_survival(30, 20)


def test_mistakes_at_random_have_one_rate() -> None:
    """Wherever a run is."""
    runs, rng = DraftRunStats(), random.Random(7)  # noqa: S311 - reproducible draws
    run_length = 0
    for _ in range(2_000):
        if rng.random() < 0.9:
            runs.add_right_tokens(run_length, 1)
            run_length += 1
        else:
            runs.add_wrong_token(run_length)
            run_length = 0
    assert [runs.estimate_rate(run) for run in (0, 2, 6, 16)] == pytest.approx([0.9] * 4, abs=0.06)


@pytest.mark.parametrize("run_length", [0, 3, 50])
def test_survival_and_likely_tokens_agree(run_length: int) -> None:
    """The last of the likely tokens is the first that makes all of them less likely than that."""
    runs = copying()
    num_likely = runs.count_likely_tokens(run_length, 0.1, 1000)
    assert runs.estimate_survival(run_length, num_likely) <= 0.1 <= runs.estimate_survival(run_length, num_likely - 1)
    assert runs.count_likely_tokens(run_length, 0.1, 5) == 5


def test_survival_is_the_product_of_the_rates() -> None:
    runs = copying()
    product = 1.0
    for run in range(4, 24):
        product *= runs.estimate_rate(run)
    assert runs.estimate_survival(4, 20) == pytest.approx(product)
    assert runs.estimate_survival(4, 0) == 1.0


def test_a_new_draft_is_given_the_benefit_of_the_doubt() -> None:
    runs = DraftRunStats()
    assert runs.num_judged == 0
    assert runs.estimate_rate(0) == runs.estimate_rate(99) == pytest.approx(0.98)
