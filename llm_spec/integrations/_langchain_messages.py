"""Messages of LangChain as this library's, and back: what is said to a model, and what it says. Pure."""

from __future__ import annotations

import base64
import json
from binascii import Error as Base64Error
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, TypeAlias, cast
from urllib.parse import unquote_to_bytes

from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    convert_to_openai_messages,
    message_chunk_to_message,
)
from langchain_core.messages import ToolCall as LangChainToolCall
from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata
from langchain_core.messages.block_translators import get_translator
from langchain_core.messages.tool import InvalidToolCall, invalid_tool_call, tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.utils.json import parse_partial_json

from llm_spec.chat import (
    AnswerDetail,
    ChatMessage,
    Finish,
    ReasoningDelta,
    ReasoningDetail,
    StreamEvent,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from llm_spec.chat_response import append_tool_call_delta
from llm_spec.errors import InvalidRequestError
from llm_spec.integrations._shared import convert_usage_to_openai, describe_finish_as_json, split_provider_name
from llm_spec.openai_logprobs import build_chat_logprobs
from llm_spec.reasoning_details import merge_reasoning_details

__all__ = [
    "ChunkBuilder",
    "build_chat_result",
    "convert_langchain_messages",
    "separate_invalid_tool_calls",
    "sum_token_usage",
]

_Block: TypeAlias = dict[str, Any]

# content blocks of an answer that are no content in OpenAI's form: calls and reasoning are fields there
_REASONING_TYPES: Final = ("reasoning", "thinking", "redacted_thinking")
_NON_CONTENT_TYPES: Final = (
    "tool_call",
    "tool_call_chunk",
    "invalid_tool_call",
    "tool_use",
    "tool_result",
    "function_call",
    "refusal",
    *_REASONING_TYPES,
)
_CACHE_MARKS: Final = ("cache_control", "prompt_cache_breakpoint")
_TEXT_TYPES: Final = frozenset({"application/json", "application/xml", "application/yaml", "application/x-yaml"})
_INVALID: Final = "invalid_tool_calls"  # in `response_metadata["llm_spec"]`: what pieces put together hide


# --------------------------------------------------------------------------------------------- to a request


def convert_langchain_messages(messages: Sequence[BaseMessage]) -> list[ChatMessage]:
    """Messages for a request; raises InvalidRequestError that says which cannot be sent."""
    converted: list[ChatMessage] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        try:
            converted += _convert_message(message, where)
        except InvalidRequestError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidRequestError(f"{where} cannot be sent: {error}") from error
    return converted


def _convert_message(message: BaseMessage, where: str) -> Iterator[ChatMessage]:
    """A message, or several: results of tools may be blocks of one."""
    if isinstance(message.content, list):
        message = message.model_copy(update={"content": list(map(_inline_text_file, message.content))})
    if isinstance(message, AIMessage):
        calls, broken = _split_tool_calls(message)
        message = message.model_copy(update={"tool_calls": calls, "invalid_tool_calls": broken})
    marks = [_find_cache_marks(block) for block in _list_content_blocks(message)]
    # as one string LangChain would put newlines between blocks of text
    text_format: Literal["string", "block"] = "string" if isinstance(message.content, str) else "block"
    for fields in cast("list[_Block]", convert_to_openai_messages([message], text_format=text_format)):
        if isinstance(fields["content"], list):
            fields["content"] = _convert_parts(fields["content"], marks)
        if isinstance(message, AIMessage) and fields["role"] == "assistant":
            yield _convert_answer(message, fields, where)
        else:
            yield ChatMessage.from_openai(fields, where)


def _list_content_blocks(message: BaseMessage) -> list[str | _Block]:
    if isinstance(message.content, str):
        return []
    blocks = cast("list[str | _Block]", message.content)
    return [block for block in blocks if isinstance(block, str) or block.get("type") not in _NON_CONTENT_TYPES]


def _find_cache_marks(block: str | _Block) -> _Block:
    """What says that a prompt up to here is to be cached; LangChain's own form has it in `extras`."""
    if isinstance(block, str):
        return {}
    extras = block.get("extras")
    places = [block, cast("_Block", extras)] if isinstance(extras, dict) else [block]
    return {name: place[name] for place in reversed(places) for name in _CACHE_MARKS if name in place}


def _convert_parts(parts: list[_Block], marks: Sequence[_Block]) -> str | list[_Block]:
    """Parts in OpenAI's form, with their marks; those that are text alone are one text, with nothing between them."""
    parts = [part for part in parts if part.get("type") not in _NON_CONTENT_TYPES]
    if any(marks) and len(parts) == len(marks):
        return [part | mark for part, mark in zip(parts, marks, strict=True)]
    is_text = all(part.get("type") == "text" for part in parts)
    return "".join(part["text"] for part in parts) if is_text else parts


def _inline_text_file(block: str | _Block) -> str | _Block:
    """A file that is text, as text; other blocks as they are."""
    if isinstance(block, str) or block.get("type") not in ("file", "text-plain"):
        return block
    text = _read_text_file(block)
    if text is None:
        return block
    extras = cast("_Block", block.get("extras") or block.get("metadata") or {})
    name = block.get("filename") or extras.get("filename") or block.get("title")
    return {"type": "text", "text": f"{name}:\n{text}" if name else text} | _find_cache_marks(block)


def _read_text_file(block: _Block) -> str | None:
    """The text of a file, None where it is none, or where it is not here."""
    if isinstance(text := block.get("text"), str):
        return text
    address = block.get("url")
    mime_type = str(block.get("mime_type") or ("text/plain" if block["type"] == "text-plain" else ""))
    data = block.get("base64") or block.get("data")
    try:
        if isinstance(data, str) and _is_text_type(mime_type):
            return base64.b64decode(data, validate=True).decode()
        if isinstance(address, str) and address.startswith("data:"):
            head, _, body = address[5:].partition(",")
            if _is_text_type(head.partition(";")[0]):
                is_base64 = head.endswith(";base64")
                return (base64.b64decode(body, validate=True) if is_base64 else unquote_to_bytes(body)).decode()
    except (Base64Error, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"a file of type {mime_type or 'text'} is not UTF-8 in base64: {error}") from error
    return None


def _is_text_type(mime_type: str) -> bool:
    return mime_type.startswith("text/") or mime_type in _TEXT_TYPES or mime_type.endswith(("+json", "+xml"))


def _convert_answer(message: AIMessage, fields: _Block, where: str) -> ChatMessage:
    """An earlier answer, with calls that are broken as they were written, and with its reasoning."""
    if message.invalid_tool_calls:
        fields["tool_calls"] = [*fields.get("tool_calls", ()), *map(_build_broken_call, message.invalid_tool_calls)]
    details = tuple(_find_reasoning_details(message))
    converted = ChatMessage.from_openai(fields, where)
    return replace(converted, reasoning=_find_reasoning_text(message), reasoning_details=details)


def _build_broken_call(call: InvalidToolCall) -> _Block:
    function = {"name": call["name"] or "", "arguments": call["args"] or ""}
    return {"id": call["id"], "type": "function", "function": function}


def _find_reasoning_text(message: AIMessage) -> str:
    if isinstance(text := message.additional_kwargs.get("reasoning_content"), str) and text:
        return text
    texts = (block.get("reasoning") or block.get("thinking") for block in _list_reasoning_blocks(message))
    return "".join(text for text in texts if isinstance(text, str))


def _find_reasoning_details(message: AIMessage) -> Iterator[ReasoningDetail]:
    """What APIs need back: as answers of this library keep it, else blocks of thinking that are signed."""
    kept = message.additional_kwargs
    for item in kept.get("reasoning_details") or ():
        yield ReasoningDetail("chat", item)
    blocks = kept.get("thinking_blocks") or map(_restore_thinking_block, _list_reasoning_blocks(message))
    for block in blocks:
        if block.get("signature") or block.get("type") == "redacted_thinking":
            yield ReasoningDetail("messages", block)


def _list_reasoning_blocks(message: AIMessage) -> list[_Block]:
    blocks = message.content if isinstance(message.content, list) else []
    return [block for block in blocks if isinstance(block, dict) and block.get("type") in _REASONING_TYPES]


def _restore_thinking_block(block: _Block) -> _Block:
    """A block of thinking as Anthropic's API has it, of one in LangChain's standard form."""
    if block["type"] == "redacted_thinking":
        return {"type": "redacted_thinking", "data": block.get("data", "")}
    extras = cast("_Block", block.get("extras") or {})
    text = block.get("thinking") or block.get("reasoning") or ""
    return {
        "type": "thinking",
        "thinking": text,
        "signature": block.get("signature") or extras.get("signature") or "",
    }


# ------------------------------------------------------------------------------------------- from an answer


class ChunkBuilder:
    """The events of one answer as LangChain's chunks; the finish is the one with usage.

    `name`: the provider's, where an answer does not tell its target.
    """

    def __init__(self, name: str, *, has_usage: bool = True) -> None:
        self._name = name
        self._has_usage = has_usage
        self._calls: dict[int, ToolCall] = {}
        self._reasoning: list[ReasoningDelta | ReasoningDetail] = []
        self.llm_output: dict[str, Any] = {}
        """What LangChain wants to know of the whole answer, once it has ended."""

    def convert(self, event: StreamEvent) -> Iterator[ChatGenerationChunk]:
        """An event as a chunk, if it is of those that have one."""
        match event:
            case TextDelta():
                logprobs = build_chat_logprobs(event.logprobs)
                info = None if logprobs is None else {"logprobs": logprobs}
                yield ChatGenerationChunk(message=AIMessageChunk(content=event.text), generation_info=info)
            case ReasoningDelta():
                self._reasoning.append(event)
                yield _make_chunk(reasoning_content=event.text)
            case ReasoningDetail():
                self._reasoning.append(event)
            case AnswerDetail() if event.refusal:
                yield _make_chunk(refusal=event.refusal)
            case ToolCallDelta():
                yield self._convert_tool_call_delta(event)
            case Finish():
                yield self._convert_finish(event)
            case _:
                pass  # rounds, fallbacks and retries are no part of an answer

    def _convert_tool_call_delta(self, event: ToolCallDelta) -> ChatGenerationChunk:
        """A piece of a call; LangChain joins names and ids, so what comes again is left out."""
        before = self._calls.get(event.index)
        after = self._calls[event.index] = append_tool_call_delta(before, event)
        name = after.name if before is None or before.name != after.name else None
        call_id = after.id if before is None or before.id != after.id else None
        piece = tool_call_chunk(name=name or None, args=event.arguments, id=call_id or None, index=event.index)
        return ChatGenerationChunk(message=AIMessageChunk(content="", tool_call_chunks=[piece]))

    def _convert_finish(self, event: Finish) -> ChatGenerationChunk:
        report = describe_finish_as_json(event)
        if broken := [invalid for call in self._calls.values() if (invalid := _find_fault(call, event)) is not None]:
            report[_INVALID] = broken
        provider, model = split_provider_name(report.get("target") or self._name)
        self.llm_output = {"model_name": model}
        if provider and _may_tell_provider(provider, has_reasoning=bool(self._reasoning)):
            self.llm_output["model_provider"] = provider
        if event.service_tier is not None:
            self.llm_output["service_tier"] = event.service_tier
        metadata = {**self.llm_output, "finish_reason": event.finish_reason, "llm_spec": report}
        if event.response_id is not None:
            metadata["id"] = event.response_id
        if event.usage is not None:
            self.llm_output["token_usage"] = convert_usage_to_openai(event.usage)
        details = merge_reasoning_details(self._reasoning)
        kept = {"reasoning_details": "chat", "thinking_blocks": "messages"}
        found = {name: [dict(detail.value) for detail in details if detail.api == api] for name, api in kept.items()}
        usage = event.usage if self._has_usage else None
        message = AIMessageChunk(
            content="",
            additional_kwargs={name: values for name, values in found.items() if values},
            response_metadata=metadata,
            usage_metadata=None if usage is None else _convert_usage_to_langchain(usage),
            chunk_position="last",
        )
        return ChatGenerationChunk(message=message)


def build_chat_result(chunks: Sequence[ChatGenerationChunk], llm_output: dict[str, Any]) -> ChatResult:
    """The whole answer of its chunks."""
    merged = chunks[0] + list(chunks[1:])
    message = message_chunk_to_message(merged.message)
    generation = ChatGeneration(message=message, generation_info=merged.generation_info)
    return separate_invalid_tool_calls(ChatResult(generations=[generation], llm_output=llm_output))


def separate_invalid_tool_calls(result: ChatResult) -> ChatResult:
    """The same, with calls that were cut off or are no JSON where LangChain keeps such.

    Pieces that LangChain puts together are read as far as they go, which is right only while an answer is written.
    """
    for generation in result.generations:
        message = generation.message
        if isinstance(message, AIMessage):
            message.tool_calls, message.invalid_tool_calls = _split_tool_calls(message)
    return result


def _split_tool_calls(message: AIMessage) -> tuple[list[LangChainToolCall], list[InvalidToolCall]]:
    """A message's calls that are whole, and those that are not."""
    calls, invalid = list(message.tool_calls), list(message.invalid_tool_calls)
    report = message.response_metadata.get("llm_spec")
    found = cast("dict[str, Any]", report).get(_INVALID) if isinstance(report, dict) else None
    broken = list(cast("Sequence[InvalidToolCall]", found or ()))
    for fault in broken:
        guess = (fault["id"], fault["name"] or "", _parse_as_pieces(fault["args"]))
        at = next((at for at, call in enumerate(calls) if (call["id"], call["name"], call["args"]) == guess), None)
        if at is not None:
            del calls[at]
    known = [(fault["id"], fault["args"]) for fault in broken]
    return calls, [call for call in invalid if (call["id"], call["args"]) not in known] + broken


def _parse_as_pieces(arguments: str | None) -> object:
    try:
        return parse_partial_json(arguments) if arguments else {}
    except ValueError:
        return None


def _find_fault(call: ToolCall, finish: Finish) -> InvalidToolCall | None:
    """The call as LangChain keeps a broken one; None for one that is whole."""
    fault: str | None = None
    try:
        arguments = json.loads(call.arguments, strict=False) if call.arguments.strip() else None
        if arguments is None and finish.finish_reason == "length":
            fault = "the answer was cut off before its arguments"
        elif not isinstance(arguments, dict | None):
            fault = f"its arguments are {type(arguments).__name__}, not an object"
    except ValueError as error:
        fault = f"its arguments are not valid JSON: {error}"
    if fault is None:
        return None
    # as the call's pieces have it, so that the two are known to be one
    return invalid_tool_call(name=call.name or None, args=call.arguments, id=call.id or None, error=fault)


def _make_chunk(**additional_kwargs: str) -> ChatGenerationChunk:
    return ChatGenerationChunk(message=AIMessageChunk(content="", additional_kwargs=additional_kwargs))


def _may_tell_provider(name: str, *, has_reasoning: bool) -> bool:
    """Whether a message may name its provider.

    LangChain then reads its content as that provider's own class writes it. That must not lose what is in it here.
    """
    return get_translator(name) is None or (name == "openai" and not has_reasoning)


def _convert_usage_to_langchain(usage: Usage) -> UsageMetadata:
    details = InputTokenDetails(cache_read=usage.cached_input_tokens)
    if usage.cache_write_input_tokens:
        details["cache_creation"] = usage.cache_write_input_tokens
    return UsageMetadata(
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
        total_tokens=usage.input_tokens + usage.output_tokens,
        input_token_details=details,
        output_token_details=OutputTokenDetails(reasoning=usage.reasoning_tokens),
    )


def sum_token_usage(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Usage of two answers together, field by field."""
    added = dict(first)
    for name, value in second.items():
        if isinstance(value, Mapping):
            added[name] = sum_token_usage(added.get(name) or {}, cast("Mapping[str, Any]", value))
        else:
            added[name] = (added.get(name) or 0) + (value or 0)
    return added
