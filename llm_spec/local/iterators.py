"""One way to close an iterator that may or may not be a generator."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TypeVar

__all__ = ["as_closable_generator"]

T = TypeVar("T")


def as_closable_generator(items: Iterator[T]) -> Generator[T]:
    """An iterator as something that `contextlib.closing` can close; if it is a generator, closing runs its clean-up."""
    yield from items
