"""Converts this library's requests, in OpenAI's form, to bodies of Anthropic's messages. Pure.

Messages, content parts and tools that are already in Anthropic's form stay unchanged. Participants'
names (`name`) and seeds have no counterpart and are left out.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias, cast

from llm_spec import ChatMessage, ChatRequest, InvalidRequestError, Sampling, ToolCall
from llm_spec.contract.messages import ContentPart
from llm_spec.contract.system_texts import place_later_system_texts
from llm_spec_anthropic.fields import translate_openai_fields
from llm_spec_anthropic.models import can_model_continue_prefix, get_default_max_tokens

__all__ = ["Body", "build_request_body"]

Body: TypeAlias = dict[str, Any]

_SYSTEM_ROLES: Final = ("system", "developer")
_DATA_URL: Final = re.compile(r"data:(?P<media_type>[\w.+-]+/[\w.+-]+)(?:;[\w.=+-]+)*;base64,(?P<data>.*)", re.DOTALL)
_NEUTRAL_SAMPLING: Final[Mapping[str, object]] = {  # values that, like None, change nothing
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
}
_TOOL_CHOICES: Final = {"auto": "auto", "required": "any", "none": "none"}


def build_request_body(request: ChatRequest, model: str) -> Body:
    """Build the JSON of a streaming request. `extra`, in Anthropic's form, comes last and wins.

    Raises InvalidRequestError for what Anthropic's messages cannot express.
    """
    request, _ = translate_openai_fields(request, model, is_openai_client=False)
    sampling = _check_sampling_is_supported(request.sampling)
    system, conversation = _split_system_messages(request.messages)
    tools, tool_choice = _select_allowed_tools(request.tools, request.tool_choice)
    body: Body = {
        "model": model,
        "max_tokens": request.max_tokens or get_default_max_tokens(model),
        "messages": _build_turns(conversation),
        "stream": True,
    }
    optional: Body = {
        "system": _build_system_blocks(system),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop_sequences": list(request.stop) or None,
        "tools": [_convert_tool_to_anthropic(tool) for tool in tools] or None,
        "tool_choice": _convert_tool_choice_to_anthropic(tool_choice),
        "output_config": _build_output_config(request.response_format),
    }
    body |= {name: value for name, value in optional.items() if value is not None}
    if request.raw:
        raise InvalidRequestError("raw is set; Anthropic's models take only messages: leave it out")
    if request.top_logprobs is not None:
        raise InvalidRequestError("top_logprobs is set; Anthropic's models return no log-probabilities: leave it out")
    if request.prefix:
        body["messages"].append({"role": "assistant", "content": _check_prefix_is_supported(request.prefix, model)})
    extra = dict(request.extra)
    if "output_config" in body and isinstance(extra.get("output_config"), Mapping):
        # an effort in `extra` leaves the format unchanged
        extra["output_config"] = body["output_config"] | extra["output_config"]
    return body | extra


# ------------------------------------------------------------------------------------------- fields


def _check_sampling_is_supported(sampling: Sampling) -> Sampling:
    for name, neutral in _NEUTRAL_SAMPLING.items():
        value = getattr(sampling, name)
        if value is not None and value != neutral:
            raise InvalidRequestError(f"{name} is {value!r}; Anthropic's models take no {name}, leave it out")
    return sampling


def _check_prefix_is_supported(prefix: str, model: str) -> str:
    if not can_model_continue_prefix(model):
        raise InvalidRequestError(f"prefix is set; {model} cannot continue an assistant's text (Claude up to 4.5 can)")
    if prefix != prefix.rstrip():
        raise InvalidRequestError(
            f"prefix ends in whitespace ({prefix[-8:]!r}), which Anthropic refuses; end it before the whitespace"
        )
    return prefix


def _convert_tool_to_anthropic(tool: Mapping[str, Any]) -> Body:
    # the form of chat completions; Anthropic's custom tools have no field `custom`
    if isinstance(custom := tool.get("custom"), Mapping):
        name = cast("Mapping[str, Any]", custom).get("name")
        raise InvalidRequestError(f"tools holds the custom tool {name!r}; Anthropic's models take only functions")
    if tool.get("type") != "function":
        return dict(tool)
    function = _require_mapping(tool.get("function"), "tool 'function'")
    if not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"tool {dict(tool)!r} has no function name")
    schema = _require_mapping(function.get("parameters") or {"properties": {}}, "tool 'parameters'")
    kept = {name: function[name] for name in ("description", "strict") if function.get(name) is not None}
    return {"name": function["name"], "input_schema": {"type": "object", **schema}, **kept, **_copy_cache_control(tool)}


def _select_allowed_tools(
    tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any] | None
) -> tuple[Sequence[Mapping[str, Any]], str | Mapping[str, Any] | None]:
    """Return the tools that OpenAI's `allowed_tools` leaves, and how to choose among them.

    With another choice, both are returned unchanged.
    """
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return tools, choice
    allowed = _require_mapping(choice.get("allowed_tools"), "tool_choice 'allowed_tools'")
    names = [_get_function_name(tool) for tool in allowed.get("tools") or ()]
    others = {name: value for name, value in choice.items() if name not in ("type", "allowed_tools")}
    kind = _TOOL_CHOICES.get(str(allowed.get("mode")), "auto")
    return [tool for tool in tools if _get_function_name(tool) in names], {"type": kind, **others}


def _get_function_name(tool: Mapping[str, Any]) -> object:
    function = tool.get("function")
    return cast("Mapping[str, Any]", function).get("name") if isinstance(function, Mapping) else None


def _convert_tool_choice_to_anthropic(choice: str | Mapping[str, Any] | None) -> Body | None:
    if choice is None:
        return None
    if isinstance(choice, Mapping):
        if choice.get("type") == "function":
            return {
                "type": "tool",
                "name": _require_mapping(choice.get("function"), "tool_choice 'function'").get("name"),
            }
        return dict(choice)
    if choice not in _TOOL_CHOICES:
        raise InvalidRequestError(f"tool_choice is {choice!r}; it must be one of {', '.join(_TOOL_CHOICES)} or a tool")
    return {"type": _TOOL_CHOICES[choice]}


def _build_output_config(response_format: Mapping[str, Any] | None) -> Body | None:
    kind = None if response_format is None else response_format.get("type")
    if response_format is None or kind == "text":
        return None
    if kind != "json_schema":
        raise InvalidRequestError(f"response_format is of type {kind!r}; Anthropic takes json_schema (or text)")
    schema = _require_mapping(response_format.get("json_schema"), "response_format 'json_schema'").get("schema")
    return {"format": {"type": "json_schema", "schema": _require_mapping(schema, "response_format 'schema'")}}


# ----------------------------------------------------------------------------------------- messages


def _split_system_messages(messages: Sequence[ChatMessage]) -> tuple[list[ChatMessage], list[ChatMessage]]:
    """Return the system messages before the first answer, and the conversation.

    Later system texts keep their place as user texts, unless they came in Anthropic's form.
    """
    if not any(message.role in _SYSTEM_ROLES and _is_native_anthropic_message(message) for message in messages):
        messages = place_later_system_texts(messages, role="user")
    system: list[ChatMessage] = []
    conversation: list[ChatMessage] = []
    for message in messages:
        stays = message.role not in _SYSTEM_ROLES or (conversation and _is_native_anthropic_message(message))
        (conversation if stays else system).append(message)
    return system, conversation


def _build_system_blocks(messages: Sequence[ChatMessage]) -> str | list[Body] | None:
    """Return one text as it is, and more of them as blocks."""
    contents = [_build_message_content(message) for message in messages]
    if len(contents) == 1:
        return contents[0] or None
    return [block for content in contents for block in _convert_parts_to_blocks(content)] or None


def _build_turns(messages: Sequence[ChatMessage]) -> list[Body]:
    """Build the turns of the conversation.

    Consecutive tool results form one turn, as they answer one turn. What a native message says
    after its results belongs to that turn, too.
    """
    turns: list[Body] = []
    role_before = ""
    for message in messages:
        is_behind = role_before == "tool" and message.role == "user" and _is_native_anthropic_message(message)
        if message.role == "tool" or is_behind:
            if role_before != "tool":
                turns.append({"role": "user", "content": []})
            turns[-1]["content"] += _convert_parts_to_blocks(_build_message_content(message))
        elif (content := _build_message_content(message)) or message is messages[-1]:
            # other empty turns are left out: the API refuses them
            turns.append({"role": message.role, "content": content})
        role_before = message.role
    return turns


def _is_native_anthropic_message(message: ChatMessage) -> bool:
    return message.native is not None and message.native.api == "messages"


def _build_message_content(message: ChatMessage) -> str | list[Body]:
    """Return a message's text or blocks: the ones it came in, otherwise from its fields."""
    native = message.native
    if native is not None and native.api == "messages":
        content: str | list[Body] = native.value["content"]
        return content
    if message.role == "tool":
        content = [_build_tool_result_block(message)]
    elif message.tool_calls:
        content = [*_convert_parts_to_blocks(message.content), *map(_build_tool_use_block, message.tool_calls)]
    else:
        content = _convert_content_to_anthropic(message.content)
    thinking = [dict(detail.value) for detail in message.reasoning_details if detail.api == "messages"]
    if thinking:
        content = [*thinking, *_convert_parts_to_blocks(content)]
    mark = {} if native is None else _copy_cache_control(native.value)
    if not mark or not content:
        return content
    *blocks, last = _convert_parts_to_blocks(content)
    return [*blocks, last | mark]  # a message is cached up to its end


