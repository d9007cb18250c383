"""OpenAI's chat completions as they come: streamed chunks (JSON objects) to events. Pure; for providers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, TypeAlias, cast

from llm_spec.chat import (
    Finish,
    FinishReason,
    ReasoningDelta,
    ReasoningDetail,
    StoppedBy,
    StreamEvent,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)
from llm_spec.openai_logprobs import parse_logprobs

__all__ = ["ChunkReader", "ReadTokenIds", "has_finish_reason", "parse_finish_reason", "parse_usage"]

ReadTokenIds: TypeAlias = Callable[[Mapping[str, Any]], "tuple[int, ...] | None"]  # of a choice

_FINISH_REASONS: Final[Mapping[str, FinishReason]] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
}
_FAILED_FINISH_REASONS: Final = frozenset(
    {"error", "network_error"}
)  # OpenRouter, Mistral: the model's server broke off
_EMPTY_CHOICE: Final[Mapping[str, Any]] = {}
_TEXT_ONLY_FIELDS: Final = frozenset({"content", "role"})
_STOPPED_BY: Final[Mapping[FinishReason, StoppedBy]] = {
    "length": "max_tokens",
    "tool_calls": "tool_calls",
    "content_filter": "content_filter",
}


class ChunkReader:
    """Reads the chunks of one answer, of chat or of a plain completion; choices but the first are passed over.

    With `read_token_ids` text comes with its token ids, else empty text gives no event; the ids of a chunk that calls a
    tool come after the call, with an empty text. With `has_logprobs` text comes with its log-probabilities. What the
    model says to refuse is text, and the answer ends with `content_filter`.
    """

    def __init__(self, read_token_ids: ReadTokenIds | None = None, *, has_logprobs: bool = False) -> None:
        self._read_token_ids = read_token_ids
        self._has_logprobs = has_logprobs
        self._is_text_alone = read_token_ids is None and not has_logprobs
        self._numbers = _ToolCallNumbering()
        self._reason: FinishReason | None = None
        self._has_failed = self._has_text = self._has_calls = self._has_refused = False
        self._usage: Usage | None = None
        self._service_tier: str | None = None  # that was served
        self._held_logprobs: tuple[TokenLogprob, ...] = ()  # of tokens that end inside a character

    def read_chunk(self, chunk: Mapping[str, Any]) -> list[StreamEvent]:
        """The events of the next chunk, without its finish."""
        if chunk.get("usage"):
            self._usage = parse_usage(chunk) or self._usage
        choice = _get_first_choice_or_empty(chunk)
        if chunk.get("service_tier"):
            self._service_tier = str(chunk["service_tier"])
        if reason := choice.get("finish_reason"):
            self._reason, self._has_failed = parse_finish_reason(choice), str(reason) in _FAILED_FINISH_REASONS
        delta: Mapping[str, Any] = choice.get("delta") or _EMPTY_CHOICE
        content: object = choice.get("text") or delta.get("content")
        if type(content) is str and content and self._is_text_alone and delta.keys() <= _TEXT_ONLY_FIELDS:
            self._has_text = True
            return [TextDelta(content)]  # nearly always
        return self._read_delta_beyond_text(choice, delta, content)

    def _read_delta_beyond_text(
        self, choice: Mapping[str, Any], delta: Mapping[str, Any], content: object
    ) -> list[StreamEvent]:
        """The events of a choice that brings more than a text, or none."""
        token_ids = None if self._read_token_ids is None else self._read_token_ids(choice)
        texts: list[StreamEvent]
        if isinstance(content, list):
            texts = list(_parse_content_parts(cast("list[object]", content)))
        else:
            text = _get_text_or_empty(content)
            logprobs = self._read_logprobs_of_text(choice, has_text=bool(text))
            texts = [TextDelta(text, "plain", token_ids, logprobs)] if text or token_ids else []
        self._has_text = self._has_text or bool(texts)
        calls: list[StreamEvent] = list(self._parse_tool_call_deltas(delta))
        if calls and token_ids:  # they say that all before them is what the server made of them
            texts = [replace(text, token_ids=None) for text in texts if isinstance(text, TextDelta) and text.text]
            calls.append(TextDelta("", "plain", token_ids))
        return [*self._parse_reasoning_events(delta), *texts, *calls]

    def _read_logprobs_of_text(self, choice: Mapping[str, Any], *, has_text: bool) -> tuple[TokenLogprob, ...] | None:
        """Those of a piece of text, and of what came before it without any."""
        if not self._has_logprobs or not choice.get("logprobs"):
            return None
        logprobs = self._held_logprobs + (parse_logprobs(choice) or ())
        self._held_logprobs = () if has_text else logprobs
        return logprobs if has_text else None

    def make_finish(self, *, is_done: bool = False) -> Finish | None:
        """How the answer ended; None: it did not end well, `failure` says how.

        `is_done`: the stream ended with `[DONE]`. Servers that never name a finish reason (Snowflake, gateways to
        Gemini), or now and then do not (vLLM), send it all the same, and only when they have finished: behind text or
        tool calls it is a good end. The SDKs take the end of a connection for one, too, but so ends an answer whose
        server or gateway died: without `[DONE]` it has broken off.
        """
        reason = self._reason
        if reason is None and is_done and not self._has_failed and (self._has_text or self._has_calls):
            reason = "tool_calls" if self._has_calls else "stop"
        if reason is None:
            return None
        if self._has_refused and reason == "stop":  # OpenAI's word for a refusal; for the caller it is no answer
            reason = "content_filter"
        return Finish(reason, self._usage, _STOPPED_BY.get(reason), service_tier=self._service_tier)

    @property
    def failure_message(self) -> str:
        """What the server did where `finish` gives nothing."""
        if self._has_failed:
            return "broke off its answer: the finish reason is an error"
        return "ended its answer without a finish reason"

    def _parse_reasoning_events(self, delta: Mapping[str, Any]) -> Iterator[StreamEvent]:
        if reasoning := _get_text_or_empty(delta.get("reasoning_content") or delta.get("reasoning")):
            yield ReasoningDelta(reasoning)
        details: object = delta.get("reasoning_details")
        for detail in cast("list[object]", details) if isinstance(details, list) else ():
            if isinstance(detail, dict):
                yield ReasoningDetail("chat", cast("Mapping[str, Any]", detail))
        if refusal := _get_text_or_empty(delta.get("refusal")):
            self._has_refused = self._has_text = True
            yield TextDelta(refusal)

    def _parse_tool_call_deltas(self, delta: Mapping[str, Any]) -> Iterator[StreamEvent]:
        for position, call in enumerate(delta.get("tool_calls") or ()):
            self._has_calls = True
            yield self._numbers.assign_call_number(_parse_tool_call_delta(call, position))


def _get_text_or_empty(value: object) -> str:
    return value if isinstance(value, str) else ""


def _parse_content_parts(content: Iterable[object]) -> Iterator[StreamEvent]:
    """The events of a content in parts, as Mistral's thinking models send it; other parts (references) say nothing.

    `[{"type": "thinking", "thinking": [{"type": "text", "text": …}]}, {"type": "text", "text": …}]`, and text alone as
    soon as the thinking is over.
    """
    for part in content:
        fields = cast("Mapping[str, object]", part) if isinstance(part, dict) else _EMPTY_CHOICE
        if fields.get("type") == "text" and (text := _get_text_or_empty(fields.get("text"))):
            yield TextDelta(text)
        elif fields.get("type") == "thinking" and (thought := _join_thinking_text(fields.get("thinking"))):
            yield ReasoningDelta(thought)


def _join_thinking_text(thinking: object) -> str:
    """The text of a thinking part, which is in parts itself."""
    if not isinstance(thinking, list):
        return _get_text_or_empty(thinking)
    return "".join(
        event.text for event in _parse_content_parts(cast("list[object]", thinking)) if isinstance(event, TextDelta)
    )


def _parse_tool_call_delta(call: Mapping[str, Any], position: int) -> ToolCallDelta:
    function: Mapping[str, Any] = call.get("function") or {}
    index = call.get("index")
    return ToolCallDelta(
        position if index is None else int(index),
        call.get("id") or None,
        function.get("name") or None,
        function.get("arguments") or "",
    )


class _ToolCallNumbering:
    """Numbers a stream's tool calls, also where a server gives them no index, or all the same one: by their ids."""

    def __init__(self) -> None:
        self._ids: dict[int, str | None] = {}  # of the calls so far, by number
        self._numbers: dict[int, int] = {}  # by the server's index: of the latest call that it gave that index

    def assign_call_number(self, event: ToolCallDelta) -> ToolCallDelta:
        """The piece of a call with its number among the stream's calls."""
        number = self._numbers.get(event.index, event.index)
        if event.id is not None and self._ids.get(number) not in (None, event.id):
            known = (n for n, call_id in self._ids.items() if call_id == event.id)
            number = next(known, max(self._ids) + 1)
        self._numbers[event.index] = number
        self._ids[number] = self._ids.get(number) or event.id
        return replace(event, index=number)


