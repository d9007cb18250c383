"""What a model finds out about rows when it is loaded is true, shown with arithmetic that every CPU does alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from zlib import crc32

import numpy as np
import pytest
from llm_spec_torch import TorchModel
from llm_spec_torch.batch_checks import do_joined_passes_agree
from llm_spec_torch.caches import CachePool
from llm_spec_torch.checks import find_agreeing_widths, make_fixed_token_ids
from llm_spec_torch.pass_queue import ForwardPass, PassResult
from llm_spec_torch.shape import PassShape

MAX_WIDTH = 6
IDS = make_fixed_token_ids(21 + 2 * MAX_WIDTH, 100)


def row_after(*numbers: int) -> np.ndarray:
    """Logits that depend on these numbers alone."""
    return np.random.default_rng(numbers).standard_normal(8).astype(np.float32)


def find_widths(error: Callable[[int, int, Sequence[int]], float]) -> list[int]:
    """The widths found where a row's relative error depends on width, row and all tokens of the pass."""
    context: list[int] = [*IDS]

    def read_at(start: int, token_ids: Sequence[int]) -> np.ndarray:
        del context[start:]
        context.extend(token_ids)
        rows = [row_after(*context[: start + number + 1]) for number in range(len(token_ids))]
        errors = [[error(len(rows), row, token_ids)] for row in range(len(rows))]
        return np.array(rows) * (1 + np.array(errors, np.float32))

    return find_agreeing_widths(read_at, IDS, [2, 3, 4, MAX_WIDTH])


def test_widths_that_agree_are_found() -> None:
    """All of them, those that agree with the widest, or none if there a row has other bits in other company."""
    assert find_widths(lambda *_: 0.0) == [2, 3, 4, MAX_WIDTH]
    assert find_widths(lambda width, *_: 1e-6 if width == 3 else 0.0) == [2, 4, MAX_WIDTH]
    assert find_widths(lambda width, *_: 1e-6 * (width < MAX_WIDTH)) == [MAX_WIDTH]
    assert find_widths(lambda width, row, *_: 1e-6 * (width == 4 and row == 3)) == [2, 3, MAX_WIDTH]
    assert find_widths(lambda _, __, token_ids: 1e-6 * max(token_ids)) == []


@pytest.mark.parametrize("odd_row", range(MAX_WIDTH))
def test_a_row_of_the_widest_pass_that_is_computed_otherwise_is_found(odd_row: int) -> None:
    """Whichever it is, such as the last that is left alone in a block."""
    assert find_widths(lambda width, row, *_: 1e-6 * (width == MAX_WIDTH and row == odd_row)) == []


FAULTS: dict[str, Callable[[Sequence[ForwardPass], ForwardPass], float]] = {
    "none": lambda _, __: 0.0,
    "number of passes": lambda passes, _: 1e-6 * len(passes),
    "slot": lambda _, one: 1e-6 * one.slot.index,
    "number of keys": lambda passes, _: 1e-6 * max(other.num_keys for other in passes),
    "others' tokens": lambda passes, one: 1e-6 * sum(len(other.token_ids) for other in passes if other is not one),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_rows_of_joined_passes_that_agree_are_found(tiny_model: TorchModel, fault: str) -> None:
    """They may depend on what the slot's cache holds up to their place, and on nothing else."""

    def run(passes: Sequence[ForwardPass], one: ForwardPass) -> np.ndarray:
        cached, rows = one.slot.cache.layers[0][0], list[np.ndarray]()
        for place, token_id in enumerate(one.token_ids, len(one.slot.token_ids)):
            cached[place] = token_id
            rows.append(row_after(crc32(cached[: place + 1].cpu().numpy().tobytes())))
        return np.array(rows[-one.num_rows :]) * np.float32(1 + FAULTS[fault](passes, one))

    def run_all(passes: Sequence[ForwardPass]) -> list[PassResult]:
        return [run(passes, one) for one in passes]

    pool = CachePool(tiny_model._network, num_slots=4, capacity=600 + MAX_WIDTH)
    assert do_joined_passes_agree(run_all, pool, PassShape([MAX_WIDTH], 256), IDS) == (fault == "none")
