"""ModelSettings of the Agents SDK as options of a request: each is taken, or refused by its name. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from agents import ModelSettings, UserError

__all__ = ["build_setting_options"]

# What the request says in the same word.
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
# Read below, or where the request is made.
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
# The runner's, and what to do with usage, which is always counted.
_OF_THE_RUNNER: Final = frozenset({"include_usage", "preserve_raw_usage", "retry", "timeout"})
_ADVICE: Final = {
    "context_management": "only OpenAI's Responses API has it",
    "extra_headers": "headers belong to the target; give its provider what it needs",
    "extra_query": "queries belong to the target's address; write it there",
}
# Of `extra_args`: what OpenAI's client does not send in the body.
_OF_THE_CLIENT: Final = frozenset(
    {"extra_headers", "extra_query", "messages", "model", "stream", "stream_options", "timeout"}
)
# A summary is what the target shows of its reasoning: it comes without being requested.
_REASONING: Final = frozenset({"effort", "generate_summary", "summary"})
_LOGPROBS: Final = "message.output_text.logprobs"
_INCLUDED: Final = frozenset({_LOGPROBS, "reasoning.encrypted_content"})  # the latter comes unasked


def build_setting_options(settings: ModelSettings) -> dict[str, Any]:
    """Options for `build_request_options`, without those about tools. Raises UserError naming what is not taken."""
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
    if settings.truncation not in (None, "disabled"):  # a prompt that is too long is an error here in any case
        raise _refuse("truncation", settings.truncation)


def _refuse(name: str, value: object) -> UserError:
    field = name.removeprefix("extra_args['").removesuffix("']")
    # A header may hold a key: values of what is sent are not told.
    told = "set" if field.startswith("extra_") else repr(value)
    advice = _ADVICE.get(field, "leave it out")
    return UserError(f"ModelSettings.{name} is {told}, which SpeculativeModel does not take; {advice}")
