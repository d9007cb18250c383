"""How many tokens a text, a request or an answer has, where nobody has counted them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Final, cast

from llm_spec.contract.draft import DraftPiece
from llm_spec.contract.errors import DraftError
from llm_spec.contract.events import (
    AnswerDetail,
    ChatResponse,
    ReasoningDelta,
    StreamEvent,
    TextDelta,
    ToolCallDelta,
    Usage,
)
from llm_spec.contract.messages import ChatMessage
from llm_spec.contract.request import ChatRequest

__all__ = [
    "PIECES_PER_LOOP_TURN",
    "MaxTokensCutter",
    "check_draft_piece",
    "count_answer_tokens_in_event",
    "count_piece_tokens",
    "count_pieces",
    "count_prompt_pieces",
    "count_words",
    "cut_response_to_max_tokens",
    "estimate_request_tokens",
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


_TOKEN_BYTES: Final = 4  # of text in a token, at most, on the average of what is sent
_IMAGE_TOKENS: Final = 1600  # what vendors count for a large one
_IMAGE_TYPES: Final = ("image", "image_url", "input_image")
_COUNTED_FIELDS: Final = ("role", "content", "name", "tool_calls", "tool_call_id")
_COUNTED_BLOCKS: Final = ("text", "image", "tool_use", "tool_result")

_NON_SPACE: Final = re.compile(r"\S+")

_LONGEST_TOKEN: Final = 128  # bytes; vocabularies have runs of so many spaces and signs …
_DENSE_TEXT_BYTES: Final = 32  # … but no text has tokens of so many on the average


def count_answer_tokens_in_event(event: StreamEvent) -> int:
    """How many tokens of an answer came with an event: by ids, else in pieces."""
    if isinstance(event, TextDelta):  # nearly always
        return count_piece_tokens(event)
    match event:
        case ReasoningDelta():
            return len(split_into_pieces(event.text))
        case AnswerDetail():
            return len(split_into_pieces(event.refusal))
        case ToolCallDelta():
            return max(1, len(split_into_pieces(event.arguments)))
        case _:
            return 0


def estimate_request_tokens(request: ChatRequest) -> int:
    """How many tokens a request has without its prefix: its text in pieces, or a token for 4 bytes if that is more.

    Tools, schemas and fields that this library knows nothing of count by their bytes, an image as a large one.
    """
    num_bytes = sum(_count_utf8_bytes(message.text) for message in request.messages)
    num_bytes += sum(_count_utf8_bytes(message.reasoning) for message in request.messages if message.native is None)
    others = [request.tools, request.response_format, request.extra]
    num_others = sum(map(_estimate_json_value_bytes, others)) + sum(
        map(_count_tool_call_and_file_bytes, request.messages)
    )
    num_images = sum(map(_count_image_parts, request.messages))
    num_others += sum(
        _estimate_json_value_bytes(_list_uncounted_native_fields(message))
        for message in request.messages
        if message.native
    )
    num_text = max(count_prompt_pieces(request), num_bytes // _TOKEN_BYTES)
    return num_text + num_others // _TOKEN_BYTES + num_images * _IMAGE_TOKENS


def _count_utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


def _count_image_parts(message: ChatMessage) -> int:
    parts = message.content if isinstance(message.content, tuple) else ()
    return sum(part.get("type") in _IMAGE_TYPES for part in (*parts, *_list_tool_result_parts(message)))


def _count_tool_call_and_file_bytes(message: ChatMessage) -> int:
    """Of the parts that are neither text nor images, and of tool calls."""
    parts = message.content if isinstance(message.content, tuple) else ()
    others = [part for part in parts if part.get("type") not in ("text", *_IMAGE_TYPES)]
    calls = sum(_count_utf8_bytes(call.name) + _count_utf8_bytes(call.arguments) for call in message.tool_calls)
    return sum(map(_estimate_json_value_bytes, others)) + calls


def _list_uncounted_native_fields(message: ChatMessage) -> Sequence[object]:
    """What a native message says beside the fields that are counted already."""
    native = message.native
    if native is not None and native.api == "chat":
        return [value for name, value in native.value.items() if name not in _COUNTED_FIELDS]
    return [
        block
        for block in (*_list_native_content_blocks(message), *_list_tool_result_parts(message))
        if block.get("type") not in _COUNTED_BLOCKS
    ]


def _list_native_content_blocks(message: ChatMessage) -> Sequence[Mapping[str, Any]]:
    """Those of a message that came in Anthropic's words."""
    native = message.native
    content: object = native.value["content"] if native is not None and native.api == "messages" else ()
    return () if isinstance(content, str) else cast("Sequence[Mapping[str, Any]]", content)


