"""OpenAI's responses, as far as they need no stored state: from bodies to requests. Pure.

https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, TypeAlias, cast

from llm_spec.contract.errors import InvalidRequestError
from llm_spec.contract.messages import ChatMessage, ContentPart, Role, ToolCall
from llm_spec.server.apis.compaction import COMPACTION_REQUEST, is_compaction_requested, read_compaction_item
from llm_spec.server.apis.custom_tool_input import encode_custom_input
from llm_spec.server.apis.fields import (
    Body,
    Json,
    ParsedRequest,
    build_chat_request,
    get_object_field,
    get_object_list_field,
    get_requested_model_name,
    get_typed_field,
)
from llm_spec.server.apis.logprobs import get_requested_top_logprobs
from llm_spec.server.apis.responses_tools import ResponsesTools, read_client_tool

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
# Items of tools that OpenAI ran in earlier turns, and encrypted ones: they have no text for a model
_LEFT_OUT_ITEMS: Final = frozenset(
    {
        "compaction",
        "image_generation_call",
        "mcp_list_tools",
        "tool_search_call",
        "tool_search_output",
        "web_search_call",
    }
)

Content: TypeAlias = str | tuple[ContentPart, ...] | None


def parse_responses_request(body: Body, *, is_local: bool) -> ParsedRequest:
    """Parse a body of the responses API.

    Raises InvalidRequestError for a wrong field, and for one that needs stored responses.
    """
    for name in _STATEFUL_FIELDS:
        if body.get(name):
            raise InvalidRequestError(f"{name} is set; this server keeps no responses: send the whole input")
    include = cast("Sequence[object]", get_typed_field(body, "include", None, list) or ())
    effort = get_object_field(body, "reasoning").get("effort")
    tools = ResponsesTools.read(body)
    messages, left_out_items = _parse_input_messages(body, tools)
    request = build_chat_request(
        body,
        _KNOWN_FIELDS,
        is_local=is_local,
        messages=messages,
        max_tokens=get_typed_field(body, "max_output_tokens", None, int),
        tools=tools.functions,
        tool_choice="none" if is_compaction_requested(body) and tools.functions else tools.convert_tool_choice(body),
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
        left_out=tuple(dict.fromkeys((*tools.left_out, *left_out_items))),
        client_tools=tools.client_tools,
    )


def _parse_input_messages(body: Body, tools: ResponsesTools) -> tuple[tuple[ChatMessage, ...], list[str]]:
    """Return the conversation, and the types of the items that are left out."""
    instructions = get_typed_field(body, "instructions", "")
    first = [ChatMessage("system", instructions)] if instructions else []
    input_value = body.get("input")
    if isinstance(input_value, str):
        return (*first, ChatMessage("user", input_value)), []
    items = get_object_list_field(body, "input")
    if not items:
        raise InvalidRequestError("input is empty; it must be a text or a list of at least one item")
    reader = _ItemReader(tools)
    for index, item in enumerate(items):
        try:
            reader.read_item(item)
        except (InvalidRequestError, KeyError, TypeError) as error:
            raise InvalidRequestError(f"input[{index}] is wrong: {_describe_item_error(error)}") from error
    return (*first, *_place_results_behind_calls(reader.end_messages())), reader.left_out


def _describe_item_error(error: Exception) -> str:
    return f"it has no {error.args[0]}" if isinstance(error, KeyError) else str(error)


class _ItemReader:
    """Reads items; the items of one answer (reasoning, texts, calls) become one message."""

    def __init__(self, tools: ResponsesTools) -> None:
        self.left_out: list[str] = []
        self._tools = tools
        self._messages: list[ChatMessage] = []
        self._answer: ChatMessage | None = None  # being put together

    def read_item(self, item: Json) -> None:
        """Read the next item; raises InvalidRequestError, KeyError or TypeError if it is wrong."""
        match item.get("type", "message"):
            case "message":
                self._add_message(ChatMessage(cast("Role", item.get("role")), _convert_item_content(item)))
            case "reasoning":
                self._add_to_answer(ChatMessage("assistant", None, reasoning=_read_reasoning(item)))
            case "function_call" | "custom_tool_call":
                self._add_to_answer(ChatMessage("assistant", None, tool_calls=(self._read_call(item),)))
            case "function_call_output" | "custom_tool_call_output":
                content, call_id = _convert_item_content(item, "output"), _get_text(item, "call_id")
                self._add_message(ChatMessage("tool", content, tool_call_id=call_id))
            case "compaction_trigger":
                self._add_message(COMPACTION_REQUEST)
            case "compaction" if (summary := read_compaction_item(item)) is not None:
                self._add_message(summary)
            case "additional_tools":
                pass  # they have been read already
            case kind if kind in _LEFT_OUT_ITEMS:
                self.left_out.append(str(kind))
            case kind:
                raise InvalidRequestError(f"an item of type {kind!r} is not supported here")

    def end_messages(self) -> list[ChatMessage]:
        """Return all messages, without reasoning that led to nothing."""
        answer, self._answer = self._answer, None
        if answer is not None and (answer.content is not None or answer.tool_calls):
            self._messages.append(answer)
        return self._messages

    def _add_message(self, message: ChatMessage) -> None:
        if message.role == "assistant":
            self._add_to_answer(message)
        else:
            self.end_messages().append(message)

    def _add_to_answer(self, piece: ChatMessage) -> None:
        self._answer = piece if self._answer is None else _join_answers(self._answer, piece)

    def _read_call(self, item: Json) -> ToolCall:
        is_custom = item["type"] == "custom_tool_call"
        tool = read_client_tool(item, "custom" if is_custom else "function")
        arguments = encode_custom_input(_get_text(item, "input")) if is_custom else _get_text(item, "arguments")
        return ToolCall(_get_text(item, "call_id"), self._tools.get_target_name(tool), arguments)


def _get_text(item: Json, name: str) -> str:
    if not isinstance(item[name], str):
        raise InvalidRequestError(f"{name} is of type {type(item[name]).__name__}; it must be a text")
    return str(item[name])


def _join_answers(answer: ChatMessage, piece: ChatMessage) -> ChatMessage:
    return replace(
        answer,
        content=_join_contents(answer.content, piece.content),
        tool_calls=(*answer.tool_calls, *piece.tool_calls),
        reasoning=_join_texts(answer.reasoning, piece.reasoning),
    )


def _join_contents(content: Content, more: Content) -> Content:
    if content is None or more is None:
        return more if content is None else content
    if isinstance(content, str) and isinstance(more, str):
        return _join_texts(content, more)
    return (*_list_parts(content), *_list_parts(more))


def _join_texts(text: str, more: str) -> str:
    return text + ("\n\n" if text.strip() and more.strip() else "") + more


def _list_parts(content: str | tuple[ContentPart, ...]) -> tuple[ContentPart, ...]:
    return ({"type": "text", "text": content},) if isinstance(content, str) else content


def _read_reasoning(item: Json) -> str:
    """Return the text of a model's reasoning, or else its summary; skip what is encrypted."""
    texts = [str(part.get("text") or "") for part in get_object_list_field(item, "content")]
    if any(texts):
        return "".join(texts)
    return "\n\n".join(str(part.get("text") or "") for part in get_object_list_field(item, "summary"))


