"""Converts pydantic-ai's settings, tools and output types to options of a ChatRequest. Pure.

Each setting is used, enforced by pydantic-ai itself, or named in an UnsupportedSettingWarning.
Settings of other vendors (`google_…`, `bedrock_…`) are ignored, as by pydantic-ai's own models.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Final, cast

from pydantic_ai.exceptions import UnsupportedSettingWarning, UserError
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models._tool_choice import resolve_tool_choice  # as pydantic-ai's own models do
from pydantic_ai.profiles import ModelProfile
from pydantic_ai.profiles.anthropic import ANTHROPIC_THINKING_BUDGET_MAP
from pydantic_ai.profiles.openai import OPENAI_REASONING_EFFORT_MAP, SAMPLING_PARAMS
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import ToolDefinition

from llm_spec.contract.errors import InvalidRequestError
from llm_spec.contract.provider import Capabilities
from llm_spec.contract.request import RequestOptions
from llm_spec.integrations._pydantic_ai_names import Target
from llm_spec.integrations._shared import convert_logprob_options, convert_prediction

__all__ = ["KEPT_ANNOTATIONS", "build_request_options", "warn_about_unused_settings"]

_SCHEMA_NAME: Final = "final_result"  # if the output type has no name
_OPTIONS: Final[Mapping[str, str]] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "max_tokens": "max_tokens",
    "seed": "seed",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "stop_sequences": "stop",
    "openai_logprobs": "logprobs",
    "openai_top_logprobs": "top_logprobs",
}
# Fields that go to a server in `extra`. A vendor's own setting follows the shared one and wins
_EXTRA_FIELDS: Final[Mapping[str, str]] = {
    "service_tier": "service_tier",
    "openai_moderation": "moderation",
    "openai_prompt_cache_key": "prompt_cache_key",
    "openai_prompt_cache_options": "prompt_cache_options",
    "openai_prompt_cache_retention": "prompt_cache_retention",
    "openai_reasoning_effort": "reasoning_effort",
    "openai_service_tier": "service_tier",
    "openai_store": "store",
    "openai_text_verbosity": "verbosity",
    "openai_user": "user",
}
_ANTHROPIC_FIELDS: Final[Mapping[str, str]] = {
    "anthropic_betas": "betas",
    "anthropic_container": "container",
    "anthropic_context_management": "context_management",
    "anthropic_metadata": "metadata",
    "anthropic_service_tier": "service_tier",
    "anthropic_speed": "speed",
    "anthropic_thinking": "thinking",
}
_ANTHROPIC_EFFORT: Final = "anthropic_effort"
_PREDICTION: Final = "openai_prediction"
KEPT_ANNOTATIONS: Final = "openai_include_raw_annotations"
_READ: Final = frozenset(
    {
        *_OPTIONS,
        *_EXTRA_FIELDS,
        "extra_body",
        "logit_bias",
        _PREDICTION,
        KEPT_ANNOTATIONS,
        "parallel_tool_calls",
        "thinking",
        "tool_choice",
    }
)
_BY_PYDANTIC_AI: Final = frozenset(  # enforced, or warned about, by pydantic-ai itself
    {"extra_headers", "first_event_timeout", "framing_announcement", "max_retries", "request_timeout", "timeout"}
)
_EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh")
# Providers of targets, and the prefix of the settings that are made for them
_VENDORS: Final = {"anthropic": "anthropic_"}


def warn_about_unused_settings(settings: Mapping[str, Any], target: Target, capabilities: Capabilities) -> None:
    """Warn about settings that this target does not use. None and False request nothing."""
    used = _READ | _BY_PYDANTIC_AI | _get_vendor_fields(target).keys() | {_ANTHROPIC_EFFORT}
    if not target.is_local and not _can_use_predictions(capabilities):
        used -= {_PREDICTION}
    prefixes = ("openai_", _VENDORS.get(target.provider, "openai_"))
    shared = ModelSettings.__annotations__
    for name, value in settings.items():
        if name in used or value is None or value is False:
            continue
        if name in shared or name.startswith(prefixes):
            warnings.warn(f"The `{name}` setting is not used by this model.", UnsupportedSettingWarning, stacklevel=4)


def _can_use_predictions(can: Capabilities) -> bool:
    """Return True if a server takes predictions, or may verify one as a draft."""
    return can.prediction or can.continue_prefix or can.token_endpoint is not None or bool(can.discoverable)


def build_request_options(
    settings: ModelSettings, parameters: ModelRequestParameters, profile: ModelProfile, target: Target
) -> RequestOptions:
    """Build a target's request options from prepared settings and parameters.

    Raises UserError if `extra_body` is not a mapping or a prediction is not text.
    """
    extra = {} if parameters.thinking is None else _translate_thinking(parameters.thinking, profile, target)
    extra |= _collect_extra_fields(settings, target)
    chosen = _drop_sampling_of_reasoning_models(settings, extra.get("reasoning_effort"), profile)
    options: dict[str, Any] = {
        ours: chosen[theirs] for theirs, ours in _OPTIONS.items() if chosen.get(theirs) is not None
    }
    options["logit_bias"] = {int(token): bias for token, bias in (chosen.get("logit_bias") or {}).items()}
    options["prediction"] = _convert_prediction(chosen.get(_PREDICTION))
    options["tools"], options["tool_choice"] = _convert_pydantic_ai_tools(settings, parameters, profile)
    options["response_format"] = _build_response_format(parameters, profile)
    if options["tools"] and "parallel_tool_calls" in settings:
        extra["parallel_tool_calls"] = settings["parallel_tool_calls"]
    options["extra"] = extra | _read_extra_body(settings.get("extra_body"))
    return cast("RequestOptions", convert_logprob_options(options))


def _drop_sampling_of_reasoning_models(
    chosen: Mapping[str, Any], effort: str | None, profile: ModelProfile
) -> Mapping[str, Any]:
    """Remove settings that OpenAI's models refuse while they reason.

    A warning names them, as in pydantic-ai's own model.
    """
    known: Mapping[str, Any] = cast("Mapping[str, Any]", profile)
    if not known.get("openai_supports_reasoning"):
        return chosen
    accepted = known.get("openai_reasoning_efforts")
    can_be_off = known.get("openai_supports_reasoning_effort_none") if accepted is None else "none" in accepted
    reasons = known.get("thinking_enabled_by_default") if effort is None else effort != "none"
    dropped = [name for name in SAMPLING_PARAMS if name in chosen]
    if not dropped or (can_be_off and not reasons):
        return chosen
    names = ", ".join(dropped)
    warnings.warn(f"A model that reasons takes no {names}; they are left out.", UserWarning, stacklevel=5)
    return {name: value for name, value in chosen.items() if name not in dropped}


def _collect_extra_fields(chosen: Mapping[str, Any], target: Target) -> dict[str, Any]:
    names = {**_EXTRA_FIELDS, **_get_vendor_fields(target)}
    extra = {ours: chosen[theirs] for theirs, ours in names.items() if chosen.get(theirs) is not None}
    if target.provider == "anthropic" and (effort := chosen.get(_ANTHROPIC_EFFORT)) is not None:
        extra["output_config"] = {"effort": effort}
    return extra


def _get_vendor_fields(target: Target) -> Mapping[str, str]:
    return _ANTHROPIC_FIELDS if target.provider == "anthropic" else {}


def _read_extra_body(body: object) -> dict[str, Any]:
    if body is None:
        return {}
    if not isinstance(body, Mapping):
        raise UserError(f"extra_body is of type {type(body).__name__}; it must be a mapping of fields to their values")
    return dict(cast("Mapping[str, Any]", body))


def _convert_prediction(prediction: Mapping[str, Any] | None) -> str | None:
    """Return the text of a predicted output, which may be in parts."""
    if prediction is None:
        return None
    try:
        return convert_prediction(prediction)
    except InvalidRequestError as error:
        raise UserError(f"openai_{error}") from error


def _translate_thinking(thinking: Any, profile: ModelProfile, target: Target) -> dict[str, Any]:
    """Translate `thinking` for the target. A vendor's own setting or `extra_body` overrides it."""
    known: Mapping[str, Any] = cast("Mapping[str, Any]", profile)
    if target.is_local:
        return {"enable_thinking": True} if thinking is True else {"reasoning_effort": thinking or "none"}
    if target.provider != "anthropic":
        return _choose_effort(OPENAI_REASONING_EFFORT_MAP[thinking], known)
    if thinking is False:
        return {"thinking": {"type": "disabled"}} if known.get("thinking_enabled_by_default") else {}
    if not known.get("anthropic_supports_adaptive_thinking"):
        return {"thinking": {"type": "enabled", "budget_tokens": ANTHROPIC_THINKING_BUDGET_MAP[thinking]}}
    effort = {} if thinking is True else {"reasoning_effort": thinking}
    return {"thinking": {"type": "adaptive"}, **effort}