def _build_tool_use_block(call: ToolCall) -> Body:
    if call.kind == "custom":
        return {"type": "tool_use", "id": call.id, "name": call.name, "input": {"input": call.arguments}}
    try:
        arguments = json.loads(call.arguments or "{}")
    except (TypeError, ValueError):
        arguments = None
    if not isinstance(arguments, dict):
        # a call that was cut off is a part of the conversation, too
        arguments = {"arguments": call.arguments}
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": cast("Body", arguments)}


def _build_tool_result_block(message: ChatMessage) -> Body:
    if message.tool_call_id is None:
        raise InvalidRequestError("a tool message has no tool_call_id; name the call that it answers")
    return {
        "type": "tool_result",
        "tool_use_id": message.tool_call_id,
        "content": _convert_content_to_anthropic(message.content),
    }


def _convert_content_to_anthropic(content: str | Sequence[ContentPart] | None) -> str | list[Body]:
    if isinstance(content, str | None):
        return content if content and not content.isspace() else ""
    return _convert_parts_to_blocks(content)


def _convert_parts_to_blocks(content: str | Sequence[ContentPart] | None) -> list[Body]:
    """Convert content to blocks, without blank texts: the API refuses them."""
    parts = [{"type": "text", "text": content or ""}] if isinstance(content, str | None) else content
    return [_convert_part_to_block(part) for part in parts if not _is_blank_text(part)]