def _place_results_behind_calls(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Place results of tools behind their calls, as chat completions demand."""
    messages_with_results: list[tuple[ChatMessage, list[ChatMessage]]] = []
    results_by_id: dict[str | None, list[ChatMessage]] = {}  # of the latest call of that id
    for message in messages:
        if message.role == "tool" and message.tool_call_id in results_by_id:
            results_by_id[message.tool_call_id].append(message)
            continue
        results: list[ChatMessage] = []
        messages_with_results.append((message, results))
        results_by_id.update((call.id, results) for call in message.tool_calls)
    return [placed for message, results in messages_with_results for placed in (message, *results)]


def _convert_item_content(item: Json, name: str = "content") -> str | tuple[ContentPart, ...]:
    content = item[name] if name == "output" else item.get(name)
    if isinstance(content, str):
        return content
    parts = get_object_list_field(item, name)
    if all(part.get("type") in _TEXT_PART_TYPES for part in parts):
        return _join_part_texts(parts)
    return tuple(_convert_responses_part(part) for part in parts)


def _join_part_texts(parts: Sequence[Json]) -> str:
    return "".join(str(part.get("text") or part.get("refusal") or "") for part in parts)


def _convert_responses_part(part: Json) -> ContentPart:
    """Convert a content part to the form of chat completions."""
    kind = part.get("type")
    if kind in _TEXT_PART_TYPES:
        return {"type": "text", "text": _join_part_texts([part])}
    for name in ("file_id", "file_url"):
        if part.get(name):
            raise InvalidRequestError(f"{name} is set; this server keeps and fetches no files: send the data itself")
    if kind == "input_image" and part.get("image_url"):
        return {"type": "image_url", "image_url": {"url": part["image_url"], "detail": part.get("detail") or "auto"}}
    if kind == "input_file" and part.get("file_data"):
        return {"type": "file", "file": {name: part[name] for name in ("filename", "file_data") if part.get(name)}}
    if kind == "input_audio":
        return part
    raise InvalidRequestError(f"a part of type {kind!r} is not supported here")


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
