"""Where a sequence's end has occurred before: what prompt lookup and given texts rest on."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final, Generic, TypeVar

from llm_spec.drafting.occurrences import OccurrenceIndex

__all__ = ["NgramIndex", "SequenceFollower", "estimate_copy_confidence"]

T = TypeVar("T", bound=Hashable)

_FOLLOWED_NGRAM: Final = 8
# Of a match that is found after a difference, measured on edited source files
_NEAR: Final = 32  # items from where the answer would stand
_MIN_FAR_MATCH: Final = 3
_MAX_REPLACED: Final = 4
_MATCHING_AT_FIRST: Final = 2
# A guess after n matching items is right in about 1 - 0.6 / n of cases (measured on the built-in pair: .43, .59, .78,
# .88, then .95 and more); it is a first estimate, the lookahead learns the true rates.
_MISMATCH_FACTOR: Final = 0.6
_CONFIDENCE_WITHOUT_MATCH: Final = 0.3


class NgramIndex(Generic[T]):
    """A growing sequence (token ids, words) that finds what followed its own or another sequence's last items before.

    The longest match wins, up to `max_ngram` items and at least `min_ngram`; among equals the latest. Adding an item
    and searching each cost at most `max_ngram` dictionary look-ups.
    """

    def __init__(self, max_ngram: int, min_ngram: int = 1) -> None:
        self.items: list[T] = []
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._ends: dict[tuple[T, ...], int] = {}  # n-gram -> index of the item after its latest occurrence

    def extend(self, items: Sequence[T]) -> None:
        """Append items. The n-grams that end with the very last item become findable once something follows them."""
        for item in items:
            end = len(self.items)
            for size in self._sizes:
                if size <= end:
                    self._ends[tuple(self.items[end - size :])] = end
            self.items.append(item)

    def find_continuation(self, tail: Sequence[T]) -> tuple[int, int] | None:
        """Index of the item that followed the longest indexed end of `tail`, and that end's length; None: no match."""
        for size in self._sizes:
            if size <= len(tail):
                at = self._ends.get(tuple(tail[len(tail) - size :]))
                if at is not None:
                    return at, size
        return None


class SequenceFollower(Generic[T]):
    """Where an answer stands in a given sequence: straight on while they agree, else after the longest match.

    Of several matches the nearest to where the answer would stand wins. Just after a difference, a short match far away
    is not believed: an item was replaced, as it seems, and the sequence goes on after it.
    """

    def __init__(self, items: Sequence[T] = ()) -> None:
        self._occurrences = OccurrenceIndex[T]()
        self.items = self._occurrences.items
        self.extend(items)
        self._tail: list[T] = []  # the answer's last items
        self._at: int | None = 0
        self._expected = 0  # where the answer would stand if items were replaced one by one since the last difference
        self._num_since_difference = 0
        # items before the current place that are the answer's last ones; at first: answers tend to begin as they should
        self.num_matching = _MATCHING_AT_FIRST

    def extend(self, items: Sequence[T]) -> None:
        """Append items to the sequence."""
        self._occurrences.extend(items)

    def advance(self, new: Sequence[T]) -> int | None:
        """Index of the item that should come after the answer, which grew by `new` items; None: lost."""
        self._tail = [*self._tail, *new][-_FOLLOWED_NGRAM:]
        num_equal = 0 if self._at is None else _count_equal_items(self.items, self._at, new)
        if self._at is not None:
            self._at += num_equal
            self.num_matching += num_equal
        if num_equal < len(new):
            self._realign(len(new) - num_equal)
        return self._at

    def _realign(self, num_different: int) -> None:
        if self._at is not None and self.num_matching:
            self._expected, self._num_since_difference = self._at, 0
        self._expected += num_different
        self._num_since_difference += num_different
        expected = self._expected
        found = self._occurrences.find_longest_match(self._tail, _FOLLOWED_NGRAM)
        self._at, self.num_matching = None, 0
        if found is not None:
            nearest = min(found.positions, key=lambda position: abs(position - expected))
            if found.length >= _MIN_FAR_MATCH or abs(nearest - expected) <= _NEAR:
                self._at, self.num_matching = nearest, found.length
        if self._at is None and expected < len(self.items) and self._num_since_difference <= _MAX_REPLACED:
            self._at = expected


def estimate_copy_confidence(num_matching: int) -> float:
    """How sure a guess is that is copied from after `num_matching` matching items."""
    return 1 - _MISMATCH_FACTOR / num_matching if num_matching else _CONFIDENCE_WITHOUT_MATCH


def _count_equal_items(items: Sequence[T], start: int, new: Sequence[T]) -> int:
    """How many of the new items stand in `items` from `start` on."""
    return next((i for i, item in enumerate(new) if start + i >= len(items) or items[start + i] != item), len(new))
