"""Converts the Agents SDK's ModelSettings to request options, or refuses them by name. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from agents import ModelSettings, UserError

__all__ = ["build_setting_options"]

# Settings with the same name in a request.
_SAME_WORD: Final = frozenset(
    {
        "frequency_penalty",
        "max_tokens",
        "metadata",
        "presence_penalty",
        "prompt_cache_options",
        "prompt_cache_retention",
        "store",
        "temperature",
        "top_logprobs",
        "top_p",
        "verbosity",
    }
)
# Read below, or when the request is built.
_READ: Final = frozenset(
    {
        "extra_args",
        "extra_body",
        "parallel_tool_calls",
        "reasoning",
        "response_include",
        "tool_choice",
        "truncation",
    }
)
# Read by the runner. Usage is always counted.
_OF_THE_RUNNER: Final = frozenset({"include_usage", "preserve_raw_usage", "retry", "timeout"})
_ADVICE: Final = {
    "context_management": "leave it out: only OpenAI's Responses API has it",
    "extra_headers": "headers belong to the target: give them to its provider",
    "extra_query": "write the query into the target's address",
}
# Keys of `extra_args` that OpenAI's client does not send in the body.
_OF_THE_CLIENT: Final = frozenset(
    {"extra_headers", "extra_query", "messages", "model", "stream", "stream_options", "timeout"}
)
# A summary needs no request: it is the reasoning that a target shows anyway.
_REASONING: Final = frozenset({"effort", "generate_summary", "summary"})
_LOGPROBS: Final = "message.output_text.logprobs"
# Encrypted reasoning is always sent
_INCLUDED: Final = frozenset({_LOGPROBS, "reasoning.encrypted_content"})


def build_setting_options(settings: ModelSettings) -> dict[str, Any]:
    """Build the options for `build_request_options`, except those about tools.

    Raises UserError that names a setting that is not supported.
    """
    given = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    given = {name: value for name, value in given.items() if value is not None}
    for name in given.keys() - _SAME_WORD - _READ - _OF_THE_RUNNER:
        raise _refuse(name, given[name])
    options = {name: value for name, value in given.items() if name in _SAME_WORD}
    _check_truncation(settings)
    included = set(settings.response_include or ())
    for name in included - _INCLUDED:
        raise _refuse("response_include", str(name))
    if _LOGPROBS in included:
        options.setdefault("top_logprobs", 0)
    extra_args = settings.extra_args or {}
    for name in extra_args.keys() & _OF_THE_CLIENT:
        raise _refuse(f"extra_args[{name!r}]", extra_args[name])
    options |= extra_args
    if settings.reasoning is not None:
        reasoning = settings.reasoning.model_dump(exclude_none=True)
        for name in reasoning.keys() - _REASONING:
            raise _refuse(f"reasoning.{name}", reasoning[name])
        if "effort" in reasoning:
            options.setdefault("reasoning_effort", reasoning["effort"])
    if settings.extra_body is not None:
        if not isinstance(settings.extra_body, Mapping):
            raise UserError(f"ModelSettings.extra_body is of type {type(settings.extra_body).__name__}; give a dict")
        options["extra_body"] = {**options.get("extra_body", {}), **settings.extra_body}
    return options


def _check_truncation(settings: ModelSettings) -> None:
    # a prompt that is too long always raises
    if settings.truncation not in (None, "disabled"):
        raise _refuse("truncation", settings.truncation)


def _refuse(name: str, value: object) -> UserError:
    field = name.removeprefix("extra_args['").removesuffix("']")
    # A header may hold a key, so values of `extra_…` are not shown.
    told = "set" if field.startswith("extra_") else repr(value)
    advice = _ADVICE.get(field, "leave it out")
    return UserError(f"ModelSettings.{name} is {told}, which SpeculativeModel does not take; {advice}")
