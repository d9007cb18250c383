"""Answers of Anthropic's messages, before anything is wrong with them: as one JSON value, and as events. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from upstream_chat_bases import Base

Json: TypeAlias = dict[str, Any]

_USAGE: Final[Json] = {
    "input_tokens": 19,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 12,
    "output_tokens": 9,
    "service_tier": "standard",
}


def _write(name: str, blocks: Sequence[tuple[Json, Sequence[Json]]], stop: str, whole_usage: bool = False) -> Base:
    """`blocks` are each its start and its pieces; the whole answer is made of both."""
    head: Json = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": []}
    ends: Json = {"stop_reason": None, "stop_sequence": None, "usage": _USAGE | {"output_tokens": 1}}
    events: list[Json] = [{"type": "message_start", "message": head | ends}, {"type": "ping"}]
    content: list[Json] = []
    for index, (start, pieces) in enumerate(blocks):
        events.append({"type": "content_block_start", "index": index, "content_block": start})
        events.extend({"type": "content_block_delta", "index": index, "delta": piece} for piece in pieces)
        events.append({"type": "content_block_stop", "index": index})
        content.append(_join(start, pieces))
    usage = _USAGE if whole_usage else {"output_tokens": 9}
    events.append({"type": "message_delta", "delta": {"stop_reason": stop, "stop_sequence": None}, "usage": usage})
    events.append({"type": "message_stop"})
    finish = {"end_turn": "stop", "max_tokens": "length", "tool_use": "tool_calls", "refusal": "content_filter"}[stop]
    return Base(
        name=f"messages: {name}",
        whole=head | {"content": content, "stop_reason": stop, "stop_sequence": None, "usage": _USAGE},
        events=events,
        text="".join(block.get("text", "") for block in content),
        reasoning="".join(block.get("thinking", "") for block in content),
        calls=tuple((block["name"], '{"city": "Oslo"}') for block in content if block["type"] == "tool_use"),
        finish=finish,
        dialect="messages",
    )


def _join(start: Json, pieces: Sequence[Json]) -> Json:
    block = dict(start)
    for piece in pieces:
        for name in ("text", "thinking", "signature"):
            if name in piece:
                block[name] += piece[name]
        if "partial_json" in piece:
            block["input"] = {"city": "Oslo"}
    return block


def _write_text(*pieces: str) -> tuple[Json, Sequence[Json]]:
    return {"type": "text", "text": ""}, [{"type": "text_delta", "text": piece} for piece in pieces]


def _write_call(call_id: str, name: str) -> tuple[Json, Sequence[Json]]:
    pieces = [{"type": "input_json_delta", "partial_json": piece} for piece in ("", '{"city":', ' "Oslo"}')]
    return {"type": "tool_use", "id": call_id, "name": name, "input": {}}, pieces


_THOUGHT: Final[tuple[Json, Sequence[Json]]] = (
    {"type": "thinking", "thinking": "", "signature": ""},
    [
        {"type": "thinking_delta", "thinking": "Let me "},
        {"type": "thinking_delta", "thinking": "think."},
        {"type": "signature_delta", "signature": "c2lnbmVk"},
    ],
)
_OVERLOADED: Final[Json] = {"type": "error", "error": {"type": "overloaded_error", "message": "It is overloaded."}}


def _write_errors() -> list[Base]:
    bases: list[Base] = []
    for status, kind, words in (
        (400, "invalid_request_error", "The prompt is too long for the model."),
        (429, "rate_limit_error", "Too many requests at the moment."),
        (529, "overloaded_error", "It is overloaded at the moment."),
        (500, "api_error", "Something broke behind the curtain."),
    ):
        error = {"type": "error", "error": {"type": kind, "message": words}, "request_id": "req_1"}
        name = f"messages: status {status}"
        bases.append(Base(name=name, whole=error, events=(), finish="error", status=status, dialect="messages"))
    begun = _write("", [_write_text("It is ", "42.")], "end_turn").events[:4]
    name = "messages: error in the stream"
    bases.append(Base(name=name, whole=_OVERLOADED, events=[*begun, _OVERLOADED], finish="error", dialect="messages"))
    return bases


MESSAGES: Final[Sequence[Base]] = (
    _write("text", [_write_text("It is ", "4", "2.")], "end_turn"),
    _write("text with all of usage at the end", [_write_text("It is ", "42.")], "end_turn", whole_usage=True),
    _write("cut text", [_write_text("It is ", "42 and")], "max_tokens"),
    _write("refusal", [_write_text("I cannot ", "help.")], "refusal"),
    _write("thinking", [_THOUGHT, _write_text("It is ", "42.")], "end_turn"),
    _write("call", [_write_call("toolu_0", "get_weather")], "tool_use"),
    _write("text and a call", [_write_text("I will look."), _write_call("toolu_0", "get_weather")], "tool_use"),
    _write("two calls", [_write_call("toolu_0", "get_weather"), _write_call("toolu_1", "get_time")], "tool_use"),
    *_write_errors(),
)
