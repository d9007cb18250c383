"""Every stretch of some sequences, how often it occurred and what followed it: what suffix drafts rest on.

A suffix automaton (Blumer et al. 1985) has one state for all stretches that end at the same places, at most two states
and three transitions per item, and grows by an item in amortised constant time. How often a state occurred would need a
walk over all suffixes for each item; it is kept for stretches of at most `max_match + 1` items, so that a walk is short
too, and with it the likeliest follower of each stretch of at most `max_match` items.
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
    """A stretch that occurred: the last `length` items of some sequence. States change as an automaton grows, this not.

    It is understood only by the automaton that gave it.
    """

    state: int = _ROOT
    length: int = 0


class LikelyNextItem(NamedTuple, Generic[T]):
    """What followed a stretch of `length` items most often, `num_times` of `num_total`; `match` is both together."""

    item: T
    num_times: int
    num_total: int
    length: int
    match: SuffixMatch


class SuffixAutomaton(Generic[T]):
    """Sequences of items other than None, the last of which may grow. Used by one thread at a time.

    It knows stretches of up to `max_match` items. Among followers that are equally frequent the latest wins.
    """

    def __init__(self, max_match: int) -> None:
        self.num_items = 0
        self._max_match = max_match
        self._next: list[dict[T, int]] = []  # of a state: item -> the state that it leads to
        self._link: list[int] = []  # to the state of the longest suffix that ends at more places
        self._longest: list[int] = []  # length of its longest stretch
        self._count: list[int] = []  # how often its stretches occurred
        self._followed: list[int] = []  # how often anything followed them
        self._most_frequent_item: list[T | None] = []
        self._create_state(0, {})
        self.begin_sequence()

    def begin_sequence(self) -> None:
        """Begin another sequence."""
        self._last = _ROOT  # all of the sequence
        self._end = _ROOT  # its last `max_match + 1` items

    def extend(self, items: Iterable[T]) -> None:
        """Append items to the last sequence."""
        for item in items:
            self._append_input_item(item)

    def find_longest_repeated_end(self) -> SuffixMatch:
        """The longest end of the last sequence that occurred before."""
        state = self._link[self._last]
        return SuffixMatch() if state <= _ROOT else self._make_suffix_match(state, self._longest[state])

    def advance_match(self, match: SuffixMatch, items: Sequence[T]) -> SuffixMatch:
        """The longest end of `match` and `items` that occurred."""
        if len(items) > self._max_match:  # the longest match there is
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
        """What followed a stretch most often; None: nothing did."""
        state = self._find_state_of_ending(match.state, match.length)
        item = self._most_frequent_item[state]
        if item is None:
            return None
        target = self._next[state][item]
        longer = self._make_suffix_match(target, match.length + 1)
        return LikelyNextItem(item, self._count[target], self._followed[state], match.length, longer)

    def shorten_match(self, match: SuffixMatch) -> SuffixMatch:
        """The longest end of a stretch that occurred at more places."""
        state = self._link[self._find_state_of_ending(match.state, match.length)]
        return SuffixMatch() if state <= _ROOT else SuffixMatch(state, self._longest[state])

    # ------------------------------------------------------------------------------------------ inside

    def _append_input_item(self, item: T) -> None:
        self._last = self._add_state(item)
        before = self._find_state_of_ending(self._end, self._max_match)
        self._end = self._find_state_of_ending(self._next[before][item], self._max_match + 1)
        self.num_items += 1
        self._add_occurrence(before, item)

    def _add_state(self, item: T) -> int:
        """The state of the sequence with one item more."""
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
        """A state of their own for the stretches of `target` that are one longer than those of `state` or shorter."""
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
        """One more occurrence of every end of the sequence, the last item of which followed every end of `before`."""
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
        """The state that holds the last `length` items of a state's stretches, or all of a shorter one."""
        above = self._link[state]
        while above != _NONE and self._longest[above] >= length:
            state, above = above, self._link[above]
        return state


_AutomataByVocabulary: TypeAlias = dict[str, SuffixAutomaton[int]]  # tokenizer fingerprint -> answers


class PastAnswers:
    """The latest answers, at most `max_tokens` tokens of all vocabularies together, at least half as many once full.

    An automaton can forget nothing, so there are two shelves: when the new one is full, it takes the place of the old
    one, whose answers are dropped. Adding holds `lock` for some microseconds a token; hold it while reading a shelf.
    """

    def __init__(self, max_tokens: int, max_match: int) -> None:
        self.lock = threading.Lock()
        self._capacity = max_tokens // 2  # of a shelf
        self._max_match = max_match
        self._new: _AutomataByVocabulary = {}
        self._old: _AutomataByVocabulary = {}
        reset_in_forked_child(self)

    def reset_after_fork(self) -> None:
        if self.lock.locked():  # somebody was in the middle of adding
            self._new, self._old = {}, {}
        self.lock = threading.Lock()

    @property
    def num_tokens(self) -> int:
        """Tokens remembered."""
        with self.lock:
            return _count_automata_items(self._new) + _count_automata_items(self._old)

    def get_suffix_automata(self, fingerprint: str) -> list[SuffixAutomaton[int]]:
        """The answers in one vocabulary, the newer first; they may grow, and are kept for those who hold them."""
        with self.lock:
            return [automata[fingerprint] for automata in (self._new, self._old) if fingerprint in automata]

    def add_answer(self, fingerprint: str, token_ids: Sequence[int]) -> None:
        """Remember an answer; of one that is too long, its end."""
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
