"""The order of contenders."""

from __future__ import annotations

from collections import Counter
from itertools import islice, pairwise

import pytest

from llm_spec.cli.bench.run import iterate_contender_orders


@pytest.mark.parametrize("num_contenders", [1, 2, 3, 4, 5, 6, 7])
def test_each_is_equally_often_at_each_place_and_after_each_other(num_contenders: int) -> None:
    """Within as many orders as there are contenders; where their number is odd, twice as many for the neighbours."""
    orders = list(islice(iterate_contender_orders(num_contenders, seed=3), 4 * num_contenders))
    for start in range(0, len(orders), num_contenders):
        square = orders[start : start + num_contenders]
        assert set(Counter((place, c) for order in square for place, c in enumerate(order)).values()) == {1}
    cycle = orders[: num_contenders * (1 + num_contenders % 2)]
    neighbours = Counter(pair for order in cycle for pair in pairwise(order))
    assert len(neighbours) == num_contenders * (num_contenders - 1)
    assert len(set(neighbours.values())) <= 1


def test_the_seed_decides() -> None:
    first, again, other = (list(islice(iterate_contender_orders(4, seed), 8)) for seed in (1, 1, 2))
    assert first == again != other
