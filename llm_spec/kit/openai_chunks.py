"""A server's own chunks, in the form of OpenAI's API, for answers that are passed on. Pure.

They are read like an answer's events (`openai_chat`), so that both mean the same, and an answer
that is invalid there is invalid here. Fields that this library does not read stay as they are.
Log-probabilities that cannot be read become an empty object: they are not part of the text, and the
client sees that there are none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias, cast

from llm_spec.contract.events import AnswerDetail, ReasoningDelta, StreamEvent, TextDelta, ToolCallDelta
from llm_spec.contract.request import ChatRequest
from llm_spec.kit.answer_parts import BrokenAnswerError, clean_usage
from llm_spec.kit.openai_chat import DETAIL_FIELDS, ChunkReader, list_choices, parse_finish_reason, read_choice_index
from llm_spec.kit.openai_logprobs import clean_logprobs
from llm_spec.kit.surrogates import mend_value

__all__ = ["ChunkNormalizer", "build_tool_call_delta", "create_chunk_normalizer"]

_Json: TypeAlias = dict[str, Any]
_LEGACY_REASON: Final = "function_call"
_READ_FIELDS: Final = frozenset({"content", "reasoning", "reasoning_content", "refusal", "role", "tool_calls"})
_DETAIL_FIELDS: Final = frozenset({"reasoning_details", *DETAIL_FIELDS})


class ChunkNormalizer:
    """Normalizes the chunks of one answer; `num_choices` were requested."""

    def __init__(self, *, num_choices: int = 1) -> None:
        self._num_choices = num_choices
        # if one choice was requested: the index of the first that comes, the only one that is read
        self._only_index: int | None = None
        self._readers: dict[int, ChunkReader] = {}
        self._has_foreign = False
        self._is_text = False  # plain completions, which have no deltas

    def normalize(self, chunk: Mapping[str, Any]) -> _Json:
        """Return the next chunk in normal form; raise BrokenAnswerError."""
        choices = list_choices(chunk)
        self._has_foreign = self._has_foreign or choices is None
        found: list[_Json] = []
        for position, choice in enumerate(choices or []):
            index = self._find_index(position, choice)
            if index is not None:
                found.append(self._normalize_choice(index, choice))
        normalized: _Json = {**chunk, "choices": found}
        if "usage" in chunk:
            normalized["usage"] = clean_usage(chunk)
        return normalized

    def finish(self, *, is_done: bool) -> _Json | None:
        """Return a last chunk with the held pieces, or None if there are none.

        Raises BrokenAnswerError if the answer has not ended well, as defined by
        `ChunkReader.make_finish`.
        """
        for reader in self._readers.values():
            if reader.make_finish(is_done=is_done and not self._has_foreign) is None:
                raise BrokenAnswerError(reader.failure_message, is_transient=True)
        if not self._readers:
            raise BrokenAnswerError("ended its answer without a finish reason", is_transient=True)
        if max(self._readers) >= len(self._readers):
            raise BrokenAnswerError("left out a choice before the last one", is_transient=True)
        rests = [(index, reader.flush()) for index, reader in sorted(self._readers.items())]
        found = [
            {"index": index, **self._build_content(events, {}), "finish_reason": None}
            for index, events in rests
            if events
        ]
        return {"choices": found} if found else None

    def _normalize_choice(self, index: int, choice: Mapping[str, Any]) -> _Json:
        reader = self._readers.setdefault(index, ChunkReader())
        delta = choice.get("message") if choice.get("delta") is None else choice.get("delta")
        kept: Mapping[str, Any] = cast("Mapping[str, Any]", delta) if isinstance(delta, dict) else {}
        # the client speaks this API: a call in its older form keeps that form
        if not isinstance(kept.get("function_call"), dict | None):
            raise BrokenAnswerError(f"sent a function_call of type {type(kept['function_call']).__name__}")
        read = {**choice, "delta": {**kept, "function_call": None}} if "function_call" in kept else choice
        self._is_text = self._is_text or (delta is None and "text" in choice)
        events = reader.read_choice(read)
        normalized: _Json = {
            **{name: value for name, value in choice.items() if name not in ("delta", "message", "text", "error")},
            "index": index,
            **self._build_content(events, kept),
            "finish_reason": _read_finish_reason(choice, reader),
        }
        if "logprobs" in normalized:
            normalized["logprobs"] = clean_logprobs(choice)
        return normalized

    def _find_index(self, position: int, choice: Mapping[str, Any]) -> int | None:
        """Return the index of a choice, by its position if it has none.

        Returns None for a choice that was not requested.
        """
        index = read_choice_index(choice)
        if self._num_choices == 1:
            if self._only_index is None:
                self._only_index = index or 0
            return 0 if (position == 0 if index is None else index == self._only_index) else None
        is_told = choice.get("index") is not None
        if index is None and not is_told and (position > 0 or max(self._readers, default=0) == 0):
            index = position
        if index is None or index >= self._num_choices:
            which = f"with index {index}" if index is not None else "without an index"
            raise BrokenAnswerError(f"sent a choice {which}, and {self._num_choices} were requested")
        return index

    def _build_content(self, events: Iterable[StreamEvent], kept: Mapping[str, Any]) -> _Json:
        """Return the text or the delta of a choice; `kept` is the server's own delta."""
        text = "".join(event.text for event in events if isinstance(event, TextDelta))
        if self._is_text:
            return {"text": text}
        delta: _Json = mend_value({name: value for name, value in kept.items() if _is_passed_on(name, value)})
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
    """Return a normalizer for the chunks that answer a request."""
    num_choices = request.extra.get("n")
    return ChunkNormalizer(num_choices=num_choices if isinstance(num_choices, int) and num_choices > 0 else 1)


def _is_passed_on(name: str, value: object) -> bool:
    """True if a field of a delta stays as it is.

    A server's own fields do, and the fields that clients read if they are valid.
    """
    return name not in _READ_FIELDS and (name not in _DETAIL_FIELDS or isinstance(value, list | dict | None))


def _read_finish_reason(choice: Mapping[str, Any], reader: ChunkReader) -> str | None:
    reason = parse_finish_reason(choice)
    if reason == "tool_calls" and choice["finish_reason"] == _LEGACY_REASON:
        return _LEGACY_REASON
    return "tool_calls" if reason == "stop" and reader.has_calls else reason


def build_tool_call_delta(event: ToolCallDelta) -> _Json:
    """Build a piece of a call for a chunk; only the first one has id and name."""
    is_custom = event.kind == "custom"
    content: _Json = {"input" if is_custom else "arguments": event.arguments}
    if event.name is None:
        return {"index": event.index, event.kind: content}
    return {"index": event.index, "id": event.id, "type": event.kind, event.kind: {"name": event.name, **content}}
