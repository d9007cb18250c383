"""What a client reads of the replies of chat completions, responses and messages, and whether it is what it is owed.

Pure. It shares nothing with the package that writes the replies. Replies must be valid JSON, without NaN and without
halves of characters, and have the fields of their API.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, TypeAlias, cast

from upstream_oracle import Expectation, ExpectedCall, ExpectedChoice, is_count

Json: TypeAlias = dict[str, Any]


class MalformedReplyError(Exception):
    """No client could read the reply."""


@dataclass
class ReadCall:
    """A tool call that a client sees."""

    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass
class ReadChoice:
    """An answer that a client sees."""

    text: str = ""
    reasoning: str = ""
    calls: list[ReadCall] = field(default_factory=list[ReadCall])
    finish: str | None = None


@dataclass
class Reply:
    """What a client reads; `error` is the whole error object."""

    status: int
    choices: list[ReadChoice] = field(default_factory=list[ReadChoice])
    error: Json | None = None
    usage: tuple[int, int] | None = None  # input, output


_MAX_INT: Final = 2**63  # of clients whose numbers have 64 bits
_FINISHES: Final = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "calls",
    "function_call": "calls",
    "content_filter": "filter",
    "end_turn": "stop",
    "stop_sequence": "stop",
    "pause_turn": "stop",
    "model_context_window_exceeded": "length",
    "max_tokens": "length",
    "tool_use": "calls",
    "refusal": "filter",
}


def _refuse_constant(name: str) -> NoReturn:
    raise MalformedReplyError(f"{name} is not JSON")


def parse_json(data: bytes) -> Json:
    """An object; raises MalformedReplyError."""
    try:
        value = json.loads(data.decode(), parse_constant=_refuse_constant)
        if b"\\ud" in data.lower():
            json.dumps(value, ensure_ascii=False).encode()  # halves of characters
    except ValueError as error:
        raise MalformedReplyError(f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise MalformedReplyError("not an object")
    return cast("Json", value)


def _get(value: Any, *path: str | int) -> Any:
    """A value that must be there."""
    for step in path:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            raise MalformedReplyError(f"there is no {'.'.join(map(str, path))}") from None
    return value


def _get_text(value: Any, *path: str | int) -> str:
    found = _get(value, *path)
    if not isinstance(found, str):
        raise MalformedReplyError(f"{'.'.join(map(str, path))} is not a text")
    return found


def _get_list(value: Any, *path: str | int) -> list[Any]:
    found = _get(value, *path)
    if not isinstance(found, list):
        raise MalformedReplyError(f"{'.'.join(map(str, path))} is not a list")
    return cast("list[Any]", found)


def _get_index(value: Any, highest: int) -> int:
    index = _get(value, "index")
    if not is_count(index) or index > highest:
        raise MalformedReplyError(f"an index is {index!r}")
    return index


def _get_finish(word: Any) -> str:
    if not isinstance(word, str) or word not in _FINISHES:
        raise MalformedReplyError(f"the finish reason is {word!r}")
    return _FINISHES[word]


def _get_usage(value: Any, names: tuple[str, str]) -> tuple[int, int]:
    counts = (_get(value, names[0]), _get(value, names[1]))
    if not all(map(is_count, _list_numbers(value))) or not all(map(is_count, counts)):
        raise MalformedReplyError(f"a count of usage is not a count: {json.dumps(value)[:300]}")
    return counts


def _list_numbers(value: Any) -> Iterator[Any]:
    for name, inner in cast("Json", value).items():
        if name == "service_tier" and isinstance(inner, str):
            continue
        if isinstance(inner, dict):
            yield from _list_numbers(inner)
        elif inner is not None:
            yield inner


# ------------------------------------------------------------------------------------------ whole replies


def read_reply(api: str, status: int, content_type: str, data: bytes) -> Reply:
    """Any reply; raises MalformedReplyError."""
    try:
        return _read_reply(api, status, content_type, data)
    except (AttributeError, KeyError, TypeError) as error:
        raise MalformedReplyError(f"a field of another type than its API has: {error!r}") from error


def _read_reply(api: str, status: int, content_type: str, data: bytes) -> Reply:
    if content_type.startswith("text/event-stream"):
        return _STREAMED[api](status, _split_events(data))
    value = parse_json(data)
    if status >= 400:
        error = _get(value, "error")
        _get_text(error, "message")
        _get_text(error, "type")
        return Reply(status, error=error)
    if value.get("error") is not None:
        return Reply(status, error=value["error"])
    return _WHOLE[api](status, value)


def _read_chat(status: int, value: Json) -> Reply:
    _check_head(value, "chat.completion")
    reply = Reply(status)
    for choice in _get_list(value, "choices"):
        _get_index(choice, 7)
        message = _get(choice, "message")
        read = ReadChoice(finish=_get_finish(_get(choice, "finish_reason")))
        read.text = _read_optional(message, "content") + _read_optional(message, "refusal")
        read.reasoning = _read_optional(message, "reasoning_content") or _read_optional(message, "reasoning")
        for call in message.get("tool_calls") or ():
            arguments = _get_text(call, "function", "arguments")
            read.calls.append(ReadCall(_get_text(call, "id"), _get_text(call, "function", "name"), arguments))
        reply.choices.append(read)
    if value.get("usage") is not None:
        reply.usage = _get_usage(value["usage"], ("prompt_tokens", "completion_tokens"))
    return reply


def _read_completions(status: int, value: Json) -> Reply:
    _check_head(value, "text_completion")
    choices = _get_list(value, "choices")
    read = [ReadChoice(_get_text(each, "text"), finish=_get_finish(_get(each, "finish_reason"))) for each in choices]
    usage = value.get("usage")
    counts = None if usage is None else _get_usage(usage, ("prompt_tokens", "completion_tokens"))
    return Reply(status, read, usage=counts)


def _check_head(value: Json, kind: str) -> None:
    _get_text(value, "id")
    _get_text(value, "model")
    created = value.get("created")
    is_time = isinstance(created, int) and not isinstance(created, bool) and abs(created) < _MAX_INT
    if value.get("object") != kind or not is_time:
        raise MalformedReplyError(f"object is {value.get('object')!r}, created {value.get('created')!r}")


def _read_optional(value: Any, name: str) -> str:
    return "" if value.get(name) is None else _get_text(value, name)


def _read_responses(status: int, value: Json) -> Reply:
    reply, read = Reply(status), ReadChoice()
    state = _get_text(value, "status")
    if state == "failed":
        reply.error = _get(value, "error")
        return reply
    for item in _get_list(value, "output"):
        _add_item(read, item)
    if state == "incomplete":
        reason = _get_text(value, "incomplete_details", "reason")
        read.finish = {"max_output_tokens": "length", "content_filter": "filter"}[reason]
    elif state == "completed":
        read.finish = "calls" if read.calls else "stop"
    else:
        raise MalformedReplyError(f"the status is {state!r}")
    reply.choices.append(read)
    if _get(value, "usage") is not None:
        reply.usage = _get_usage(value["usage"], ("input_tokens", "output_tokens"))
    return reply


def _add_item(read: ReadChoice, item: Json) -> None:
    match _get_text(item, "type"):
        case "message":
            for part in _get_list(item, "content"):
                read.text += _get_text(part, "refusal" if _get_text(part, "type") == "refusal" else "text")
        case "reasoning":
            for part in (*(item.get("summary") or ()), *(item.get("content") or ())):
                read.reasoning += _get_text(part, "text")
        case "function_call":
            name, arguments = _get_text(item, "name"), _get_text(item, "arguments")
            read.calls.append(ReadCall(_get_text(item, "call_id"), name, arguments))
        case kind:
            raise MalformedReplyError(f"an item of type {kind!r}")


def _read_messages(status: int, value: Json) -> Reply:
    reply, read = Reply(status), ReadChoice()
    for block in _get_list(value, "content"):
        match _get_text(block, "type"):
            case "text":
                read.text += _get_text(block, "text")
            case "thinking":
                read.reasoning += _get_text(block, "thinking")
            case "tool_use":
                given = _get(block, "input")
                if not isinstance(given, dict):
                    raise MalformedReplyError("the input of a call is not an object")
                read.calls.append(ReadCall(_get_text(block, "id"), _get_text(block, "name"), json.dumps(given)))
            case kind:
                raise MalformedReplyError(f"a block of type {kind!r}")
    read.finish = _get_finish(_get(value, "stop_reason"))
    reply.choices.append(read)
    reply.usage = _get_messages_usage(_get(value, "usage"))
    return reply


def _get_messages_usage(usage: Any) -> tuple[int, int]:
    """Tokens that were read from a cache or written to it are not among the input's."""
    inputs, outputs = _get_usage(usage, ("input_tokens", "output_tokens"))
    cached = [usage.get(name) or 0 for name in ("cache_read_input_tokens", "cache_creation_input_tokens")]
    return inputs + sum(cached), outputs


