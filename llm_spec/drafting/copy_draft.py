"""CopyingDraft: the text drafts of one request that are copied from text, by whatever rule."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager

from llm_spec.contract.draft import DraftCapabilities, DraftPiece
from llm_spec.contract.request import ChatRequest
from llm_spec.measure.text_pieces import stream_texts_as_draft_pieces

__all__ = ["CopyDraft"]


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