def _is_blank_text(part: ContentPart) -> bool:
    kind = part.get("type")
    return kind in ("text", "refusal") and not str(part.get(kind) or "").strip()


def _convert_part_to_block(part: ContentPart) -> Body:
    match part.get("type"):
        case "image_url":
            image = part.get("image_url")
            url = image if isinstance(image, str) else _require_mapping(image, "part 'image_url'").get("url")
            return {"type": "image", "source": _build_image_source(url), **_copy_cache_control(part)}
        case "file":
            return _build_document_block(_require_mapping(part.get("file"), "part 'file'")) | _copy_cache_control(part)
        case "refusal":
            return {"type": "text", "text": str(part.get("refusal"))}
        case "input_audio":
            raise InvalidRequestError(
                "a message has a part of type 'input_audio', which Anthropic's models do not take"
            )
        case _:
            return dict(part)


def _build_document_block(file: Mapping[str, Any]) -> Body:
    data = _DATA_URL.fullmatch(str(file.get("file_data")))
    if data is None:
        raise InvalidRequestError("a message's file has no file_data in a base64 data URL; Anthropic needs it")
    title = {"title": file["filename"]} if file.get("filename") else {}
    if not data["media_type"].startswith("text/"):
        return {"type": "document", "source": {"type": "base64", **data.groupdict()}, **title}
    try:
        text = base64.b64decode(data["data"], validate=True).decode()
    except ValueError as error:
        raise InvalidRequestError(f"a message's file is not valid UTF-8: {error}") from error
    return {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": text}, **title}


def _build_image_source(url: object) -> Body:
    data = _DATA_URL.fullmatch(url) if isinstance(url, str) else None
    if data is not None:
        return {"type": "base64", **data.groupdict()}
    if isinstance(url, str) and url.startswith(("https://", "http://")):
        return {"type": "url", "url": url}
    raise InvalidRequestError(f"image_url is {str(url)[:60]!r}; it must be an http(s) or a base64 data URL")


def _copy_cache_control(holder: Mapping[str, Any]) -> Body:
    return {"cache_control": holder["cache_control"]} if "cache_control" in holder else {}


def _require_mapping(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"{name} is {value!r}; it must be an object")
    return cast("Mapping[str, Any]", value)
