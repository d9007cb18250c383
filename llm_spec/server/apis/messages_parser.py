"""Anthropic's messages: from bodies to requests. Pure.

https://platform.claude.com/docs/en/api/messages

A target that speaks this API itself gets messages, tools and fields as they came (`NativeMessage`,
`extra`). So marks for its cache, signatures of its thinking and errors of tools arrive. For any
other target they are converted to chat completions, and fields without a counterpart there are left
out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

from llm_spec.contract.errors import InvalidRequestError
from llm_spec.contract.messages import ApiName, ChatMessage, NativeMessage, Role, ToolCall
from llm_spec.contract.system_texts import strip_billing_header
from llm_spec.server.apis.fields import (
    Body,
    Json,
    ParsedRequest,
    build_chat_request,
    get_object_field,
    get_object_list_field,
    get_requested_model_name,
    get_typed_field,
    parse_stop_strings,
)
from llm_spec.server.apis.messages_content import (
    convert_blocks_to_content,
    convert_tool_result_to_content,
    has_unread_document,
)
from llm_spec.server.problems import HttpProblem

__all__ = ["parse_messages_request"]

_KNOWN_FIELDS: Final = frozenset(
    {
        "max_tokens",
        "messages",
        "model",
        "stop_sequences",
        "stream",
        "system",
        "thread",
        "tool_choice",
        "tools",
    }
)
# Other APIs have no such fields: how to think, cache, bill and label. An answer without them is
# valid all the same
_MESSAGES_ONLY_FIELDS: Final = frozenset(
    {
        "betas",
        "billing_policy",
        "cache_control",
        "context_management",
        "diagnostics",
        "fallback_credit_token",
        "fallbacks",
        "inference_geo",
        "metadata",
        "output_config",
        "output_format",
        "thinking",
        "user_profile_id",
        "workspace_id",
    }
)
# For a model in this process
_CONVERTED_FIELDS: Final = frozenset({"output_config", "output_format", "thinking"})
# They make answers of blocks that are not passed on
_UNSUPPORTED_FIELDS: Final = ("compaction", "mcp_servers")
# Of Anthropic's tools, those that the client runs
_CLIENT_TOOL_PREFIXES: Final = ("bash_", "computer_", "memory_", "text_editor_")
# On this error, the SDK's message threads and tool runner send the whole conversation
_NO_THREADS_MESSAGE: Final = "thread is set; this server keeps no conversations: send all messages, without thread"
_TOOL_CHOICES: Final[Mapping[str, str]] = {"auto": "auto", "any": "required", "none": "none"}


def parse_messages_request(body: Body, *, target_api: ApiName | None) -> ParsedRequest:
    """Parse a body of the messages API. A last message of the assistant is continued.

    `target_api`: the target's own API, or None for a model in this process.

    Raises InvalidRequestError, which names the wrong field, and HttpProblem for a thread.
    """
    if body.get("max_tokens") is None:
        raise InvalidRequestError("max_tokens is missing; this API requires it")
    if body.get("thread") is not None:  # its part of the conversation is not in `messages`
        raise HttpProblem(400, _NO_THREADS_MESSAGE, code="thread_unsupported_request", param="thread")
    for name in _UNSUPPORTED_FIELDS:
        if body.get(name):
            raise InvalidRequestError(f"{name} is set; this server does not support it: leave it out")
    is_native, is_local = target_api == "messages", target_api is None
    messages = [
        *_parse_anthropic_system(body, is_native=is_native),
        *_parse_anthropic_messages(body, is_native=is_native),
    ]
    if not is_native:
        messages = _join_neighbouring_answers(messages)
    prefix = ""
    if messages and _is_prefix_message(messages[-1]):
        prefix = messages.pop().text
    if not messages:
        raise InvalidRequestError("messages is empty; it must hold at least one message")
    if is_native:
        known_fields = _KNOWN_FIELDS
    else:
        known_fields = _KNOWN_FIELDS | (_CONVERTED_FIELDS if is_local else _MESSAGES_ONLY_FIELDS)
    request = build_chat_request(
        body,
        known_fields,
        is_local=is_local,
        extra_fields=None if is_native else _convert_anthropic_extra_fields(body, is_local=is_local),
        messages=tuple(messages),
        max_tokens=get_typed_field(body, "max_tokens", None, int),
        stop=parse_stop_strings(body, "stop_sequences"),
        tools=tuple(_convert_anthropic_tools(body, is_native=is_native)),
        tool_choice=(get_object_field(body, "tool_choice") or None)
        if is_native
        else _convert_anthropic_tool_choice(body),
        response_format=None if is_native else _convert_anthropic_output_format(body),
        prefix=prefix,
    )
    return ParsedRequest(
        model=get_requested_model_name(body),
        request=request,
        stream=get_typed_field(body, "stream", default=False),
        changes=() if is_native else _list_changes(body),
    )


def _list_changes(body: Body) -> tuple[str, ...]:
    """List `documents` if the target is only told the name of one."""
    contents: list[object] = [message.get("content") for message in get_object_list_field(body, "messages")]
    blocks = [block for content in contents if isinstance(content, list) for block in cast("list[Json]", content)]
    return ("documents",) if has_unread_document(blocks) else ()


def _is_prefix_message(last: ChatMessage) -> bool:
    """Return True if a message is text to continue; one that has more is sent as it is."""
    return last.role == "assistant" and not last.tool_calls and last.native is None


def _build_native_message(role: Any, content: str | Sequence[Json], *, is_native: bool) -> NativeMessage | None:
    return NativeMessage("messages", {"role": role, "content": content}) if is_native else None


def _parse_anthropic_system(body: Body, *, is_native: bool) -> Iterator[ChatMessage]:
    system: object = body.get("system")
    if isinstance(system, list):
        blocks = get_object_list_field(body, "system")
        text = "\n\n".join(str(block.get("text", "")) for block in blocks)
        if is_native:
            yield ChatMessage("system", text, native=_build_native_message("system", blocks, is_native=True))
            return
    elif isinstance(system, str | None):
        text = system or ""
    else:
        raise InvalidRequestError(f"system is of type {type(system).__name__}; it must be a text or text blocks")
    if text := text if is_native else strip_billing_header(text):
        yield ChatMessage("system", text)


def _parse_anthropic_messages(body: Body, *, is_native: bool) -> Iterator[ChatMessage]:
    for index, message in enumerate(get_object_list_field(body, "messages")):
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise InvalidRequestError(f"messages[{index}].role is {role!r}; it must be user or assistant")
        if isinstance(content, str):
            # between other messages, a system message means something else than before them
            keep_native = is_native and role == "system"
            yield ChatMessage(role, content, native=_build_native_message(role, content, is_native=keep_native))
            continue
        try:
            blocks = get_object_list_field(message, "content")
            if role == "assistant":
                yield _parse_assistant_message(blocks, is_native=is_native)
            else:
                yield from _parse_user_message(blocks, role, is_native=is_native)
        except (InvalidRequestError, KeyError, TypeError) as error:
            raise InvalidRequestError(f"messages[{index}].content is wrong: {error}") from error


def _parse_assistant_message(blocks: Sequence[Json], *, is_native: bool) -> ChatMessage:
    calls = tuple(
        ToolCall(block["id"], block["name"], json.dumps(block.get("input", {})))
        for block in blocks
        if block.get("type") == "tool_use"
    )
    text = "".join(block["text"] for block in blocks if block.get("type") == "text")
    if is_native:
        is_text = all(block.keys() == {"type", "text"} for block in blocks)
        native = _build_native_message("assistant", blocks, is_native=not is_text)
        return ChatMessage("assistant", text or (None if calls else ""), tool_calls=calls, native=native)
    thoughts = [block.get("thinking") for block in blocks if block.get("type") == "thinking"]
    reasoning = "".join(thought for thought in thoughts if isinstance(thought, str))
    return ChatMessage("assistant", text or (None if calls else ""), tool_calls=calls, reasoning=reasoning)


def _join_neighbouring_answers(messages: Iterable[ChatMessage]) -> list[ChatMessage]:
    """Join neighbouring messages of the assistant: in Anthropic's API they are one turn."""
    joined: list[ChatMessage] = []
    for message in messages:
        last = joined[-1] if joined else None
        if last is not None and last.role == message.role == "assistant":
            calls = (*last.tool_calls, *message.tool_calls)
            content = last.text + message.text or (None if calls else "")
            reasoning = last.reasoning + message.reasoning
            joined[-1] = replace(last, content=content, tool_calls=calls, reasoning=reasoning)
        else:
            joined.append(message)
    return joined


