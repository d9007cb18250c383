"""`benchmarks/best_schedule.py`: what its schedules take, that the best is the best, and one of its cells."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import takewhile

import pytest
from best_schedule import (
    GRID,
    NUM_TOKENS,
    PLAIN,
    Call,
    Costs,
    Schedule,
    draw_cells,
    find_best_schedule,
    iterate_calls,
    limit_tokens_per_second,
    list_schedules,
    measure_cell,
    measure_schedule,
    run_schedule,
)

LONGEST = 12  # drafted tokens


def make_costs(
    *, row_ms: float = 0, draft_ms: float = 3, places: int = 4, agreement: float = 0.9, step_ms: float = 25
) -> Costs:
    return Costs(20, step_ms, row_ms, draft_ms, places, agreement)


def test_a_stream_takes_a_step_a_token() -> None:
    assert run_schedule(make_costs(), PLAIN, []) == pytest.approx(0.045 + (NUM_TOKENS - 1) * 0.025)


def test_calls_one_after_another_take_a_round_trip_and_their_rows_each() -> None:
    """Five tokens a call, of which the draft has written the next ones when it is answered."""
    rounds = Schedule(has_stream=False, first_rows=5, max_rows=5, num_calls=1)
    costs = make_costs(row_ms=2, places=1)
    assert run_schedule(costs, rounds, []) == pytest.approx(0.005 + 4 * 0.003 + NUM_TOKENS / 5 * (0.045 + 4 * 0.002))


def test_what_is_under_way_costs_a_call_its_rows() -> None:
    """The stream and the four rows of the call before."""
    schedule = Schedule(has_stream=True, gap_s=0.001, first_rows=4, max_rows=4, num_calls=2)
    calls = iterate_calls(make_costs(row_ms=1), schedule, 0.045)
    first, second = next(calls), next(calls)
    assert first.answered_s == pytest.approx(0.005 + 4 * 0.003 + 0.045 + 0.004)  # position 0 is the stream's
    assert second.answered_s == pytest.approx(0.005 + 5 * 0.003 + 0.045 + 0.005)


def test_a_draft_that_is_slower_than_the_stream_is_of_no_use() -> None:
    schedule = Schedule(has_stream=True, first_rows=4, max_rows=4, num_calls=2)
    assert not list(iterate_calls(make_costs(draft_ms=30), schedule, 0.045))


@pytest.mark.parametrize("places", [1, 2, 8])
def test_no_schedule_is_faster_than_the_limit(places: int) -> None:
    costs = make_costs(places=places)
    limit = limit_tokens_per_second(costs, [1, 2])
    assert all(measure_schedule(costs, schedule, [1, 2]) <= limit + 1e-6 for schedule in list_schedules(costs))


def test_many_places_and_free_rows_come_to_the_limit() -> None:
    costs = make_costs(places=64, step_ms=250)
    best = measure_schedule(costs, find_best_schedule(costs), [1, 2])
    assert best == pytest.approx(limit_tokens_per_second(costs, [1, 2]), rel=0.01)


def list_all_partitions(costs: Costs, asked: int = 0, calls: tuple[Call, ...] = ()) -> Iterator[tuple[Call, ...]]:
    """All ways to ask for the first positions in order, each call as early as may be."""
    if asked == LONGEST:
        yield calls
    for end in range(asked + 1, LONGEST + 1):
        free_s = sorted(call.answered_s for call in calls)[-costs.places] if len(calls) >= costs.places else 0.0
        send_s = max(free_s, costs.ready_s(end - 1))
        num_others = sum(call.end - call.start for call in calls if call.answered_s > send_s)
        answered_s = send_s + costs.call_s(num_others + end - asked - 1)
        yield from list_all_partitions(costs, end, (*calls, Call(asked, end, answered_s)))


def expect_seconds(costs: Costs, calls: Iterable[Call]) -> float:
    """Until the first wrong token of a draft is known, on average."""
    expected_s = answered_s = 0.0
    for call in calls:
        answered_s = max(answered_s, call.answered_s)
        end_weight = 0.0 if call.end >= LONGEST else costs.agreement**call.end
        expected_s += (costs.agreement**call.start - end_weight) * answered_s
    return expected_s


@pytest.mark.parametrize("places", [1, 3])
@pytest.mark.parametrize("row_ms", [0, 4])
def test_the_known_schedules_are_near_the_best_of_all(places: int, row_ms: float) -> None:
    """Of all rows without a stream; where the draft begins, nothing is known but the costs, and tokens a cycle are so
    many on average whatever is sent."""
    costs = make_costs(places=places, row_ms=row_ms, agreement=0.6)
    best_s = min(expect_seconds(costs, calls) for calls in list_all_partitions(costs))
    known_s = min(
        expect_seconds(costs, takewhile(lambda call: call.start < LONGEST, iterate_calls(costs, schedule, math.inf)))
        for schedule in list_schedules(costs)
        if not schedule.has_stream
    )
    assert best_s - 1e-9 <= known_s <= 1.03 * best_s


def test_the_scheduler_is_near_the_best_schedule() -> None:
    cell = measure_cell(make_costs())
    assert 2.5 * cell.plain < cell.best <= cell.limit
    assert cell.ratio >= 0.9


def test_cells_have_each_value_equally_often() -> None:
    cells = draw_cells(60)
    for name, values in GRID.items():
        found = [getattr(cell, name) for cell in cells]
        assert {found.count(value) for value in values} == {60 // len(values)}
