"""OpenAI's chat completions: from bodies to requests, from answers to bodies and chunks. Pure.

https://platform.openai.com/docs/api-reference/chat
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring_ascii as quote
from typing import Any, Final, cast

from llm_spec.chat import (
    Fallback,
    ReasoningDelta,
    ReasoningDetail,
    Retry,
    Round,
    Started,
    StreamEvent,
    TargetStream,
    TextDelta,
    ToolCallDelta,
    Weakened,
)
from llm_spec.errors import InvalidRequestError
from llm_spec.json_text import dumps_ascii
from llm_spec.result import SpeculativeFinish, SpeculativeResult
from llm_spec.server.bodies import (
    Asked,
    Body,
    Json,
    chat_request,
    listed,
    read_messages,
    read_model,
    read_num_choices,
    read_stop,
    table,
    wanted,
)
from llm_spec.server.encoding import COMMENT, DONE, figures, finish_reason_of, sse, usage_counts
from llm_spec.server.problems import Problem, shown_name, without_places

__all__ = ["ChatEncoder", "chat_body", "chat_usage", "read_chat"]

_KNOWN: Final = frozenset(
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
_DETAIL_TEXTS: Final = ("text", "summary", "data")


def read_chat(body: Body, *, is_local: bool) -> Asked:
    """A chat completion's body; raises InvalidRequestError naming the field that is wrong."""
    num_choices, logprobs = read_num_choices(body), wanted(body, "logprobs", default=False)
    tools = tuple(listed(body, "tools"))
    relayed: Json = {}
    if num_choices > 1 or logprobs:
        relayed = {name: body[name] for name in ("n", "logprobs", "top_logprobs") if body.get(name)}
    request = chat_request(
        body,
        _KNOWN,
        is_local=is_local,
        more=relayed,
        messages=read_messages(body),
        max_tokens=_max_tokens(body),
        stop=read_stop(body),
        tools=tools,
        tool_choice=_tool_choice(body, tools),
        response_format=_response_format(body),
        prediction=_prediction(body),
    )
    return Asked(
        model=read_model(body),
        request=request,
        stream=wanted(body, "stream", default=False),
        include_usage=wanted(table(body, "stream_options"), "include_usage", default=False),
        num_choices=num_choices,
        logprobs=logprobs,
    )


def _max_tokens(body: Body) -> int | None:
    newer: int | None = wanted(body, "max_completion_tokens", None, int)
    return wanted(body, "max_tokens", None, int) if newer is None else newer


def _tool_choice(body: Body, tools: Sequence[Json]) -> str | Json | None:
    choice: Any = body.get("tool_choice")
    if choice is not None and not isinstance(choice, str | dict):
        raise InvalidRequestError(f"tool_choice is of type {type(choice).__name__}; it must be a text or an object")
    return cast("str | Json | None", choice) if tools else None


def _response_format(body: Body) -> Json | None:
    wanted_format = table(body, "response_format")
    if not wanted_format:
        return None
    table(table(wanted_format, "json_schema"), "schema")
    return None if wanted_format.get("type", "text") == "text" else wanted_format


def _prediction(body: Body) -> str | None:
    """The text of a predicted output: a text, or text parts."""
    prediction = table(body, "prediction")
    if not prediction:
        return None
    content = prediction.get("content")
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in listed(prediction, "content"))


def chat_usage(result: SpeculativeResult) -> Json | None:
    """The `usage` object; None where nobody counted."""
    counts = usage_counts(result)
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


def chat_body(result: SpeculativeResult, *, answer_id: str, model: str) -> Json:
    """A whole answer."""
    message: Json = {"role": "assistant", "content": result.content, "refusal": None}
    if result.tool_calls:
        message = {**result.message.to_openai(), "refusal": None}
    if result.reasoning:
        message["reasoning_content"] = result.reasoning
    if details := _reasoning_details(result):
        message["reasoning_details"] = details
    usage = chat_usage(result)
    return {
        "id": f"chatcmpl-{answer_id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason_of(result)}],
        **({} if usage is None else {"usage": usage}),
    }


def _reasoning_details(result: SpeculativeResult) -> list[Json]:
    """The details that came in pieces, each whole: neighbours of one type and index are one, their texts joined."""
    whole: list[Json] = []
    for event in result.reasoning_events:
        if not isinstance(event, ReasoningDetail) or event.api != "chat":
            continue
        piece = {name: value for name, value in event.value.items() if value is not None}
        before = whole[-1] if whole else {}
        if before and all(before.get(name) == piece.get(name) for name in ("type", "index")):
            texts = {name: before[name] + piece[name] for name in _DETAIL_TEXTS if name in before and name in piece}
            whole[-1] = before | piece | texts
        else:
            whole.append(piece)
    return whole


