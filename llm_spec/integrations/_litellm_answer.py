"""Converts the events of an answer to litellm's objects, as a whole or in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, TypeAlias, cast
from uuid import uuid4

from litellm.litellm_core_utils.prompt_templates.common_utils import _parse_content_for_reasoning
from litellm.types.llms.openai import ChatCompletionToolCallChunk, ChatCompletionUsageBlock
from litellm.types.utils import (
    ChoiceLogprobs,
    Delta,
    GenericStreamingChunk,
    Message,
    ModelResponse,
    ModelResponseStream,
    StreamingChoices,
)
from litellm.types.utils import Usage as LiteLLMUsage

from llm_spec.contract.events import (
    AnswerDetail,
    Finish,
    FinishReason,
    ReasoningDelta,
    StreamEvent,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)
from llm_spec.contract.messages import ReasoningDetail, ToolCall
from llm_spec.contract.reasoning_details import build_thinking_blocks, merge_chat_details, merge_reasoning_details
from llm_spec.contract.response import append_tool_call_delta
from llm_spec.integrations._litellm_request import REPORT_FIELD
from llm_spec.integrations._shared import convert_usage_to_openai, describe_finish_as_json
from llm_spec.kit.answer_parts import merge_detail
from llm_spec.kit.openai_chunks import build_tool_call_delta
from llm_spec.kit.openai_logprobs import build_chat_logprobs

__all__ = ["Chunk", "ChunkBuilder", "fill_response"]

Chunk: TypeAlias = GenericStreamingChunk | ModelResponseStream


def fill_response(response: ModelResponse, events: Sequence[StreamEvent], model: str) -> ModelResponse:
    """Fill litellm's response object with the events of a whole answer."""
    (finish,) = (event for event in events if isinstance(event, Finish))
    builder = _AnswerFields()
    for event in events:
        builder.add_event(event)
    (choice,) = response.choices
    text = "".join(event.text for event in events if isinstance(event, TextDelta))
    fields = builder.build_message_fields()
    # as litellm does with whole answers of its other providers
    if "reasoning_content" not in fields:
        thought, rest = _parse_content_for_reasoning(text)
        text, fields = (text, fields) if thought is None else (rest or "", fields | {"reasoning_content": thought})
    calls = builder.build_tool_calls()
    choice.message = Message(
        content=text or (None if calls or fields else ""),
        tool_calls=calls,
        **fields,
        provider_specific_fields=builder.build_specific_fields(finish),
    )
    choice.finish_reason = builder.get_finish_reason(finish)
    logprobs = [event.logprobs for event in events if isinstance(event, TextDelta) and event.logprobs is not None]
    if logprobs:
        choice.logprobs = _build_litellm_logprobs(list(chain.from_iterable(logprobs)))
    response.model = model
    if finish.response_id is not None:
        response.id = finish.response_id
    if finish.service_tier is not None:
        response.service_tier = finish.service_tier  # type: ignore[attr-defined]  # a field by assignment
    if finish.usage is not None:
        response.usage = LiteLLMUsage(**_build_litellm_usage(finish.usage))  # type: ignore[attr-defined]  # as above
    return response


