"""OpenAI's responses: from answers to bodies and numbered events. Pure.

https://platform.openai.com/docs/api-reference/responses-streaming
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from llm_spec.chat import AnswerDetail, ReasoningDelta, StreamEvent, TextDelta, TokenLogprob, ToolCall, ToolCallDelta
from llm_spec.openai_logprobs import convert_logprobs_to_openai
from llm_spec.result import SpeculativeResult
from llm_spec.server.encoding import (
    SSE_COMMENT,
    ToolCallSequencer,
    format_sse,
    get_client_token_counts,
    get_finish_reason,
)
from llm_spec.server.problems import HttpProblem
from llm_spec.server.request_fields import Json, ParsedRequest

__all__ = ["ResponsesStreamEncoder", "build_responses_api_response"]


def build_responses_api_response(
    result: SpeculativeResult, parsed: ParsedRequest, *, answer_id: str, model: str
) -> Json:
    """A whole answer."""
    output: list[Json] = []
    if result.reasoning:
        output.append(_build_reasoning_item(f"rs_{answer_id}", result.reasoning, "completed"))
    if result.refusal:
        output.append(_build_refusal_item(f"msg_{answer_id}_refusal", result.refusal))
    if result.content or not (output or result.tool_calls):
        logprobs = convert_logprobs_to_openai(result.logprobs)
        output.append(_build_message_item(f"msg_{answer_id}", result.content, "completed", logprobs))
    for index, call in enumerate(result.tool_calls):
        output.append(_build_function_call_item(f"fc_{answer_id}_{index}", call, "completed"))
    return _add_final_fields_to_response(_build_initial_response(parsed, answer_id, model), result, output)


def _build_initial_response(parsed: ParsedRequest, answer_id: str, model: str) -> Json:
    """A response that has just begun; it repeats the request's settings."""
    body, sampling = parsed.body, parsed.request.sampling
    return {
        "id": f"resp_{answer_id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": parsed.request.max_tokens,
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
        "top_logprobs": parsed.request.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _add_final_fields_to_response(response: Json, result: SpeculativeResult, output: Sequence[Json]) -> Json:
    reason = {"length": "max_output_tokens", "content_filter": "content_filter"}.get(get_finish_reason(result))
    if result.refusal and reason == "content_filter":  # the refusal is the answer
        reason = None
    counts = get_client_token_counts(result)
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


def _build_message_item(item_id: str, text: str | None, status: str, logprobs: Sequence[Json] = ()) -> Json:
    content = [] if text is None else [_build_text_part(text, logprobs)]
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}


def _build_refusal_item(item_id: str, text: str) -> Json:
    return {**_build_message_item(item_id, None, "completed"), "content": [{"type": "refusal", "refusal": text}]}


def _build_text_part(text: str, logprobs: Sequence[Json] = ()) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _build_reasoning_item(item_id: str, text: str | None, status: str) -> Json:
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    return {"id": item_id, "type": "reasoning", "status": status, "summary": [], "content": content}


def _build_function_call_item(item_id: str, call: ToolCall, status: str) -> Json:
    return {
        "id": item_id,
        "type": "function_call",
        "status": status,
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
    }


