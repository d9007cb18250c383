"""Builds a response from the events of a stream."""

from __future__ import annotations

from dataclasses import replace

from llm_spec.contract.errors import TargetError
from llm_spec.contract.events import (
    AnswerDetail,
    ChatResponse,
    Finish,
    ReasoningDelta,
    StreamEvent,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
)
from llm_spec.contract.messages import ChatMessage, ReasoningDetail, ToolCall
from llm_spec.contract.provider import LlmProvider
from llm_spec.contract.reasoning_details import merge_reasoning_details
from llm_spec.contract.request import ChatRequest

__all__ = ["ChatResponseBuilder", "append_tool_call_delta", "complete_from_stream"]


class ChatResponseBuilder:
    """Collects the events of one answer."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] | None = None
        self._reasoning: list[ReasoningDelta | ReasoningDetail] = []
        self._calls: dict[int, ToolCall] = {}
        self._details: list[AnswerDetail] = []

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._texts)

    def add_event(self, event: StreamEvent) -> ChatResponse | None:
        """Take in the next event; return the response after the last one, else None."""
        match event:
            case TextDelta():
                self._texts.append(event.text)
                if event.logprobs is not None:
                    self._logprobs = self._logprobs or []
                    self._logprobs += event.logprobs
            case ReasoningDelta() | ReasoningDetail():
                self._reasoning.append(event)
            case ToolCallDelta():
                self._calls[event.index] = append_tool_call_delta(self._calls.get(event.index), event)
            case AnswerDetail():
                self._details.append(event)
            case Finish():
                calls = tuple(call for _, call in sorted(self._calls.items()))
                reasoning = "".join(part.text for part in self._reasoning if isinstance(part, ReasoningDelta))
                return ChatResponse(
                    message=ChatMessage(
                        "assistant",
                        self.text or None,
                        tool_calls=calls,
                        reasoning=reasoning,
                        reasoning_details=merge_reasoning_details(self._reasoning),
                    ),
                    finish_reason=event.finish_reason,
                    usage=event.usage,
                    reasoning=reasoning,
                    stopped_by=event.stopped_by,
                    logprobs=None if self._logprobs is None else tuple(self._logprobs),
                    stop_string=event.stop_string,
                    details=tuple(self._details),
                    service_tier=event.service_tier,
                    speed=event.speed,
                    response_id=event.response_id,
                )
            case _:
                pass
        return None


async def complete_from_stream(provider: LlmProvider, request: ChatRequest) -> ChatResponse:
    """Implement `complete` for a provider whose native form is `stream`."""
    builder = ChatResponseBuilder()
    async with provider.stream(request) as events:
        async for event in events:
            response = builder.add_event(event)
            if response is None:
                continue
            has_none = request.top_logprobs is not None and not builder.text
            return replace(response, logprobs=()) if has_none else response
    raise TargetError(f"{provider.name} ended its stream without a finish reason", partial_text=builder.text)


def append_tool_call_delta(call: ToolCall | None, delta: ToolCallDelta) -> ToolCall:
    """Return a tool call with one more piece of it."""
    if call is None:
        return ToolCall(delta.id or "", delta.name or "", delta.arguments, delta.kind)
    return replace(
        call,
        id=call.id or delta.id or "",
        name=call.name or delta.name or "",
        arguments=call.arguments + delta.arguments,
    )