def parse_finish_reason(choice: Mapping[str, Any]) -> FinishReason | None:
    """Why a choice ended, where it says so; None also where it was broken off."""
    reason = choice.get("finish_reason")
    return None if not reason or str(reason) in _FAILED_FINISH_REASONS else _FINISH_REASONS.get(str(reason), "stop")


def has_finish_reason(chunk: Mapping[str, Any]) -> bool:
    """Whether it says why one of the choices ended."""
    choices: list[Mapping[str, Any]] = chunk.get("choices") or []
    return any(choice.get("finish_reason") for choice in choices)


def parse_usage(chunk: Mapping[str, Any]) -> Usage | None:
    """The token counts of a chunk that has them."""
    usage = chunk.get("usage")
    if not isinstance(usage, dict):
        return None
    counts = cast("Mapping[str, Any]", usage)
    prompt: Mapping[str, Any] = counts.get("prompt_tokens_details") or _EMPTY_CHOICE
    answer: Mapping[str, Any] = counts.get("completion_tokens_details") or _EMPTY_CHOICE
    num_rejected = answer.get("rejected_prediction_tokens") or 0
    return Usage(
        input_tokens=counts.get("prompt_tokens") or 0,
        output_tokens=counts.get("completion_tokens") or 0,
        cached_input_tokens=prompt.get("cached_tokens") or 0,
        reasoning_tokens=answer.get("reasoning_tokens") or 0,
        accepted_prediction_tokens=answer.get("accepted_prediction_tokens") or 0,
        rejected_prediction_tokens=num_rejected,
        cancelled_output_tokens=num_rejected,  # which are counted as output
    )


def _get_first_choice_or_empty(chunk: Mapping[str, Any]) -> Mapping[str, Any]:
    """The choice that this library reads; empty in a chunk without one."""
    choices: list[Mapping[str, Any]] = chunk.get("choices") or []
    for choice in choices:
        if not choice.get("index"):
            return choice
    return _EMPTY_CHOICE
