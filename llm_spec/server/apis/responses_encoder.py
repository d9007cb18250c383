"""OpenAI's responses: from answers to bodies and numbered events. Pure.

https://platform.openai.com/docs/api-reference/responses-streaming
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, cast

from llm_spec.contract.events import AnswerDetail, ReasoningDelta, StreamEvent, TextDelta, ToolCallDelta
from llm_spec.contract.messages import ToolCall
from llm_spec.decoder.result import SpeculativeResult
from llm_spec.kit.openai_logprobs import convert_logprobs_to_openai
from llm_spec.server.apis.compaction import build_compaction_item, is_compaction_requested
from llm_spec.server.apis.encoding import (
    SSE_COMMENT,
    ToolCallSequencer,
    build_tier_fields,
    format_sse,
    get_client_token_counts,
    get_finish_reason,
)
from llm_spec.server.apis.fields import ClientTool, Json, ParsedRequest
from llm_spec.server.apis.responses_items import (
    OpenCustomCallItem,
    OpenFunctionCallItem,
    OpenMessageItem,
    OpenOutputItem,
    OpenReasoningItem,
    OpenRefusalItem,
    OutputEvent,
    parse_image,
)
from llm_spec.server.problems import HttpProblem

__all__ = ["ResponsesStreamEncoder", "build_responses_api_response"]

# Codes that clients of responses know: the API's own, and those of its refusals
_ERROR_CODES: Final = frozenset(
    {
        "bio_policy",
        "context_length_exceeded",
        "cyber_policy",
        "data_residency_mismatch",
        "image_content_policy_violation",
        "image_file_too_large",
        "image_parse_error",
        "image_too_large",
        "image_too_small",
        "insufficient_quota",
        "invalid_base64_image",
        "invalid_image",
        "invalid_image_format",
        "invalid_image_url",
        "invalid_prompt",
        "misalignment_policy_violation",
        "rate_limit_exceeded",
        "server_is_overloaded",
        "slow_down",
        "unsupported_image_media_type",
    }
)
_ERROR_CODES_BY_STATUS: Final = {400: "invalid_prompt", 413: "invalid_prompt", 429: "rate_limit_exceeded"}


def build_responses_api_response(
    result: SpeculativeResult, parsed: ParsedRequest, *, answer_id: str, model: str
) -> Json:
    """Build a whole answer, with the items that its stream would have."""
    output = _OutputWriter(parsed, answer_id)
    for event in result.iterate_answer():
        output.write_event(event)
    output.end()
    return _add_final_fields_to_response(_build_initial_response(parsed, answer_id, model), result, output.list_items())


def _build_initial_response(parsed: ParsedRequest, answer_id: str, model: str) -> Json:
    """Build a response that has just begun; it repeats the request's settings."""
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
    return {**response, **ending, "output": list(output), "usage": usage, **build_tier_fields(result)}


class ResponsesStreamEncoder:
    """Encodes an answer as numbered semantic events."""

    keep_alive_bytes = SSE_COMMENT

    def __init__(self, parsed: ParsedRequest, *, answer_id: str, model: str) -> None:
        self._response = _build_initial_response(parsed, answer_id, model)
        self._sequence_number = 0
        self._output = _OutputWriter(parsed, answer_id)

    def encode_start(self) -> bytes:
        return self._format_numbered_event("response.created", response=self._response) + self._format_numbered_event(
            "response.in_progress", response=self._response
        )

    def encode_event(self, event: StreamEvent) -> bytes:
        return self._format_events(self._output.write_event(event))

    def encode_end(self, result: SpeculativeResult) -> bytes:
        frames = self._format_events(self._output.end())
        response = _add_final_fields_to_response(self._response, result, self._output.list_items())
        return frames + self._format_numbered_event(f"response.{response['status']}", response=response)

    def encode_error(self, problem: HttpProblem) -> bytes:
        failed = {"status": "failed", "error": {"code": _get_error_code(problem), "message": problem.message}}
        response = {**self._response, **failed, "output": self._output.list_items()}
        return self._format_numbered_event("response.failed", response=response)

    def _format_events(self, events: Sequence[OutputEvent]) -> bytes:
        return b"".join(self._format_numbered_event(name, **fields) for name, fields in events)

    # Positional only, because a call's fields have a name, too
    def _format_numbered_event(self, name: str, /, **fields: Any) -> bytes:
        number, self._sequence_number = self._sequence_number, self._sequence_number + 1
        return format_sse({"type": name, "sequence_number": number, **fields}, name)


