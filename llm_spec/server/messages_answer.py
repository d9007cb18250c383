"""Anthropic's messages: from answers to bodies and events. Pure.

https://platform.claude.com/docs/en/api/messages and https://platform.claude.com/docs/en/build-with-claude/streaming
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, cast

from llm_spec.chat import ReasoningDelta, ReasoningDetail, StreamEvent, TextDelta, ToolCallDelta
from llm_spec.result import SpeculativeResult
from llm_spec.server.bodies import Asked, Json
from llm_spec.server.encoding import CallOrder, finish_reason_of, sse, usage_counts
from llm_spec.server.problems import Problem

__all__ = ["MessagesEncoder", "messages_body"]

_STOP_REASONS: Final[Mapping[str, str]] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}


def messages_body(result: SpeculativeResult, asked: Asked, *, answer_id: str, model: str) -> Json:
    """A whole answer."""
    content = _thinking(result)
    if result.content or not result.tool_calls:
        content.append({"type": "text", "text": result.content})
    content += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)}
        for call in result.tool_calls
    ]
    return {**_message(answer_id, model), "content": content, **_ending(result, asked), "usage": _usage(result)}


def _thinking(result: SpeculativeResult) -> list[Json]:
    """Blocks of thinking, each up to its signature, and such as may not be read."""
    blocks: list[Json] = []
    open_block: Json | None = None
    for event in result.reasoning_events:
        if isinstance(event, ReasoningDetail) and event.value.get("type") == "redacted_thinking":
            blocks.append(dict(event.value))
            open_block = None
            continue
        if isinstance(event, ReasoningDetail) and event.api != "messages":
            continue
        if open_block is None:
            open_block = {"type": "thinking", "thinking": "", "signature": ""}
            blocks.append(open_block)
        if isinstance(event, ReasoningDelta):
            open_block["thinking"] += event.text
        else:
            open_block["signature"] = event.value["signature"]
            open_block = None
    return blocks


def _message(answer_id: str, model: str) -> Json:
    return {"id": f"msg_{answer_id}", "type": "message", "role": "assistant", "model": model}


def _input(arguments: str) -> Json:
    try:
        value = json.loads(arguments or "{}")
    except ValueError:
        value = None
    return cast("Json", value) if isinstance(value, dict) else {"arguments": arguments}  # as it was written


def _ending(result: SpeculativeResult, asked: Asked) -> Json:
    if result.stopped_by == "stop_string":
        stops = asked.request.stop
        return {"stop_reason": "stop_sequence", "stop_sequence": stops[0] if len(stops) == 1 else None}
    return {"stop_reason": _STOP_REASONS[finish_reason_of(result)], "stop_sequence": None}


def _usage(result: SpeculativeResult | None) -> Json:
    counts: Mapping[str, int] = {} if result is None else usage_counts(result)
    cached, written = counts.get("cached", 0), counts.get("cache_write", 0)
    return {
        "input_tokens": max(0, counts.get("input", 0) - cached - written),
        "output_tokens": counts.get("output", 0),
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": written,
    }


class MessagesEncoder:
    """An answer in events; blocks begin and end as its kinds of content follow each other."""

    keep_alive = sse({"type": "ping"}, "ping")

    def __init__(self, asked: Asked, *, answer_id: str, model: str) -> None:
        self._asked = asked
        self._message = _message(answer_id, model)
        self._answer_id = answer_id
        self._calls = CallOrder()
        self._index = -1
        self._open: str | int | None = None  # "text", "thinking", or the index of a call

    def begin(self) -> bytes:
        empty: Json = {
            **self._message,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(None),
        }
        return sse({"type": "message_start", "message": empty}, "message_start")

    def event(self, event: StreamEvent) -> bytes:
        match event:
            case TextDelta():
                return self._in("text", {"type": "text", "text": ""}) + self._delta(type="text_delta", text=event.text)
            case ReasoningDelta():
                return self._in_thinking() + self._delta(type="thinking_delta", thinking=event.text)
            case ReasoningDetail("messages", detail):
                return self._detail(detail)
            case ToolCallDelta():
                return b"".join(map(self._call, self._calls.push(event)))
            case _:
                return b""

    def end(self, result: SpeculativeResult) -> bytes:
        frames = b"".join(map(self._call, self._calls.rest()))
        if self._index < 0:
            frames += self._in("text", {"type": "text", "text": ""})
        frames += self._close()
        usage = _usage(result)
        frames += sse({"type": "message_delta", "delta": _ending(result, self._asked), "usage": usage}, "message_delta")
        return frames + sse({"type": "message_stop"}, "message_stop")

    def failure(self, problem: Problem) -> bytes:
        return sse(problem.to_anthropic(), "error")

    def _in_thinking(self) -> bytes:
        return self._in("thinking", {"type": "thinking", "thinking": "", "signature": ""})

    def _detail(self, detail: Mapping[str, Any]) -> bytes:
        """A block that may not be read, or the signature that ends one of thinking."""
        if detail["type"] == "redacted_thinking":
            return self._in("redacted_thinking", dict(detail)) + self._close()
        begun = self._in_thinking()
        return begun + self._delta(type="signature_delta", signature=detail["signature"]) + self._close()

    def _call(self, piece: ToolCallDelta) -> bytes:
        call_id = piece.id or f"toolu_{self._answer_id}_{piece.index}"
        block: Json = {"type": "tool_use", "id": call_id, "name": piece.name or "", "input": {}}
        return self._in(piece.index, block) + self._delta(type="input_json_delta", partial_json=piece.arguments)

    def _in(self, kind: str | int, block: Json) -> bytes:
        """Go on in a block of this kind, or begin one."""
        if self._open == kind:
            return b""
        closed = self._close()
        self._open = kind
        self._index += 1
        begun = {"type": "content_block_start", "index": self._index, "content_block": block}
        return closed + sse(begun, "content_block_start")

    def _delta(self, **delta: str) -> bytes:
        change = {"type": "content_block_delta", "index": self._index, "delta": delta}
        return sse(change, "content_block_delta")

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return sse({"type": "content_block_stop", "index": self._index}, "content_block_stop")
