"""OpenAI's chat completions: from bodies to requests, from answers to bodies and chunks. Pure.

https://platform.openai.com/docs/api-reference/chat
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from json.encoder import encode_basestring_ascii as quote
from typing import Any, Final, cast

from llm_spec.contract.errors import InvalidRequestError
from llm_spec.contract.events import (
    AnswerDetail,
    AnswerStarted,
    Fallback,
    GuaranteeWeakened,
    ReasoningDelta,
    Retry,
    Round,
    StreamEvent,
    TargetStreamReport,
    TextDelta,
    ToolCallDelta,
)
from llm_spec.contract.messages import ReasoningDetail
from llm_spec.contract.reasoning_details import merge_chat_details
from llm_spec.decoder.result import SpeculativeFinish, SpeculativeResult
from llm_spec.kit.answer_parts import merge_detail
from llm_spec.kit.json import dumps_ascii
from llm_spec.kit.openai_chunks import build_tool_call_delta
from llm_spec.kit.openai_logprobs import build_chat_logprobs
from llm_spec.server.apis.acceptance import build_acceptance_fields
from llm_spec.server.apis.encoding import (
    SSE_COMMENT,
    SSE_DONE,
    build_tier_fields,
    describe_result_for_client,
    format_sse,
    get_client_token_counts,
    get_finish_reason,
)
from llm_spec.server.apis.fields import (
    Body,
    Json,
    ParsedRequest,
    build_chat_request,
    get_num_choices,
    get_object_field,
    get_object_list_field,
    get_requested_model_name,
    get_typed_field,
    parse_openai_messages,
    parse_stop_strings,
)
from llm_spec.server.apis.logprobs import get_requested_top_logprobs
from llm_spec.server.problems import HttpProblem, get_public_name, redact_server_details

__all__ = ["ChatStreamEncoder", "build_chat_completion", "build_chat_usage", "parse_chat_request"]

_KNOWN_FIELDS: Final = frozenset(
    {
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "model",
        "n",
        "prediction",
        "response_format",
        "stop",
        "stream",
        "stream_options",
        "tool_choice",
        "tools",
        "top_logprobs",
    }
)
_FREQUENT_FIELDS: Final = frozenset({"max_completion_tokens", "max_tokens", "messages", "model", "stream"})


def parse_chat_request(body: Body, *, is_local: bool) -> ParsedRequest:
    """Parse a chat completion's body; raises InvalidRequestError, which names the wrong field."""
    if body.keys() <= _FREQUENT_FIELDS:
        request = build_chat_request(
            body,
            _KNOWN_FIELDS,
            is_local=is_local,
            messages=parse_openai_messages(body),
            max_tokens=_get_max_tokens(body),
        )
        return ParsedRequest(
            model=get_requested_model_name(body), request=request, stream=get_typed_field(body, "stream", default=False)
        )
    num_choices, logprobs = get_num_choices(body), get_typed_field(body, "logprobs", default=False)
    tools = tuple(get_object_list_field(body, "tools"))
    relay_fields: Json = {}
    if not is_local and (num_choices > 1 or logprobs):
        relay_fields = {name: body[name] for name in ("n", "logprobs", "top_logprobs") if body.get(name)}
    request = build_chat_request(
        body,
        _KNOWN_FIELDS,
        is_local=is_local,
        extra_fields=relay_fields,
        messages=parse_openai_messages(body),
        max_tokens=_get_max_tokens(body),
        stop=parse_stop_strings(body),
        tools=tools,
        tool_choice=_get_tool_choice(body, tools),
        response_format=_get_response_format(body),
        prediction=_get_prediction_text(body),
        top_logprobs=get_requested_top_logprobs(body, is_requested=logprobs, requested_by="logprobs: true")
        if is_local
        else None,
    )
    return ParsedRequest(
        model=get_requested_model_name(body),
        request=request,
        stream=get_typed_field(body, "stream", default=False),
        include_usage=get_typed_field(get_object_field(body, "stream_options"), "include_usage", default=False),
        num_choices=num_choices,
        logprobs=logprobs and not is_local,
    )


def _get_max_tokens(body: Body) -> int | None:
    max_completion_tokens: int | None = get_typed_field(body, "max_completion_tokens", None, int)
    return get_typed_field(body, "max_tokens", None, int) if max_completion_tokens is None else max_completion_tokens


