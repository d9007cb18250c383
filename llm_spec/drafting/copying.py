"""CopyDraft: a draft of one request that copies text, by any rule.

A `TextIndex` keeps the pieces of one request's conversation, and where each occurred. It reads text
in steps of some hundred pieces, with a turn of the event loop between two steps: a conversation of
100,000 words takes tenths of a second, and no other request should wait that long. It reads the
text once. The answer grows at its end; if the next call's answer differs from the last one's (a
guess was wrong), the index is cut back to their common part.
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
    """A `DraftProvider` for one request; `copy_pieces(request, max_tokens)` returns the pieces."""

    capabilities = DraftCapabilities(is_free=True)

    def __init__(self, name: str, copy_pieces: Callable[[ChatRequest, int], Awaitable[Sequence[str]]]) -> None:
        self.name = name
        self._copy_pieces = copy_pieces

    @asynccontextmanager
    async def draft(self, request: ChatRequest, max_tokens: int) -> AsyncGenerator[AsyncIterator[DraftPiece]]:
        async with aclosing(stream_texts_as_draft_pieces(await self._copy_pieces(request, max_tokens))) as pieces:
            yield pieces

    async def aclose(self) -> None:
        """Do nothing: it holds no resources."""


class TextIndex:
    """Texts in pieces; the last text may grow or be cut back. Joined, `pieces` are the texts."""

    def __init__(self) -> None:
        self._occurrences = OccurrenceIndex[str]()
        self._start = 0  # where the last text begins, in pieces
        self._text = ""
        self._ends = array("q")  # where its pieces end, in characters

    @property
    def pieces(self) -> Sequence[str]:
        """All pieces so far."""
        return self._occurrences.items

    def find_longest_match(self, tail: Sequence[str], max_match: int, min_match: int = 1) -> OccurrenceMatch | None:
        """Return where the longest end of `tail` occurred before, with something after it.

        It has `min_match` to `max_match` pieces. Returns None if there is no match.
        """
        return self._occurrences.find_longest_match(tail, max_match, min_match)

    def find_match_end(self, tail: Sequence[str], max_match: int) -> int | None:
        """Return where the latest match of the longest end of `tail` ends in the last text.

        The place is in characters. Returns None if there is no match.
        """
        found = self._occurrences.find_longest_match(tail, max_match)
        return None if found is None else self._ends[found.positions[-1] - self._start - 1]

    async def update_last_text(self, text: str) -> None:
        """Read the last text, which is now `text`, in steps."""
        await _run_steps_yielding_to_loop(lambda: self.update_last_text_partly(text, PIECES_PER_LOOP_TURN))

    def update_last_text_partly(self, text: str, max_pieces: int) -> bool:
        """Read at most `max_pieces` (2 or more) pieces of the last text, which is now `text`.

        Returns True if all of it has been read.
        """
        # A piece is kept if a character that both texts share follows it: this shows that the piece
        # has ended.
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
        """Begin another text; the one before stays unchanged."""
        self._start, self._text, self._ends = len(self._occurrences.items), "", array("q")


class ConversationIndex(TextIndex):
    """One request's conversation, with the answer so far as the last text.

    The texts in its tool calls come before the messages.
    """

    def __init__(self) -> None:
        super().__init__()
        self._messages: tuple[ChatMessage, ...] = ()
        self._unread: deque[str] = deque()

    async def index_request(self, request: ChatRequest) -> None:
        """Update the index to a request's messages and prefix, in steps.

        Other messages start it over. If it is cancelled, the next call continues where it stopped.
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
    """Take steps until one returns True, with a turn of the event loop after each."""
    while not step():  # noqa: ASYNC110 - nothing is waited for: others have their turn
        await asyncio.sleep(0)


def _count_common_prefix_characters(a: str, b: str) -> int:
    """Return how many leading characters two texts share."""
    if a is b or b.startswith(a):
        return len(a)
    return bisect_left(range(1, min(len(a), len(b)) + 1), 1, key=lambda num: a[:num] != b[:num])