def _list_tool_result_parts(message: ChatMessage) -> list[Mapping[str, Any]]:
    """What their results of tools are made of."""
    contents: list[object] = [
        block.get("content") for block in _list_native_content_blocks(message) if block.get("type") == "tool_result"
    ]
    return [
        part for content in contents if isinstance(content, list) for part in cast("list[Mapping[str, Any]]", content)
    ]


def _estimate_json_value_bytes(value: object) -> int:
    """About as many as a JSON value has when it is written."""
    total, left = 0, [value]
    while left:
        value = left.pop()
        if isinstance(value, str):
            total += _count_utf8_bytes(value) + 2
        elif isinstance(value, Mapping):
            fields = cast("Mapping[str, Any]", value)
            left += fields.keys()
            left += fields.values()
        elif isinstance(value, Sequence):
            left += cast("Sequence[object]", value)
        else:
            total += 2
    return total


class MaxTokensCutter:
    """Cuts the text of a target that writes more than `max_tokens`.

    Token ids are counted. Of text without ids it is the least number of tokens that it can have: as many as it has
    words between spaces, none of which shares a token with another. So what keeps to its limit is not cut.

    A text has at most half as many words as characters: it is only counted once it could be at the limit.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._num_ids = 0
        self._num_words = 0
        self._bytes_left = max_tokens * _DENSE_TEXT_BYTES + _LONGEST_TOKEN
        self._ends_in_word = False
        self._uncounted_texts: list[str] = []
        self._num_uncounted_chars = 2 * max_tokens  # that may still come without being counted

    def cut_delta(self, delta: TextDelta) -> TextDelta | None:
        """What of the next text is within the limit; None: nothing of it is."""
        if delta.token_ids is not None:
            is_full = self._num_ids >= self._max_tokens and bool(delta.token_ids)
            self._num_ids += len(delta.token_ids)
            return None if is_full else delta
        num_chars_left = self._num_uncounted_chars - len(delta.text)
        if num_chars_left >= 0:  # nearly always
            self._num_uncounted_chars = num_chars_left
            self._uncounted_texts.append(delta.text)
            return delta
        self._cut_text_to_bytes_left("".join(self._uncounted_texts))
        self._uncounted_texts.clear()
        text = self._cut_text_to_bytes_left(delta.text)
        self._num_uncounted_chars = max(0, min(2 * (self._max_tokens - self._num_words), self._bytes_left // 4))
        return delta if text == delta.text else replace(delta, text=text) if text else None

    def _cut_text_to_bytes_left(self, text: str) -> str:
        num_bytes, bytes_left = _count_utf8_bytes(text), self._bytes_left
        self._bytes_left -= num_bytes
        if num_bytes > bytes_left:
            text = text.encode(errors="surrogatepass")[: max(0, bytes_left)].decode(errors="ignore")
        if not text:
            return text
        num_begun = 1 if self._ends_in_word and not text[0].isspace() else 0  # goes on with the word before
        num_left, num_words = self._max_tokens - self._num_words, len(_NON_SPACE.findall(text)) - num_begun
        if num_words > num_left:
            self._num_words = self._max_tokens
            first_over = next(islice(_NON_SPACE.finditer(text), num_begun + num_left, None))
            return text[: first_over.start()].rstrip()
        self._num_words += num_words
        self._ends_in_word = not text[-1].isspace()
        return text


def cut_response_to_max_tokens(response: ChatResponse, max_tokens: int | None) -> ChatResponse:
    """A whole answer, cut as a stream would be."""
    if max_tokens is None:
        return response
    whole = TextDelta(response.content)
    kept = MaxTokensCutter(max_tokens).cut_delta(whole)
    if kept is whole:
        return response
    message = replace(response.message, content="" if kept is None else kept.text)
    return replace(response, message=message, finish_reason="length", stopped_by="max_tokens")
