"""Converts the messages and options that litellm passes on to a ChatRequest. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

from llm_spec.contract.errors import InvalidRequestError
from llm_spec.contract.messages import ChatMessage, NativeMessage, ReasoningDetail
from llm_spec.contract.request import ChatRequest
from llm_spec.integrations._shared import build_request_options

__all__ = ["REPORT_FIELD", "build_request_from_litellm"]

REPORT_FIELD: Final = "llm_spec"  # in `provider_specific_fields`: how an answer came about
# Handled by litellm, or by SpeculativeLLM
_IGNORED_OPTIONS: Final = ("max_retries", "stream", "stream_options")
_REFUSED_OPTIONS: Final[Mapping[str, str]] = {
    "functions": "give tools",
    "function_call": "give tool_choice",
    "extra_query": "write the query into the target's address",
}
# Fields of an earlier answer that are converted to its reasoning
_REASONING_FIELDS: Final = ("reasoning", "reasoning_content", "reasoning_details", "reasoning_items", "thinking_blocks")
_THINKING_FIELDS: Final = ("type", "thinking", "signature", "data")
_LITELLM_FIELDS: Final = ("provider_specific_fields", *_REASONING_FIELDS)


def build_request_from_litellm(messages: Sequence[Mapping[str, Any]], params: Mapping[str, Any]) -> ChatRequest:
    """Build a request. Raises InvalidRequestError for an option that a request does not have."""
    options = {name: value for name, value in params.items() if value is not None and name not in _IGNORED_OPTIONS}
    for name, advice in _REFUSED_OPTIONS.items():
        if options.pop(name, None):
            raise InvalidRequestError(f"{name} is not supported by llm_spec; {advice}")
    if (num_answers := options.pop("n", 1)) != 1:
        raise InvalidRequestError(f"n is {num_answers!r}; llm_spec gives one answer per request, so leave n out")
    if "max_completion_tokens" in options:
        options["max_tokens"] = options.pop("max_completion_tokens")
    return ChatRequest.create(list(map(_convert_message, messages)), **build_request_options(options))


def _convert_message(message: Mapping[str, Any]) -> ChatMessage:
    """Convert a message. Fields of litellm and of this library go: some servers refuse them."""
    if not isinstance(cast("object", message), Mapping):
        return ChatMessage.from_openai(message)  # raises and says what it must be
    fields = _drop_report(message)
    if isinstance(content := fields.get("content"), list):
        fields["content"] = list(map(_convert_image_address, content))
    if fields.get("role") != "assistant":
        return ChatMessage.from_openai(fields)
    specific = _get_object(fields, "provider_specific_fields")
    details = (
        *map(_convert_thinking_block, filter(_is_signed, _find_list("thinking_blocks", fields, specific))),
        *(ReasoningDetail("chat", dict(item)) for item in _find_list("reasoning_details", fields, specific)),
    )
    reasoning = fields.get("reasoning_content") or fields.get("reasoning")
    converted = ChatMessage.from_openai({name: of for name, of in fields.items() if name not in _LITELLM_FIELDS})
    converted = replace(converted, reasoning=reasoning if isinstance(reasoning, str) else "", reasoning_details=details)
    if converted.native is None:
        return converted
    # a chat server is sent the message as it came, so its reasoning is added there
    known: dict[str, Any] = replace(converted, native=None).to_openai()
    added: dict[str, Any] = {name: known[name] for name in _REASONING_FIELDS if name in known}
    return replace(converted, native=NativeMessage("chat", {**converted.native.value, **added}))


def _convert_image_address(part: object) -> object:
    """Convert a bare address in `image_url`, which litellm allows, to the API's form."""
    if isinstance(part, Mapping) and isinstance(address := part.get("image_url"), str):
        return {**part, "image_url": {"url": address}}
    return part


def _is_signed(block: Mapping[str, Any]) -> bool:
    """Return True if a block of thinking is signed. The API refuses one that is not."""
    return bool(block.get("data" if block.get("type") == "redacted_thinking" else "signature"))


def _convert_thinking_block(block: Mapping[str, Any]) -> ReasoningDetail:
    """Convert a block of thinking. Fields that litellm adds (`index`, `cache_control`) go."""
    return ReasoningDetail("messages", {name: block[name] for name in _THINKING_FIELDS if name in block})


def _drop_report(message: Mapping[str, Any]) -> dict[str, Any]:
    """Remove `REPORT_FIELD` from a message and from its calls."""
    fields = dict(message)
    if specific := _get_object(fields, "provider_specific_fields"):
        fields["provider_specific_fields"] = {name: of for name, of in specific.items() if name != REPORT_FIELD} or None
    fields.pop(REPORT_FIELD, None)
    if isinstance(calls := fields.get("tool_calls"), list):
        fields["tool_calls"] = [_drop_report(call) if isinstance(call, Mapping) else call for call in calls]
    return fields


def _get_object(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = fields.get(name)
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def _find_list(name: str, *places: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the objects of the list `name` in the first place that has one."""
    lists = (place.get(name) for place in places)
    found = next((value for value in lists if value and isinstance(value, list)), [])
    return [item for item in found if isinstance(item, Mapping)]
