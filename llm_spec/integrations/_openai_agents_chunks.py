"""Converts a provider's events to OpenAI's chat completion chunks."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

from openai.types.chat import ChatCompletionChunk

from llm_spec.contract.events import AnswerDetail, Finish, ReasoningDelta, StreamEvent, TextDelta, ToolCallDelta
from llm_spec.contract.messages import ReasoningDetail
from llm_spec.contract.reasoning_details import build_thinking_blocks, merge_chat_details
from llm_spec.contract.request import ChatRequest
from llm_spec.integrations._shared import convert_usage_to_openai, describe_finish_as_json
from llm_spec.kit.openai_logprobs import build_chat_logprobs

__all__ = ["ChatChunkStream"]


class ChatChunkStream:
    """The chunks of one answer.

    `figures`, `raw_usage`, `response_id` and `reasoning_details` are set with the last chunk.

    Blocks of thinking are in the SDK's field `thinking_blocks`. It has no field for items of
    `reasoning_details`.

    The Agents SDK identifies a call by its id for a whole run. If a server gives no id, or one that
    the conversation already has, the call gets a new id.
    """

    def __init__(self, events: AsyncIterator[StreamEvent], request: ChatRequest, model: str, target: str) -> None:
        self._events = events
        self._target = target
        self._used_ids = {call.id for message in request.messages for call in message.tool_calls}
        self._started_calls: set[int] = set()
        self._thinking: list[ReasoningDelta | ReasoningDetail] = []  # since the last signature
        self._chat_details: list[ReasoningDetail] = []
        self._envelope: dict[str, Any] = {
            "id": f"chatcmpl-{uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "object": "chat.completion.chunk",
        }
        self.response_id: str | None = None  # the server's
        self.figures: dict[str, Any] = {}
        self.raw_usage: dict[str, Any] | None = None
        self.reasoning_details: list[dict[str, Any]] = []

    async def iter_chunks(self) -> AsyncIterator[ChatCompletionChunk]:
        """Yield the chunks as their events come. The last has the finish reason and the usage."""
        async for event in self._events:
            match event:
                case TextDelta():
                    logprobs = build_chat_logprobs(event.logprobs)
                    yield self._build_chat_chunk({"content": event.text}, logprobs=logprobs)
                case ReasoningDelta():
                    self._thinking.append(event)
                    yield self._build_chat_chunk({"reasoning_content": event.text})
                case ReasoningDetail(api="messages"):
                    blocks = build_thinking_blocks([*self._thinking, event])
                    self._thinking.clear()
                    yield self._build_chat_chunk({"thinking_blocks": blocks})
                case ReasoningDetail():
                    self._chat_details.append(event)
                case AnswerDetail():
                    if delta := _build_detail_delta(event):
                        yield self._build_chat_chunk(delta)
                case ToolCallDelta():
                    yield self._build_chat_chunk({"tool_calls": [self._build_tool_call_delta(event)]})
                case Finish():
                    self.figures = {"target": self._target} | describe_finish_as_json(event)
                    self.response_id = event.response_id
                    self.raw_usage = None if event.usage is None else convert_usage_to_openai(event.usage)
                    self.reasoning_details = merge_chat_details(self._chat_details)
                    yield self._build_chat_chunk({}, event)
                case _:
                    pass

    def _build_chat_chunk(
        self, delta: dict[str, Any], finish: Finish | None = None, *, logprobs: dict[str, Any] | None = None
    ) -> ChatCompletionChunk:
        reason = None if finish is None else finish.finish_reason
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
        return ChatCompletionChunk.model_validate({**self._envelope, "choices": [choice], "usage": self.raw_usage})

    def _build_tool_call_delta(self, event: ToolCallDelta) -> dict[str, Any]:
        call: dict[str, Any] = {"index": event.index, "type": "function", "function": {"arguments": event.arguments}}
        if event.index not in self._started_calls:
            self._started_calls.add(event.index)
            call["id"] = event.id if event.id and event.id not in self._used_ids else f"call_{uuid4().hex}"
            self._used_ids.add(call["id"])
        if event.name is not None:
            call["function"]["name"] = event.name
        return call


def _build_detail_delta(event: AnswerDetail) -> dict[str, Any]:
    """Build the fields of a delta that the SDK reads besides text, reasoning and calls."""
    delta = {name: event.value[name] for name in ("annotations", "audio") if event.value.get(name)}
    return delta | {"refusal": event.refusal} if event.refusal else delta