def _parse_user_message(blocks: Sequence[Json], role: Role, *, is_native: bool) -> Iterator[ChatMessage]:
    others: list[Json] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            content = _get_tool_result_text(block) if is_native else convert_tool_result_to_content(block)
            native = _build_native_message("user", [block], is_native=is_native)
            yield ChatMessage("tool", content, tool_call_id=block["tool_use_id"], native=native)
        else:
            others.append(block)
    if not others:
        return
    native = _build_native_message(role, others, is_native=is_native)
    read = others if native is None else list(filter(_can_draft_read, others))
    yield ChatMessage(role, convert_blocks_to_content(read), native=native)


def _can_draft_read(block: Json) -> bool:
    """Return True if models other than the target can read a block that it gets as it is."""
    if block.get("type") == "image":
        return get_object_field(block, "source").get("type") in ("base64", "url")
    return block.get("type") == "text"


def _get_tool_result_text(block: Json) -> str:
    """Return the text for a draft, which need not see what the target sees."""
    content = block.get("content")
    parts = get_object_list_field(block, "content") if isinstance(content, list) else ()
    return "".join(str(part.get("text", "")) for part in parts) if isinstance(content, list) else str(content or "")


def _convert_anthropic_tools(body: Body, *, is_native: bool) -> Iterator[Json]:
    for index, tool in enumerate(get_object_list_field(body, "tools")):
        kind = str(tool.get("type") or "custom")
        if "name" in tool and is_native and (kind == "custom" or kind.startswith(_CLIENT_TOOL_PREFIXES)):
            yield tool
            continue
        if kind == "custom" and "name" not in tool:
            raise InvalidRequestError(f"tools[{index}].name is missing; a tool must have one")
        if kind != "custom":
            raise InvalidRequestError(
                f"tools[{index}] is {tool.get('type')!r}; only tools that the client runs are supported here"
            )
        function = {"name": tool["name"], "parameters": tool.get("input_schema", {"type": "object"})}
        more = {name: tool[name] for name in ("description", "strict") if tool.get(name)}
        yield {"type": "function", "function": {**function, **more}}


