"""A streamed answer: Anthropic's events, as JSON objects, to this library's. Pure.

https://platform.claude.com/docs/en/build-with-claude/streaming
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from llm_spec import Finish, ReasoningDelta, ReasoningDetail, StreamEvent, TextDelta, ToolCallDelta, Usage
from llm_spec.provider_kit import FinishReason, StoppedBy, mend_text, read_finish_reason, read_token_count

__all__ = ["AnthropicAnswerReader"]

_FINISH_REASONS: Final[Mapping[str, tuple[FinishReason, StoppedBy | None]]] = {
    "end_turn": ("stop", "eos"),
    "stop_sequence": ("stop", "stop_string"),
    "max_tokens": ("length", "max_tokens"),
    "model_context_window_exceeded": ("length", "context_length"),
    "tool_use": ("tool_calls", "tool_calls"),
    "refusal": ("content_filter", "content_filter"),
    "pause_turn": ("length", None),  # the turn goes on when it is sent back: what came is not all of it
}
_COUNT_FIELDS: Final = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens", "output_tokens")


@dataclass(slots=True)
class _OpenToolCall:
    """A tool call that is being written."""

    index: int
    given_input: Mapping[str, Any]
    has_arguments: bool = False


class AnthropicAnswerReader:
    """Reads the events of one answer, in order; what it does not know is passed over."""

    def __init__(self) -> None:
        self.text = ""
        self._calls: dict[object, _OpenToolCall] = {}  # by the index of their block
        self._counts: dict[str, object] = {}  # as the server says them
        self._num_reasoning_tokens = 0
        self._finish_reason: tuple[FinishReason, StoppedBy | None] | None = None
        self._stop_string: str | None = None
        self._service_tier: str | None = None  # that was served …
        self._speed: str | None = None  # … and how fast

    @property
    def finish(self) -> Finish | None:
        """The end of the answer, once the server has said why it ended."""
        if self._finish_reason is None:
            return None
        reason, stopped_by = self._finish_reason
        return Finish(reason, self._build_usage(), stopped_by, None, self._stop_string, self._service_tier, self._speed)

    def read_event(self, event: Mapping[str, Any]) -> Iterator[StreamEvent]:
        """Take one event in; give what it says."""
        match event.get("type"):
            case "message_start":
                self._update_token_counts(_as_object_or_empty(_as_object_or_empty(event.get("message")).get("usage")))
            case "content_block_start":
                yield from self._read_block_start(event.get("index"), _as_object_or_empty(event.get("content_block")))
            case "content_block_delta":
                yield from self._read_block_delta(event.get("index"), _as_object_or_empty(event.get("delta")))
            case "content_block_stop":
                call = self._calls.get(event.get("index"))
                if call is not None and not call.has_arguments:
                    yield ToolCallDelta(call.index, arguments=json.dumps(call.given_input))
            case "message_delta":
                self._update_token_counts(_as_object_or_empty(event.get("usage")))
                delta = _as_object_or_empty(event.get("delta"))
                reason, stop_string = delta.get("stop_reason"), delta.get("stop_sequence")
                if reason is not None:
                    self._finish_reason = _FINISH_REASONS.get(str(reason)) or _read_foreign_reason(reason)
                    self._stop_string = stop_string if isinstance(stop_string, str) else None
            case _:
                pass

    # ------------------------------------------------------------------------------------------ inside

    def _read_block_start(self, index: object, block: Mapping[str, Any]) -> Iterator[StreamEvent]:
        if block.get("type") != "tool_use":
            yield from self._convert_content_piece(block)
            return
        call = _OpenToolCall(len(self._calls), _as_object_or_empty(block.get("input")))
        self._calls[index] = call
        yield ToolCallDelta(call.index, block.get("id"), block.get("name"))

    def _read_block_delta(self, index: object, delta: Mapping[str, Any]) -> Iterator[StreamEvent]:
        if delta.get("type") != "input_json_delta":
            yield from self._convert_content_piece(delta)
            return
        call, piece = self._calls.get(index), delta.get("partial_json")
        if call is not None and isinstance(piece, str) and piece:
            call.has_arguments = True
            yield ToolCallDelta(call.index, arguments=mend_text(piece))

    def _convert_content_piece(self, piece: Mapping[str, Any]) -> Iterator[StreamEvent]:
        """What a block's beginning or a delta says, if it is of those that are known."""
        match piece:
            case {"type": "text" | "text_delta", "text": str(text)} if text:
                text = mend_text(text)
                self.text += text
                yield TextDelta(text)
            case {"type": "thinking" | "thinking_delta", "thinking": str(thought)} if thought:
                yield ReasoningDelta(mend_text(thought))
            case {"type": "signature_delta", "signature": str(signature)} if signature:
                yield ReasoningDetail("messages", piece)
            case {"type": "redacted_thinking"}:
                yield ReasoningDetail("messages", piece)
            case _:
                pass

    def _update_token_counts(self, usage: Mapping[str, Any]) -> None:
        """Counts are totals: the last one given stands, 0 as well; one that is left out or null changes nothing.

        As in the SDK's own accumulation. After the context was compacted `message_delta` lowers what `message_start`
        said: the cached input to 0, the other to what was read in the end.
        """
        self._counts |= {name: usage[name] for name in _COUNT_FIELDS if usage.get(name) is not None}
        self._service_tier = usage.get("service_tier") or self._service_tier
        self._speed = usage.get("speed") or self._speed
        num_thinking = _as_object_or_empty(usage.get("output_tokens_details")).get("thinking_tokens")
        counted = read_token_count(num_thinking)
        self._num_reasoning_tokens = self._num_reasoning_tokens if counted is None else counted

    def _build_usage(self) -> Usage | None:
        if not any(self._counts.values()):  # a server that does not count
            return None
        counts = [read_token_count(self._counts.get(name, 0)) for name in _COUNT_FIELDS]
        num_new, num_cached, num_written, num_output = counts
        if num_new is None or num_output is None:
            return None
        return Usage(
            input_tokens=num_new + (num_cached or 0) + (num_written or 0),  # input_tokens leave out the cached ones
            output_tokens=num_output,
            cached_input_tokens=num_cached or 0,
            cache_write_input_tokens=num_written or 0,
            reasoning_tokens=min(self._num_reasoning_tokens, num_output),
        )


def _read_foreign_reason(reason: object) -> tuple[FinishReason, StoppedBy | None] | None:
    """A reason that gateways to other models give; None where the answer broke off."""
    read = read_finish_reason(reason)
    return None if read is None or read == "failed" else (read, None)


def _as_object_or_empty(value: Any) -> Mapping[str, Any]:
    """A JSON object as it is, anything else as an empty one."""
    return cast("Mapping[str, Any]", value) if isinstance(value, dict) else {}