def _get_error_code(problem: HttpProblem) -> str:
    """Return the problem's own code if clients know it, else one for its status."""
    if problem.code in _ERROR_CODES:
        return problem.code
    return _ERROR_CODES_BY_STATUS.get(problem.status, "server_error")


class _OutputWriter:
    """Puts an answer's events into items, and returns the events that a client gets.

    A text is done when reasoning or a call begins. Reasoning is done when a text or a call begins.
    A call is open to the end, since nothing marks its end. So a text between its pieces becomes an
    item of its own behind it, while both are open. Further calls follow at the end, one after
    another. If a summary was requested, the text is the summary.
    """

    def __init__(self, parsed: ParsedRequest, answer_id: str) -> None:
        self._client_tools = parsed.client_tools
        self._summary: list[str] | None = [] if is_compaction_requested(parsed.body) else None
        self._answer_id = answer_id
        self._finished_items: dict[int, Json] = {}  # by their places in the output
        self._num_items = 0
        self._text: OpenMessageItem | OpenReasoningItem | OpenRefusalItem | None = None
        # The open call, with its number among the answer's calls
        self._call: tuple[int, OpenFunctionCallItem] | None = None
        self._call_sequencer = ToolCallSequencer()
        self._annotations: list[Json] = []  # for the next text
        self._images: list[Mapping[str, Any]] = []  # for the end

    def list_items(self) -> list[Json]:
        """List the items that are done, in their order."""
        return [item for _, item in sorted(self._finished_items.items(), key=lambda placed: placed[0])]

    def write_event(self, event: StreamEvent) -> list[OutputEvent]:
        """Add the next event of the answer."""
        match event:
            case TextDelta() if self._summary is not None:
                self._summary.append(event.text)
                return []
            case TextDelta():
                return list(self._write_text(event))
            case ReasoningDelta():
                return list(self._write_reasoning(event))
            case ToolCallDelta():
                return [out for delta in self._call_sequencer.push(event) for out in self._write_call_delta(delta)]
            case AnswerDetail():
                return list(self._write_detail(event))
            case _:
                return []

    def end(self) -> list[OutputEvent]:
        """Finish what is open; an empty answer gets one empty text."""
        images = [image for image in map(parse_image, self._images) if image is not None]
        events: list[OutputEvent] = []
        if self._annotations or not (self._num_items or images or self._summary is not None):
            events += self._open_message_item()
        for delta in self._call_sequencer.flush():
            events += self._write_call_delta(delta)
        events += [*self._finish_call(), *self._finish_text()]
        if self._summary is not None:
            events += self._write_whole_item(partial(self._build_compaction_item, "".join(self._summary)))
        for data in images:
            events += self._write_whole_item(partial(self._build_image_item, data))
        return events

    def _write_text(self, event: TextDelta) -> Iterator[OutputEvent]:
        if not event.text and not isinstance(self._text, OpenMessageItem):
            return
        item = self._text
        if not isinstance(item, OpenMessageItem):
            yield from self._open_message_item()
            item = cast("OpenMessageItem", self._text)
        yield from item.iter_text_events(event.text, convert_logprobs_to_openai(event.logprobs))

    def _open_message_item(self) -> Iterator[OutputEvent]:
        yield from self._finish_text()
        item = self._text = OpenMessageItem(self._answer_id, self._take_output_index())
        yield from item.iter_start_events()
        annotations, self._annotations = self._annotations, []
        for annotation in annotations:
            yield from item.iter_annotation_events(annotation)

    def _write_reasoning(self, event: ReasoningDelta) -> Iterator[OutputEvent]:
        if not event.text:
            return
        if not isinstance(self._text, OpenReasoningItem):
            yield from self._finish_text()
            self._text = OpenReasoningItem(self._answer_id, self._take_output_index())
            yield from self._text.iter_start_events()
        yield from self._text.iter_delta_events(event.text)

    def _write_refusal(self, text: str) -> Iterator[OutputEvent]:
        if not isinstance(self._text, OpenRefusalItem):
            yield from self._finish_text()
            self._text = OpenRefusalItem(self._answer_id, self._take_output_index())
            yield from self._text.iter_start_events()
        yield from self._text.iter_delta_events(text)

    def _write_call_delta(self, delta: ToolCallDelta) -> Iterator[OutputEvent]:
        if self._call is None or self._call[0] != delta.index:
            yield from self._finish_call()
            yield from self._finish_text()
            item = self._create_call_item(delta)
            self._call = (delta.index, item)
            yield from item.iter_start_events()
        yield from self._call[1].iter_delta_events(delta.arguments)

    def _create_call_item(self, delta: ToolCallDelta) -> OpenFunctionCallItem:
        name = delta.name or ""
        tool = self._client_tools.get(name, ClientTool(name, kind=delta.kind))
        call, index = ToolCall(delta.id or "", name, ""), self._take_output_index()
        if tool.kind == "function":
            return OpenFunctionCallItem(self._answer_id, index, call, tool)
        return OpenCustomCallItem(self._answer_id, index, call, tool, is_encoded=delta.kind == "function")

    def _write_detail(self, event: AnswerDetail) -> Iterator[OutputEvent]:
        """Write a refusal, citations and images. Responses have no place for other details."""
        detail: Mapping[str, Any] = event.value if event.api == "chat" else {}
        if event.refusal:
            yield from self._write_refusal(event.refusal)
        for annotation in map(_convert_annotation, _list_objects(detail.get("annotations"))):
            if isinstance(self._text, OpenMessageItem):
                yield from self._text.iter_annotation_events(annotation)
            else:
                self._annotations.append(annotation)
        self._images += _list_objects(detail.get("images"))

    def _write_whole_item(self, build_item: Callable[[int], tuple[Json, Json]]) -> list[OutputEvent]:
        """Write an item that comes at once.

        `build_item`: returns the item as it begins and as it is done, given its place.
        """
        index = self._take_output_index()
        begun, done = build_item(index)
        self._finished_items[index] = done
        return [
            ("response.output_item.added", {"output_index": index, "item": begun}),
            ("response.output_item.done", {"output_index": index, "item": done}),
        ]

    def _build_image_item(self, data: str, index: int) -> tuple[Json, Json]:
        item = {"id": f"ig_{self._answer_id}_{index}", "type": "image_generation_call"}
        return {**item, "status": "in_progress", "result": None}, {**item, "status": "completed", "result": data}

    def _build_compaction_item(self, summary: str, index: int) -> tuple[Json, Json]:
        item_id = f"cmp_{self._answer_id}_{index}"
        return build_compaction_item(item_id, ""), build_compaction_item(item_id, summary)

    def _take_output_index(self) -> int:
        index, self._num_items = self._num_items, self._num_items + 1
        return index

    def _finish_text(self) -> list[OutputEvent]:
        item, self._text = self._text, None
        return self._finish_item(item)

    def _finish_call(self) -> list[OutputEvent]:
        call, self._call = self._call, None
        return self._finish_item(None if call is None else call[1])

    def _finish_item(self, item: OpenOutputItem | None) -> list[OutputEvent]:
        if item is None:
            return []
        events = list(item.iter_end_events())
        self._finished_items[item.output_index] = item.build_finished_item()
        return events


def _list_objects(values: object) -> list[Mapping[str, Any]]:
    found = cast("list[object]", values) if isinstance(values, list | tuple) else []
    return [cast("Mapping[str, Any]", value) for value in found if isinstance(value, Mapping)]


def _convert_annotation(annotation: Mapping[str, Any]) -> Json:
    """Convert an annotation of chat completions, whose fields are in an object of their own."""
    kind = str(annotation.get("type"))
    fields: object = annotation.get(kind)
    return {"type": kind, **cast("Mapping[str, Any]", fields)} if isinstance(fields, Mapping) else dict(annotation)
