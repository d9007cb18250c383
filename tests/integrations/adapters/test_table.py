"""Each adapter does what its framework's own model for OpenAI does, whole and streamed; the docs say what it does."""

from __future__ import annotations

import pytest

from .known_faults import KNOWN_FAULTS, ON_PURPOSE
from .probes import Adapter
from .rows import ROWS, Row
from .table import ADAPTERS, PAGE, build_page, find_cell, is_fault

CASES = [pytest.param(adapter, row, id=f"{adapter.name}-{row.id}") for adapter in ADAPTERS for row in ROWS]


@pytest.mark.parametrize(("adapter", "row"), CASES)
def test_row(adapter: Adapter, row: Row) -> None:
    """What the framework's own model does is supported, or refused by name; a known fault that is gone is taken out."""
    cell = find_cell(adapter, row)
    is_known = (adapter.name, row.id) in KNOWN_FAULTS
    assert is_fault(adapter, row) == is_known, f"{cell.outcomes}: {'; '.join(cell.notes) or 'no fault any more'}"


def test_known_faults_are_of_rows() -> None:
    """Each names an adapter and a row of the table."""
    rows = {(adapter.name, row.id) for adapter in ADAPTERS for row in ROWS}
    assert rows >= KNOWN_FAULTS.keys() | ON_PURPOSE.keys()


@pytest.mark.parametrize(("adapter", "row"), CASES)
def test_what_is_on_purpose_is_so(adapter: Adapter, row: Row) -> None:
    """What is listed is not as the framework's own model, and nothing else is called so."""
    is_listed = (adapter.name, row.id) in ON_PURPOSE
    assert is_listed == ("on purpose" in find_cell(adapter, row).outcomes)


def test_the_page_has_the_table() -> None:
    """`python -m integrations.adapters.table --write` has nothing to write."""
    page = PAGE.read_text("utf-8")
    assert build_page(page) == page
