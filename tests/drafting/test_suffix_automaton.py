"""Every stretch of some sequences: the automaton against looking everywhere."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from llm_spec.drafting.suffix_automaton import SuffixAutomaton, SuffixMatch

WORDS = st.text("abc", max_size=30)
SEQUENCES = st.lists(WORDS, min_size=1, max_size=5)
MAX_MATCH = st.integers(1, 6)


def automaton_of(*sequences: str, max_match: int = 8) -> SuffixAutomaton[str]:
    automaton = SuffixAutomaton[str](max_match)
    for sequence in sequences:
        automaton.begin_sequence()
        automaton.extend(sequence)
    return automaton


def followers(sequences: list[str], stretch: str) -> list[str]:
    """What followed each occurrence of a stretch, in order, by looking everywhere."""
    size = len(stretch)
    return [s[at + size] for s in sequences for at in range(len(s) - size) if s[at : at + size] == stretch]


def longest_end(sequences: list[str], text: str, max_match: int) -> str:
    """The longest end of a text that occurs in a sequence."""
    ends = (text[start:] for start in range(max(0, len(text) - max_match), len(text) + 1))
    return next(end for end in ends if any(end in s for s in sequences))


def find_likely_next(sequences: list[str], stretch: str) -> tuple[str, int, int] | None:
    """The most frequent follower; among equals the latest."""
    counts, best = Counter[str](), None
    for item in followers(sequences, stretch):
        counts[item] += 1
        if best is None or counts[item] >= counts[best]:
            best = item
    return None if best is None else (best, counts[best], counts.total())


def assert_knows(automaton: SuffixAutomaton[str], sequences: list[str], stretch: str) -> None:
    match = automaton.advance_match(SuffixMatch(), stretch)
    found = automaton.find_likely_next(match)
    assert (found and found[:3]) == find_likely_next(sequences, stretch), stretch


@settings(max_examples=300, deadline=None)
@given(SEQUENCES, MAX_MATCH)
def test_the_likeliest_follower_of_every_stretch(sequences: list[str], max_match: int) -> None:
    """Item, count and total of each stretch are those that looking everywhere gives."""
    automaton = automaton_of(*sequences, max_match=max_match)
    assert automaton.num_items == sum(map(len, sequences))
    for size in range(max_match + 1):
        for stretch in map("".join, itertools.product("abc", repeat=min(size, 4))):
            if any(stretch in sequence for sequence in sequences):
                assert_knows(automaton, sequences, stretch)


@settings(max_examples=300, deadline=None)
@given(SEQUENCES, MAX_MATCH, st.lists(WORDS, min_size=1, max_size=4))
def test_the_longest_end_that_occurred(sequences: list[str], max_match: int, parts: list[str]) -> None:
    """Also when text and automaton grow by turns: a match outlives the splitting of its state."""
    automaton, match, text = SuffixAutomaton[str](max_match), SuffixMatch(), ""
    for num_known, (sequence, part) in enumerate(zip(sequences, itertools.cycle(parts), strict=False), start=1):
        known = sequences[:num_known]
        automaton.begin_sequence()
        automaton.extend(sequence)
        match = automaton.advance_match(match, part)
        text += part
        assert_knows(automaton, known, text[len(text) - match.length :])
        assert automaton.advance_match(SuffixMatch(), text).length == len(longest_end(known, text, max_match))


@settings(max_examples=300, deadline=None)
@given(WORDS, MAX_MATCH)
def test_the_end_of_a_sequence_that_occurred_before(text: str, max_match: int) -> None:
    """The longest end that has already been followed by something, item by item."""
    automaton = SuffixAutomaton[str](max_match)
    for at, item in enumerate(text, start=1):
        automaton.extend(item)
        expected = longest_end([text[: at - 1]], text[:at], max_match)
        match = automaton.find_longest_repeated_end()
        assert match.length == len(expected)
        found = automaton.find_likely_next(match)
        assert (found and found[:3]) == find_likely_next([text[:at]], expected)


@settings(max_examples=200, deadline=None)
@given(SEQUENCES, WORDS.filter(bool), MAX_MATCH)
def test_what_follows_can_be_followed(sequences: list[str], tail: str, max_match: int) -> None:
    """Step by step each likeliest item has the counts of its own last `max_match` items."""
    automaton = automaton_of(*sequences, max_match=max_match)
    match = automaton.advance_match(SuffixMatch(), tail)
    stretch = tail[len(tail) - match.length :]
    for _ in range(10):
        found = automaton.find_likely_next(match)
        assert (found and found[:3]) == find_likely_next(sequences, stretch)
        if found is None:
            return
        stretch = (stretch + found.item)[-max_match:]
        match = found.match
        assert match.length == len(stretch)


def test_by_hand() -> None:
    """`b` was followed twice by `1` and once, later, by `2`; `ab` once by each, `2` the latest."""
    automaton = automaton_of("ab1", "cb1", "ab2")
    assert automaton.find_likely_next(automaton.advance_match(SuffixMatch(), "b"))[:3] == ("1", 2, 3)  # type: ignore[index]
    assert automaton.find_likely_next(automaton.advance_match(SuffixMatch(), "ab"))[:3] == ("2", 1, 2)  # type: ignore[index]
    assert automaton.find_likely_next(automaton.advance_match(SuffixMatch(), "ab2")) is None
    assert automaton.advance_match(SuffixMatch(), "xyz") == SuffixMatch()
