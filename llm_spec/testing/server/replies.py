"""The server's replies, whole or in frames, in OpenAI's and vLLM's fields."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, Literal, NamedTuple, TypeAlias

from aiohttp import web

from llm_spec.testing.server.bodies import Json, wants_token_ids, wants_usage
from llm_spec.testing.server.model import ScriptedAnswer, make_unlikely_token_ids

__all__ = [
    "MODEL",
    "Kind",
    "ScriptedFailure",
    "StreamFrame",
    "make_error_response",
    "make_stream_frames",
    "make_usage_fields",
    "make_whole_choice",
    "make_whole_response",
]

MODEL: Final = "scripted"

Kind: TypeAlias = Literal["chat", "text"]
_OBJECTS: Final = {"chat": "chat.completion", "text": "text_completion"}
_CHUNKS: Final = {"chat": "chat.completion.chunk", "text": "text_completion"}


class StreamFrame(NamedTuple):
    """Bytes that are sent at once.

    `num_tokens`: the tokens of the answer that are sent by then.
    """

    line: bytes
    num_tokens: int


class ScriptedFailure(Exception):  # noqa: N818 - it is an answer, not an error of this server
    """A scripted refusal."""

    def __init__(self, status: int, retry_after_s: float | None) -> None:
        super().__init__(status)
        self.response = make_error_response(status, f"scripted failure {status}")
        if retry_after_s is not None:
            self.response.headers["Retry-After"] = f"{retry_after_s:g}"


def make_error_response(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


def make_usage_fields(answers: Sequence[ScriptedAnswer], num_cached_tokens: int) -> Json:
    num_prompt = sum(len(answer.prompt_ids) for answer in answers)
    num_answer = sum(len(answer.pieces) for answer in answers)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_answer,
        "total_tokens": num_prompt + num_answer,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }


# ------------------------------------------------------------------------------------ whole answers


def make_whole_response(
    body: Json, kind: Kind, answers: Sequence[ScriptedAnswer], choices: Sequence[Json], usage: Json
) -> web.Response:
    whole: Json = {"id": MODEL, "object": _OBJECTS[kind], "model": MODEL, "choices": choices, "usage": usage}
    if kind == "chat" and wants_token_ids(body):
        whole["prompt_token_ids"] = answers[0].prompt_ids
    return web.json_response(whole)


def make_whole_choice(body: Json, kind: Kind, index: int, answer: ScriptedAnswer) -> Json:
    choice: Json = {"index": index, "finish_reason": answer.finish_reason}
    if kind == "chat":
        choice["message"] = {"role": "assistant", "content": answer.text}
    else:
        choice["text"] = answer.text
    if wants_token_ids(body):
        choice["token_ids"] = [*answer.token_ids, *answer.ending]
        if kind == "text":
            choice["prompt_token_ids"] = answer.prompt_ids
    if kind == "text" and body.get("logprobs"):
        choice["logprobs"] = _make_logprobs(body, answer)
    return choice


def _make_logprobs(body: Json, answer: ScriptedAnswer) -> Json:
    """Return the logprobs of certain tokens and of their alternatives."""
    ids = [*answer.token_ids, *answer.ending]
    names = [*answer.pieces, *("" for _ in answer.ending)]
    if body.get("return_tokens_as_token_ids"):
        names = [f"token_id:{token_id}" for token_id in ids]
    others = [make_unlikely_token_ids(int(body["logprobs"]) - 1, token_id) for token_id in ids]
    tops = [
        {name: 0.0} | {f"token_id:{other}": -10.0 - rank for rank, other in enumerate(row)}
        for name, row in zip(names, others, strict=True)
    ]
    return {"tokens": names, "token_logprobs": [0.0] * len(names), "top_logprobs": tops}


# ------------------------------------------------------------------------------------------ streams


class _FrameContent(NamedTuple):
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None


def make_stream_frames(
    body: Json, kind: Kind, answer: ScriptedAnswer, usage: Json, tokens_per_frame: int
) -> list[StreamFrame]:
    """Make the frames of a stream: tokens, finish, usage (if requested), and the end."""
    with_ids, num_tokens = wants_token_ids(body), len(answer.pieces)
    first, *others = _split_answer_into_frames(answer, tokens_per_frame)
    lines = [
        _make_first_frame_bytes(kind, first, answer.prompt_ids)
        if with_ids
        else _make_frame_bytes(kind, first, with_ids=False)
    ]
    lines += [_make_frame_bytes(kind, part, with_ids=with_ids) for part in others]
    if wants_usage(body):
        lines.append(_encode_frame({**_make_chunk_head(kind), "choices": [], "usage": usage}))
    lines.append(b"data: [DONE]\n\n")
    return [StreamFrame(line, min((index + 1) * tokens_per_frame, num_tokens)) for index, line in enumerate(lines)]


def _split_answer_into_frames(answer: ScriptedAnswer, size: int) -> list[_FrameContent]:
    """Split the tokens into groups, and add the finish.

    A repeated prefix is in front of the first group, even if that is empty.
    """
    starts = range(0, max(len(answer.pieces), bool(answer.repeated)), size)
    texts = ["".join(answer.pieces[start : start + size]) for start in starts]
    texts[:1] = [answer.repeated + text for text in texts[:1]]
    groups = [tuple(answer.token_ids[start : start + size]) for start in starts]
    return [*map(_FrameContent, texts, groups), _FrameContent("", answer.ending, answer.finish_reason)]


@lru_cache(maxsize=1 << 16)  # answers of one script share frames, and encoding one takes 7 us
def _make_frame_bytes(kind: Kind, part: _FrameContent, *, with_ids: bool) -> bytes:
    return _encode_frame(_make_chunk(kind, part, with_ids=with_ids))


def _make_first_frame_bytes(kind: Kind, part: _FrameContent, prompt_ids: Sequence[int]) -> bytes:
    """Make the frame with the prompt's ids.

    vLLM puts them beside the choices of a chat, and into the choice of a completion.
    """
    chunk = _make_chunk(kind, part, with_ids=True)
    (chunk if kind == "chat" else chunk["choices"][0])["prompt_token_ids"] = prompt_ids
    return _encode_frame(chunk)


def _make_chunk(kind: Kind, part: _FrameContent, *, with_ids: bool) -> Json:
    choice: Json = {"index": 0}
    if kind == "chat":
        choice["delta"] = {"role": "assistant", "content": part.text}
    else:
        choice["text"] = part.text
    if with_ids:
        choice["token_ids"] = part.token_ids
    return {**_make_chunk_head(kind), "choices": [{**choice, "finish_reason": part.finish_reason}]}


def _make_chunk_head(kind: Kind) -> Json:
    return {"id": MODEL, "object": _CHUNKS[kind], "model": MODEL}


def _encode_frame(chunk: Json) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"
