"""What each sequence of a joined pass bears of its time."""

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
        times.divide([num_tokens], (base_s + token_s * num_tokens) * draws.uniform(1.0, 1.1), is_full=False)
    return times


def test_who_is_alone_bears_all() -> None:
    times = PassTimes()
    assert times.divide([5], 0.25, is_full=False) == [pytest.approx(0.25)]
    assert times.divide([2], 0.125, is_full=False) == [pytest.approx(0.125)]


@pytest.mark.parametrize(("base_s", "token_s"), [(0.05, 0.002), (0.01, 0.01), (0.0, 0.02)])
def test_each_bears_a_part_of_the_pass_and_its_own_tokens(base_s: float, token_s: float) -> None:
    """Together what it took; a further token costs what passes have shown that it takes."""
    lengths = [1, 1, 5, 3]
    pass_s = base_s + token_s * 10
    borne = learn(base_s, token_s).divide(lengths, pass_s, is_full=False)
    assert sum(borne) == pytest.approx(pass_s)
    assert (borne[2] - borne[0]) / 4 == pytest.approx(token_s, rel=0.25)
    assert borne[0] == borne[1] < borne[3] < borne[2]


def test_tokens_that_take_no_time_cost_none() -> None:
    borne = learn(0.05, 0.0).divide([1, 8], 0.05, is_full=False)
    assert borne[1] - borne[0] < 0.006


def test_a_token_that_takes_anothers_room_bears_as_much_as_any() -> None:
    """Where some wait that found no room, whatever passes take by their length."""
    assert learn(0.05, 0.0).divide([1, 3], 0.04, is_full=True) == pytest.approx([0.01, 0.03])


def test_passes_that_all_had_one_length_say_nothing_of_tokens() -> None:
    borne = learn(0.05, 0.01, lengths=range(8, 9)).divide([1, 7], 0.13, is_full=False)
    assert borne == pytest.approx([0.065, 0.065], rel=0.05)


def test_a_model_that_becomes_slower_is_learned_anew() -> None:
    """After a hundred passes nothing is left of what was before."""
    times = learn(0.05, 0.0)
    for count in range(100):
        times.divide([2 + count % 14], 0.01 * (2 + count % 14), is_full=False)
    borne = times.divide([1, 9], 0.1, is_full=False)
    assert borne == pytest.approx([0.01, 0.09], rel=0.1)


@pytest.mark.parametrize(("base_s", "token_s", "found_s"), [(0.05, 0.002, 0.05), (0.05, 0.0, 0.05), (0.0, 0.02, 0.018)])
def test_the_base_is_what_passes_take_whatever_is_in_them(base_s: float, token_s: float, found_s: float) -> None:
    """A tenth of a pass, where that is more."""
    assert PassTimes().base_s == 0.0
    assert learn(base_s, token_s).base_s == pytest.approx(found_s, rel=0.3)
