"""Headers of all calls for one answer, such as the id of its conversation.

They are in a context variable while an answer's work runs, and so in every task that this work
starts. Calls that know nothing of the request, such as tokenizing, have them, too. A provider adds
`get_session_headers()` to the headers that it sends.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from typing import Final, TypeVar

__all__ = ["bind_session_headers", "get_session_headers", "stream_with_session_headers"]

T = TypeVar("T")

_NO_HEADERS: Final[Mapping[str, str]] = {}
_HEADERS: Final[ContextVar[Mapping[str, str]]] = ContextVar("session_headers", default=_NO_HEADERS)


def get_session_headers() -> Mapping[str, str]:
    """Return the headers of every call for the current answer, such as the session's id."""
    return _HEADERS.get()


@contextmanager
def bind_session_headers(headers: Mapping[str, str]) -> Generator[None]:
    """Set the headers of calls while the context is open.

    Not for generators, whose steps may run elsewhere.
    """
    token = _HEADERS.set(headers)
    try:
        yield
    finally:
        _HEADERS.reset(token)


async def stream_with_session_headers(items: AsyncGenerator[T], headers: Mapping[str, str]) -> AsyncGenerator[T]:
    """Yield the items of a generator, each of whose steps runs with these headers.

    The consumer's own code runs without them.
    """
    async with aclosing(items):
        while True:
            try:
                with bind_session_headers(headers):
                    item = await anext(items)
            except StopAsyncIteration:
                return
            yield item