class ResponsesStreamEncoder:
    """An answer in semantic events, numbered; an item is open until one of another kind begins."""

    keep_alive_bytes = SSE_COMMENT

    def __init__(self, parsed: ParsedRequest, *, answer_id: str, model: str) -> None:
        self._answer_id = answer_id
        self._response = _build_initial_response(parsed, answer_id, model)
        self._sequence_number = 0
        self._finished_items: list[Json] = []  # the items that are done
        self._current_item: _OpenOutputItem | None = None
        self._call_sequencer = ToolCallSequencer()

    def encode_start(self) -> bytes:
        return self._format_numbered_event("response.created", response=self._response) + self._format_numbered_event(
            "response.in_progress", response=self._response
        )

    def encode_event(self, event: StreamEvent) -> bytes:
        match event:
            case TextDelta():
                item_id = f"msg_{self._answer_id}_{len(self._finished_items)}"
                return self._encode_item_text(_OpenMessageItem, item_id, event.text, event.logprobs)
            case ReasoningDelta():
                return self._encode_item_text(
                    _OpenReasoningItem, f"rs_{self._answer_id}_{len(self._finished_items)}", event.text
                )
            case AnswerDetail() if event.refusal:
                item_id = f"msg_{self._answer_id}_{len(self._finished_items)}"
                return self._encode_item_text(_OpenRefusalItem, item_id, event.refusal)
            case ToolCallDelta():
                return b"".join(map(self._encode_tool_call_delta, self._call_sequencer.push(event)))
            case _:
                return b""

    def encode_end(self, result: SpeculativeResult) -> bytes:
        frames = b"".join(map(self._encode_tool_call_delta, self._call_sequencer.flush()))
        if not self._finished_items and self._current_item is None:
            frames += self.encode_event(TextDelta(""))
        frames += self._close_output_item()
        response = _add_final_fields_to_response(self._response, result, self._finished_items)
        return frames + self._format_numbered_event(f"response.{response['status']}", response=response)

    def encode_error(self, problem: HttpProblem) -> bytes:
        failed = {"status": "failed", "error": {"code": "server_error", "message": problem.message}}
        response = {**self._response, **failed, "output": self._finished_items}
        return self._format_numbered_event("response.failed", response=response)

    # ------------------------------------------------------------------------------------------ inside

    def _encode_item_text(
        self,
        kind: type[_OpenMessageItem | _OpenReasoningItem | _OpenRefusalItem],
        item_id: str,
        text: str,
        logprobs: Sequence[TokenLogprob] | None = None,
    ) -> bytes:
        frames = b""
        if not isinstance(self._current_item, kind):
            frames = self._close_output_item() + self._start_output_item(kind(item_id, len(self._finished_items)))
        return frames + self._encode_item_delta(text, logprobs)

    def _encode_tool_call_delta(self, event: ToolCallDelta) -> bytes:
        frames, item = b"", self._current_item
        if not isinstance(item, _OpenFunctionCallItem) or item.index != event.index:
            frames = self._close_output_item()
            number = len(self._finished_items)
            call = ToolCall(event.id or f"call_{self._answer_id}_{number}", event.name or "", "")
            frames += self._start_output_item(
                _OpenFunctionCallItem(f"fc_{self._answer_id}_{number}", number, event.index, call)
            )
        return frames + self._encode_item_delta(event.arguments)

    def _start_output_item(self, item: _OpenOutputItem) -> bytes:
        self._current_item = item
        return b"".join(self._format_numbered_event(name, **fields) for name, fields in item.iter_start_events())

    def _encode_item_delta(self, text: str, logprobs: Sequence[TokenLogprob] | None = None) -> bytes:
        item = self._current_item
        if item is None or not text:
            return b""
        item.add_text(text, convert_logprobs_to_openai(logprobs))
        name, fields = item.build_delta_event(text)
        return self._format_numbered_event(name, **fields)

    def _close_output_item(self) -> bytes:
        item, self._current_item = self._current_item, None
        if item is None:
            return b""
        self._finished_items.append(item.build_finished_item())
        return b"".join(self._format_numbered_event(name, **fields) for name, fields in item.iter_end_events())

    def _format_numbered_event(self, name: str, /, **fields: Any) -> bytes:  # a call's fields have a name, too
        number, self._sequence_number = self._sequence_number, self._sequence_number + 1
        return format_sse({"type": name, "sequence_number": number, **fields}, name)


class _OpenOutputItem:
    """An item of the output that is being written."""

    def __init__(self, item_id: str, output_index: int) -> None:
        self.item_id = item_id
        self.output_index = output_index
        self.text = ""
        self.logprobs: list[Json] = []
        self._new_logprobs: list[Json] = []

    def add_text(self, text: str, logprobs: list[Json]) -> None:
        """Write one more piece."""
        self.text += text
        self.logprobs += logprobs
        self._new_logprobs = logprobs

    @property
    def position_fields(self) -> Mapping[str, Any]:
        return {"item_id": self.item_id, "output_index": self.output_index}

    def iter_start_events(self) -> Iterator[tuple[str, Json]]:
        yield "response.output_item.added", {"output_index": self.output_index, "item": self.build_empty_item()}

    def iter_end_events(self) -> Iterator[tuple[str, Json]]:
        yield "response.output_item.done", {"output_index": self.output_index, "item": self.build_finished_item()}

    def build_empty_item(self) -> Json:
        raise NotImplementedError

    def build_delta_event(self, text: str) -> tuple[str, Json]:
        raise NotImplementedError

    def build_finished_item(self) -> Json:
        raise NotImplementedError


