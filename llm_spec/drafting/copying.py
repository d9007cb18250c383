"""CopyingDraft: the text drafts of one request that are copied from text, by whatever rule."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager

from llm_spec.chat import ChatRequest
from llm_spec.drafting.pieces import draft_pieces
from llm_spec.provider import DraftPiece

__all__ = ["CopyingDraft"]


class CopyingDraft:
    """A `DraftProvider` for one request; `copy(request, max_tokens)` gives the pieces of each call."""

    is_free = True

    def __init__(self, name: str, copy: Callable[[ChatRequest, int], Awaitable[Sequence[str]]]) -> None:
        self.name = name
        self._copy = copy

    @asynccontextmanager
    async def draft(self, request: ChatRequest, max_tokens: int) -> AsyncGenerator[AsyncIterator[DraftPiece]]:
        async with aclosing(draft_pieces(await self._copy(request, max_tokens))) as pieces:
            yield pieces

    async def aclose(self) -> None:
        """Nothing to release."""
