"""Text cut into pieces that stand for tokens where a target's own tokenizer is out of reach."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Final

from llm_spec.chat import ChatRequest, TextDelta
from llm_spec.provider import DraftPiece

__all__ = [
    "conversation_pieces",
    "count_tokens",
    "draft_pieces",
    "iter_piece_ends",
    "num_prompt_pieces",
    "split_pieces",
]

# A word with the space before it, a run of spaces, one newline, or one other sign: about what tokenizers make of text.
_PIECE: Final = re.compile(r" ?\w+|\n|[^\S\n]+|[^\w\s]")


def split_pieces(text: str) -> list[str]:
    """Cut text into pieces; joined they are the text again."""
    return _PIECE.findall(text)


def count_tokens(piece: TextDelta | DraftPiece) -> int:
    """How many tokens a stretch of text is: as many as it has ids, else as many as it has pieces."""
    return len(split_pieces(piece.text)) if piece.token_ids is None else len(piece.token_ids)


def conversation_pieces(request: ChatRequest) -> list[str]:
    """A request's messages and the answer so far, in pieces."""
    texts = [*(message.text for message in request.messages), request.prefix]
    return [piece for text in texts for piece in split_pieces(text)]


def num_prompt_pieces(request: ChatRequest) -> int:
    """How many pieces the text of a request's messages has."""
    return sum(len(split_pieces(message.text)) for message in request.messages)


def iter_piece_ends(text: str, start: int) -> Iterator[int]:
    """Where each piece behind `start` ends."""
    return (match.end() for match in _PIECE.finditer(text, start))


async def draft_pieces(texts: Sequence[str]) -> AsyncGenerator[DraftPiece]:
    """Texts that are all there already, in the form of a draft."""
    for text in texts:
        yield DraftPiece(text)
    yield DraftPiece("", finish_reason="stop")