def _get_tool_choice(body: Body, tools: Sequence[Json]) -> str | Json | None:
    choice: Any = body.get("tool_choice")
    if choice is not None and not isinstance(choice, str | dict):
        raise InvalidRequestError(f"tool_choice is of type {type(choice).__name__}; it must be a text or an object")
    return cast("str | Json | None", choice) if tools else None


def _get_response_format(body: Body) -> Json | None:
    requested_format = get_object_field(body, "response_format")
    if not requested_format:
        return None
    get_object_field(get_object_field(requested_format, "json_schema"), "schema")
    return None if requested_format.get("type", "text") == "text" else requested_format


def _get_prediction_text(body: Body) -> str | None:
    """Return the text of a predicted output, which is a text or text parts."""
    prediction = get_object_field(body, "prediction")
    if not prediction:
        return None
    content = prediction.get("content")
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in get_object_list_field(prediction, "content"))


def build_chat_usage(result: SpeculativeResult) -> Json | None:
    """Build the `usage` object, or return None if the tokens were not counted."""
    counts = get_client_token_counts(result)
    if not counts:
        return None
    return {
        "prompt_tokens": counts["input"],
        "completion_tokens": counts["output"],
        "total_tokens": counts["input"] + counts["output"],
        "prompt_tokens_details": {"cached_tokens": counts["cached"]},
        "completion_tokens_details": {
            "reasoning_tokens": counts["reasoning"],
            "accepted_prediction_tokens": counts["accepted"],
            "rejected_prediction_tokens": counts["rejected"],
        },
    }


def build_chat_completion(
    result: SpeculativeResult, *, answer_id: str, model: str, has_functions: bool = False
) -> Json:
    """Build a whole answer.

    `has_functions`: the request had `functions` in place of `tools`; their calls have another form.
    """
    message: Json = {"role": "assistant", "content": result.content, "refusal": None}
    if result.tool_calls:
        message = {**result.message.to_openai(), "refusal": None}
    if result.reasoning:
        message["reasoning_content"] = result.reasoning
    if has_functions and (calls := message.pop("tool_calls", None)):
        message["function_call"] = calls[0]["function"]
    for detail in result.details:
        if detail.api == "chat":
            merge_detail(message, detail.value)
    if message["refusal"] and not message["content"]:
        message["content"] = None
    if details := merge_chat_details(result.reasoning_events):
        message["reasoning_details"] = details
    usage = build_chat_usage(result)
    choice = {
        "index": 0,
        "message": message,
        "logprobs": build_chat_logprobs(result.logprobs),
        "finish_reason": _get_chat_finish_reason(result, has_functions=has_functions),
    }
    return {
        "id": f"chatcmpl-{answer_id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        **({} if usage is None else {"usage": usage}),
        **build_tier_fields(result),
        **build_acceptance_fields(result),
    }


def _get_chat_finish_reason(result: SpeculativeResult, *, has_functions: bool) -> str:
    """Return the finish reason; as at OpenAI, a refusal ends with `stop`."""
    reason = get_finish_reason(result)
    if has_functions and reason == "tool_calls":
        return "function_call"
    return "stop" if reason == "content_filter" and result.refusal else reason


