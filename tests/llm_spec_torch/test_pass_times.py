"""What a request's part of a joined pass costs, and how long it is worth to wait for another's."""

from __future__ import annotations

import numpy as np
import pytest
from llm_spec_torch.pass_times import PassTimes


def learn(base_s: float, token_s: float, *, lengths: range = range(2, 17)) -> PassTimes:
    """After a hundred passes of so many tokens in all, some of which took up to a tenth longer."""
    times = PassTimes()
    draws = np.random.default_rng(1)
    for _ in range(100):
        num_tokens = int(draws.choice(lengths))
        times.update(1, num_tokens, (base_s + token_s * num_tokens) * draws.uniform(1.0, 1.1))
    return times


def test_who_is_alone_took_all() -> None:
    for times in (PassTimes(), learn(0.05, 0.002)):
        assert times.estimate_part_s(5, 5, 0.25) == pytest.approx(0.25)


@pytest.mark.parametrize(("base_s", "token_s"), [(0.05, 0.002), (0.01, 0.01), (0.0, 0.02), (0.05, 0.0)])
def test_each_bears_a_part_of_the_pass_and_its_own_tokens(base_s: float, token_s: float) -> None:
    """Where four share passes, a fourth of what a pass takes whatever is in it; together all of it."""
    times, lengths = learn(base_s, token_s), (1, 1, 5, 3)
    pass_s = base_s + 10 * token_s
    for _ in range(20):
        times.update(4, 10, pass_s)
    parts_s = [times.estimate_part_s(length, 10, pass_s) for length in lengths]
    assert sum(parts_s) == pytest.approx(pass_s, rel=0.02)
    assert parts_s[3] == pytest.approx(base_s / 4 + 3 * token_s, rel=0.25)


def test_passes_that_all_had_one_length_say_nothing_of_tokens() -> None:
    times = learn(0.05, 0.01, lengths=range(8, 9))
    for _ in range(20):
        times.update(2, 8, 0.13)
    assert times.estimate_part_s(1, 8, 0.13) == pytest.approx(0.065, rel=0.05)


def test_company_that_changes_from_pass_to_pass_changes_parts_little() -> None:
    """One pass without the others costs no eight times as much."""
    times = learn(0.05, 0.0)
    for _ in range(20):
        times.update(8, 8, 0.05)
    before = times.estimate_part_s(1, 8, 0.05)
    times.update(1, 1, 0.05)
    assert times.estimate_part_s(1, 1, 0.05) < 1.5 * before


def test_a_model_that_becomes_slower_is_learned_anew() -> None:
    """After two hundred passes nothing is left of what was before."""
    times = learn(0.05, 0.0)
    for count in range(200):
        times.update(1, 2 + count % 14, 0.1 * (2 + count % 14))
    assert times.estimate_part_s(1, 10, 1.0) == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("num_tokens", [2, 8, 16])
def test_one_slow_pass_says_little(num_tokens: int) -> None:
    """Whatever the machine did meanwhile."""
    times = learn(0.05, 0.002)
    before = times.estimate_part_s(3, 10, 0.07)
    times.update(1, num_tokens, 5.0)
    assert times.estimate_part_s(3, 10, 0.07) == pytest.approx(before, rel=0.3)


@pytest.mark.parametrize(("base_s", "token_s", "found_s"), [(0.05, 0.002, 0.05), (0.05, 0.0, 0.05), (0.0, 0.02, 0.018)])
def test_the_base_is_what_passes_take_whatever_is_in_them(base_s: float, token_s: float, found_s: float) -> None:
    """A tenth of a pass, where that is more."""
    assert PassTimes().base_s == 0.0
    assert learn(base_s, token_s).base_s == pytest.approx(found_s, rel=0.3)


def test_nobody_waits_for_long_after_a_slow_first_pass() -> None:
    """It is remembered for a while, but no wait is longer than the last pass."""
    times = PassTimes()
    times.update(1, 2, 5.0)
    for _ in range(3):
        times.update(1, 2, 0.05)
        assert times.base_s <= 0.05
