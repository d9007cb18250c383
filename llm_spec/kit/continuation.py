"""Whether a server goes on from an assistant's text: found out by trying, once for each provider.

A server that ignores the mark of a continuation (an older build, a proxy in between) begins a new answer. Behind the
beginning of an answer its text would come twice. So before any text is continued, two short requests are made:

1. a simple question, answered greedily;
2. the same question with a beginning of that answer to go on from, which ends inside a word: "Monday, Tuesday, Wednes".

The server is believed if the rest of the word comes. Whatever else it does begins with a whole word: the same answer
again, the given beginning again, or a new turn after a finished one. (At a space it could not be told: after "one, two,
three," a new turn may be " four" as well.) Little is asked of the model, since it has written that word itself; where
it wrote it in several tokens the cut is between two of them, so that the beginning has the same tokens. One that fails
the test all the same is not believed: its broken answers end in an error, and it is not raced by text.

The given beginning has more words than the second answer may have tokens, and no token holds two words. So where the
dialect removes a repeated beginning, an answer that begins anew ends before it could be taken for one that goes on.
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
    """Tries whether `stream` goes on from `ChatRequest.prefix`; the first answer counts from then on."""

    def __init__(self, name: str, stream: Stream) -> None:
        self._name = name
        self._stream = stream
        self._can_continue: bool | None = None

    async def can_continue(self) -> bool:
        """Whether it does; raises TransientError, and has found out nothing, where the server cannot answer now."""
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
        except Exception:  # noqa: BLE001 - whatever the server does instead, it does not go on
            return False


class _WordSplit(NamedTuple):
    """A text cut in two inside a word; `rest` is the rest of it. `is_server_boundary`: the server cut it there, too."""

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
    """The best place inside a word that is far enough from the beginning; None: there is none."""
    text = "".join(pieces)
    seams = frozenset(accumulate(map(len, pieces)))
    cuts: list[_WordSplit] = []
    for word in _WORD.finditer(text):
        if word.end() == len(text):
            break  # it may be the token limit that ended it
        inside = range(word.start() + 1, word.end() - 1)
        for at in seams.intersection(inside) or [inside[len(inside) // 2]]:
            cut = _WordSplit(text[:at], text[at : word.end()], at in seams)
            if len(cut.prefix.split()) > _NUM_TEST_TOKENS and not text.startswith(cut.rest[:2]):
                cuts.append(cut)
    return max(cuts, key=lambda cut: (cut.is_server_boundary, len(cut.rest)), default=None)


async def _collect_stream_texts(opened: AbstractAsyncContextManager[AsyncIterator[StreamEvent]]) -> list[str]:
    async with opened as events:
        return [event.text async for event in events if isinstance(event, TextDelta)]
