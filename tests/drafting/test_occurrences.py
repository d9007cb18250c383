"""Where items occurred: against looking everywhere, after growing and cutting back, and within bounds."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from llm_spec.drafting.ngrams import OccurrenceIndex

WORDS = st.lists(st.sampled_from("abc"), max_size=30)


def indexed(items: list[str]) -> OccurrenceIndex[str]:
    occurrences = OccurrenceIndex[str]()
    occurrences.extend(items)
    return occurrences


def longest_match(items: list[str], tail: list[str], max_match: int, min_match: int) -> tuple[int, list[int]] | None:
    """The definition, by looking everywhere."""
    for size in range(min(max_match, len(tail)), min_match - 1, -1):
        positions = [at for at in range(size, len(items)) if items[at - size : at] == tail[len(tail) - size :]]
        if positions:
            return size, positions
    return None


@settings(max_examples=400, deadline=None)
@given(WORDS, WORDS, st.integers(1, 3), st.integers(0, 5))
def test_every_place_of_the_longest_match(items: list[str], tail: list[str], min_match: int, wants_more: int) -> None:
    """As looking everywhere for the longest end of the tail would find them, in their order."""
    max_match = min_match + wants_more
    assert indexed(items).find_longest_match(tail, max_match, min_match) == longest_match(
        items, tail, max_match, min_match
    )


@settings(max_examples=400, deadline=None)
@given(WORDS, st.integers(1, 3), st.integers(0, 5))
def test_its_own_end(items: list[str], min_match: int, wants_more: int) -> None:
    """The very end, which nothing has followed, is not a match of itself."""
    max_match = min_match + wants_more
    assert indexed(items).find_longest_match(items, max_match, min_match) == longest_match(
        items, items, max_match, min_match
    )


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), WORDS), max_size=6), WORDS)
def test_growing_and_cutting_back_leaves_no_trace(changes: list[tuple[int, list[str]]], tail: list[str]) -> None:
    """It finds what one finds that was made of the items that are left."""
    changed, items = OccurrenceIndex[str](), list[str]()
    for length, wants_more in changes:
        changed.truncate(length)
        changed.extend(wants_more)
        items = items[:length] + wants_more
    assert changed.items == items
    assert changed.find_longest_match(tail, 8) == indexed(items).find_longest_match(tail, 8)
    assert changed.find_longest_match(items, 8) == indexed(items).find_longest_match(items, 8)


def test_the_rarest_item_leads_to_the_match() -> None:
    """However frequent the others are: the match is exact where one of its items is rare."""
    items = [*"xaaaay", *"a" * 5000, *"xaaaa"]
    assert indexed(items).find_longest_match(items, 8) == (5, [5])


def test_a_search_among_frequent_items_is_bounded() -> None:
    """Where every item is frequent, the latest places count."""
    found = indexed(["a"] * 100_000).find_longest_match(["a"] * 40, 32)
    assert found is not None
    assert found.length == 32
    assert found.positions[-1] == 99_999
    assert len(found.positions) <= 256


def test_equal_items_are_one_object() -> None:
    """A conversation repeats its words."""
    first, second = "".join(["wo", "rd"]), "".join(["w", "ord"])
    assert first is not second
    items = indexed([first, second]).items
    assert items[0] is items[1]
