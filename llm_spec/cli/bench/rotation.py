"""In which order contenders answer: each comes equally often at each place, and after each other one."""

from __future__ import annotations

import random
from collections.abc import Iterator

__all__ = ["iterate_contender_orders"]


def iterate_contender_orders(num_contenders: int, seed: int) -> Iterator[list[int]]:
    """Orders of contenders, for one prompt after another, without end.

    So many orders in a row form a balanced square (Williams 1949): who answers first, and what a server still has of
    who answered before, affects all alike. The contenders' places in each square, and the order of its rows, are
    drawn by the seed. An odd number needs two squares, of which the second is the first one read backwards.
    """
    rng = random.Random(seed)  # noqa: S311 - no secret
    steps = [(index + 1) // 2 if index % 2 else -(index // 2) for index in range(num_contenders)]
    while True:
        names = rng.sample(range(num_contenders), num_contenders)
        square = [[names[(row + step) % num_contenders] for step in steps] for row in range(num_contenders)]
        rng.shuffle(square)
        yield from square
        if num_contenders % 2:
            yield from (order[::-1] for order in square)