class ChunkBuilder:
    """Converts the events of one answer to litellm's chunks."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._id = f"chatcmpl-{uuid4()}"  # the same in all chunks
        self._fields = _AnswerFields()
        # reasoning since the last block of thinking
        self._unsigned: list[ReasoningDelta | ReasoningDetail] = []

    def convert_event(self, event: StreamEvent) -> Iterator[Chunk]:
        """Yield the chunk of an event. Some events have none."""
        is_named = isinstance(event, ToolCallDelta) and self._fields.has_call(event.index)
        self._fields.add_event(event)
        match event:
            case TextDelta(logprobs=None):
                yield _build_generic_chunk(event.text)
            case TextDelta(logprobs=tuple() as logprobs):  # the generic chunk has no field for them
                yield self._build_chunk(Delta(content=event.text), logprobs=_build_litellm_logprobs(logprobs))
            case ReasoningDelta():
                self._unsigned.append(event)
                yield self._build_chunk(Delta(content=None, reasoning_content=event.text))
            case ReasoningDetail():
                yield from self._convert_reasoning_detail(event)
            case AnswerDetail():
                yield self._build_chunk(Delta(content=None, **event.value))
            case ToolCallDelta(kind="custom"):
                piece = event if not is_named else ToolCallDelta(event.index, None, None, event.arguments, event.kind)
                yield self._build_chunk(Delta(content=None, tool_calls=[build_tool_call_delta(piece)]))
            case ToolCallDelta():  # id and name are sent once, even if a server repeats them
                called = {"name": None if is_named else event.name, "arguments": event.arguments}
                tool_use = {
                    "id": None if is_named else event.id,
                    "type": "function",
                    "function": called,
                    "index": event.index,
                }
                yield _build_generic_chunk(tool_use=cast("ChatCompletionToolCallChunk", tool_use))
            case Finish():
                yield _build_generic_chunk(finish=event, fields=self._fields)
            case _:
                pass  # rounds, fallbacks and retries are not part of an answer

    def _convert_reasoning_detail(self, event: ReasoningDetail) -> Iterator[Chunk]:
        if event.api == "chat":
            yield self._build_chunk(Delta(content=None, reasoning_details=[dict(event.value)]))
            return
        is_whole = event.value.get("type") == "redacted_thinking"
        blocks = [dict(event.value)] if is_whole else build_thinking_blocks([*self._unsigned, event])
        self._unsigned.clear()
        yield self._build_chunk(Delta(content=None, thinking_blocks=cast("list[Any]", blocks)))

    def _build_chunk(self, delta: Delta, *, logprobs: ChoiceLogprobs | None = None) -> ModelResponseStream:
        choice = StreamingChoices(index=0, delta=delta, logprobs=logprobs)
        return ModelResponseStream(id=self._id, model=self._model, choices=[choice])


class _AnswerFields:
    """The parts of an answer other than its text."""

    def __init__(self) -> None:
        self._calls: dict[int, ToolCall] = {}
        self._reasoning: list[ReasoningDelta | ReasoningDetail] = []
        self._details: dict[str, Any] = {}

    def add_event(self, event: StreamEvent) -> None:
        match event:
            case ToolCallDelta():
                self._calls[event.index] = append_tool_call_delta(self._calls.get(event.index), event)
            case ReasoningDelta() | ReasoningDetail():
                self._reasoning.append(event)
            case AnswerDetail():
                merge_detail(self._details, event.value)
            case _:
                pass

    def has_call(self, index: int) -> bool:
        return index in self._calls

    def build_tool_calls(self) -> list[dict[str, Any]] | None:
        """Return the calls, or None. Arguments that are not JSON stay as the model wrote them."""
        calls = sorted(self._calls.items())
        built = [build_tool_call_delta(ToolCallDelta(i, c.id, c.name, c.arguments, c.kind)) for i, c in calls]
        return [{name: of for name, of in call.items() if name != "index"} for call in built] or None

    def build_message_fields(self) -> dict[str, Any]:
        """Build the message fields that litellm's other providers also set."""
        fields = dict(self._details)
        if text := "".join(event.text for event in self._reasoning if isinstance(event, ReasoningDelta)):
            fields["reasoning_content"] = text
        details = merge_reasoning_details(self._reasoning)
        if blocks := [dict(detail.value) for detail in details if detail.api == "messages"]:
            fields["thinking_blocks"] = blocks
        return fields

    def build_specific_fields(self, finish: Finish) -> dict[str, Any]:
        """Build `provider_specific_fields`: the answer's report, and details for the next turn.

        litellm's message has no other field for those details.
        """
        fields: dict[str, Any] = {REPORT_FIELD: describe_finish_as_json(finish)}
        if items := merge_chat_details(self._reasoning):
            fields["reasoning_details"] = items
        return fields

    def get_finish_reason(self, finish: Finish) -> FinishReason:
        """Return the finish reason; for a refusal it is "stop", as in OpenAI's answers."""
        has_refused = finish.finish_reason == "content_filter" and self._details.get("refusal")
        return "stop" if has_refused else finish.finish_reason


def _build_generic_chunk(
    text: str = "",
    *,
    tool_use: ChatCompletionToolCallChunk | None = None,
    finish: Finish | None = None,
    fields: _AnswerFields | None = None,
) -> GenericStreamingChunk:
    usage = None if finish is None or finish.usage is None else _build_litellm_usage(finish.usage)
    return GenericStreamingChunk(
        text=text,
        tool_use=tool_use,
        is_finished=finish is not None,
        finish_reason="" if finish is None or fields is None else fields.get_finish_reason(finish),
        usage=cast("ChatCompletionUsageBlock | None", usage),
        index=0,
        provider_specific_fields=None if finish is None or fields is None else fields.build_specific_fields(finish),
    )


def _build_litellm_usage(usage: Usage) -> dict[str, Any]:
    """Convert usage, with the fields that litellm's prices need."""
    fields = convert_usage_to_openai(usage)
    if usage.cache_write_input_tokens:
        fields["cache_creation_input_tokens"] = usage.cache_write_input_tokens
    if usage.cached_input_tokens:
        fields["cache_read_input_tokens"] = usage.cached_input_tokens
    return fields


def _build_litellm_logprobs(logprobs: Sequence[TokenLogprob]) -> ChoiceLogprobs:
    return ChoiceLogprobs.model_validate(build_chat_logprobs(logprobs))
