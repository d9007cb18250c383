"""`benchmarks/best_rows.py`: the best time that a server's costs allow, against every way to write the answer."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from best_rows import ServerCosts, count_right_tokens, find_best_s

from llm_spec import ChatRequest, PromptLookup


def find_best_s_of_all_ways(num_right: Sequence[int], costs: ServerCosts, place: int = 1) -> float:
    if place >= len(num_right):
        return 0.0
    ways = [costs.token_s + find_best_s_of_all_ways(num_right, costs, place + 1)]
    for num_accepted in range(1, min(num_right[place], len(num_right) - place - 1) + 1):
        rest_s = find_best_s_of_all_ways(num_right, costs, place + num_accepted + 1)
        ways.append(costs.estimate_call_s(num_accepted + 1) + rest_s)
    return min(ways)


@pytest.mark.parametrize("seed", range(20))
def test_no_way_to_write_an_answer_is_shorter_than_the_best(seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311 - a reproducible draw, no secret
    costs = ServerCosts(0.02, {1: 0.03, 2: 0.03 + 0.02 * rng.random(), 4: 0.06, 8: 0.06 + 0.1 * rng.random()})
    num_right = [rng.choice((0, 0, 1, 3, 6)) for _ in range(14)]
    best_s = find_best_s(num_right, costs)
    assert best_s == pytest.approx(find_best_s_of_all_ways(num_right, costs))
    assert best_s <= 13 * costs.token_s


def test_a_call_between_two_measured_widths_lies_on_the_line_between_them() -> None:
    costs = ServerCosts(0.02, {1: 0.03, 2: 0.04, 4: 0.08})
    assert [costs.estimate_call_s(width) for width in (1, 2, 3, 4, 5)] == pytest.approx([0.03, 0.04, 0.06, 0.08, 0.08])


async def test_right_tokens_are_those_that_the_draft_has_at_each_place() -> None:
    request = ChatRequest.create("one two three four five six. one two", max_tokens=8)
    texts = ["one", " two", " three", " four", " nine"]
    assert await count_right_tokens(PromptLookup(), request, texts) == [0, 3, 2, 1, 0]
