"""What a draft proposes, by token and by piece of text; a draft of given items."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

from llm_spec import ChatRequest
from llm_spec.contract.draft import DraftCapabilities, DraftPiece, DraftProvider
from llm_spec.contract.token_model import DraftToken, TokenDrafter
from llm_spec.local.sampling import FloatArray
from llm_spec.testing import ByteTokenizer, TableModel

__all__ = ["PROMPT", "TARGET", "ItemDraft", "choose", "pieces_of", "proposed"]

TARGET = TableModel()
PROMPT = ByteTokenizer().encode_chat(ChatRequest.create("say: one two three. now: one t"))


def choose(logits: FloatArray, context_ids: Sequence[int]) -> DraftToken:  # noqa: ARG001 - greedy
    return DraftToken(int(logits.argmax()))


def proposed(drafter: TokenDrafter, answer: str, num: int = 8, prompt: Sequence[int] = PROMPT) -> str:
    """What is proposed after an answer, in one round."""
    draft = drafter.open_token_draft(TARGET, choose, prompt)
    tokens = itertools.islice(draft.propose([*prompt, *answer.encode()]), num)
    text = bytes(token.token_id for token in tokens).decode()
    draft.close()
    return text


async def pieces_of(draft: DraftProvider, request: ChatRequest, max_tokens: int = 100) -> list[DraftPiece]:
    async with draft.draft(request, max_tokens) as pieces:
        return [piece async for piece in pieces]


class ItemDraft:
    """Gives items as they are, whatever it is asked for: a text is a piece, a float a sleep, an error is raised."""

    name = "items"

    def __init__(self, *items: Any, continues_prefix: bool = True) -> None:
        self.capabilities = DraftCapabilities(continues_prefix=continues_prefix)
        self.requests: list[ChatRequest] = []
        self.num_given = self.num_open = 0
        self._items = items

    @asynccontextmanager
    async def draft(self, request: ChatRequest, max_tokens: int) -> AsyncGenerator[AsyncIterator[DraftPiece]]:  # noqa: ARG002 - it does as it likes
        self.requests.append(request)
        self.num_open += 1
        try:
            async with aclosing(self._given()) as pieces:
                yield pieces
        finally:
            self.num_open -= 1

    async def aclose(self) -> None:
        """Nothing to release."""

    async def _given(self) -> AsyncGenerator[Any]:
        for item in self._items:
            if isinstance(item, BaseException):
                raise item
            if isinstance(item, float):
                await asyncio.sleep(item)
                continue
            self.num_given += 1
            yield DraftPiece(item) if isinstance(item, str) else item
