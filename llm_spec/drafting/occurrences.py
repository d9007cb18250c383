"""Where the items of a sequence occurred, for sequences that are long, searched now and then, and sometimes cut back.

Only single items are indexed. A search starts from the rarest of the last items and compares around each place where
that one occurred, so an item costs one entry, not one for every n-gram that ends with it. The places of an item are a
chain through one array. So few objects are made that neither the garbage collector nor dropping it all takes long.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

__all__ = ["OccurrenceIndex", "OccurrenceMatch"]

T = TypeVar("T", bound=Hashable)

_MAX_PLACES: Final = 256  # the latest places of an item that are compared: bounds a search where every item is frequent


class OccurrenceMatch(NamedTuple):
    """The longest end of a sequence that occurred: `length` items, followed by those at `positions`, in order."""

    length: int
    positions: list[int]


class OccurrenceIndex(Generic[T]):
    """A sequence that grows at its end and may be cut there."""

    def __init__(self) -> None:
        self.items: list[T] = []
        self._counts: dict[T, int] = {}
        self._latest: dict[T, int] = {}  # the last place of each item …
        self._previous = array("q")  # … and of each place the one before it with the same item; -1: there is none

    def extend(self, items: Iterable[T]) -> None:
        """Append items."""
        for item in items:
            self.append(item)

    def append(self, item: T) -> None:
        """Append an item."""
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
        """Where the longest end of `tail` occurred that anything followed; None: no end of `min_match` items did.

        At most `max_match` items are matched. Exact unless each of them occurred more than 256 times.
        """
        counts = self._count_occurrences(tail, max_match)
        while len(counts) >= min_match:
            num_after = counts.index(min(counts))  # of the tail, after the rarest item
            found = self._find_match_with_last_items(tail, num_after, len(counts))
            if found is not None:
                return found if found.length >= min_match else None
            del counts[num_after:]
        return None

    def _count_occurrences(self, tail: Sequence[T], max_match: int) -> list[int]:
        """How often each of the last items occurred, the last one first, up to one that never did."""
        counts: list[int] = []
        for item in reversed(tail[-max_match:]):
            count = self._counts.get(item)
            if count is None:
                break
            counts.append(count)
        return counts

    def _find_match_with_last_items(self, tail: Sequence[T], num_after: int, max_match: int) -> OccurrenceMatch | None:
        """The longest match that includes the item before the last `num_after` ones."""
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
        """The latest places of an item, the last one first."""
        positions: list[int] = []
        place = self._latest.get(item, -1)
        while place >= 0 and len(positions) < _MAX_PLACES:
            positions.append(place)
            place = self._previous[place]
        return positions
