"""Converts an answer's events to the parts of a pydantic-ai response."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal

from opentelemetry.trace import Span, get_current_span
from pydantic_ai.messages import FinishReason, ModelRequestAttempt, ModelResponseStreamEvent
from pydantic_ai.models import StreamedResponse
from pydantic_ai.usage import RequestUsage

from llm_spec.contract.errors import LlmSpecError
from llm_spec.contract.events import AnswerDetail, Finish, ReasoningDelta, StreamEvent, TextDelta, ToolCallDelta, Usage
from llm_spec.contract.messages import ReasoningDetail
from llm_spec.contract.reasoning_details import merge_chat_details
from llm_spec.decoder.result import SpeculativeFinish, SpeculativeResult
from llm_spec.integrations._pydantic_ai_errors import convert_error_to_pydantic_ai
from llm_spec.integrations._pydantic_ai_names import Target, split_name
from llm_spec.integrations._pydantic_ai_reasoning import (
    CONTENT_ID,
    REASONING_ID,
    REDACTED_ID,
    ThoughtSplitter,
    describe_chat_details,
)
from llm_spec.integrations._shared import StreamClosedError, TaskReadEventStream, describe_finish_as_json
from llm_spec.kit.openai_logprobs import convert_logprobs_to_openai

__all__ = ["SpeculativeStreamedResponse", "find_request_span"]

_FINISH_REASONS: Final[dict[str, FinishReason]] = {
    "stop": "stop",
    "length": "length",
    "content_filter": "content_filter",
    "tool_calls": "tool_call",
}
_SPAN_FIELDS: Final = (
    "strategy",
    "guarantee",
    "acceptance_rate",
    "draft_tokens",
    "accepted_tokens",
    "plain_reason",
)
_REQUESTED_MODEL: Final = "gen_ai.request.model"

_Segment = Literal["none", "text", "thought", "reasoning"]


def find_request_span() -> Span | None:
    """Return the span that pydantic-ai opened for this request, or None without instrumentation."""
    span = get_current_span()
    return span if span.is_recording() and _REQUESTED_MODEL in (getattr(span, "attributes", None) or {}) else None


@dataclass
class SpeculativeStreamedResponse(StreamedResponse):
    """One answer as it comes. `cancel()` and leaving the stream end the request.

    If something interrupts text or reasoning, the rest is a part of its own. `_splitter` finds
    reasoning in the text. With `_keeps_annotations`, the last text keeps the answer's annotations.
    """

    _target: Target
    _stream: TaskReadEventStream
    _splitter: ThoughtSplitter | None = None
    _ignores_leading_space: bool = False
    _keeps_annotations: bool = False
    _span: Span | None = None
    _started: datetime = field(default_factory=lambda: datetime.now(UTC))
    _logprobs: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]], init=False)
    _segment: tuple[_Segment, int] = field(default=("none", 0), init=False)
    _first_reasoning: tuple[_Segment, int] | None = field(default=None, init=False)
    _last_text: tuple[_Segment, int] | None = field(default=None, init=False)
    _named_calls: set[int] = field(default_factory=set[int], init=False)
    _chat_details: list[ReasoningDetail] = field(default_factory=list[ReasoningDetail], init=False)
    _annotations: list[Any] = field(default_factory=list[Any], init=False)
    _refusal: str = field(default="", init=False)
    # a provider may leave usage out
    _usage_received: bool | None = field(default=False, init=False)

    @property
    def has_refused(self) -> bool:
        """True if the model refused to answer."""
        return bool(self._refusal)

    async def close_stream(self) -> None:
        """Close the upstream and release a task that waits for the next event."""
        await self._stream.aclose()

    def get_stream_cancel_errors(self) -> tuple[type[BaseException], ...]:
        """Return the errors that a waiting reader gets if `cancel()` closes the upstream."""
        return (StreamClosedError,)

    async def _get_event_iterator(self) -> AsyncIterator[ModelResponseStreamEvent]:
        has_begun = False
        try:
            async for event in self._stream:
                for part_event in self._convert_event_to_part_events(event):
                    has_begun = True
                    yield part_event
        except LlmSpecError as error:
            raise convert_error_to_pydantic_ai(self._target.model, error, in_stream=has_begun) from error

    def _convert_event_to_part_events(self, event: StreamEvent) -> Iterator[ModelResponseStreamEvent]:
        match event:
            case TextDelta():
                self._logprobs += convert_logprobs_to_openai(event.logprobs)
                if self._splitter is None:
                    yield from self._add_text(event.text)
                else:
                    yield from self._add_split_text(self._splitter.push(event.text))
            case ReasoningDelta():
                yield from self._add_reasoning(event.text)
            case ReasoningDetail() if event.api == "chat":
                self._chat_details.append(event)
            case ReasoningDetail():
                yield from self._add_thinking_block_detail(event)
            case ToolCallDelta():
                yield from self._add_tool_call_delta(event)
            case AnswerDetail():
                self._refusal += event.refusal
                annotations: Any = event.value.get("annotations")
                self._annotations += annotations if isinstance(annotations, list) else []
            case Finish():
                yield from self._end_answer(event)
            case _:
                pass

    # ---------------------------------------------------------------------------------------- parts

    def _enter(self, kind: _Segment) -> tuple[_Segment, int]:
        """Return the segment that the next piece of this kind belongs to."""
        if self._segment[0] != kind:
            self._segment = (kind, self._segment[1] + 1)
        return self._segment

    def _leave(self) -> Iterator[ModelResponseStreamEvent]:
        """End the open text or reasoning, with the text that was held back."""
        if self._splitter is not None:
            yield from self._add_split_text(self._splitter.flush())
        self._enter("none")

    def _add_split_text(self, pieces: Iterable[tuple[bool, str]]) -> Iterator[ModelResponseStreamEvent]:
        for is_thought, piece in pieces:
            if not is_thought:
                yield from self._add_text(piece)
                continue
            yield from self._parts_manager.handle_thinking_delta(
                vendor_part_id=self._enter("thought"),
                id=CONTENT_ID,
                content=piece,
                provider_name=self.provider_name,
            )

    def _add_text(self, text: str) -> Iterator[ModelResponseStreamEvent]:
        segment = self._enter("text")
        for event in self._parts_manager.handle_text_delta(
            vendor_part_id=segment, content=text, ignore_leading_whitespace=self._ignores_leading_space
        ):
            self._last_text = segment
            yield event

    def _add_reasoning(self, text: str) -> Iterator[ModelResponseStreamEvent]:
        if self._segment[0] != "reasoning":
            yield from self._leave()
        segment = self._enter("reasoning")
        self._first_reasoning = self._first_reasoning or segment
        yield from self._parts_manager.handle_thinking_delta(
            vendor_part_id=segment, id=REASONING_ID, content=text, provider_name=self.provider_name
        )

    def _add_thinking_block_detail(self, detail: ReasoningDetail) -> Iterator[ModelResponseStreamEvent]:
        """Add a signature, which ends the open block. Redacted thinking is a block of its own."""
        is_redacted = detail.value.get("type") == REDACTED_ID
        if is_redacted or self._segment[0] != "reasoning":
            yield from self._leave()
        yield from self._parts_manager.handle_thinking_delta(
            vendor_part_id=self._enter("reasoning"),
            id=REDACTED_ID if is_redacted else REASONING_ID,
            content="" if is_redacted else None,
            signature=detail.value["data" if is_redacted else "signature"],
            provider_name=self.provider_name,
        )
        self._enter("none")

    def _add_tool_call_delta(self, delta: ToolCallDelta) -> Iterator[ModelResponseStreamEvent]:
        """Add a piece of a call. Some servers repeat name and id, which pydantic-ai would join."""
        if self._segment[0] != "none":
            yield from self._leave()
        is_named = delta.index in self._named_calls
        if delta.name:
            self._named_calls.add(delta.index)
        yield from self._parts_manager.handle_tool_call_delta_events(
            vendor_part_id=("call", delta.index),
            tool_name=None if is_named else delta.name,
            args=delta.arguments or None,
            tool_call_id=None if is_named else delta.id or None,
        )

    # ------------------------------------------------------------------------------------------ end

    def _end_answer(self, finish: Finish) -> Iterator[ModelResponseStreamEvent]:
        yield from self._leave()
        if items := merge_chat_details(self._chat_details):
            signature, details = describe_chat_details(items)
            yield from self._parts_manager.handle_thinking_delta(
                vendor_part_id=self._first_reasoning or self._enter("reasoning"),
                id=REASONING_ID,
                signature=signature,
                provider_name=self.provider_name,
                provider_details=details,
            )
        if self._keeps_annotations and self._annotations and self._last_text is not None:
            yield from self._parts_manager.handle_text_delta(
                vendor_part_id=self._last_text,
                content="",
                provider_name=self.provider_name,
                provider_details={"annotations": self._annotations},
            )
        self._record_finish_in_response(finish)

    def _record_finish_in_response(self, finish: Finish) -> None:
        self.finish_reason = _FINISH_REASONS[finish.finish_reason]
        self.provider_response_id = finish.response_id
        self.provider_details = describe_finish_as_json(finish)
        if self._refusal:
            self.finish_reason = "content_filter"  # by this pydantic-ai recognizes a refusal
            del self.provider_details["finish_reason"]
            self.provider_details["refusal"] = self._refusal
        if self._logprobs:
            self.provider_details["logprobs"] = self._logprobs
        if finish.usage is not None:
            self._add_usage(_convert_usage_to_pydantic_ai(finish.usage), reported=True)
        if isinstance(finish, SpeculativeFinish) and finish.result is not None:
            attempts = _list_failed_attempts(finish.result, self._started)
            # a fallback model may have put its own attempts there
            self.failed_attempts = [*(self.failed_attempts or []), *attempts] or None
            self._record_result_in_span(finish.result)

    def _record_result_in_span(self, result: SpeculativeResult) -> None:
        if self._span is None or not self._span.is_recording():
            return
        report = result.to_report()
        said = {name: report[name] for name in _SPAN_FIELDS if report[name] is not None}
        self._span.set_attributes({f"llm_spec.{name}": value for name, value in said.items()})

    @property
    def model_name(self) -> str:
        return self._target.model

    @property
    def provider_name(self) -> str:
        return self._target.provider

    @property
    def provider_url(self) -> str | None:
        return self._target.url

    @property
    def timestamp(self) -> datetime:
        return self._started


def _convert_usage_to_pydantic_ai(usage: Usage) -> RequestUsage:
    details = {
        "reasoning_tokens": usage.reasoning_tokens,
        "accepted_prediction_tokens": usage.accepted_prediction_tokens,
        "rejected_prediction_tokens": usage.rejected_prediction_tokens,
        "extra_input_tokens": usage.extra_input_tokens,
        "cancelled_output_tokens": usage.cancelled_output_tokens,
    }
    return RequestUsage(
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
        cache_read_tokens=usage.cached_input_tokens,
        cache_write_tokens=usage.cache_write_input_tokens,
        details={name: count for name, count in details.items() if count},
    )


def _list_failed_attempts(result: SpeculativeResult, started: datetime) -> list[ModelRequestAttempt]:
    """List the attempts that failed or were rejected. Only a rejected draft's time is known."""
    attempts = [_build_failed_attempt(result.target, reason, started) for reason in result.retries]
    attempts += [_build_failed_attempt(result.draft or "draft", reason, started) for reason in result.fallbacks]
    if result.draft is not None and result.stats.num_wasted_draft_tokens:
        provider, model = split_name(result.draft)
        rejected = ModelRequestAttempt(
            model_name=model,
            provider_name=provider,
            outcome="rejected",
            timestamp=started,
            duration=timedelta(seconds=result.stats.draft_s),
            usage=_convert_usage_to_pydantic_ai(result.draft_usage)
            if result.draft_usage is not None and result.cost.draft
            else None,
        )
        attempts.append(rejected)
    return attempts


def _build_failed_attempt(name: str, reason: str, started: datetime) -> ModelRequestAttempt:
    provider, model = split_name(name)
    return ModelRequestAttempt(
        model_name=model,
        provider_name=provider,
        outcome="error",
        error=reason,
        timestamp=started,
        duration=timedelta(),
    )
