"""Text cut into pieces that stand for tokens where a target's own tokenizer is out of reach."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Iterator, Sequence
from itertools import islice
from typing import Final, cast

from llm_spec.contract.draft import DraftPiece
from llm_spec.contract.errors import DraftError
from llm_spec.contract.events import TextDelta, Usage
from llm_spec.contract.request import ChatRequest

__all__ = [
    "PIECES_PER_LOOP_TURN",
    "check_draft_piece",
    "count_piece_tokens",
    "count_pieces",
    "count_prompt_pieces",
    "count_words",
    "iterate_piece_ends",
    "iterate_pieces_yielding_to_loop",
    "split_into_pieces",
    "stream_texts_as_draft_pieces",
    "take_last_pieces",
]

PIECES_PER_LOOP_TURN: Final = 512  # that are read between two turns of the event loop: about a millisecond

_SAMPLE_WINDOW: Final = 256  # characters of a long text that are counted at a time …
_NUM_SAMPLE_WINDOWS: Final = 64  # … at so many places, which takes about a millisecond

# A word with the space before it, a run of spaces, one newline, or one other sign: about what tokenizers make of text.
_PIECE: Final = re.compile(r" ?\w+|\n|[^\S\n]+|[^\w\s]")
_WORD: Final = re.compile(r"\w+(?:['\u2019]\w+)*")  # "don't" is one


def split_into_pieces(text: str) -> list[str]:
    """Cut text into pieces; joined they are the text again."""
    return _PIECE.findall(text)


def count_piece_tokens(piece: TextDelta | DraftPiece) -> int:
    """How many tokens a stretch of text is that came at once: as many as it has ids.

    Without ids: one where it has no two words, since servers send a token at a time and a token may be `()` or a line
    break with its indentation; else as many as it has pieces.
    """
    if piece.token_ids is not None:
        return len(piece.token_ids)
    if piece.text.strip().isalnum():  # a word, as most are
        return 1
    return len(split_into_pieces(piece.text)) if count_words(piece.text) > 1 else bool(piece.text)


def count_words(text: str) -> int:
    """How many words a text has. No token of a common tokenizer has two, so it has at least as many tokens."""
    return len(_WORD.findall(text))


def check_draft_piece(piece: object) -> DraftPiece:
    """A piece as a draft gave it, without a usage that cannot be added up; raises DraftError for anything else."""
    if not isinstance(piece, DraftPiece):
        raise DraftError(f"the draft gave an object of type {type(piece).__name__}; it must give DraftPiece")
    text, ids, usage = cast("tuple[object, object, object]", (piece.text, piece.token_ids, piece.usage))
    if not isinstance(text, str):
        raise DraftError(f"the text of a drafted piece is of type {type(text).__name__}; it must be str")
    if ids is not None and not (
        isinstance(ids, (tuple, list)) and all(type(i) is int for i in cast("list[object]", ids))
    ):
        raise DraftError("the token_ids of a drafted piece must be a tuple of integers, or None")
    if usage is None or (isinstance(usage, Usage) and all(type(n) is int and n >= 0 for n in vars(usage).values())):
        return piece
    return piece._replace(usage=None)


def count_pieces(text: str) -> int:
    """How many pieces a text has; of one longer than 16,384 characters, an estimate from so many all over it."""
    num_sampled = _NUM_SAMPLE_WINDOWS * _SAMPLE_WINDOW
    if len(text) <= num_sampled:
        return len(split_into_pieces(text))
    starts = range(0, len(text) - _SAMPLE_WINDOW + 1, (len(text) - _SAMPLE_WINDOW) // (_NUM_SAMPLE_WINDOWS - 1))[
        :_NUM_SAMPLE_WINDOWS
    ]
    num_pieces = sum(len(split_into_pieces(text[start : start + _SAMPLE_WINDOW])) for start in starts)
    return round(num_pieces * len(text) / num_sampled)


def count_prompt_pieces(request: ChatRequest) -> int:
    """How many pieces the text of a request's messages has; an estimate where that is long."""
    texts = [message.text for message in request.messages]
    if sum(map(len, texts)) <= _NUM_SAMPLE_WINDOWS * _SAMPLE_WINDOW:
        return sum(map(count_pieces, texts))
    return count_pieces("".join(texts))


def take_last_pieces(text: str, num_pieces: int) -> list[str]:
    """The last pieces of a text, at most so many, however long it is."""
    size = _SAMPLE_WINDOW
    while True:
        pieces = split_into_pieces(text[-size:])
        if size >= len(text) or len(pieces) > num_pieces:  # the first one may be the end of a piece
            return pieces[-num_pieces:]
        size *= 2


async def iterate_pieces_yielding_to_loop(
    text: str, start: int = 0, max_pieces: int | None = None
) -> AsyncGenerator[str]:
    """The pieces after `start`, with a turn of the event loop after every 512."""
    for number, end in enumerate(islice(iterate_piece_ends(text, start), max_pieces), 1):
        yield text[start:end]
        start = end
        if number % PIECES_PER_LOOP_TURN == 0:
            await asyncio.sleep(0)


def iterate_piece_ends(text: str, start: int) -> Iterator[int]:
    """Where each piece after `start` ends."""
    return (match.end() for match in _PIECE.finditer(text, start))


async def stream_texts_as_draft_pieces(texts: Sequence[str]) -> AsyncGenerator[DraftPiece]:
    """Texts that are all there already, in the form of a draft."""
    for text in texts:
        yield DraftPiece(text)
    yield DraftPiece("", finish_reason="stop")
