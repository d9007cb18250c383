"""Anthropic's messages: from bodies to requests, from answers to bodies and events. Pure.

https://docs.anthropic.com/en/api/messages and https://docs.anthropic.com/en/docs/build-with-claude/streaming
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast

from llm_spec.chat import ChatMessage, ReasoningDelta, StreamEvent, TextDelta, ToolCall, ToolCallDelta
from llm_spec.errors import InvalidRequestError
from llm_spec.result import SpeculativeResult
from llm_spec.server.bodies import Asked, Body, Json, chat_request, listed, read_model, read_stop, table, wanted
from llm_spec.server.encoding import CallOrder, finish_reason_of, sse, usage_counts
from llm_spec.server.problems import Problem

__all__ = ["MessagesEncoder", "messages_body", "read_messages_api"]

_KNOWN: Final = frozenset(
    {
        "max_tokens",
        "messages",
        "metadata",
        "model",
        "output_config",
        "output_format",
        "service_tier",
        "stop_sequences",
        "stream",
        "system",
        "tool_choice",
        "tools",
    }
)
# By this code the SDK's message threads and tool runner know to send the whole conversation instead
_NO_THREADS: Final = "thread is set; this server keeps no conversations: send all messages, without thread"
_CHOICES: Final[Mapping[str, str]] = {"auto": "auto", "any": "required", "none": "none"}
_STOP_REASONS: Final[Mapping[str, str]] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}


def read_messages_api(body: Body, *, is_local: bool) -> Asked:
    """A body of the messages API; raises InvalidRequestError naming the field that is wrong, Problem for a thread.

    A last message of the assistant is continued.
    """
    if body.get("max_tokens") is None:
        raise InvalidRequestError("max_tokens is missing; this API wants it")
    if body.get("thread") is not None:  # what it holds of the conversation is not in `messages`
        raise Problem(400, _NO_THREADS, code="thread_unsupported_request", param="thread")
    messages = [*_system(body), *_messages(body)]
    prefix = ""
    if messages and messages[-1].role == "assistant" and not messages[-1].tool_calls:
        prefix = messages.pop().text
    if not messages:
        raise InvalidRequestError("messages is empty; it must hold at least one message")
    request = chat_request(
        body,
        _KNOWN,
        is_local=is_local,
        messages=tuple(messages),
        max_tokens=wanted(body, "max_tokens", None, int),
        stop=read_stop(body, "stop_sequences"),
        tools=tuple(_tools(body)),
        tool_choice=_tool_choice(body),
        response_format=_response_format(body),
        prefix=prefix,
    )
    return Asked(model=read_model(body), request=request, stream=wanted(body, "stream", default=False))


def _system(body: Body) -> Iterator[ChatMessage]:
    system = body.get("system")
    if isinstance(system, list):
        system = "\n\n".join(str(part.get("text", "")) for part in listed(body, "system"))
    if system is not None and not isinstance(system, str):
        raise InvalidRequestError(f"system is of type {type(system).__name__}; it must be a text or text blocks")
    if system:
        yield ChatMessage("system", system)


def _messages(body: Body) -> Iterator[ChatMessage]:
    for index, message in enumerate(listed(body, "messages")):
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise InvalidRequestError(f"messages[{index}].role is {role!r}; it must be user or assistant")
        if isinstance(content, str):
            yield ChatMessage(role, content)
            continue
        try:
            blocks = listed(message, "content")
            yield from _assistant(blocks) if role == "assistant" else _user(blocks, role)
        except (InvalidRequestError, KeyError, TypeError) as error:
            raise InvalidRequestError(f"messages[{index}].content is wrong: {error}") from error


def _assistant(blocks: Sequence[Json]) -> Iterator[ChatMessage]:
    calls = tuple(
        ToolCall(block["id"], block["name"], json.dumps(block.get("input", {})))
        for block in blocks
        if block.get("type") == "tool_use"
    )
    text = "".join(block["text"] for block in blocks if block.get("type") == "text")
    yield ChatMessage("assistant", text or (None if calls else ""), tool_calls=calls)


def _user(blocks: Sequence[Json], role: Any) -> Iterator[ChatMessage]:
    parts: list[Json] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            yield ChatMessage("tool", _result_text(block), tool_call_id=block["tool_use_id"])
        else:
            parts.append(_part(block))
    if parts and all(part["type"] == "text" for part in parts):
        yield ChatMessage(role, "".join(part["text"] for part in parts))
    elif parts:
        yield ChatMessage(role, tuple(parts))


def _result_text(block: Json) -> str:
    content = block.get("content")
    if isinstance(content, list):
        parts = listed(block, "content")
        if any(part.get("type") != "text" for part in parts):
            raise InvalidRequestError("a tool_result has a part that is not text, which is not taken here")
        return "".join(str(part.get("text", "")) for part in parts)
    return str(content or "")


def _part(block: Json) -> Json:
    """A content part in OpenAI's form."""
    kind = block.get("type")
    if kind == "text":
        return {"type": "text", "text": str(block["text"])}
    if kind == "image":
        source = table(block, "source")
        url = source["url"] if source.get("type") == "url" else f"data:{source['media_type']};base64,{source['data']}"
        return {"type": "image_url", "image_url": {"url": url}}
    raise InvalidRequestError(f"a block of type {kind!r} is not taken here")


