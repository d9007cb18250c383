"""The sample of a matrix of parameters."""

from __future__ import annotations

import itertools

from support.matrix import choose_covering, every_combination


def test_each_pair_occurs() -> None:
    """In about as many combinations as the two longest axes have pairs."""
    axes = ["abcde", "wxyz", "123"]
    chosen = choose_covering(axes)
    for (first, values), (second, others) in itertools.combinations(enumerate(axes), 2):
        assert {(case[first], case[second]) for case in chosen} == set(itertools.product(values, others))
    assert 20 <= len(chosen) <= 24
    assert len(chosen) == len(set(chosen))


def test_of_two_axes_each_value_occurs() -> None:
    chosen = choose_covering(["abc", "12"])
    assert len(chosen) == 3
    assert ({first for first, _ in chosen}, {second for _, second in chosen}) == (set("abc"), set("12"))


def test_what_is_left_out_is_marked_slow() -> None:
    """All combinations are there, once each."""
    mark = every_combination(letter="abc", digit="12")
    names, cases = mark.args
    assert names == ("letter", "digit")
    assert [case.values for case in cases] == list(itertools.product("abc", "12"))
    assert sum(not case.marks for case in cases) == 3
    assert {mark.name for case in cases for mark in case.marks} == {"slow"}
