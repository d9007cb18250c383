"""OpenAI's responses: from answers to bodies and numbered events. Pure.

https://platform.openai.com/docs/api-reference/responses-streaming
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from llm_spec.chat import ReasoningDelta, StreamEvent, TextDelta, ToolCall, ToolCallDelta
from llm_spec.result import SpeculativeResult
from llm_spec.server.bodies import Asked, Json
from llm_spec.server.encoding import COMMENT, CallOrder, finish_reason_of, sse, usage_counts
from llm_spec.server.problems import Problem

__all__ = ["ResponsesEncoder", "response_body"]


def response_body(result: SpeculativeResult, asked: Asked, *, answer_id: str, model: str) -> Json:
    """A whole answer."""
    output: list[Json] = []
    if result.reasoning:
        output.append(_reasoning_item(f"rs_{answer_id}", result.reasoning, "completed"))
    if result.content or not result.tool_calls:
        output.append(_message_item(f"msg_{answer_id}", result.content, "completed"))
    for index, call in enumerate(result.tool_calls):
        output.append(_call_item(f"fc_{answer_id}_{index}", call, "completed"))
    return _ended(_response(asked, answer_id, model), result, output)


def _response(asked: Asked, answer_id: str, model: str) -> Json:
    """A response that has just begun; it repeats what was asked for."""
    body, sampling = asked.body, asked.request.sampling
    return {
        "id": f"resp_{answer_id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": asked.request.max_tokens,
        "metadata": body.get("metadata") or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": None,
        "store": False,
        "temperature": sampling.temperature,
        "text": body.get("text") or {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": list(body.get("tools") or ()),
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _ended(response: Json, result: SpeculativeResult, output: Sequence[Json]) -> Json:
    reason = {"length": "max_output_tokens", "content_filter": "content_filter"}.get(finish_reason_of(result))
    counts = usage_counts(result)
    usage = (
        {
            "input_tokens": counts["input"],
            "input_tokens_details": {"cached_tokens": counts["cached"], "cache_write_tokens": 0},
            "output_tokens": counts["output"],
            "output_tokens_details": {
                "reasoning_tokens": counts["reasoning"],
                "accepted_prediction_tokens": counts["accepted"],
                "rejected_prediction_tokens": counts["rejected"],
            },
            "total_tokens": counts["input"] + counts["output"],
        }
        if counts
        else None
    )
    ending = (
        {"status": "completed"}
        if reason is None
        else {"status": "incomplete", "incomplete_details": {"reason": reason}}
    )
    return {**response, **ending, "output": list(output), "usage": usage}


def _message_item(item_id: str, text: str | None, status: str) -> Json:
    content = [] if text is None else [_text_part(text)]
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}


def _text_part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _reasoning_item(item_id: str, text: str | None, status: str) -> Json:
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    return {"id": item_id, "type": "reasoning", "status": status, "summary": [], "content": content}


def _call_item(item_id: str, call: ToolCall, status: str) -> Json:
    return {
        "id": item_id,
        "type": "function_call",
        "status": status,
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
    }


class ResponsesEncoder:
    """An answer in semantic events, numbered; an item is open until one of another kind begins."""

    keep_alive = COMMENT

    def __init__(self, asked: Asked, *, answer_id: str, model: str) -> None:
        self._answer_id = answer_id
        self._response = _response(asked, answer_id, model)
        self._number = 0
        self._output: list[Json] = []  # the items that are done
        self._open: _OpenItem | None = None
        self._calls = CallOrder()

    def begin(self) -> bytes:
        return self._told("response.created", response=self._response) + self._told(
            "response.in_progress", response=self._response
        )

    def event(self, event: StreamEvent) -> bytes:
        match event:
            case TextDelta():
                return self._add(_OpenMessage, f"msg_{self._answer_id}_{len(self._output)}", event.text)
            case ReasoningDelta():
                return self._add(_OpenReasoning, f"rs_{self._answer_id}_{len(self._output)}", event.text)
            case ToolCallDelta():
                return b"".join(map(self._call, self._calls.push(event)))
            case _:
                return b""

    def end(self, result: SpeculativeResult) -> bytes:
        told = b"".join(map(self._call, self._calls.rest()))
        if not self._output and self._open is None:
            told += self.event(TextDelta(""))
        told += self._close()
        response = _ended(self._response, result, self._output)
        return told + self._told(f"response.{response['status']}", response=response)

    def failure(self, problem: Problem) -> bytes:
        failed = {"status": "failed", "error": {"code": "server_error", "message": problem.message}}
        response = {**self._response, **failed, "output": self._output}
        return self._told("response.failed", response=response)

    # ------------------------------------------------------------------------------------------ inside

    def _add(self, kind: type[_OpenMessage | _OpenReasoning], item_id: str, text: str) -> bytes:
        told = b""
        if not isinstance(self._open, kind):
            told = self._close() + self._begin(kind(item_id, len(self._output)))
        return told + self._written(text)

    def _call(self, event: ToolCallDelta) -> bytes:
        told, item = b"", self._open
        if not isinstance(item, _OpenCall) or item.index != event.index:
            told = self._close()
            number = len(self._output)
            call = ToolCall(event.id or f"call_{self._answer_id}_{number}", event.name or "", "")
            told += self._begin(_OpenCall(f"fc_{self._answer_id}_{number}", number, event.index, call))
        return told + self._written(event.arguments)

    def _begin(self, item: _OpenItem) -> bytes:
        self._open = item
        return b"".join(self._told(name, **fields) for name, fields in item.begin())

    def _written(self, text: str) -> bytes:
        item = self._open
        if item is None or not text:
            return b""
        item.text += text
        name, fields = item.delta(text)
        return self._told(name, **fields)

    def _close(self) -> bytes:
        item, self._open = self._open, None
        if item is None:
            return b""
        self._output.append(item.done())
        return b"".join(self._told(name, **fields) for name, fields in item.end())

    def _told(self, name: str, /, **fields: Any) -> bytes:  # a call's fields have a name, too
        number, self._number = self._number, self._number + 1
        return sse({"type": name, "sequence_number": number, **fields}, name)


class _OpenItem:
    """An item of the output that is being written."""

    def __init__(self, item_id: str, output_index: int) -> None:
        self.item_id = item_id
        self.output_index = output_index
        self.text = ""

    @property
    def place(self) -> Mapping[str, Any]:
        return {"item_id": self.item_id, "output_index": self.output_index}

    def begin(self) -> Iterator[tuple[str, Json]]:
        yield "response.output_item.added", {"output_index": self.output_index, "item": self.empty()}

    def end(self) -> Iterator[tuple[str, Json]]:
        yield "response.output_item.done", {"output_index": self.output_index, "item": self.done()}

    def empty(self) -> Json:
        raise NotImplementedError

    def delta(self, text: str) -> tuple[str, Json]:
        raise NotImplementedError

    def done(self) -> Json:
        raise NotImplementedError


class _OpenMessage(_OpenItem):
    @property
    def place(self) -> Mapping[str, Any]:
        return {**super().place, "content_index": 0}

    def begin(self) -> Iterator[tuple[str, Json]]:
        yield from super().begin()
        yield "response.content_part.added", {**self.place, "part": _text_part("")}

    def empty(self) -> Json:
        return _message_item(self.item_id, None, "in_progress")

    def delta(self, text: str) -> tuple[str, Json]:
        return "response.output_text.delta", {**self.place, "delta": text, "logprobs": []}

    def end(self) -> Iterator[tuple[str, Json]]:
        yield "response.output_text.done", {**self.place, "text": self.text, "logprobs": []}
        yield "response.content_part.done", {**self.place, "part": _text_part(self.text)}
        yield from super().end()

    def done(self) -> Json:
        return _message_item(self.item_id, self.text, "completed")


class _OpenReasoning(_OpenItem):
    @property
    def place(self) -> Mapping[str, Any]:
        return {**super().place, "content_index": 0}

    def empty(self) -> Json:
        return _reasoning_item(self.item_id, None, "in_progress")

    def delta(self, text: str) -> tuple[str, Json]:
        return "response.reasoning_text.delta", {**self.place, "delta": text}

    def end(self) -> Iterator[tuple[str, Json]]:
        yield "response.reasoning_text.done", {**self.place, "text": self.text}
        yield from super().end()

    def done(self) -> Json:
        return _reasoning_item(self.item_id, self.text, "completed")


class _OpenCall(_OpenItem):
    def __init__(self, item_id: str, output_index: int, index: int, call: ToolCall) -> None:
        super().__init__(item_id, output_index)
        self.index = index
        self._call = call

    def empty(self) -> Json:
        return _call_item(self.item_id, self._call, "in_progress")

    def delta(self, text: str) -> tuple[str, Json]:
        return "response.function_call_arguments.delta", {**self.place, "delta": text}

    def end(self) -> Iterator[tuple[str, Json]]:
        told = {**self.place, "name": self._call.name, "arguments": self.text}
        yield "response.function_call_arguments.done", told
        yield from super().end()

    def done(self) -> Json:
        return _call_item(self.item_id, replace(self._call, arguments=self.text), "completed")