class ChatStreamEncoder:
    """Encodes an answer as chunks. With `trace`, each tells in `llm_spec` how it came about."""

    keep_alive_bytes = SSE_COMMENT

    def __init__(
        self,
        *,
        answer_id: str,
        model: str,
        include_usage: bool,
        trace: bool,
        started_s: float,
        has_functions: bool = False,
    ) -> None:
        self._has_functions = has_functions
        self._envelope: Json = {
            "id": f"chatcmpl-{answer_id}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
        }
        self._include_usage = include_usage
        self._trace = trace
        self._started_s = started_s
        self._started_calls: set[int] = set()  # those whose first piece has been sent
        # Building the most frequent chunk from parts costs a tenth of encoding it whole
        head, tail = dumps_ascii(self._build_chunk_with_choice({"content": ""})).split(b'"content":""')
        self._text_head, self._text_tail = b"data: " + head + b'"content":', tail + b"\n\n"

    def encode_start(self) -> bytes:
        return b"" if self._trace else format_sse(self._build_chunk_with_choice({"role": "assistant", "content": ""}))

    def encode_event(self, event: StreamEvent) -> bytes:
        if self._trace:
            return self._encode_event_with_trace(event)
        if type(event) is TextDelta and event.logprobs is None:
            return self._text_head + quote(event.text).encode() + self._text_tail
        delta = self._build_chunk_delta(event)
        return (
            b""
            if delta is None
            else format_sse(self._build_chunk_with_choice(delta, logprobs=_build_logprobs_of_event(event)))
        )

    def encode_end(self, result: SpeculativeResult) -> bytes:
        self._envelope |= build_tier_fields(result)
        reason = _get_chat_finish_reason(result, has_functions=self._has_functions)
        frames = format_sse(self._build_chunk_with_choice({}, reason))
        usage = build_chat_usage(result)
        last_chunk: Json = {**self._envelope, "choices": []}
        if self._trace:
            last_chunk["llm_spec"] = {"result": describe_result_for_client(result)}
        if self._include_usage and usage is not None:
            last_chunk |= {"usage": usage, **build_acceptance_fields(result)}
        if self._trace or "usage" in last_chunk:
            frames += format_sse(last_chunk)
        return frames + SSE_DONE

    def encode_error(self, problem: HttpProblem) -> bytes:
        return format_sse(problem.to_openai()) + SSE_DONE

    def _build_chunk_with_choice(
        self, delta: Json, finish_reason: str | None = None, logprobs: Json | None = None
    ) -> Json:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        chunk = {**self._envelope, "choices": [choice]}
        return {**chunk, "usage": None} if self._include_usage else chunk

    def _build_chunk_delta(self, event: StreamEvent) -> Json | None:
        """Build a chunk's delta, or return None if the event is not part of the answer."""
        match event:
            case TextDelta():
                return {"content": event.text}
            case ReasoningDelta():
                return {"reasoning_content": event.text}
            case ReasoningDetail("chat", detail):
                return {"reasoning_details": [detail]}
            case AnswerDetail("chat", detail):
                return dict(detail)
            case ToolCallDelta():
                return self._build_tool_call_fields(event)
            case _:
                return None

    def _build_tool_call_fields(self, event: ToolCallDelta) -> Json:
        """Build a piece of a call; only the first piece has its id and name."""
        call_id = event.id or f"call_{self._envelope['id']}_{event.index}"
        is_first = event.index not in self._started_calls
        self._started_calls.add(event.index)
        piece = build_tool_call_delta(replace(event, id=call_id, name=(event.name or "") if is_first else None))
        return {"function_call": piece["function"]} if self._has_functions else {"tool_calls": [piece]}

    def _encode_event_with_trace(self, event: StreamEvent) -> bytes:
        elapsed_s = time.monotonic() - self._started_s
        if isinstance(event, AnswerStarted):
            chunk = self._build_chunk_with_choice({"role": "assistant", "content": ""})
            names = {"target": get_public_name(event.target), "draft": event.draft and get_public_name(event.draft)}
            return format_sse({**chunk, "llm_spec": {"started": dataclasses.asdict(event) | names}})
        delta = self._build_chunk_delta(event)
        if delta is not None:
            origin = event.origin if isinstance(event, TextDelta) else "plain"
            chunk = self._build_chunk_with_choice(delta, logprobs=_build_logprobs_of_event(event))
            return format_sse({**chunk, "llm_spec": {"origin": origin, "t": round(elapsed_s, 6)}})
        progress = _convert_progress_event_to_json(event)
        if progress is None:
            return b""
        name, fields = progress
        return format_sse({**self._envelope, "choices": [], "llm_spec": {name: {**fields, "t": round(elapsed_s, 6)}}})


def _build_logprobs_of_event(event: StreamEvent) -> Json | None:
    return build_chat_logprobs(event.logprobs) if isinstance(event, TextDelta) else None


_PROGRESS_NAMES: Final[Mapping[type, str]] = {
    Round: "round",
    Fallback: "fallback",
    Retry: "retry",
    TargetStreamReport: "upstream",
    GuaranteeWeakened: "weakened",
}


def _convert_progress_event_to_json(event: StreamEvent) -> tuple[str, Json] | None:
    name = _PROGRESS_NAMES.get(type(event))
    if name is None or isinstance(event, SpeculativeFinish):
        return None
    fields = dataclasses.asdict(event)
    if isinstance(event, TargetStreamReport):
        fields["outcome"] = "emitted" if fields.pop("is_used") else "cancelled"
    if "reason" in fields:
        fields["reason"] = redact_server_details(fields["reason"])
    return name, fields
