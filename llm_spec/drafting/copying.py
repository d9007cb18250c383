"""CopyDraft: the text drafts of one request that are copied from text, by whatever rule.

A `TextIndex` keeps the pieces of a conversation for one request, and where each occurred. Text is read in steps of some
hundred pieces, with a turn of the event loop between two of them: a conversation of 100,000 words takes tenths of a
second, and no request should wait so long for another. It is read once: the answer grows at its end, and where the next
call's answer differs from the last one's (a guess that proved wrong), it is cut back to what both share.
"""

from __future__ import annotations

import asyncio
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from itertools import islice

from llm_spec.contract.draft import DraftCapabilities, DraftPiece
from llm_spec.contract.messages import ChatMessage
from llm_spec.contract.request import ChatRequest
from llm_spec.drafting.forms import iterate_unescaped_tool_texts, uses_tools
from llm_spec.drafting.ngrams import OccurrenceIndex, OccurrenceMatch
from llm_spec.measure.tokens import PIECES_PER_LOOP_TURN, iterate_piece_ends, stream_texts_as_draft_pieces

__all__ = [
    "ConversationIndex",
    "CopyDraft",
    "TextIndex",
]


class CopyDraft:
    """A `DraftProvider` for one request; `copy_pieces(request, max_tokens)` gives the pieces of each call."""

    capabilities = DraftCapabilities(is_free=True)

    def __init__(self, name: str, copy_pieces: Callable[[ChatRequest, int], Awaitable[Sequence[str]]]) -> None:
        self.name = name
        self._copy_pieces = copy_pieces

    @asynccontextmanager
    async def draft(self, request: ChatRequest, max_tokens: int) -> AsyncGenerator[AsyncIterator[DraftPiece]]:
        async with aclosing(stream_texts_as_draft_pieces(await self._copy_pieces(request, max_tokens))) as pieces:
            yield pieces

    async def aclose(self) -> None:
        """Nothing to release."""


class TextIndex:
    """Texts in pieces, the last of which may grow or be cut back; joined, `pieces` are the texts."""

    def __init__(self) -> None:
        self._occurrences = OccurrenceIndex[str]()
        self._start = 0  # of the last text, in pieces
        self._text = ""
        self._ends = array("q")  # of its pieces, in characters

    @property
    def pieces(self) -> Sequence[str]:
        """All pieces so far."""
        return self._occurrences.items

    def find_longest_match(self, tail: Sequence[str], max_match: int, min_match: int = 1) -> OccurrenceMatch | None:
        """Where the longest end of `tail` occurred that anything followed, of at most `max_match` pieces."""
        return self._occurrences.find_longest_match(tail, max_match, min_match)

    def find_match_end(self, tail: Sequence[str], max_match: int) -> int | None:
        """Where in the last text, in characters, the latest match of the longest end of `tail` ends."""
        found = self._occurrences.find_longest_match(tail, max_match)
        return None if found is None else self._ends[found.positions[-1] - self._start - 1]

    async def update_last_text(self, text: str) -> None:
        """Read the last text, which is now `text`, in steps."""
        await _run_steps_yielding_to_loop(lambda: self.update_last_text_partly(text, PIECES_PER_LOOP_TURN))

    def update_last_text_partly(self, text: str, max_pieces: int) -> bool:
        """Read at most `max_pieces` (2 or more) pieces of the last text, which is now `text`; whether that is all."""
        # What is read stays where it is followed by a character that both texts share: it shows that a piece has ended.
        num_kept = bisect_left(self._ends, _count_common_prefix_characters(self._text, text))
        self._occurrences.truncate(self._start + num_kept)
        del self._ends[num_kept:]
        start = self._ends[-1] if self._ends else 0
        for end in islice(iterate_piece_ends(text, start), max_pieces):
            self._occurrences.append(text[start:end])
            self._ends.append(end)
            start = end
        self._text = text
        return start == len(text)

    def clear(self) -> None:
        """Forget everything."""
        self._occurrences = OccurrenceIndex[str]()
        self.begin_text()

    def begin_text(self) -> None:
        """Begin another text; the one before stays as it is."""
        self._start, self._text, self._ends = len(self._occurrences.items), "", array("q")


class ConversationIndex(TextIndex):
    """The messages of one request, and the answer so far as the last text; before them what its tools' calls hold."""

    def __init__(self) -> None:
        super().__init__()
        self._messages: tuple[ChatMessage, ...] = ()
        self._unread: deque[str] = deque()

    async def index_request(self, request: ChatRequest) -> None:
        """Bring it in line with a request's messages and prefix, in steps. Other messages start it over.

        Cancelled, it goes on where it was with the next call.
        """
        await _run_steps_yielding_to_loop(lambda: self._index_next_pieces(request))

    def _index_next_pieces(self, request: ChatRequest) -> bool:
        if self._messages is not request.messages:
            self.clear()
            self._messages = request.messages
            forms = list(iterate_unescaped_tool_texts(request)) if uses_tools(request) else []
            self._unread = deque([*reversed(forms), *(message.text for message in request.messages)])
        until = len(self.pieces) + PIECES_PER_LOOP_TURN
        while self._unread:
            room = until - len(self.pieces)
            if room < 2 or not self.update_last_text_partly(self._unread[0], room):
                return False
            self._unread.popleft()
            self.begin_text()
        room = until - len(self.pieces)
        return room >= 2 and self.update_last_text_partly(request.prefix, room)


async def _run_steps_yielding_to_loop(step: Callable[[], bool]) -> None:
    """Take steps until one is the last, with a turn of the event loop after each."""
    while not step():  # noqa: ASYNC110 - nothing is waited for: others have their turn
        await asyncio.sleep(0)


def _count_common_prefix_characters(a: str, b: str) -> int:
    """How many characters two texts begin with in common."""
    if a is b or b.startswith(a):
        return len(a)
    return bisect_left(range(1, min(len(a), len(b)) + 1), 1, key=lambda num: a[:num] != b[:num])
