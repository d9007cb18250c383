"""A server's own chunks, in the form that OpenAI's API has: for answers that are passed on as they are. Pure.

They are read as an answer's events are (`llm_spec.openai_chat`), so that what is passed on means the same, and what is
no answer is none here either. Fields that this library does not read stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias, cast

from llm_spec.broken_answer import BrokenAnswerError
from llm_spec.chat import AnswerDetail, ChatRequest, ReasoningDelta, StreamEvent, TextDelta, ToolCallDelta
from llm_spec.openai_chat import ChunkReader, list_choices, parse_finish_reason, read_choice_index
from llm_spec.openai_logprobs import clean_logprobs
from llm_spec.openai_usage import clean_usage
from llm_spec.surrogates import mend_value

__all__ = ["ChunkNormalizer", "build_tool_call_delta", "create_chunk_normalizer"]

_Json: TypeAlias = dict[str, Any]
_LEGACY_REASON: Final = "function_call"
_READ_FIELDS: Final = frozenset({"content", "reasoning", "reasoning_content", "refusal", "role", "tool_calls"})


class ChunkNormalizer:
    """Brings the chunks of one answer into form; `num_choices` were requested. Whoever reads them ends open choices."""

    def __init__(self, *, num_choices: int = 1) -> None:
        self._num_choices = num_choices
        self._readers: dict[int, ChunkReader] = {}
        self._has_foreign = False
        self._is_text = False  # plain completions, which have no deltas

    def normalize(self, chunk: Mapping[str, Any]) -> _Json:
        """The next chunk; raises BrokenAnswerError."""
        choices = list_choices(chunk)
        self._has_foreign = self._has_foreign or choices is None
        found = [self._normalize_choice(self._find_index(*pair), pair[1]) for pair in enumerate(choices or [])]
        normalized: _Json = {**chunk, "choices": found}
        if "usage" in chunk:
            normalized["usage"] = clean_usage(chunk)
        return normalized

    def check_end(self, *, is_done: bool) -> None:
        """Raise BrokenAnswerError where the answer has not ended well, as `ChunkReader.make_finish` says."""
        for reader in self._readers.values():
            if reader.make_finish(is_done=is_done and not self._has_foreign) is None:
                raise BrokenAnswerError(reader.failure_message, is_transient=True)
        if not self._readers:
            raise BrokenAnswerError("ended its answer without a finish reason", is_transient=True)

    def _normalize_choice(self, index: int, choice: Mapping[str, Any]) -> _Json:
        reader = self._readers.setdefault(index, ChunkReader())
        delta = choice.get("message") if choice.get("delta") is None else choice.get("delta")
        kept: Mapping[str, Any] = cast("Mapping[str, Any]", delta) if isinstance(delta, dict) else {}
        # the client speaks this API: a call in its older form stays one
        read = {**choice, "delta": {**kept, "function_call": None}} if "function_call" in kept else choice
        self._is_text = self._is_text or (delta is None and "text" in choice)
        events = reader.read_choice(read)
        normalized: _Json = {
            **{name: value for name, value in choice.items() if name not in ("delta", "message", "text", "error")},
            "index": index,
            **self._build_content(events, kept),
            "finish_reason": _read_finish_reason(choice, reader),
        }
        if normalized.get("logprobs"):
            normalized["logprobs"] = clean_logprobs(normalized["logprobs"])
        return normalized

    def _find_index(self, position: int, choice: Mapping[str, Any]) -> int:
        """Which choice it is: by its position, where its index says nothing and only one was requested."""
        index = read_choice_index(choice)
        if index is None and choice.get("index") is not None and self._num_choices > 1:
            raise BrokenAnswerError(f"sent a choice without an index, and {self._num_choices} were requested")
        return position if index is None else index

    def _build_content(self, events: Iterable[StreamEvent], kept: Mapping[str, Any]) -> _Json:
        """What a choice brings, as its text or its delta; `kept` is what the server has sent of it."""
        text = "".join(event.text for event in events if isinstance(event, TextDelta))
        if self._is_text:
            return {"text": text}
        delta: _Json = mend_value({name: value for name, value in kept.items() if name not in _READ_FIELDS})
        if isinstance(kept.get("role"), str):
            delta["role"] = kept["role"]
        if text or "content" in kept:
            delta["content"] = text if text or kept.get("content") is not None else None
        reasoning_name = (
            "reasoning_content" if kept.get("reasoning_content") or "reasoning" not in kept else "reasoning"
        )
        for event in events:
            match event:
                case ReasoningDelta():
                    delta[reasoning_name] = delta.get(reasoning_name, "") + event.text
                case AnswerDetail() if event.refusal:
                    delta["refusal"] = delta.get("refusal", "") + event.refusal
                case ToolCallDelta():
                    delta.setdefault("tool_calls", []).append(build_tool_call_delta(event))
                case _:
                    pass
        return {"delta": delta}


def create_chunk_normalizer(request: ChatRequest) -> ChunkNormalizer:
    """What brings the chunks into form that answer a request."""
    num_choices = request.extra.get("n")
    return ChunkNormalizer(num_choices=num_choices if isinstance(num_choices, int) and num_choices > 0 else 1)


def _read_finish_reason(choice: Mapping[str, Any], reader: ChunkReader) -> str | None:
    reason = parse_finish_reason(choice)
    if reason == "tool_calls" and choice["finish_reason"] == _LEGACY_REASON:
        return _LEGACY_REASON
    return "tool_calls" if reason == "stop" and reader.has_calls else reason


def build_tool_call_delta(event: ToolCallDelta) -> _Json:
    """A piece of a call as chunks have it: its id and name with the first, and only with that."""
    is_custom = event.kind == "custom"
    content: _Json = {"input" if is_custom else "arguments": event.arguments}
    if event.name is None:
        return {"index": event.index, event.kind: content}
    return {"index": event.index, "id": event.id, "type": event.kind, event.kind: {"name": event.name, **content}}