def _convert_anthropic_tool_choice(body: Body) -> str | Json | None:
    choice = get_object_field(body, "tool_choice")
    kind = str(choice.get("type"))
    if not choice or not body.get("tools"):
        return None
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind not in _TOOL_CHOICES:
        raise InvalidRequestError(f"tool_choice is {kind!r}; it must be one of tool, {', '.join(_TOOL_CHOICES)}")
    return _TOOL_CHOICES[kind]


def _convert_anthropic_extra_fields(body: Body, *, is_local: bool) -> Json:
    """Convert fields that have other names in chat completions or for a model in this process."""
    fields: Json = {}
    if body.get("service_tier") == "standard_only" and not is_local:
        fields["service_tier"] = "default"
    if body.get("tools") and get_object_field(body, "tool_choice").get("disable_parallel_tool_use") is True:
        fields["parallel_tool_calls"] = False
    if is_local:
        effort = get_object_field(body, "output_config").get("effort")
        given = {"thinking": get_object_field(body, "thinking") or None, "reasoning_effort": effort}
        fields |= {name: value for name, value in given.items() if value is not None}
    return fields


def _convert_anthropic_output_format(body: Body) -> Json | None:
    requested_format = get_object_field(get_object_field(body, "output_config"), "format") or get_object_field(
        body, "output_format"
    )
    if not requested_format:
        return None
    schema = {"name": "answer", "schema": requested_format.get("schema", {}), "strict": True}
    return {"type": "json_schema", "json_schema": schema}
