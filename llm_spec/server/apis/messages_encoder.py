"""Anthropic's messages: from answers to bodies and events. Pure.

https://platform.claude.com/docs/en/api/messages
https://platform.claude.com/docs/en/build-with-claude/streaming
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, cast

from llm_spec.contract.events import AnswerDetail, ReasoningDelta, StreamEvent, TextDelta, ToolCallDelta
from llm_spec.contract.messages import ReasoningDetail
from llm_spec.contract.reasoning_details import build_thinking_blocks
from llm_spec.decoder.result import SpeculativeResult
from llm_spec.server.apis.encoding import ToolCallSequencer, format_sse, get_client_token_counts, get_finish_reason
from llm_spec.server.apis.fields import Json, ParsedRequest
from llm_spec.server.problems import HttpProblem

__all__ = ["MessagesStreamEncoder", "build_anthropic_message"]

_STOP_REASONS: Final[Mapping[str, str]] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}
_LONG_CALL_CHARS: Final = 1024  # of arguments; a model writes them in some seconds


def build_anthropic_message(result: SpeculativeResult, parsed: ParsedRequest, *, answer_id: str, model: str) -> Json:
    """Build the body of a whole answer."""
    content = build_thinking_blocks(result.reasoning_events)
    text = result.content + result.refusal
    if text or not (content or result.tool_calls):  # an empty text may not be sent back
        content.append({"type": "text", "text": text})
    content += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": _parse_tool_input(call.arguments)}
        for call in result.tool_calls
    ]
    return {
        **_build_message_envelope(answer_id, model),
        "content": content,
        **_build_stop_fields(result, parsed),
        "usage": _build_anthropic_usage(result) | _build_served_fields(result),
    }


def _build_served_fields(result: SpeculativeResult) -> Json:
    """Return the served tier and speed in Anthropic's words, as far as the target tells them."""
    tier = "standard" if result.service_tier == "default" else result.service_tier
    return {name: value for name, value in (("service_tier", tier), ("speed", result.speed)) if value is not None}


def _build_message_envelope(answer_id: str, model: str) -> Json:
    return {"id": f"msg_{answer_id}", "type": "message", "role": "assistant", "model": model}


def _parse_tool_input(arguments: str) -> Json:
    try:
        value = json.loads(arguments or "{}")
    except ValueError:
        value = None
    # Else as the model wrote it
    return cast("Json", value) if isinstance(value, dict) else {"arguments": arguments}


def _build_stop_fields(result: SpeculativeResult, parsed: ParsedRequest) -> Json:
    if result.stopped_by == "stop_string":
        stops = parsed.request.stop
        stop_string = result.stop_string or (stops[0] if len(stops) == 1 else None)
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_string}
    return {"stop_reason": _STOP_REASONS[get_finish_reason(result)], "stop_sequence": None}


def _build_anthropic_usage(result: SpeculativeResult | None) -> Json:
    counts: Mapping[str, int] = {} if result is None else get_client_token_counts(result)
    cached, written = counts.get("cached", 0), counts.get("cache_write", 0)
    return {
        "input_tokens": max(0, counts.get("input", 0) - cached - written),
        "output_tokens": counts.get("output", 0),
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": written,
    }


