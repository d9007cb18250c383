"""Which fields of a request go to a target that this server does not read itself. Pure.

A client speaks with the operator's key, to the operator's server. What passes by default says how to sample, think,
call tools and keep to a form, labels a request, or caches it. What loads things (`lora`, `chat_template`), reaches
other places (`kv_transfer_params`), replaces the prompt (`prompt_embeds`), jumps a queue (`priority`) or costs more
(`service_tier`, `plugins`) passes where the operator says so, and what sets another limit of length never does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Final

from llm_spec.chat import LIMIT_FIELDS
from llm_spec.server.request_fields import ParsedRequest

__all__ = ["ALL_FIELDS", "SAFE_FIELDS", "build_dropped_fields_header", "drop_unsafe_fields"]

ALL_FIELDS: Final = "*"
_HEADER_SAFE_NAME: Final = re.compile(r"[\w.-]{1,60}", re.ASCII)  # that a header can carry
_MAX_REPORTED_FIELDS: Final = 16
_PARSED_FIELDS: Final = "echo logit_bias logprobs max_tokens n seed top_k top_logprobs"  # as this server has read them
_LABEL_FIELDS: Final = (
    "betas cache_control cache_salt metadata prompt_cache_key prompt_cache_retention safety_identifier store user"
)
_SAMPLING_FIELDS: Final = """
    allowed_token_ids bad_words dry_allowed_length dry_base dry_multiplier dry_penalty_last_n dry_sequence_breakers
    dynatemp_exponent dynatemp_range early_stopping epsilon_cutoff eta_cutoff ignore_eos include_stop_str_in_output
    length_penalty min_keep min_tokens mirostat mirostat_eta mirostat_tau no_stop_trim penalize_nl random_seed
    repeat_last_n repeat_penalty samplers skip_special_tokens smoothing_factor spaces_between_special_tokens
    stop_token_ids tfs_z top_a top_n_sigma typical_p xtc_probability xtc_threshold
"""
_FORMAT_FIELDS: Final = """
    ebnf function_call functions grammar guided_choice guided_grammar guided_json guided_regex json_schema
    modalities output_format parallel_tool_calls regex structured_outputs suffix
"""
_REASONING_FIELDS: Final = """
    context_management enable_thinking include_reasoning output_config prompt_mode reasoning reasoning_effort
    reasoning_format safe_prompt thinking thinking_budget verbosity
"""
_TEMPLATE_FIELDS: Final = "add_generation_prompt add_special_tokens cache_prompt continue_final_message"
_REPORT_FIELDS: Final = "include_usage return_token_ids return_tokens_as_token_ids timings_per_token"

SAFE_FIELDS: Final = frozenset(
    " ".join(
        (
            _PARSED_FIELDS,
            _LABEL_FIELDS,
            _SAMPLING_FIELDS,
            _FORMAT_FIELDS,
            _REASONING_FIELDS,
            _TEMPLATE_FIELDS,
            _REPORT_FIELDS,
        )
    ).split()
)


def drop_unsafe_fields(parsed: ParsedRequest, allowed_fields: AbstractSet[str]) -> tuple[ParsedRequest, list[str]]:
    """A request with no other fields than those that pass, and the names of the others."""
    extra = parsed.request.extra
    if extra.keys() <= SAFE_FIELDS:  # nearly always
        return parsed, []
    kept = {name: value for name, value in extra.items() if _is_allowed(name, allowed_fields)}
    dropped_fields = sorted(extra.keys() - kept.keys())
    return (replace(parsed, request=replace(parsed.request, extra=kept)) if dropped_fields else parsed), dropped_fields


def _is_allowed(name: str, allowed_fields: AbstractSet[str]) -> bool:
    if name in SAFE_FIELDS:
        return True
    return name.lower() not in LIMIT_FIELDS and (name in allowed_fields or ALL_FIELDS in allowed_fields)


def build_dropped_fields_header(names: Sequence[str]) -> Mapping[str, str]:
    """What tells a client which of its fields were left out."""
    shown = [name for name in names if _HEADER_SAFE_NAME.fullmatch(name)][:_MAX_REPORTED_FIELDS]
    return {"x-llm-spec-left-out": ", ".join(shown)} if shown else {}
