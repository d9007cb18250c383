"""One way to close an iterator that may or may not be a generator."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TypeVar

__all__ = ["as_closable_generator"]

T = TypeVar("T")


def as_closable_generator(items: Iterator[T]) -> Generator[T]:
    """A view for `contextlib.closing`: closing it runs the clean-up of the generator behind it, if it is one."""
    yield from items
