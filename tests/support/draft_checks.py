"""What a draft proposes, by token and by piece of text."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from llm_spec import ChatRequest
from llm_spec.contract.draft import DraftPiece, DraftProvider
from llm_spec.contract.token_model import DraftToken, TokenDrafter
from llm_spec.local.sampling import FloatArray
from llm_spec.testing import ByteTokenizer, TableModel

__all__ = ["PROMPT", "TARGET", "choose", "pieces_of", "proposed"]

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
