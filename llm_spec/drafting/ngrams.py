"""Where a sequence's end has occurred before: what prompt lookup and given texts rest on."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final, Generic, TypeVar

from llm_spec.drafting.occurrences import OccurrenceIndex

__all__ = ["NgramIndex", "SequenceFollower"]

T = TypeVar("T", bound=Hashable)

_FOLLOWED_NGRAM: Final = 8


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

    def find(self, tail: Sequence[T]) -> tuple[int, int] | None:
        """Index of the item that followed the longest indexed end of `tail`, and that end's length; None: no match."""
        for size in self._sizes:
            if size <= len(tail):
                at = self._ends.get(tuple(tail[len(tail) - size :]))
                if at is not None:
                    return at, size
        return None


class SequenceFollower(Generic[T]):
    """Where an answer stands in a given sequence: straight on while they agree, else behind the longest match."""

    def __init__(self, items: Sequence[T] = ()) -> None:
        self._occurrences = OccurrenceIndex[T]()
        self.items = self._occurrences.items
        self.extend(items)
        self._tail: list[T] = []  # the answer's last items
        self._at: int | None = 0

    def extend(self, items: Sequence[T]) -> None:
        """Append items to the sequence."""
        self._occurrences.extend(items)

    def advance(self, new: Sequence[T]) -> int | None:
        """Index of the item that should come after the answer, which grew by `new` items; None: lost."""
        self._tail = [*self._tail, *new][-_FOLLOWED_NGRAM:]
        if self._at is not None and self.items[self._at : self._at + len(new)] == list(new):
            self._at += len(new)
        else:
            found = self._occurrences.find(self._tail, _FOLLOWED_NGRAM)
            self._at = None if found is None else found.positions[-1]
        return self._at