class ChatEncoder:
    """An answer in chunks. With `trace` every chunk tells in `llm_spec` how it came about."""

    keep_alive = COMMENT

    def __init__(self, *, answer_id: str, model: str, include_usage: bool, trace: bool, started_s: float) -> None:
        self._envelope: Json = {
            "id": f"chatcmpl-{answer_id}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
        }
        self._include_usage = include_usage
        self._trace = trace
        self._started_s = started_s
        self._calls: set[int] = set()  # those whose first piece has been sent
        # the most frequent chunk is put together from parts: that costs a tenth of encoding it whole
        head, tail = dumps_ascii(self._chunk({"content": ""})).split(b'"content":""')
        self._head, self._tail = b"data: " + head + b'"content":', tail + b"\n\n"

    def begin(self) -> bytes:
        return b"" if self._trace else sse(self._chunk({"role": "assistant", "content": ""}))

    def event(self, event: StreamEvent) -> bytes:
        if self._trace:
            return self._traced(event)
        if type(event) is TextDelta:
            return self._head + quote(event.text).encode() + self._tail
        delta = self._delta(event)
        return b"" if delta is None else sse(self._chunk(delta))

    def end(self, result: SpeculativeResult) -> bytes:
        told = sse(self._chunk({}, finish_reason_of(result)))
        usage = chat_usage(result)
        last: Json = {**self._envelope, "choices": []}
        if self._trace:
            last["llm_spec"] = {"result": figures(result)}
        if self._include_usage and usage is not None:
            last["usage"] = usage
        if self._trace or "usage" in last:
            told += sse(last)
        return told + DONE

    def failure(self, problem: Problem) -> bytes:
        return sse(problem.to_openai()) + DONE

    def _chunk(self, delta: Json, finish_reason: str | None = None) -> Json:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        chunk = {**self._envelope, "choices": [choice]}
        return {**chunk, "usage": None} if self._include_usage else chunk

    def _delta(self, event: StreamEvent) -> Json | None:
        """A chunk's delta; None for what is no part of the answer."""
        match event:
            case TextDelta():
                return {"content": event.text}
            case ReasoningDelta():
                return {"reasoning_content": event.text}
            case ReasoningDetail("chat", detail):
                return {"reasoning_details": [detail]}
            case ToolCallDelta():
                return {"tool_calls": [self._call(event)]}
            case _:
                return None

    def _call(self, event: ToolCallDelta) -> Json:
        """A piece of a call: its id and name with the first, and only with that."""
        if event.index in self._calls:
            return {"index": event.index, "function": {"arguments": event.arguments}}
        self._calls.add(event.index)
        call_id = event.id or f"call_{self._envelope['id']}_{event.index}"
        function = {"name": event.name or "", "arguments": event.arguments}
        return {"index": event.index, "id": call_id, "type": "function", "function": function}

    def _traced(self, event: StreamEvent) -> bytes:
        now_s = time.monotonic() - self._started_s
        if isinstance(event, Started):
            chunk = self._chunk({"role": "assistant", "content": ""})
            names = {"target": shown_name(event.target), "draft": event.draft and shown_name(event.draft)}
            return sse({**chunk, "llm_spec": {"started": dataclasses.asdict(event) | names}})
        delta = self._delta(event)
        if delta is not None:
            origin = event.origin if isinstance(event, TextDelta) else "plain"
            return sse({**self._chunk(delta), "llm_spec": {"origin": origin, "t": round(now_s, 6)}})
        told = _progress(event)
        if told is None:
            return b""
        name, fields = told
        return sse({**self._envelope, "choices": [], "llm_spec": {name: {**fields, "t": round(now_s, 6)}}})


_PROGRESS: Final[Mapping[type, str]] = {
    Round: "round",
    Fallback: "fallback",
    Retry: "retry",
    TargetStream: "upstream",
    Weakened: "weakened",
}


def _progress(event: StreamEvent) -> tuple[str, Json] | None:
    name = _PROGRESS.get(type(event))
    if name is None or isinstance(event, SpeculativeFinish):
        return None
    fields = dataclasses.asdict(event)
    if isinstance(event, TargetStream):
        fields["outcome"] = "emitted" if fields.pop("is_used") else "cancelled"
    if "reason" in fields:
        fields["reason"] = without_places(fields["reason"])
    return name, fields