# ------------------------------------------------------------------------------------------ streamed replies


def _split_events(data: bytes) -> list[Json]:
    """The JSON of all events; `[DONE]` is an empty object."""
    events: list[Json] = []
    for block in data.replace(b"\r\n", b"\n").split(b"\n\n"):
        lines = [line[5:].strip() for line in block.split(b"\n") if line.startswith(b"data:")]
        if lines:
            events.append({} if lines == [b"[DONE]"] else parse_json(b"\n".join(lines)))
    return events


def _read_chat_events(status: int, events: Sequence[Json], kind: str = "chat.completion.chunk") -> Reply:
    reply = Reply(status, error=next((event["error"] for event in events if "error" in event), None))
    if reply.error is not None:
        return reply  # what was sent before it is of no use
    is_done = False
    for event in events:
        if not event:
            is_done = True
            continue
        _check_head(event, kind)
        for choice in _get_list(event, "choices"):
            index = _get_index(choice, 7)
            while len(reply.choices) <= index:
                reply.choices.append(ReadChoice())
            _add_delta(reply.choices[index], choice)
        if event.get("usage") is not None:
            reply.usage = _get_usage(event["usage"], ("prompt_tokens", "completion_tokens"))
    if not is_done or not reply.choices or any(choice.finish is None for choice in reply.choices):
        raise MalformedReplyError("the stream ends without a finish reason, [DONE] and an error")
    return reply


