"""OpenAI's responses, the part of them that needs no memory: from bodies to requests. Pure.

https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, cast

from llm_spec.chat import ChatMessage, Role, ToolCall
from llm_spec.errors import InvalidRequestError
from llm_spec.server.logprobs import get_requested_top_logprobs
from llm_spec.server.request_fields import (
    Body,
    Json,
    ParsedRequest,
    build_chat_request,
    get_object_field,
    get_object_list_field,
    get_requested_model_name,
    get_typed_field,
)

__all__ = ["parse_responses_request"]

# Fields that change nothing about a stateless answer
_IGNORED_FIELDS: Final = ("metadata", "store", "truncation")
_KNOWN_FIELDS: Final = frozenset(
    {
        *_IGNORED_FIELDS,
        "include",
        "input",
        "instructions",
        "max_output_tokens",
        "model",
        "parallel_tool_calls",
        "reasoning",
        "stream",
        "stream_options",
        "text",
        "tool_choice",
        "tools",
        "top_logprobs",
        "user",
    }
)
_LOGPROBS: Final = "message.output_text.logprobs"  # of `include`
_STATEFUL_FIELDS: Final = ("background", "conversation", "previous_response_id", "prompt")
_TEXT_PART_TYPES: Final = ("input_text", "output_text", "text", "refusal")


def parse_responses_request(body: Body, *, is_local: bool) -> ParsedRequest:
    """A body of the responses API; raises InvalidRequestError for what is wrong, and for what needs a memory."""
    for name in _STATEFUL_FIELDS:
        if body.get(name):
            raise InvalidRequestError(f"{name} is set; this server keeps no responses: send the whole input")
    include = cast("Sequence[object]", get_typed_field(body, "include", None, list) or ())
    effort = get_object_field(body, "reasoning").get("effort")
    request = build_chat_request(
        body,
        _KNOWN_FIELDS,
        is_local=is_local,
        messages=tuple(_parse_input_messages(body)),
        max_tokens=get_typed_field(body, "max_output_tokens", None, int),
        tools=tuple(_convert_responses_tools(body)),
        tool_choice=_convert_responses_tool_choice(body),
        response_format=_convert_responses_text_format(body),
        top_logprobs=get_requested_top_logprobs(
            body,
            is_requested=_LOGPROBS in include,
            requested_by=f"include: [{_LOGPROBS!r}]",
        ),
    )
    if effort is not None:
        request = replace(request, extra={**request.extra, "reasoning_effort": effort})
    if request.tools and body.get("parallel_tool_calls") is False:
        request = replace(request, extra={**request.extra, "parallel_tool_calls": False})
    return ParsedRequest(
        model=get_requested_model_name(body),
        request=request,
        stream=get_typed_field(body, "stream", default=False),
        body=body,
    )


def _parse_input_messages(body: Body) -> list[ChatMessage]:
    messages: list[ChatMessage] = []
    instructions = get_typed_field(body, "instructions", "")
    if instructions:
        messages.append(ChatMessage("system", instructions))
    input_value = body.get("input")
    if isinstance(input_value, str):
        return [*messages, ChatMessage("user", input_value)]
    items = get_object_list_field(body, "input")
    if not items:
        raise InvalidRequestError("input is empty; it must be a text or a list of at least one item")
    for index, item in enumerate(items):
        try:
            _append_input_item(messages, item)
        except (InvalidRequestError, KeyError, TypeError) as error:
            raise InvalidRequestError(f"input[{index}] is wrong: {error}") from error
    return messages


def _append_input_item(messages: list[ChatMessage], item: Json) -> None:
    match item.get("type", "message"):
        case "message":
            messages.append(ChatMessage(cast("Role", item.get("role")), _convert_item_content(item)))
        case "function_call":
            call = ToolCall(item["call_id"], item["name"], item["arguments"])
            if messages and messages[-1].role == "assistant":  # what an answer held together stays together
                messages[-1] = replace(messages[-1], tool_calls=(*messages[-1].tool_calls, call))
            else:
                messages.append(ChatMessage("assistant", None, tool_calls=(call,)))
        case "function_call_output":
            output = item["output"]
            text = output if isinstance(output, str) else _join_part_texts(get_object_list_field(item, "output"))
            messages.append(ChatMessage("tool", text, tool_call_id=item["call_id"]))
        case "reasoning":
            pass  # of an earlier answer: not for the model to read
        case kind:
            raise InvalidRequestError(f"an item of type {kind!r} is not supported here")


def _convert_item_content(item: Json) -> str | tuple[Json, ...]:
    content = item.get("content")
    if isinstance(content, str):
        return content
    parts = get_object_list_field(item, "content")
    if all(part.get("type") in _TEXT_PART_TYPES for part in parts):
        return _join_part_texts(parts)
    return tuple(_convert_responses_part(part) for part in parts)


def _join_part_texts(parts: Sequence[Json]) -> str:
    return "".join(str(part.get("text") or part.get("refusal") or "") for part in parts)


def _convert_responses_part(part: Json) -> Json:
    """A content part in the form of chat completions."""
    kind = part.get("type")
    if kind in _TEXT_PART_TYPES:
        return {"type": "text", "text": _join_part_texts([part])}
    if kind == "input_image" and part.get("image_url"):
        return {"type": "image_url", "image_url": {"url": part["image_url"], "detail": part.get("detail") or "auto"}}
    raise InvalidRequestError(f"a part of type {kind!r} is not supported here")


def _convert_responses_tools(body: Body) -> Iterator[Json]:
    for index, tool in enumerate(get_object_list_field(body, "tools")):
        if tool.get("type") != "function":
            raise InvalidRequestError(f"tools[{index}] is {tool.get('type')!r}; only functions are supported here")
        fields = ("name", "description", "parameters", "strict")
        yield {"type": "function", "function": {name: tool[name] for name in fields if tool.get(name) is not None}}


def _convert_responses_tool_choice(body: Body) -> str | Json | None:
    choice = body.get("tool_choice")
    if choice is None or not body.get("tools"):
        return None
    if isinstance(choice, str):
        return choice
    tool = get_object_field(body, "tool_choice")
    if tool.get("type") == "allowed_tools":
        allowed = [_convert_named_tool_choice(listed) for listed in get_object_list_field(tool, "tools")]
        return {"type": "allowed_tools", "allowed_tools": {"mode": tool.get("mode"), "tools": allowed}}
    return _convert_named_tool_choice(tool)


def _convert_named_tool_choice(tool: Json) -> Json:
    if tool.get("type") != "function":
        raise InvalidRequestError(f"tool_choice is {tool.get('type')!r}; only functions are supported here")
    return {"type": "function", "function": {"name": tool.get("name")}}


def _convert_responses_text_format(body: Body) -> Json | None:
    requested_format = get_object_field(get_object_field(body, "text"), "format")
    kind = requested_format.get("type", "text")
    if kind == "text":
        return None
    if kind != "json_schema":
        return {"type": kind}
    fields = ("name", "description", "schema", "strict")
    schema = {name: requested_format[name] for name in fields if requested_format.get(name) is not None}
    return {"type": "json_schema", "json_schema": schema}