def _choose_effort(requested: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the lowest accepted effort that is not below the requested one, else the highest."""
    accepted = known.get("openai_reasoning_efforts")
    if accepted is None:
        return {"reasoning_effort": requested}
    efforts = [effort for effort in _EFFORTS if effort in accepted and (effort != "none" or requested == "none")]
    enough = (effort for effort in efforts if _EFFORTS.index(effort) >= _EFFORTS.index(requested))
    return {"reasoning_effort": next(enough, efforts[-1])} if efforts else {}


# --------------------------------------------------------------------------------- tools and output


def _convert_pydantic_ai_tools(
    settings: ModelSettings, parameters: ModelRequestParameters, profile: ModelProfile
) -> tuple[list[dict[str, Any]], Any]:
    resolved = resolve_tool_choice(settings, parameters)
    offered_tools = parameters.declared_tool_defs
    choice: Any = resolved
    if isinstance(resolved, tuple):
        choice, names = resolved
        if choice == "required" and len(names) == 1:
            choice = {"type": "function", "function": {"name": next(iter(names))}}
        else:  # chat completions can force one tool or any tool, but not some
            offered_tools = {name: tool for name, tool in offered_tools.items() if name in names}
    tools = [_convert_pydantic_ai_tool(tool, profile) for tool in offered_tools.values()]
    return tools, choice if offered_tools else None


def _convert_pydantic_ai_tool(tool: ToolDefinition, profile: ModelProfile) -> dict[str, Any]:
    function: dict[str, Any] = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": tool.parameters_json_schema,
    }
    if tool.strict and _can_be_strict(profile):
        function["strict"] = True
    return {"type": "function", "function": function}


def _build_response_format(parameters: ModelRequestParameters, profile: ModelProfile) -> dict[str, Any] | None:
    output_object = parameters.output_object
    if parameters.output_mode == "prompted" and profile.get("supports_json_object_output", False):
        return {"type": "json_object"}
    if parameters.output_mode != "native" or output_object is None:
        return None
    schema: dict[str, Any] = {"name": output_object.name or _SCHEMA_NAME, "schema": output_object.json_schema}
    if output_object.description:
        schema["description"] = output_object.description
    if output_object.strict is not None and _can_be_strict(profile):
        schema["strict"] = output_object.strict
    return {"type": "json_schema", "json_schema": schema}


def _can_be_strict(profile: ModelProfile) -> bool:
    return bool(cast("Mapping[str, Any]", profile).get("openai_supports_strict_tool_definition", True))