def _read_completions_events(status: int, events: Sequence[Json]) -> Reply:
    return _read_chat_events(status, events, "text_completion")


def _add_delta(read: ReadChoice, choice: Json) -> None:
    delta: Json = {"content": _get_text(choice, "text")} if "text" in choice else _get(choice, "delta")
    read.text += _read_optional(delta, "content") + _read_optional(delta, "refusal")
    read.reasoning += _read_optional(delta, "reasoning_content") or _read_optional(delta, "reasoning")
    for call in cast("list[Json]", delta.get("tool_calls") or []):
        index = _get_index(call, len(read.calls))
        if index == len(read.calls):
            read.calls.append(ReadCall())
        known: ReadCall = read.calls[index]
        function: Json = call.get("function") or {}
        known.id = known.id or _read_optional(call, "id")
        known.name = known.name or _read_optional(function, "name")
        known.arguments += _read_optional(function, "arguments")
    if choice.get("finish_reason") is not None:
        read.finish = _get_finish(choice["finish_reason"])


def _read_responses_events(status: int, events: Sequence[Json]) -> Reply:
    text, arguments = "", ""
    for event in events:
        match _get_text(event, "type"):
            case "response.output_text.delta" | "response.refusal.delta":
                text += _get_text(event, "delta")
            case "response.function_call_arguments.delta":
                arguments += _get_text(event, "delta")
            case "error":
                return Reply(status, [ReadChoice(text)], error=event)
            case "response.completed" | "response.incomplete" | "response.failed":
                reply = _read_responses(status, _get(event, "response"))
                if reply.error is not None:
                    reply.choices = [ReadChoice(text)]
                    return reply
                ended = reply.choices[0]
                if ended.text != text or "".join(call.arguments for call in ended.calls) != arguments:
                    raise MalformedReplyError("the deltas are not what the last event says")
                return reply
            case _:
                pass
    raise MalformedReplyError("the stream ends without its last event")


def _read_messages_events(status: int, events: Sequence[Json]) -> Reply:
    reply, read = Reply(status), ReadChoice()
    reply.choices.append(read)
    num_blocks = 0
    started: Json = {}
    for event in events:
        match _get_text(event, "type"):
            case "message_start":
                started = _get(event, "message", "usage")
                _get_messages_usage(started)
            case "content_block_start":
                _start_block(read, event, num_blocks)
                num_blocks += 1
            case "content_block_delta":
                if _get(event, "index") != num_blocks - 1:
                    raise MalformedReplyError("a piece of a block that is not open")
                _add_block_delta(read, _get(event, "delta"))
            case "message_delta":
                read.finish = _get_finish(_get(event, "delta", "stop_reason"))
                reply.usage = _get_messages_usage(started | _get(event, "usage"))
            case "error":
                reply.error = _get(event, "error")
                return reply
            case "message_stop" if read.finish is not None:
                return reply
            case _:
                pass
    raise MalformedReplyError("the stream ends without a stop reason and message_stop")


def _start_block(read: ReadChoice, event: Json, num_blocks: int) -> None:
    index, block = _get(event, "index"), _get(event, "content_block")
    if index != num_blocks:
        raise MalformedReplyError(f"block {num_blocks} has the index {index!r}")
    if _get_text(block, "type") == "tool_use":
        read.calls.append(ReadCall(_get_text(block, "id"), _get_text(block, "name")))


def _add_block_delta(read: ReadChoice, delta: Json) -> None:
    match _get_text(delta, "type"):
        case "text_delta":
            read.text += _get_text(delta, "text")
        case "thinking_delta":
            read.reasoning += _get_text(delta, "thinking")
        case "input_json_delta":
            read.calls[-1].arguments += _get_text(delta, "partial_json")
        case "signature_delta":
            pass
        case kind:
            raise MalformedReplyError(f"a piece of type {kind!r}")


