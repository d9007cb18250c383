"""OpenAI's chat completions as they come: streamed chunks (JSON objects) to events. Pure; for providers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import count
from typing import Any, Final, TypeAlias, cast

from llm_spec.chat import FinishReason, ReasoningDelta, StoppedBy, StreamEvent, TextDelta, ToolCallDelta, Usage

__all__ = [
    "STOPPED_BY",
    "CallNumbers",
    "ReadTokenIds",
    "chunk_events",
    "chunk_finish",
    "ends_a_choice",
    "first_choice",
    "read_usage",
]

ReadTokenIds: TypeAlias = Callable[[Mapping[str, Any]], "tuple[int, ...] | None"]  # of a choice

_FINISH_REASONS: Final[Mapping[str, FinishReason]] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
}
STOPPED_BY: Final[Mapping[FinishReason, StoppedBy]] = {
    "length": "max_tokens",
    "tool_calls": "tool_calls",
    "content_filter": "content_filter",
}


def chunk_events(chunk: Mapping[str, Any], read_token_ids: ReadTokenIds | None = None) -> Iterator[StreamEvent]:
    """The events of one chunk, without its finish; choices but the first are passed over.

    Of chat or of a plain completion. With `read_token_ids` text comes with its token ids, else empty text gives none.
    """
    choice = first_choice(chunk)
    delta: Mapping[str, Any] = choice.get("delta") or {}
    token_ids = None if read_token_ids is None else read_token_ids(choice)
    reasoning = delta.get("reasoning_content") or delta.get("reasoning")
    if isinstance(reasoning, str) and reasoning:
        yield ReasoningDelta(reasoning)
    content = choice.get("text") or delta.get("content") or ""
    if isinstance(content, str) and (content or token_ids):
        yield TextDelta(content, token_ids=token_ids)
    calls = delta.get("tool_calls")
    if calls:
        yield from map(_call_delta, calls, count())


def _call_delta(call: Mapping[str, Any], position: int) -> ToolCallDelta:
    function: Mapping[str, Any] = call.get("function") or {}
    index = call.get("index")
    return ToolCallDelta(
        position if index is None else int(index),
        call.get("id") or None,
        function.get("name") or None,
        function.get("arguments") or "",
    )


class CallNumbers:
    """Numbers a stream's tool calls, also where a server gives them no index, or all the same one: by their ids."""

    def __init__(self) -> None:
        self._ids: dict[int, str | None] = {}  # of the calls so far, by number
        self._numbers: dict[int, int] = {}  # by the server's index: of the latest call that it gave that index

    def numbered(self, event: StreamEvent) -> StreamEvent:
        """The event, a tool call's with its number among the stream's calls."""
        if not isinstance(event, ToolCallDelta):
            return event
        number = self._numbers.get(event.index, event.index)
        if event.id is not None and self._ids.get(number) not in (None, event.id):
            known = (n for n, call_id in self._ids.items() if call_id == event.id)
            number = next(known, max(self._ids) + 1)
        self._numbers[event.index] = number
        self._ids[number] = self._ids.get(number) or event.id
        return replace(event, index=number)


def chunk_finish(chunk: Mapping[str, Any]) -> FinishReason | None:
    """Why the answer ended, in the chunk that says so."""
    reason = first_choice(chunk).get("finish_reason")
    return None if reason is None else _FINISH_REASONS.get(str(reason), "stop")


def ends_a_choice(chunk: Mapping[str, Any]) -> bool:
    """Whether it says why one of the choices ended."""
    choices: list[Mapping[str, Any]] = chunk.get("choices") or []
    return any(choice.get("finish_reason") for choice in choices)


def read_usage(chunk: Mapping[str, Any]) -> Usage | None:
    """The token counts of a chunk that has them."""
    usage = chunk.get("usage")
    if usage is None or not isinstance(usage, Mapping):
        return None
    counts = cast("Mapping[str, Any]", usage)
    prompt = cast("Mapping[str, Any]", counts.get("prompt_tokens_details") or {})
    answer = cast("Mapping[str, Any]", counts.get("completion_tokens_details") or {})
    return Usage(
        input_tokens=counts.get("prompt_tokens") or 0,
        output_tokens=counts.get("completion_tokens") or 0,
        cached_input_tokens=prompt.get("cached_tokens") or 0,
        reasoning_tokens=answer.get("reasoning_tokens") or 0,
        accepted_prediction_tokens=answer.get("accepted_prediction_tokens") or 0,
        rejected_prediction_tokens=answer.get("rejected_prediction_tokens") or 0,
    )


def first_choice(chunk: Mapping[str, Any]) -> Mapping[str, Any]:
    """The choice that this library reads; empty in a chunk without one."""
    choices: list[Mapping[str, Any]] = chunk.get("choices") or []
    for choice in choices:
        if not choice.get("index"):
            return choice
    return {}
