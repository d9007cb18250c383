"""Converts the JSON events of a streamed Anthropic answer to this library's events. Pure.

https://platform.claude.com/docs/en/build-with-claude/streaming

Other servers and gateways send these events, too, and a field may have another type than
Anthropic's. A field that decides what an answer says must be right. Otherwise the answer ends with
an error (`BrokenAnswerError`). Any other field is read if possible, and otherwise left out.
`openai_chat` follows the same rule.

- Events, blocks and deltas have a `type`. An unknown type is skipped, as the API asks of its
  clients; a missing type is an error. If a block was skipped, the stop reason `tool_use` without a
  call is an error, too: that block may have been the call.
- `content_block` and `delta` are objects, `text` and `partial_json` are texts. A wrong type is an
  error; a text may be null, and so may the `delta` of a message. All of an answer comes in blocks:
  a message that begins with its content is an error.
- A call has a name. Its id is read if possible, and otherwise made up (`openai_calls`). Its `input`
  is an object if no arguments follow.
- `index` says to which block arguments belong. If it cannot be read and one block is open, they
  belong to that block. Arguments of a block that is not open are an error.
- `stop_reason` says if the answer is whole (`read_finish_reason`). An unknown word or type means
  that it may not be.
- `usage` holds counts or is missing; then this library counts.
- Thinking, signatures, `stop_sequence`, `service_tier`, `speed` and the fields of the message do
  not change an answer: a wrong type is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from llm_spec import Finish, ReasoningDelta, ReasoningDetail, StreamEvent, TextDelta, Usage
from llm_spec.contract.events import FinishReason, StoppedBy
from llm_spec.kit.answer_parts import BrokenAnswerError, read_finish_reason, read_token_count
from llm_spec.kit.openai_calls import ToolCallReader
from llm_spec.kit.surrogates import SurrogateJoiner, is_encodable

__all__ = ["AnthropicAnswerReader"]

_STOPPED_BY: Final[Mapping[str, StoppedBy]] = {
    "end_turn": "eos",
    "stop_sequence": "stop_string",
    "max_tokens": "max_tokens",
    "model_context_window_exceeded": "context_length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}
_COUNT_FIELDS: Final = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens", "output_tokens")
_MAX_QUOTED_CHARS: Final = 60


@dataclass(slots=True)
class _Block:
    """An open block."""

    index: int | None  # the server's number, or None if it sends none
    kind: str
    call_number: int = 0
    given_input: object = None
    has_arguments: bool = False


class AnthropicAnswerReader:
    """Reads the events of one answer, in order."""

    def __init__(self) -> None:
        self.text = ""
        self._joiner, self._thought_joiner = SurrogateJoiner(), SurrogateJoiner()
        self._calls = ToolCallReader()
        self._num_calls = 0
        self._open_blocks: list[_Block] = []
        self._has_passed_over_blocks = False
        self._counts: dict[str, object] = {}  # as the server sends them
        self._num_reasoning_tokens = 0
        self._finish_reason: FinishReason | None = None
        self._stopped_by: StoppedBy | None = None
        self._stop_string: str | None = None
        self._service_tier: str | None = None  # the tier that served the answer
        self._speed: str | None = None  # the speed of that service
        self._response_id: str | None = None

    def read_event(self, event: Mapping[str, Any]) -> Iterator[StreamEvent]:
        """Yield what one event says. Raises BrokenAnswerError."""
        match _read_kind(event, "an event"):
            case "message_start":
                message = _as_object_or_empty(event.get("message"))
                if message.get("content"):
                    raise BrokenAnswerError("began its answer with content outside of any block")
                self._response_id = _read_word(message.get("id"))
                self._update_usage(_as_object_or_empty(message.get("usage")))
            case "content_block_start":
                yield from self._read_block_start(event.get("index"), _require_object(event, "content_block"))
            case "content_block_delta":
                yield from self._read_block_delta(event.get("index"), _require_object(event, "delta"))
            case "content_block_stop":
                block = self._find_block(event.get("index"))
                if block is not None:
                    yield from self._close_block(block)
            case "message_delta":
                self._update_usage(_as_object_or_empty(event.get("usage")))
                if event.get("delta") is not None:
                    self._read_end(_require_object(event, "delta"))
            case "error":
                raise BrokenAnswerError("reported an error", reported=event.get("error") or event)
            case _:
                pass

    def end(self) -> Iterator[StreamEvent]:
        """Yield what was held back, and the answer's finish. Raises BrokenAnswerError."""
        if self._finish_reason is None:
            raise BrokenAnswerError("ended its answer without a stop reason", is_transient=True)
        for block in tuple(self._open_blocks):
            yield from self._close_block(block)
        yield from self._flush_texts()
        yield from self._calls.flush()
        yield Finish(
            self._finish_reason,
            self._build_usage(),
            self._stopped_by,
            stop_string=self._stop_string,
            service_tier=self._service_tier,
            speed=self._speed,
            response_id=self._response_id,
        )

    # --------------------------------------------------------------------------------------- inside

    def _read_block_start(self, index: object, fields: Mapping[str, Any]) -> Iterator[StreamEvent]:
        block = _Block(read_token_count(index), _read_kind(fields, "a content_block"))
        if block.index is not None and (before := self._find_block(block.index)) is not None:
            yield from self._close_block(before)  # the server did not end it
        self._open_blocks.append(block)
        match block.kind:
            case "tool_use":
                if not fields.get("name"):
                    raise BrokenAnswerError("called a tool without its name")
                block.call_number, self._num_calls = self._num_calls, self._num_calls + 1
                block.given_input = fields.get("input")
                call = {"index": block.call_number, "id": fields.get("id"), "function": {"name": fields["name"]}}
                yield from self._calls.read_delta({"tool_calls": [call]}, is_whole=True)
            case "text":
                yield from self._read_text(fields)
            case "thinking":
                yield from self._read_thought(fields)
            case "redacted_thinking":
                if data := _read_word(fields.get("data")):
                    yield ReasoningDetail("messages", {"type": "redacted_thinking", "data": data})
            case _:
                self._has_passed_over_blocks = True

    def _read_block_delta(self, index: object, delta: Mapping[str, Any]) -> Iterator[StreamEvent]:
        match _read_kind(delta, "a delta"):
            case "text_delta" | "text":
                yield from self._read_text(delta)
            case "thinking_delta" | "thinking":
                yield from self._read_thought(delta)
            case "signature_delta":
                if signature := _read_word(delta.get("signature")):
                    yield ReasoningDetail("messages", {"type": "signature_delta", "signature": signature})
            case "input_json_delta":
                yield from self._read_arguments(self._find_block(index), _read_text_field(delta, "partial_json"))
            case _:
                pass

    def _read_text(self, fields: Mapping[str, Any]) -> Iterator[StreamEvent]:
        if text := self._joiner.push(_read_text_field(fields, "text")):
            self.text += text
            yield TextDelta(text)

    def _read_thought(self, fields: Mapping[str, Any]) -> Iterator[StreamEvent]:
        thought = fields.get("thinking")
        if isinstance(thought, str) and (thought := self._thought_joiner.push(thought)):
            yield ReasoningDelta(thought)

    def _read_arguments(self, block: _Block | None, piece: str) -> Iterator[StreamEvent]:
        if block is None or block.kind in ("text", "thinking", "redacted_thinking"):
            raise BrokenAnswerError("sent arguments of a call that is not open")
        if block.kind == "tool_use" and piece:  # other tools are run by the server itself
            block.has_arguments = True
            yield from self._add_arguments(block, piece)

    def _add_arguments(self, block: _Block, arguments: object) -> Iterator[StreamEvent]:
        call = {"index": block.call_number, "function": {"arguments": arguments}}
        yield from self._calls.read_delta({"tool_calls": [call]})

    def _find_block(self, index: object) -> _Block | None:
        """Return the open block that an index means, or None."""
        number = read_token_count(index)
        same = [block for block in self._open_blocks if block.index == number is not None]
        if same or len(self._open_blocks) != 1:
            return same[0] if same else None
        (only,) = self._open_blocks
        return only if number is None or only.index is None else None

    def _close_block(self, block: _Block) -> Iterator[StreamEvent]:
        self._open_blocks.remove(block)
        yield from self._flush_texts()
        if block.kind == "tool_use" and not block.has_arguments:
            given: object = block.given_input or {}
            if not isinstance(given, dict):
                raise BrokenAnswerError(f"sent a call whose input is of type {type(given).__name__}")
            yield from self._add_arguments(block, cast("object", given))

    def _flush_texts(self) -> Iterator[StreamEvent]:
        """Yield halves of characters that no other half has followed."""
        if thought := self._thought_joiner.flush():
            yield ReasoningDelta(thought)
        if text := self._joiner.flush():
            self.text += text
            yield TextDelta(text)

    def _read_end(self, delta: Mapping[str, Any]) -> None:
        """Read why the answer ended, if it did."""
        word = delta.get("stop_reason")
        reason = read_finish_reason(word)
        if reason is None:
            return
        if reason == "failed":
            quoted = str(word)[:_MAX_QUOTED_CHARS]
            raise BrokenAnswerError(f"broke off its answer: its stop reason is {quoted!r}", is_transient=True)
        if reason == "tool_calls" and self._has_passed_over_blocks and not self._num_calls:
            raise BrokenAnswerError("stopped to call a tool, in a block of an unknown type")
        self._finish_reason = reason
        self._stopped_by = _STOPPED_BY.get(str(word))
        self._stop_string = _read_word(delta.get("stop_sequence")) if self._stopped_by == "stop_string" else None

    def _update_usage(self, usage: Mapping[str, Any]) -> None:
        """Update the counts. They are totals: the last one stands, even if it is 0.

        A missing or null count changes nothing. The SDK accumulates counts in the same way. After a
        compaction of the context, `message_delta` lowers the counts of `message_start`: the cached
        input to 0, the other input to what was read in the end.
        """
        self._counts |= {name: usage[name] for name in _COUNT_FIELDS if usage.get(name) is not None}
        self._service_tier = _read_word(usage.get("service_tier")) or self._service_tier
        self._speed = _read_word(usage.get("speed")) or self._speed
        num_thinking = _as_object_or_empty(usage.get("output_tokens_details")).get("thinking_tokens")
        counted = read_token_count(num_thinking)
        self._num_reasoning_tokens = self._num_reasoning_tokens if counted is None else counted

    def _build_usage(self) -> Usage | None:
        if not any(self._counts.values()):  # the server does not count
            return None
        counts = [read_token_count(self._counts.get(name, 0)) for name in _COUNT_FIELDS]
        num_new, num_cached, num_written, num_output = counts
        if num_new is None or num_output is None:
            return None
        # `input_tokens` does not include cached tokens
        num_input = read_token_count(num_new + (num_cached or 0) + (num_written or 0))
        if num_input is None:
            return None
        return Usage(
            input_tokens=num_input,
            output_tokens=num_output,
            cached_input_tokens=num_cached or 0,
            cache_write_input_tokens=num_written or 0,
            reasoning_tokens=min(self._num_reasoning_tokens, num_output),
        )


def _read_kind(fields: Mapping[str, Any], what: str) -> str:
    """Return the type of an event, a block or a delta."""
    kind = fields.get("type")
    if not isinstance(kind, str) or not kind:
        raise BrokenAnswerError(f"sent {what} without a type")
    return kind


def _require_object(event: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = event.get(name)
    if not isinstance(value, dict):
        raise BrokenAnswerError(f"sent a {name} of type {type(value).__name__}")
    return cast("Mapping[str, Any]", value)


def _read_text_field(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str | None):
        raise BrokenAnswerError(f"sent {name} of type {type(value).__name__}")
    return value or ""


def _read_word(value: object) -> str | None:
    """Return a text that is not empty, or None for anything else."""
    return value if isinstance(value, str) and value and is_encodable(value) else None


def _as_object_or_empty(value: Any) -> Mapping[str, Any]:
    """Return a JSON object, or an empty one for anything else."""
    return cast("Mapping[str, Any]", value) if isinstance(value, dict) else {}
