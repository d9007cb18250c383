"""Where a sequence's end has occurred before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llm_spec.drafting.ngrams import NgramIndex, SequenceFollower

WORDS = st.lists(st.sampled_from("abc"), max_size=30)


def indexed(items: str, *, longest: int = 4, shortest: int = 1) -> NgramIndex[str]:
    index = NgramIndex[str](longest, shortest)
    index.extend(list(items))
    return index


def longest_match(items: list[str], tail: list[str], longest: int, shortest: int) -> tuple[int, int] | None:
    """The definition, by looking everywhere."""
    for size in range(min(longest, len(tail)), shortest - 1, -1):
        ends = [at for at in range(size, len(items)) if items[at - size : at] == tail[len(tail) - size :]]
        if ends:
            return ends[-1], size
    return None


@given(WORDS, WORDS, st.integers(1, 3), st.integers(0, 3))
def test_the_longest_match_wins_and_among_equals_the_latest(
    items: list[str], tail: list[str], shortest: int, wants_more: int
) -> None:
    """As looking everywhere for the longest end of the tail would find it."""
    index = NgramIndex[str](shortest + wants_more, shortest)
    index.extend(items)
    assert index.find_continuation(tail) == longest_match(items, tail, shortest + wants_more, shortest)


@given(st.lists(WORDS, max_size=5), WORDS)
def test_growing_piece_by_piece_is_growing_at_once(parts: list[list[str]], tail: list[str]) -> None:
    """An index that grew with the answer finds what one made of the whole finds."""
    grown, whole = NgramIndex[str](3), NgramIndex[str](3)
    for part in parts:
        grown.extend(part)
    whole.extend([item for part in parts for item in part])
    assert grown.find_continuation(tail) == whole.find_continuation(tail)
    assert grown.items == whole.items


def test_longest_first_by_hand() -> None:
    """`xab` was followed by `1`, the later `ab` alone by `2`: the longer match wins."""
    assert indexed("xab1ab2").find_continuation(list("xab")) == (3, 3)
    assert indexed("xab1ab2").find_continuation(list("yab")) == (6, 2)


def test_the_very_end_matches_nothing_yet() -> None:
    """An end that nothing followed is no match; a minimum length is kept."""
    assert indexed("abc").find_continuation(list("c")) is None
    assert indexed("abcab", shortest=3).find_continuation(list("ab")) is None
    assert indexed("").find_continuation(list("a")) is None


def test_a_follower_goes_straight_on_while_they_agree() -> None:
    """It takes the place where it stands, not the latest match."""
    follower = SequenceFollower(list("abXabY"))
    assert follower.advance([]) == 0
    assert follower.advance(list("ab")) == 2
    assert follower.advance(list("Xab")) == 5


def test_a_follower_goes_on_behind_the_longest_match_after_a_difference() -> None:
    """As if items were replaced, until something matches."""
    follower = SequenceFollower(list("one two"))
    assert follower.advance(list("o#")) == 2
    assert follower.num_matching == 0
    assert follower.advance(list("ne")) == 3
    assert follower.advance(list(" t")) == 5
    assert follower.num_matching > 0


def test_a_follower_is_lost_after_many_differences() -> None:
    """It guesses at replaced items for a while, then says nothing until there is a match."""
    follower = SequenceFollower(list("one two three four"))
    assert follower.advance(list("one")) == 3
    assert [follower.advance(["#"]) for _ in range(6)] == [4, 5, 6, 7, None, None]
    assert follower.advance(list("three")) == 13


def test_a_follower_takes_the_nearest_of_several_matches() -> None:
    """A line that stands in many places: the one that comes next; text may be inserted, left out or moved."""
    text = "".join(f"a{number}\nreturn x\n" for number in "0123456789")
    follower = SequenceFollower(list(text))
    assert follower.advance(list("a0\nreturn y")) is not None
    assert follower.advance(list("\na1\n")) == text.index("a1") + 3
    assert follower.advance(list("added\nreturn x")) == text.index("a1\nreturn x") + len("a1\nreturn x")
    assert follower.advance(list("\na7\n")) == text.index("a7") + 3
    assert follower.advance(list("a3\n")) == text.index("a3") + 3


def test_a_short_match_far_away_is_not_believed() -> None:
    """One item may stand anywhere; three of them hardly by chance."""
    text = "ab" + "-" * 100 + "xyz!"
    follower = SequenceFollower(list(text))
    assert follower.advance(list("ax")) == 2
    assert follower.advance(list("yz")) == text.index("!")