class MessagesStreamEncoder:
    """Encodes an answer as events; each change of the kind of content begins a block.

    A call is one block, even if the target says other things between its pieces. They are sent
    before the call, as in a whole answer. A long call is not held back but sent as it comes, and
    they follow it.
    """

    keep_alive_bytes = format_sse({"type": "ping"}, "ping")

    def __init__(self, parsed: ParsedRequest, *, answer_id: str, model: str) -> None:
        self._parsed = parsed
        self._envelope = _build_message_envelope(answer_id, model)
        self._answer_id = answer_id
        self._call_sequencer = ToolCallSequencer()
        self._held_pieces: list[ToolCallDelta] = []  # of a call that is not long yet
        self._held_events: list[StreamEvent] = []  # that came while a call was being sent
        self._is_sending_call = False
        self._block_index = -1
        self._open_block_kind: str | int | None = None  # "text", "thinking", or the index of a call

    def encode_start(self) -> bytes:
        empty: Json = {
            **self._envelope,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _build_anthropic_usage(None),
        }
        return format_sse({"type": "message_start", "message": empty}, "message_start")

    def encode_event(self, event: StreamEvent) -> bytes:
        if isinstance(event, ToolCallDelta):
            return b"".join(map(self._encode_or_hold_call_piece, self._call_sequencer.push(event)))
        if self._is_sending_call:
            self._held_events.append(event)
            return b""
        return self._encode_text_or_reasoning(event)

    def encode_end(self, result: SpeculativeResult) -> bytes:
        frames = b"".join(map(self._encode_tool_call_delta, self._held_pieces))
        frames += b"".join(map(self._encode_text_or_reasoning, self._held_events))
        frames += b"".join(map(self._encode_tool_call_delta, self._call_sequencer.flush()))
        if self._block_index < 0:
            frames += self._enter_content_block("text", {"type": "text", "text": ""})
        frames += self._close_content_block()
        usage = _build_anthropic_usage(result) | _build_served_fields(result)
        frames += format_sse(
            {"type": "message_delta", "delta": _build_stop_fields(result, self._parsed), "usage": usage},
            "message_delta",
        )
        return frames + format_sse({"type": "message_stop"}, "message_stop")

    def encode_error(self, problem: HttpProblem) -> bytes:
        return format_sse(problem.to_anthropic(), "error")

    def _encode_text_or_reasoning(self, event: StreamEvent) -> bytes:
        match event:
            case TextDelta() if event.text:
                return self._enter_content_block("text", {"type": "text", "text": ""}) + self._encode_block_delta(
                    type="text_delta", text=event.text
                )
            case ReasoningDelta():
                return self._enter_thinking_block() + self._encode_block_delta(
                    type="thinking_delta", thinking=event.text
                )
            case ReasoningDetail("messages", detail):
                return self._encode_reasoning_detail(detail)
            case AnswerDetail() if event.refusal:  # the stop reason says that it is one
                return self.encode_event(TextDelta(event.refusal))
            case _:
                return b""

    def _encode_or_hold_call_piece(self, piece: ToolCallDelta) -> bytes:
        if self._is_sending_call:
            return self._encode_tool_call_delta(piece)
        self._held_pieces.append(piece)
        if sum(len(held.arguments) for held in self._held_pieces) < _LONG_CALL_CHARS:
            return b""
        pieces, self._held_pieces, self._is_sending_call = self._held_pieces, [], True
        return b"".join(map(self._encode_tool_call_delta, pieces))

    def _enter_thinking_block(self) -> bytes:
        return self._enter_content_block("thinking", {"type": "thinking", "thinking": "", "signature": ""})

    def _encode_reasoning_detail(self, detail: Mapping[str, Any]) -> bytes:
        """Encode a redacted block, or the signature that ends a block of thinking."""
        if detail["type"] == "redacted_thinking":
            return self._enter_content_block("redacted_thinking", dict(detail)) + self._close_content_block()
        start = self._enter_thinking_block()
        return (
            start
            + self._encode_block_delta(type="signature_delta", signature=detail["signature"])
            + self._close_content_block()
        )

    def _encode_tool_call_delta(self, piece: ToolCallDelta) -> bytes:
        call_id = piece.id or f"toolu_{self._answer_id}_{piece.index}"
        block: Json = {"type": "tool_use", "id": call_id, "name": piece.name or "", "input": {}}
        return self._enter_content_block(piece.index, block) + self._encode_block_delta(
            type="input_json_delta", partial_json=piece.arguments
        )

    def _enter_content_block(self, kind: str | int, block: Json) -> bytes:
        """Continue a block of this kind, or begin one."""
        if self._open_block_kind == kind:
            return b""
        end = self._close_content_block()
        self._open_block_kind = kind
        self._block_index += 1
        start = {"type": "content_block_start", "index": self._block_index, "content_block": block}
        return end + format_sse(start, "content_block_start")

    def _encode_block_delta(self, **delta: str) -> bytes:
        change = {"type": "content_block_delta", "index": self._block_index, "delta": delta}
        return format_sse(change, "content_block_delta")

    def _close_content_block(self) -> bytes:
        if self._open_block_kind is None:
            return b""
        self._open_block_kind = None
        return format_sse({"type": "content_block_stop", "index": self._block_index}, "content_block_stop")
