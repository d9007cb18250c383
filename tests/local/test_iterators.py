"""Views that close what they read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from llm_spec.local.threads import as_closable_generator


def test_closing_a_view_closes_the_generator_behind_it() -> None:
    """Its `finally` has run when the block is left, not when garbage is collected."""
    closed: list[str] = []

    def count() -> Iterator[int]:
        try:
            yield from range(10)
        finally:
            closed.append("count")

    source = count()  # kept, so that nothing but the view can close it
    with closing(as_closable_generator(source)) as numbers:
        assert next(numbers) == 0
        assert not closed
    assert closed == ["count"]


def test_a_plain_iterator_needs_no_closing() -> None:
    with closing(as_closable_generator(iter([1, 2]))) as numbers:
        assert list(numbers) == [1, 2]
    with pytest.raises(StopIteration):
        next(numbers)
