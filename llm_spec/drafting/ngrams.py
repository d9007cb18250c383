"""Finds earlier occurrences of a sequence's end, for prompt lookup and given texts.

Sequences are long, rarely searched, and sometimes cut back. Only single items are indexed. A search
starts from the rarest of the last items, and compares around each place where it occurred. So an
item costs one entry, not one for every n-gram that ends with it. The places of an item are a chain
through one array. So there are few objects, and garbage collection and deletion are fast.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

__all__ = [
    "NgramIndex",
    "OccurrenceIndex",
    "OccurrenceMatch",
    "SequenceFollower",
    "estimate_copy_confidence",
]

T = TypeVar("T", bound=Hashable)

# how many of an item's latest places are compared: bounds a search in which every item is frequent
_MAX_PLACES: Final = 256


class OccurrenceMatch(NamedTuple):
    """The longest end that occurred: `length` items, followed by those at `positions`, in order."""

    length: int
    positions: list[int]


class OccurrenceIndex(Generic[T]):
    """A sequence that grows at its end and may be cut there."""

    def __init__(self) -> None:
        self.items: list[T] = []
        self._counts: dict[T, int] = {}
        self._latest: dict[T, int] = {}  # the last place of each item
        self._previous = array("q")  # for each place, the previous place of its item, or -1

    def extend(self, items: Iterable[T]) -> None:
        for item in items:
            self.append(item)

    def append(self, item: T) -> None:
        previous = self._latest.get(item, -1)
        if previous >= 0:
            item = self.items[previous]  # equal items are one object
            self._counts[item] += 1
        else:
            self._counts[item] = 1
        self._previous.append(previous)
        self._latest[item] = len(self.items)
        self.items.append(item)

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` items."""
        while len(self.items) > length:
            item, previous = self.items.pop(), self._previous.pop()
            if previous < 0:
                del self._latest[item], self._counts[item]
            else:
                self._latest[item] = previous
                self._counts[item] -= 1

    def find_longest_match(self, tail: Sequence[T], max_match: int, min_match: int = 1) -> OccurrenceMatch | None:
        """Find where the longest end of `tail` occurred with something after it.

        Returns None if no end of `min_match` items did. At most `max_match` items are matched. The
        result is exact unless each of them occurred more than 256 times.
        """
        counts = self._count_occurrences(tail, max_match)
        while len(counts) >= min_match:
            num_after = counts.index(min(counts))  # items of the tail after the rarest one
            found = self._find_match_with_last_items(tail, num_after, len(counts))
            if found is not None:
                return found if found.length >= min_match else None
            del counts[num_after:]
        return None

    def _count_occurrences(self, tail: Sequence[T], max_match: int) -> list[int]:
        """Return how often the last items occurred, the last first, up to one that never did."""
        counts: list[int] = []
        for item in reversed(tail[-max_match:]):
            count = self._counts.get(item)
            if count is None:
                break
            counts.append(count)
        return counts

    def _find_match_with_last_items(self, tail: Sequence[T], num_after: int, max_match: int) -> OccurrenceMatch | None:
        """Find the longest match that includes the item before the last `num_after` ones."""
        items, length = self.items, num_after + 1
        after = list(tail[len(tail) - num_after :])
        positions = [
            p
            for p in self._find_latest_positions(tail[-length])
            if items[p + 1 : p + length] == after and p + length < len(items)
        ]
        if not positions:
            return None
        while length < max_match:
            before = tail[-length - 1]
            longer = [p - 1 for p in positions if p and items[p - 1] == before]
            if not longer:
                break
            positions, length = longer, length + 1
        return OccurrenceMatch(length, [place + length for place in reversed(positions)])

    def _find_latest_positions(self, item: T) -> list[int]:
        """Return the latest places of an item, the last one first."""
        positions: list[int] = []
        place = self._latest.get(item, -1)
        while place >= 0 and len(positions) < _MAX_PLACES:
            positions.append(place)
            place = self._previous[place]
        return positions


_FOLLOWED_NGRAM: Final = 8
# For a match after a difference, measured on edited source files
_NEAR: Final = 32  # items from the expected position
_MIN_FAR_MATCH: Final = 3
_MAX_REPLACED: Final = 4
_MATCHING_AT_FIRST: Final = 2
# A guess after n matching items is right in about 1 - 0.6 / n of cases (measured on the built-in
# pair: 0.43, 0.59, 0.78, 0.88, then 0.95 and more). This is a first estimate; the lookahead learns
# the true rates.
_MISMATCH_FACTOR: Final = 0.6
_CONFIDENCE_WITHOUT_MATCH: Final = 0.3


class NgramIndex(Generic[T]):
    """A growing sequence (token ids, words) that finds what followed an earlier equal end.

    The longest match of `min_ngram` to `max_ngram` items wins; among equals the latest. Adding an
    item and searching each cost at most `max_ngram` dictionary look-ups.
    """

    def __init__(self, max_ngram: int, min_ngram: int = 1) -> None:
        self.items: list[T] = []
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        # n-gram -> index of the item after its latest occurrence
        self._ends: dict[tuple[T, ...], int] = {}

    def extend(self, items: Sequence[T]) -> None:
        """Append items.

        N-grams that end with the last item can be found once an item follows them.
        """
        for item in items:
            end = len(self.items)
            for size in self._sizes:
                if size <= end:
                    self._ends[tuple(self.items[end - size :])] = end
            self.items.append(item)

    def find_continuation(self, tail: Sequence[T]) -> tuple[int, int] | None:
        """Return the index of the item after the longest indexed end of `tail`, and its length.

        Returns None if there is no match.
        """
        for size in self._sizes:
            if size <= len(tail):
                at = self._ends.get(tuple(tail[len(tail) - size :]))
                if at is not None:
                    return at, size
        return None


class SequenceFollower(Generic[T]):
    """The position of an answer in a given sequence.

    It moves straight on while both agree, otherwise to the end of the longest match. Of several
    matches the nearest to the expected position wins. Just after a difference, a short match far
    away is ignored: an item was probably replaced, and the sequence continues after it.
    """

    def __init__(self, items: Sequence[T] = ()) -> None:
        self._occurrences = OccurrenceIndex[T]()
        self.items = self._occurrences.items
        self.extend(items)
        self._tail: list[T] = []  # the answer's last items
        self._at: int | None = 0
        # the position if items have been replaced one by one since the last difference
        self._expected = 0
        self._num_since_difference = 0
        # The items before the current place that match the answer's last ones. It starts above 0,
        # because answers tend to begin as expected.
        self.num_matching = _MATCHING_AT_FIRST

    def extend(self, items: Sequence[T]) -> None:
        """Append items to the sequence."""
        self._occurrences.extend(items)

    def advance(self, new: Sequence[T]) -> int | None:
        """Return the index of the item expected after the answer, which grew by `new` items.

        Returns None if the position is lost.
        """
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
    """Estimate how likely a guess is right that was copied after `num_matching` matching items."""
    return 1 - _MISMATCH_FACTOR / num_matching if num_matching else _CONFIDENCE_WITHOUT_MATCH


def _count_equal_items(items: Sequence[T], start: int, new: Sequence[T]) -> int:
    """Return how many of the new items stand in `items` from `start` on."""
    return next((i for i, item in enumerate(new) if start + i >= len(items) or items[start + i] != item), len(new))