class _OpenMessageItem(_OpenOutputItem):
    @property
    def position_fields(self) -> Mapping[str, Any]:
        return {**super().position_fields, "content_index": 0}

    def iter_start_events(self) -> Iterator[tuple[str, Json]]:
        yield from super().iter_start_events()
        yield "response.content_part.added", {**self.position_fields, "part": _build_text_part("")}

    def build_empty_item(self) -> Json:
        return _build_message_item(self.item_id, None, "in_progress")

    def build_delta_event(self, text: str) -> tuple[str, Json]:
        return "response.output_text.delta", {**self.position_fields, "delta": text, "logprobs": self._new_logprobs}

    def iter_end_events(self) -> Iterator[tuple[str, Json]]:
        yield "response.output_text.done", {**self.position_fields, "text": self.text, "logprobs": self.logprobs}
        yield "response.content_part.done", {**self.position_fields, "part": _build_text_part(self.text, self.logprobs)}
        yield from super().iter_end_events()

    def build_finished_item(self) -> Json:
        return _build_message_item(self.item_id, self.text, "completed", self.logprobs)


class _OpenRefusalItem(_OpenOutputItem):
    @property
    def position_fields(self) -> Mapping[str, Any]:
        return {**super().position_fields, "content_index": 0}

    def iter_start_events(self) -> Iterator[tuple[str, Json]]:
        yield from super().iter_start_events()
        yield "response.content_part.added", {**self.position_fields, "part": {"type": "refusal", "refusal": ""}}

    def build_empty_item(self) -> Json:
        return _build_message_item(self.item_id, None, "in_progress")

    def build_delta_event(self, text: str) -> tuple[str, Json]:
        return "response.refusal.delta", {**self.position_fields, "delta": text}

    def iter_end_events(self) -> Iterator[tuple[str, Json]]:
        yield "response.refusal.done", {**self.position_fields, "refusal": self.text}
        part = {"type": "refusal", "refusal": self.text}
        yield "response.content_part.done", {**self.position_fields, "part": part}
        yield from super().iter_end_events()

    def build_finished_item(self) -> Json:
        return _build_refusal_item(self.item_id, self.text)


class _OpenReasoningItem(_OpenOutputItem):
    @property
    def position_fields(self) -> Mapping[str, Any]:
        return {**super().position_fields, "content_index": 0}

    def build_empty_item(self) -> Json:
        return _build_reasoning_item(self.item_id, None, "in_progress")

    def build_delta_event(self, text: str) -> tuple[str, Json]:
        return "response.reasoning_text.delta", {**self.position_fields, "delta": text}

    def iter_end_events(self) -> Iterator[tuple[str, Json]]:
        yield "response.reasoning_text.done", {**self.position_fields, "text": self.text}
        yield from super().iter_end_events()

    def build_finished_item(self) -> Json:
        return _build_reasoning_item(self.item_id, self.text, "completed")


class _OpenFunctionCallItem(_OpenOutputItem):
    def __init__(self, item_id: str, output_index: int, index: int, call: ToolCall) -> None:
        super().__init__(item_id, output_index)
        self.index = index
        self.call = call

    def build_empty_item(self) -> Json:
        return _build_function_call_item(self.item_id, self.call, "in_progress")

    def build_delta_event(self, text: str) -> tuple[str, Json]:
        return "response.function_call_arguments.delta", {**self.position_fields, "delta": text}

    def iter_end_events(self) -> Iterator[tuple[str, Json]]:
        arguments_done = {**self.position_fields, "name": self.call.name, "arguments": self.text}
        yield "response.function_call_arguments.done", arguments_done
        yield from super().iter_end_events()

    def build_finished_item(self) -> Json:
        return _build_function_call_item(self.item_id, replace(self.call, arguments=self.text), "completed")