def _tools(body: Body) -> Iterator[Json]:
    for index, tool in enumerate(listed(body, "tools")):
        if tool.get("type", "custom") != "custom" or "name" not in tool:
            raise InvalidRequestError(f"tools[{index}] is {tool.get('type')!r}; only tools of one's own are taken here")
        function = {"name": tool["name"], "parameters": tool.get("input_schema", {"type": "object"})}
        described = {"description": tool["description"]} if tool.get("description") else {}
        yield {"type": "function", "function": {**function, **described}}


def _tool_choice(body: Body) -> str | Json | None:
    choice = table(body, "tool_choice")
    kind = str(choice.get("type"))
    if not choice or not body.get("tools"):
        return None
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind not in _CHOICES:
        raise InvalidRequestError(f"tool_choice is {kind!r}; it must be one of tool, {', '.join(_CHOICES)}")
    return _CHOICES[kind]


def _response_format(body: Body) -> Json | None:
    wanted_format = table(table(body, "output_config"), "format") or table(body, "output_format")
    if not wanted_format:
        return None
    schema = {"name": "answer", "schema": wanted_format.get("schema", {}), "strict": True}
    return {"type": "json_schema", "json_schema": schema}


def messages_body(result: SpeculativeResult, asked: Asked, *, answer_id: str, model: str) -> Json:
    """A whole answer."""
    content: list[Json] = []
    if result.reasoning:
        content.append({"type": "thinking", "thinking": result.reasoning, "signature": ""})
    if result.content or not result.tool_calls:
        content.append({"type": "text", "text": result.content})
    content += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)}
        for call in result.tool_calls
    ]
    return {**_message(answer_id, model), "content": content, **_ending(result, asked), "usage": _usage(result)}


def _message(answer_id: str, model: str) -> Json:
    return {"id": f"msg_{answer_id}", "type": "message", "role": "assistant", "model": model}


def _input(arguments: str) -> Json:
    try:
        value = json.loads(arguments or "{}")
    except ValueError:
        value = None
    return cast("Json", value) if isinstance(value, dict) else {"arguments": arguments}  # as it was written


def _ending(result: SpeculativeResult, asked: Asked) -> Json:
    if result.stopped_by == "stop_string":
        stops = asked.request.stop
        return {"stop_reason": "stop_sequence", "stop_sequence": stops[0] if len(stops) == 1 else None}
    return {"stop_reason": _STOP_REASONS[finish_reason_of(result)], "stop_sequence": None}


def _usage(result: SpeculativeResult | None) -> Json:
    counts: Mapping[str, int] = {} if result is None else usage_counts(result)
    cached = counts.get("cached", 0)
    return {
        "input_tokens": max(0, counts.get("input", 0) - cached),
        "output_tokens": counts.get("output", 0),
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
    }


class MessagesEncoder:
    """An answer in events; blocks begin and end as its kinds of content follow each other."""

    keep_alive = sse({"type": "ping"}, "ping")

    def __init__(self, asked: Asked, *, answer_id: str, model: str) -> None:
        self._asked = asked
        self._message = _message(answer_id, model)
        self._answer_id = answer_id
        self._calls = CallOrder()
        self._index = -1
        self._open: str | int | None = None  # "text", "thinking", or the index of a call

    def begin(self) -> bytes:
        empty: Json = {
            **self._message,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(None),
        }
        return sse({"type": "message_start", "message": empty}, "message_start")

    def event(self, event: StreamEvent) -> bytes:
        match event:
            case TextDelta():
                return self._in("text", {"type": "text", "text": ""}) + self._delta(type="text_delta", text=event.text)
            case ReasoningDelta():
                begun = self._in("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                return begun + self._delta(type="thinking_delta", thinking=event.text)
            case ToolCallDelta():
                return b"".join(map(self._call, self._calls.push(event)))
            case _:
                return b""

    def end(self, result: SpeculativeResult) -> bytes:
        told = b"".join(map(self._call, self._calls.rest()))
        if self._index < 0:
            told += self._in("text", {"type": "text", "text": ""})
        told += self._close()
        usage = _usage(result)
        told += sse({"type": "message_delta", "delta": _ending(result, self._asked), "usage": usage}, "message_delta")
        return told + sse({"type": "message_stop"}, "message_stop")

    def failure(self, problem: Problem) -> bytes:
        return sse(problem.to_anthropic(), "error")

    def _call(self, piece: ToolCallDelta) -> bytes:
        call_id = piece.id or f"toolu_{self._answer_id}_{piece.index}"
        block: Json = {"type": "tool_use", "id": call_id, "name": piece.name or "", "input": {}}
        return self._in(piece.index, block) + self._delta(type="input_json_delta", partial_json=piece.arguments)

    def _in(self, kind: str | int, block: Json) -> bytes:
        """Go on in a block of this kind, or begin one."""
        if self._open == kind:
            return b""
        closed = self._close()
        self._open = kind
        self._index += 1
        begun = {"type": "content_block_start", "index": self._index, "content_block": block}
        return closed + sse(begun, "content_block_start")

    def _delta(self, **delta: str) -> bytes:
        told = {"type": "content_block_delta", "index": self._index, "delta": delta}
        return sse(told, "content_block_delta")

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return sse({"type": "content_block_stop", "index": self._index}, "content_block_stop")
