"""The search of widths whose rows agree, on a machine that is made up: each way to disagree is found out.

What needs llama.cpp itself is in tests/integrations/gguf, which has an environment of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from llm_spec_gguf import width_search
from llm_spec_gguf.width_search import SEARCH_CAPACITY, SEARCH_SEQUENCES, AgreeingWidths, find_agreeing_widths

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)


class MadeUpContext:
    """A cache of (sequence, id, error) cells, as llama.cpp fills them.

    `add_error(width, num_steps)` is what a pass so wide adds to its rows, and to what it leaves in the cache, where
    attention reads so many steps of 256 tokens.
    """

    def __init__(self, add_error: Callable[[int, int], float]) -> None:
        self._add_error = add_error
        self._cells: list[tuple[int, int, float]] = []

    def read(self, token_ids: Sequence[int], *, num_rows: int) -> np.ndarray:
        num_steps = -(-(len(self._cells) + len(token_ids)) // 256)
        error = self._add_error(len(token_ids), num_steps)
        rows: list[float] = []
        for token_id in token_ids:
            self._cells.append((0, token_id, error))
            own = [(place, wrong) for sequence, place, wrong in self._cells if sequence == 0]
            rows.append(sum((at + 1) * place + wrong for at, (place, wrong) in enumerate(own)))
        assert len(self._cells) <= SEARCH_CAPACITY
        return np.array(rows[-num_rows:])[:, None]

    def forget_from(self, length: int) -> None:
        own = [index for index, (sequence, _, _) in enumerate(self._cells) if sequence == 0]
        gone = {*own[length:]}
        self._cells = [cell for index, cell in enumerate(self._cells) if index not in gone]

    def clear(self) -> None:
        self._cells = []

    def save_state(self) -> Any:
        return [cell for cell in self._cells if cell[0] == 0]

    def load_state(self, state: Any, sequence: int) -> None:
        assert 0 <= sequence < SEARCH_SEQUENCES
        assert sequence not in {cell[0] for cell in self._cells}
        self._cells += [(sequence, token_id, wrong) for _, token_id, wrong in state]


def search(add_error: Callable[[int, int], float]) -> list[int]:
    context: Any = MadeUpContext(add_error)
    return [*find_agreeing_widths(context, WIDTHS, vocab_size=1000).widths]


def test_where_nothing_matters_all_widths_agree() -> None:
    assert search(lambda _width, _steps: 0.0) == [*WIDTHS]


@pytest.mark.parametrize("odd", WIDTHS[:-1])
def test_a_width_of_its_own_kind_is_left_out(odd: int) -> None:
    """And no other: what it leaves in the cache is read again."""
    assert search(lambda width, _steps: float(width == odd)) == [width for width in WIDTHS if width != odd]


def test_a_single_row_for_which_a_full_cache_is_divided_is_left_out() -> None:
    """As llama.cpp does with several threads: in a cache of 256 tokens it agrees."""
    found = search(lambda width, steps: float(width == 1 and steps > 1))
    assert found == [*WIDTHS[1:]]


def test_a_single_row_of_another_kind_in_an_empty_cache_is_left_out() -> None:
    assert search(lambda width, steps: float(width == 1 and steps == 1)) == [*WIDTHS[1:]]


@pytest.mark.parametrize(
    "is_alone", [lambda _: True, lambda steps: steps == 1, lambda steps: steps > 1, lambda steps: steps > 2]
)
def test_where_a_single_row_is_needed_the_other_widths_are_nothing(is_alone: Callable[[int], bool]) -> None:
    """Whether it is of its own kind in a full cache, in an empty one, in both, or only after some tokens."""
    context: Any = MadeUpContext(lambda width, steps: float(width == 1 and is_alone(steps)))
    assert not find_agreeing_widths(context, WIDTHS, vocab_size=1000, needs_first=True).widths


def test_widths_that_notice_how_much_the_cache_holds_are_left_out() -> None:
    """The widest pass reaches into the next step of attention, shorter ones do not yet."""
    assert 1 not in search(lambda _width, steps: float(steps))


def test_if_the_widest_differs_from_all_others_only_it_is_left() -> None:
    assert search(lambda width, _steps: float(width == 16)) == [16]


class TimedContext(MadeUpContext):
    """A read takes a second and a tenth of one for each row; 12 reads from `busy_from` on take three times as long."""

    def __init__(self, busy_from: int) -> None:
        super().__init__(lambda _width, _steps: 0.0)
        self._busy = range(busy_from, busy_from + 12)
        self._num_reads = 0
        self.now = 0.0

    def read(self, token_ids: Sequence[int], *, num_rows: int) -> np.ndarray:
        self.now += (1.0 + 0.1 * len(token_ids)) * (3.0 if self._num_reads in self._busy else 1.0)
        self._num_reads += 1
        return super().read(token_ids, num_rows=num_rows)


@pytest.mark.parametrize("busy_from", range(0, 120, 6))
def test_a_machine_that_is_busy_for_a_while_makes_no_width_look_slow(
    monkeypatch: pytest.MonkeyPatch, busy_from: int
) -> None:
    """Widths are timed in turns: what disturbs one pass of a width does not disturb all."""
    context: Any = TimedContext(busy_from)
    monkeypatch.setattr(width_search.time, "perf_counter", lambda: context.now)
    found = find_agreeing_widths(context, (1, 2, 4, 6, 8, 12, 16), vocab_size=1000)
    assert found.pass_s == pytest.approx({width: 1.0 + 0.1 * width for width in found.widths})


def test_what_exact_passes_cost() -> None:
    """A plain step in single rows; and verifying, if all drafted tokens stand, in their place."""
    found = AgreeingWidths([2, 4, 16], {1: 0.25, 2: 0.5, 4: 0.5, 16: 2.0})
    assert (found.plain_cost, found.verifying_speed) == (2.0, 2.0)


def test_passes_that_all_take_the_same_time_cost_nothing_more() -> None:
    """Where a single row only agrees if it is padded to several, as many tokens are read for nothing."""
    costs = AgreeingWidths([4], {1: 0.25, 4: 0.5}).pass_costs
    assert (costs.wide, costs.per_token) == pytest.approx((0.0, 0.0))