_WHOLE: Final = {
    "chat": _read_chat,
    "completions": _read_completions,
    "responses": _read_responses,
    "messages": _read_messages,
}
_STREAMED: Final = {
    "chat": _read_chat_events,
    "completions": _read_completions_events,
    "responses": _read_responses_events,
    "messages": _read_messages_events,
}

# ------------------------------------------------------------------------------------------ what it should have been


def find_difference(api: str, reply: Reply, expected: Expectation) -> str | None:
    """What is wrong with a reply."""
    if is_own_failure(reply):
        return f"the server itself failed: {reply.status} {json.dumps(reply.error)[:200]}"
    if expected.verdict == "open":
        return None
    if reply.error is not None:
        if expected.verdict == "answer":
            return f"an error in place of an answer: {reply.status} {json.dumps(reply.error)[:300]}"
        return _find_error_difference(reply, expected)
    if expected.verdict == "error":
        return f"an answer in place of an error ({expected.why}): {reply.choices}"
    return _find_answer_difference(api, reply, expected)


_PYTHON_ERROR: Final = re.compile(r"failed: \w+(Error|Exception)$")  # what was caught is no reason


def is_own_failure(reply: Reply) -> bool:
    """Whether the server says that the fault is its own."""
    error: Mapping[str, Any] = reply.error or {}
    if _PYTHON_ERROR.search(str(error.get("message"))):
        return True
    return reply.status == 500 or error.get("code") == "internal" or error.get("message") == "the server failed"


def _find_error_difference(reply: Reply, expected: Expectation) -> str | None:
    if expected.verdict != "error":
        return None  # it is right as well
    if reply.status >= 400 and reply.status not in expected.statuses:
        return f"status {reply.status} in place of {sorted(expected.statuses)[:3]}: {json.dumps(reply.error)[:200]}"
    if expected.words is not None and expected.words not in json.dumps(reply.error, ensure_ascii=False):
        return f"the error's words are lost: {json.dumps(reply.error)[:300]}"
    return None


def _find_answer_difference(api: str, reply: Reply, expected: Expectation) -> str | None:
    if len(reply.choices) != len(expected.choices):
        return f"{len(reply.choices)} choices in place of {len(expected.choices)}"
    for read, owed in zip(reply.choices, expected.choices, strict=True):
        found = _find_choice_difference(api, read, owed)
        if found is not None:
            return found
    if reply.usage is not None:
        owed_counts = (("input", expected.prompt), ("output", expected.completion))
        for (name, owed_range), got in zip(owed_counts, reply.usage, strict=True):
            is_told = owed_range.low == owed_range.high
            if got > owed_range.high or (is_told and got < owed_range.low):
                # what the target does not tell may be 0 here; the budget has an estimate in any case
                return f"usage tells {got} tokens of {name} in place of {owed_range.low} to {owed_range.high}"
    return None


def _find_choice_difference(api: str, read: ReadChoice, owed: ExpectedChoice) -> str | None:
    if read.text not in owed.texts:
        return f"the text {read.text[:200]!r} in place of {owed.texts[0][:200]!r}"
    if owed.reasoning is not None and read.reasoning != owed.reasoning:
        return f"the reasoning {read.reasoning[:200]!r} in place of {owed.reasoning[:200]!r}"
    if read.finish not in owed.finishes:
        return f"the finish reason {read.finish!r} in place of {sorted(owed.finishes)}"
    if len(read.calls) != len(owed.calls):
        return f"{len(read.calls)} calls in place of {len(owed.calls)}: {read.calls}"
    found = (_find_call_difference(api, *calls) for calls in zip(read.calls, owed.calls, strict=True))
    return next(filter(None, found), None)


def _find_call_difference(api: str, call: ReadCall, owed: ExpectedCall) -> str | None:
    if not call.id:
        return f"a call without an id: {call}"
    if call.name != owed.name or (owed.id is not None and call.id != owed.id):
        return f"the call {call} in place of {owed}"
    if not has_right_arguments(api, call, owed):
        return f"the arguments {call.arguments[:200]!r} in place of {owed.arguments[0][:200]!r}"
    return None


def has_right_arguments(api: str, call: ReadCall, expected: ExpectedCall) -> bool:
    """The same text, or the same JSON. Messages tell an object in any case, so text that is none may be lost there."""
    if call.arguments in expected.arguments:
        return True
    for owed in expected.arguments:
        value = _parse_object(owed)
        if value is not None and value == _parse_object(call.arguments):
            return True
    return api == "messages" and all(_parse_object(owed) is None for owed in expected.arguments)


def _parse_object(text: str) -> Json | None:
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return None
    return cast("Json", value) if isinstance(value, dict) else None
