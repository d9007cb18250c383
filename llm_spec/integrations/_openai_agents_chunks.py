"""A provider's events as OpenAI's chat completion chunks, for what reads those."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

from openai.types.chat import ChatCompletionChunk

from llm_spec.chat import ChatRequest, Finish, ReasoningDelta, StreamEvent, TextDelta, ToolCallDelta
from llm_spec.integrations._shared import convert_usage_to_openai, describe_finish_as_json
from llm_spec.openai_logprobs import build_chat_logprobs

__all__ = ["ChatChunkStream"]


class ChatChunkStream:
    """The chunks of one answer. `describe_finish_as_json` and `raw_usage` are there once the last chunk has come.

    The Agents SDK takes a call's id for the call itself, for a whole run: where a server gives none, or one that the
    conversation has already, the call gets a new one.
    """

    def __init__(self, events: AsyncIterator[StreamEvent], request: ChatRequest, model: str) -> None:
        self._events = events
        self._used_ids = {call.id for message in request.messages for call in message.tool_calls}
        self._started_calls: set[int] = set()
        self._envelope: dict[str, Any] = {
            "id": f"chatcmpl-{uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "object": "chat.completion.chunk",
        }
        self.figures: dict[str, Any] = {}
        self.raw_usage: dict[str, Any] | None = None

    async def iter_chunks(self) -> AsyncIterator[ChatCompletionChunk]:
        """The chunks as their events come; the last has the finish reason and the usage."""
        async for event in self._events:
            match event:
                case TextDelta():
                    logprobs = build_chat_logprobs(event.logprobs)
                    yield self._build_chat_chunk({"content": event.text}, logprobs=logprobs)
                case ReasoningDelta():
                    yield self._build_chat_chunk({"reasoning_content": event.text})
                case ToolCallDelta():
                    yield self._build_chat_chunk({"tool_calls": [self._build_tool_call_delta(event)]})
                case Finish():
                    self.figures = describe_finish_as_json(event)
                    self.raw_usage = None if event.usage is None else convert_usage_to_openai(event.usage)
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
