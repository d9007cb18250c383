"""Tests of every combination of a few parameters, of which the usual run takes a sample that misses no pair."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import pytest

__all__ = ["choose_covering", "every_combination"]

Combination: TypeAlias = tuple[str, ...]


def every_combination(**axes: Iterable[str]) -> pytest.MarkDecorator:
    """Parametrise a test by all combinations of values; those that `choose_covering` leaves out are marked slow."""
    values = [tuple(axis) for axis in axes.values()]
    usual = set(choose_covering(values))
    cases = [
        pytest.param(*combination, marks=() if combination in usual else pytest.mark.slow)
        for combination in itertools.product(*values)
    ]
    return pytest.mark.parametrize(tuple(axes), cases)


def choose_covering(axes: Sequence[Sequence[str]]) -> list[Combination]:
    """A few combinations in which each pair of values of different axes occurs; of two axes, each value.

    The next combination is always one that adds the most, the first of them where several do.
    """
    strength = min(2, len(axes) - 1)
    covered = {combination: _find_parts(combination, strength) for combination in itertools.product(*axes)}
    missing = set().union(*covered.values())
    chosen: list[Combination] = []
    while missing:
        best = max(covered, key=lambda combination: len(covered[combination] & missing))
        chosen.append(best)
        missing -= covered[best]
    return chosen


def _find_parts(combination: Combination, strength: int) -> set[tuple[tuple[int, str], ...]]:
    return set(itertools.combinations(enumerate(combination), strength))
