"""Translates fields of OpenAI's APIs to those of Anthropic's messages. Pure.

Anthropic's SDK lists the fields of its API. The table of fields (`llm_spec.contract.fields`) lists
every other field that clients send. The API answers 400 to an unknown field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, TypeAlias, cast

from anthropic.types.beta.message_create_params import MessageCreateParamsBase as BetaMessageCreateParamsBase
from anthropic.types.message_create_params import MessageCreateParamsBase

from llm_spec import ChatRequest, InvalidRequestError
from llm_spec.contract.fields import FIELDS, is_default_value
from llm_spec_anthropic.models import can_model_take_effort

__all__ = ["KNOWN_FIELDS", "translate_openai_fields"]

Body: TypeAlias = dict[str, Any]

KNOWN_FIELDS: Final = frozenset(
    {*MessageCreateParamsBase.__annotations__, *BetaMessageCreateParamsBase.__annotations__, "stream"}
)
# Fields of both APIs, with different values
_SHARED_FIELDS: Final = frozenset({"metadata", "service_tier"})
_OPENAI_APIS: Final = frozenset({"chat", "completions", "responses"})
# Fields that a ChatRequest has itself
_ANSWER_FIELDS: Final = frozenset({"logit_bias", "logprobs", "top_logprobs"})
_EFFORTS: Final[Mapping[str, str]] = {"minimal": "low"} | {
    name: name for name in ("low", "medium", "high", "xhigh", "max")
}
# The tier is agreed with Anthropic beforehand; a request can only decline the better one
_SERVICE_TIERS: Final[Mapping[str, str]] = {"auto": "auto", "default": "standard_only", "priority": "auto"}


def translate_openai_fields(
    request: ChatRequest, model: str, *, is_openai_client: bool
) -> tuple[ChatRequest, tuple[str, ...]]:
    """Return a request with Anthropic's fields in `extra`, and the names of fields left out.

    A field at its default is left out and not named. If a client of OpenAI's API wrote the request
    (`is_openai_client`), names that both APIs have mean OpenAI's, and fields of other servers are
    left out, too. Otherwise both stay unchanged. Raises InvalidRequestError for a field that would
    change the form of the answer.
    """
    found = [name for name in request.extra if _needs_translation(name, is_openai_client=is_openai_client)]
    if not found:  # nearly always
        return request, ()
    extra = {name: value for name, value in request.extra.items() if name not in found}
    tool_choice, left_out = request.tool_choice, list[str]()
    for name in sorted(found):
        value = request.extra[name]
        if is_default_value(name, value):
            continue
        if name == "parallel_tool_calls":
            tool_choice = _forbid_parallel_calls(tool_choice) if request.tools and value is False else tool_choice
            continue
        fields = _translate_field(name, value, model)
        if not fields:
            _check_can_be_left_out(name)
        if not fields or (name == "metadata" and fields["metadata"] != value):
            left_out.append(name)
        # what `extra` already has in Anthropic's form stays
        for other, said in fields.items():
            extra[other] = {**said, **extra[other]} if isinstance(extra.get(other), Mapping) else extra.get(other, said)
    return replace(request, extra=extra, tool_choice=tool_choice), tuple(sorted(left_out))


def _needs_translation(name: str, *, is_openai_client: bool) -> bool:
    if name in KNOWN_FIELDS:
        return is_openai_client and name in _SHARED_FIELDS
    row = FIELDS.get(name)
    return row is not None and (is_openai_client or not _OPENAI_APIS.isdisjoint(row.apis.split()))


def _translate_field(name: str, value: Any, model: str) -> Body:
    """Return Anthropic's fields for a field; empty if the API has none."""
    match name:
        case "user" if isinstance(value, str):
            return {"metadata": {"user_id": value}}
        case "metadata" if isinstance(value, Mapping):
            user_id = cast("Mapping[str, object]", value).get("user_id")
            return {"metadata": {"user_id": user_id}} if isinstance(user_id, str) else {}
        case "reasoning" if isinstance(value, Mapping):
            return _translate_effort(cast("Mapping[str, object]", value).get("effort"), model)
        case "reasoning_effort":
            return _translate_effort(value, model)
        case "service_tier" if str(value) in _SERVICE_TIERS:
            return {"service_tier": _SERVICE_TIERS[str(value)]}
        case _:
            return {}


def _translate_effort(effort: object, model: str) -> Body:
    """Translate an effort. It is left out for a model that would refuse the request for it."""
    if effort == "none":
        return {"thinking": {"type": "disabled"}}
    if isinstance(effort, str) and effort in _EFFORTS and can_model_take_effort(model):
        return {"output_config": {"effort": _EFFORTS[effort]}}
    return {}


def _forbid_parallel_calls(choice: str | Mapping[str, Any] | None) -> str | Mapping[str, Any]:
    """Return a tool choice in Anthropic's form that allows one call at most."""
    if choice == "none":
        return choice
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        function = cast("Mapping[str, object]", choice.get("function") or {})
        chosen: Mapping[str, Any] = {"type": "tool", "name": function.get("name")}
    elif isinstance(choice, Mapping):
        chosen = choice
    else:
        chosen = {"type": "any" if choice == "required" else choice or "auto"}
    return {**chosen, "disable_parallel_tool_use": True}


def _check_can_be_left_out(name: str) -> None:
    row = FIELDS[name]
    if row.local == "refused" or row.is_limit or name in _ANSWER_FIELDS:
        raise InvalidRequestError(f"{name} is set; Anthropic's API has no such field ({row.note})")
