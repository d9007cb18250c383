"""What litellm passes on, to a ChatRequest. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

from llm_spec.contract.errors import InvalidRequestError
from llm_spec.contract.messages import ChatMessage, NativeMessage, ReasoningDetail
from llm_spec.contract.request import ChatRequest
from llm_spec.integrations._shared import build_request_options

__all__ = ["REPORT_FIELD", "build_request_from_litellm"]

REPORT_FIELD: Final = "llm_spec"  # of `provider_specific_fields`: how an answer came about
_IGNORED_OPTIONS: Final = ("max_retries", "stream", "stream_options")  # litellm, or its caller here, sees to these
_REFUSED_OPTIONS: Final[Mapping[str, str]] = {
    "functions": "give tools",
    "function_call": "give tool_choice",
    "extra_query": "queries are the target's own; give them where it is opened",
}
# Of a message in an earlier turn: read here, into fields of their own
_REASONING_FIELDS: Final = ("reasoning", "reasoning_content", "reasoning_details", "reasoning_items", "thinking_blocks")
_THINKING_FIELDS: Final = ("type", "thinking", "signature", "data")
_LITELLM_FIELDS: Final = ("provider_specific_fields", *_REASONING_FIELDS)


def build_request_from_litellm(messages: Sequence[Mapping[str, Any]], params: Mapping[str, Any]) -> ChatRequest:
    """A request of the options that litellm passes on; raises InvalidRequestError for what cannot be said."""
    options = {name: value for name, value in params.items() if value is not None and name not in _IGNORED_OPTIONS}
    for name, advice in _REFUSED_OPTIONS.items():
        if options.pop(name, None):
            raise InvalidRequestError(f"{name} is not supported by llm_spec; {advice}")
    if (num_answers := options.pop("n", 1)) != 1:
        raise InvalidRequestError(f"n is {num_answers!r}; llm_spec gives one answer a request")
    if "max_completion_tokens" in options:
        options["max_tokens"] = options.pop("max_completion_tokens")
    return ChatRequest.create(list(map(_convert_message, messages)), **build_request_options(options))


def _convert_message(message: Mapping[str, Any]) -> ChatMessage:
    """A message without what is litellm's or ours: no server knows those fields, and some refuse them."""
    if not isinstance(cast("object", message), Mapping):
        return ChatMessage.from_openai(message)  # says what it has to be
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
    known: dict[str, Any] = replace(
        converted, native=None
    ).to_openai()  # what a chat server is sent is all in the message as it came
    added: dict[str, Any] = {name: known[name] for name in _REASONING_FIELDS if name in known}
    return replace(converted, native=NativeMessage("chat", {**converted.native.value, **added}))


def _convert_image_address(part: object) -> object:
    """A part whose `image_url` is a bare address, which litellm allows, in the API's own form."""
    if isinstance(part, Mapping) and isinstance(address := part.get("image_url"), str):
        return {**part, "image_url": {"url": address}}
    return part


def _is_signed(block: Mapping[str, Any]) -> bool:
    """Whether a block of thinking may go back: the API refuses one without a signature."""
    return bool(block.get("data" if block.get("type") == "redacted_thinking" else "signature"))


def _convert_thinking_block(block: Mapping[str, Any]) -> ReasoningDetail:
    """A block as the API knows it, without what litellm adds (`index`, `cache_control`)."""
    return ReasoningDetail("messages", {name: block[name] for name in _THINKING_FIELDS if name in block})


def _drop_report(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message without the reports of `REPORT_FIELD`, in its own fields and in those of its calls."""
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
    """The objects of a list, in the first place that has any."""
    lists = (place.get(name) for place in places)
    found = next((value for value in lists if value and isinstance(value, list)), [])
    return [item for item in found if isinstance(item, Mapping)]
