"""Tests if a server continues an assistant's text, once for each provider.

A server that ignores the mark of a continuation (an older build, a proxy in between) begins a new
answer. After the beginning of an answer, its text would appear twice. So before any text is
continued, two short requests are made:

1. a simple question, answered greedily;
2. the same question with a beginning of that answer to continue, cut inside a word: "Monday,
   Tuesday, Wednes".

The server passes if the rest of the word follows. Any other behaviour begins with a whole word: the
same answer again, the given beginning again, or a new turn after a finished one. (A cut at a space
would not tell: after "one, two, three," a new turn may be " four" as well.) This is easy for the
model, since it has written that word itself. If it wrote the word in several tokens, the cut is
between two of them, so that the beginning has the same tokens. A server that continues text but
fails the test is treated as one that does not: its broken answers end in an error, and it is not
raced by text.

The given beginning has more words than the second answer may have tokens, and no token holds two
words. So if the dialect removes a repeated beginning, an answer that starts anew ends before it
could look like a continuation.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from itertools import accumulate
from typing import Final, NamedTuple, TypeAlias

from llm_spec.contract.errors import TransientError
from llm_spec.contract.events import StreamEvent, TextDelta
from llm_spec.contract.request import ChatRequest
from llm_spec.measure.clock import wait_within

__all__ = ["ContinuationTest"]

Stream: TypeAlias = Callable[[ChatRequest], AbstractAsyncContextManager[AsyncIterator[StreamEvent]]]

_TEST_REQUEST: Final = ChatRequest.create("Write down the days of the week.", temperature=0.0, max_tokens=24)
_NUM_TEST_TOKENS: Final = 3  # tokens of the second answer
_WORD: Final = re.compile(r"[a-z]\w{3,}", re.ASCII | re.IGNORECASE)
_PATIENCE_S: Final = 30.0


class ContinuationTest:
    """Tests if `stream` continues `ChatRequest.prefix`; the first result is kept."""

    def __init__(self, name: str, stream: Stream) -> None:
        self._name = name
        self._stream = stream
        self._can_continue: bool | None = None

    async def can_continue(self) -> bool:
        """Return True if it continues; raise TransientError if the server cannot answer now.

        After an error nothing is known, and the next call tests again.
        """
        if self._can_continue is None:
            self._can_continue = await self._run_test_in_time()
        return self._can_continue

    async def _run_test_in_time(self) -> bool:
        try:
            return await wait_within(
                _does_stream_continue_prefix(self._stream),
                _PATIENCE_S,
                f"{self._name} was silent for {_PATIENCE_S:g} s",
            )
        except TransientError:
            raise
        except Exception:  # noqa: BLE001 - whatever the server does instead, it does not continue
            return False


class _WordSplit(NamedTuple):
    """A text cut in two inside a word; `rest` is the rest of the word.

    `is_server_boundary`: the server's own pieces end there, too.
    """

    prefix: str
    rest: str
    is_server_boundary: bool


async def _does_stream_continue_prefix(stream: Stream) -> bool:
    cut = _find_word_split(await _collect_stream_texts(stream(_TEST_REQUEST)))
    if cut is None:
        return False
    more = "".join(
        await _collect_stream_texts(stream(replace(_TEST_REQUEST, prefix=cut.prefix, max_tokens=_NUM_TEST_TOKENS)))
    )
    return more.startswith(cut.rest) or (len(more) > 1 and cut.rest.startswith(more))


def _find_word_split(pieces: Sequence[str]) -> _WordSplit | None:
    """Return the best cut inside a word that is far enough from the beginning, or None."""
    text = "".join(pieces)
    seams = frozenset(accumulate(map(len, pieces)))
    cuts: list[_WordSplit] = []
    for word in _WORD.finditer(text):
        if word.end() == len(text):
            break  # the token limit may have cut this word
        inside = range(word.start() + 1, word.end() - 1)
        for at in seams.intersection(inside) or [inside[len(inside) // 2]]:
            cut = _WordSplit(text[:at], text[at : word.end()], at in seams)
            if len(cut.prefix.split()) > _NUM_TEST_TOKENS and not text.startswith(cut.rest[:2]):
                cuts.append(cut)
    return max(cuts, key=lambda cut: (cut.is_server_boundary, len(cut.rest)), default=None)


async def _collect_stream_texts(opened: AbstractAsyncContextManager[AsyncIterator[StreamEvent]]) -> list[str]:
    async with opened as events:
        return [event.text async for event in events if isinstance(event, TextDelta)]
