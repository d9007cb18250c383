"""All stretches of some sequences, with their counts and followers, for suffix drafts.

A suffix automaton (Blumer et al. 1985) has one state for all stretches that end at the same places,
and at most two states and three transitions per item. It grows by an item in amortised constant
time. To count how often every state occurred, each item would need a walk over all suffixes. So
counts are kept only for stretches of at most `max_match + 1` items, which keeps the walk short.
They also give the likeliest follower of each stretch of at most `max_match` items.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Sequence
from typing import Final, Generic, NamedTuple, TypeAlias, TypeVar

from llm_spec.local.forks import reset_in_forked_child

__all__ = [
    "LikelyNextItem",
    "PastAnswers",
    "SuffixAutomaton",
    "SuffixMatch",
]

T = TypeVar("T", bound=Hashable)

_ROOT: Final = 0
_NONE: Final = -1


class SuffixMatch(NamedTuple):
    """A stretch that occurred: the last `length` items of some sequence.

    States change as an automaton grows; a match does not. Only the automaton that made it can use
    it.
    """

    state: int = _ROOT
    length: int = 0


class LikelyNextItem(NamedTuple, Generic[T]):
    """The item that most often followed a stretch of `length` items.

    It followed `num_times` of `num_total` times. `match` is the stretch with the item.
    """

    item: T
    num_times: int
    num_total: int
    length: int
    match: SuffixMatch


class SuffixAutomaton(Generic[T]):
    """Sequences of items other than None; the last may grow. Used by one thread at a time.

    It knows stretches of up to `max_match` items. Among equally frequent followers the latest wins.
    """

    def __init__(self, max_match: int) -> None:
        self.num_items = 0
        self._max_match = max_match
        self._next: list[dict[T, int]] = []  # for each state: item -> next state
        # for each state: the state of its longest suffix that ends at more places
        self._link: list[int] = []
        self._longest: list[int] = []  # for each state: the length of its longest stretch
        self._count: list[int] = []  # how often its stretches occurred
        self._followed: list[int] = []  # how often an item followed them
        self._most_frequent_item: list[T | None] = []
        self._create_state(0, {})
        self.begin_sequence()

    def begin_sequence(self) -> None:
        self._last = _ROOT  # the state of the whole sequence
        self._end = _ROOT  # the state of its last `max_match + 1` items

    def extend(self, items: Iterable[T]) -> None:
        """Append items to the last sequence."""
        for item in items:
            self._append_input_item(item)

    def find_longest_repeated_end(self) -> SuffixMatch:
        """Return the longest end of the last sequence that occurred before."""
        state = self._link[self._last]
        return SuffixMatch() if state <= _ROOT else self._make_suffix_match(state, self._longest[state])

    def advance_match(self, match: SuffixMatch, items: Sequence[T]) -> SuffixMatch:
        """Return the longest end of `match` and `items` that occurred."""
        if len(items) > self._max_match:  # no match is longer
            match, items = SuffixMatch(), items[-self._max_match :]
        state, length = self._find_state_of_ending(match.state, match.length), match.length
        for item in items:
            while state != _ROOT and item not in self._next[state]:
                state = self._link[state]
                length = self._longest[state]
            target = self._next[state].get(item)
            state, length = (_ROOT, 0) if target is None else self._make_suffix_match(target, length + 1)
        return SuffixMatch(state, length)

    def find_likely_next(self, match: SuffixMatch) -> LikelyNextItem[T] | None:
        """Return the item that most often followed a stretch, or None if nothing did."""
        state = self._find_state_of_ending(match.state, match.length)
        item = self._most_frequent_item[state]
        if item is None:
            return None
        target = self._next[state][item]
        longer = self._make_suffix_match(target, match.length + 1)
        return LikelyNextItem(item, self._count[target], self._followed[state], match.length, longer)

    def shorten_match(self, match: SuffixMatch) -> SuffixMatch:
        """Return the longest end of a stretch that occurred at more places."""
        state = self._link[self._find_state_of_ending(match.state, match.length)]
        return SuffixMatch() if state <= _ROOT else SuffixMatch(state, self._longest[state])

    # --------------------------------------------------------------------------------------- inside

    def _append_input_item(self, item: T) -> None:
        self._last = self._add_state(item)
        before = self._find_state_of_ending(self._end, self._max_match)
        self._end = self._find_state_of_ending(self._next[before][item], self._max_match + 1)
        self.num_items += 1
        self._add_occurrence(before, item)

    def _add_state(self, item: T) -> int:
        """Return the state of the sequence with one item more."""
        state, longest = self._last, self._longest[self._last] + 1
        known = self._next[state].get(item)
        if known is not None:  # an earlier sequence began like this one
            return known if self._longest[known] == longest else self._split_state(state, item, known)
        grown = self._create_state(longest, {})
        while state != _NONE and item not in self._next[state]:
            self._next[state][item] = grown
            state = self._link[state]
        if state == _NONE:
            self._link[grown] = _ROOT
            return grown
        target = self._next[state][item]
        exact = self._longest[target] == self._longest[state] + 1
        self._link[grown] = target if exact else self._split_state(state, item, target)
        return grown

    def _split_state(self, state: int, item: T, target: int) -> int:
        """Split a state off `target` for its stretches of at most one item more than `state`."""
        split = self._create_state(self._longest[state] + 1, self._next[target].copy())
        self._link[split] = self._link[target]
        self._count[split] = self._count[target]
        self._followed[split] = self._followed[target]
        self._most_frequent_item[split] = self._most_frequent_item[target]
        self._link[target] = split
        while state != _NONE and self._next[state].get(item) == target:
            self._next[state][item] = split
            state = self._link[state]
        return split

    def _create_state(self, longest: int, transitions: dict[T, int]) -> int:
        self._next.append(transitions)
        self._link.append(_NONE)
        self._longest.append(longest)
        self._count.append(0)
        self._followed.append(0)
        self._most_frequent_item.append(None)
        return len(self._next) - 1

    def _add_occurrence(self, before: int, item: T) -> None:
        """Count one more occurrence of every end of the sequence.

        Its last item followed every end of `before`.
        """
        link, count, followed, favourite = self._link, self._count, self._followed, self._most_frequent_item
        state = self._end
        while state != _NONE:
            count[state] += 1
            state = link[state]
        state = before
        while state != _NONE:
            followed[state] += 1
            best = favourite[state]
            if best is None or (best != item and count[self._next[state][item]] >= count[self._next[state][best]]):
                favourite[state] = item
            state = link[state]

    def _make_suffix_match(self, state: int, length: int) -> SuffixMatch:
        length = min(length, self._max_match)
        return SuffixMatch(self._find_state_of_ending(state, length), length)

    def _find_state_of_ending(self, state: int, length: int) -> int:
        """Return the state that holds the last `length` items of a state's stretches.

        If they are shorter, it holds all of their items.
        """
        above = self._link[state]
        while above != _NONE and self._longest[above] >= length:
            state, above = above, self._link[above]
        return state


# tokenizer fingerprint -> answers
_AutomataByVocabulary: TypeAlias = dict[str, SuffixAutomaton[int]]


class PastAnswers:
    """The latest answers of all vocabularies, at most `max_tokens` tokens together.

    Once full, it holds at least half as many. An automaton cannot forget, so there are two
    generations. When the new one is full, it replaces the old one, whose answers are dropped.
    Adding holds `lock` for some microseconds per token. Hold it while reading an automaton.
    """

    def __init__(self, max_tokens: int, max_match: int) -> None:
        self.lock = threading.Lock()
        self._capacity = max_tokens // 2  # of a generation
        self._max_match = max_match
        self._new: _AutomataByVocabulary = {}
        self._old: _AutomataByVocabulary = {}
        reset_in_forked_child(self)

    def reset_after_fork(self) -> None:
        if self.lock.locked():  # another thread was adding an answer
            self._new, self._old = {}, {}
        self.lock = threading.Lock()

    @property
    def num_tokens(self) -> int:
        """The number of stored tokens."""
        with self.lock:
            return _count_automata_items(self._new) + _count_automata_items(self._old)

    def get_suffix_automata(self, fingerprint: str) -> list[SuffixAutomaton[int]]:
        """Return the automata of one vocabulary, the newer first; they may grow."""
        with self.lock:
            return [automata[fingerprint] for automata in (self._new, self._old) if fingerprint in automata]

    def add_answer(self, fingerprint: str, token_ids: Sequence[int]) -> None:
        """Store an answer; if it is too long, only its end."""
        token_ids = token_ids[max(0, len(token_ids) - self._capacity) :]
        if not token_ids:
            return
        with self.lock:
            if _count_automata_items(self._new) + len(token_ids) > self._capacity:
                self._old, self._new = self._new, {}
            if fingerprint not in self._new:
                self._new[fingerprint] = SuffixAutomaton(self._max_match)
            self._new[fingerprint].begin_sequence()
            self._new[fingerprint].extend(token_ids)


def _count_automata_items(automata: _AutomataByVocabulary) -> int:
    return sum(answers.num_items for answers in automata.values())
