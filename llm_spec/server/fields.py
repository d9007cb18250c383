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

from llm_spec.counting import LIMIT_FIELDS
from llm_spec.server.bodies import Asked

__all__ = ["ALL_FIELDS", "SAFE_FIELDS", "leave_out", "left_out_header"]

ALL_FIELDS: Final = "*"
_NAME: Final = re.compile(r"[\w.-]{1,60}", re.ASCII)  # that a header can carry
_MAX_SHOWN: Final = 16
_OWN: Final = "echo logit_bias logprobs max_tokens n seed top_k top_logprobs"  # as this server has read them
_LABELS: Final = (
    "betas cache_control cache_salt metadata prompt_cache_key prompt_cache_retention safety_identifier store user"
)
_SAMPLING: Final = """
    allowed_token_ids bad_words dry_allowed_length dry_base dry_multiplier dry_penalty_last_n dry_sequence_breakers
    dynatemp_exponent dynatemp_range early_stopping epsilon_cutoff eta_cutoff ignore_eos include_stop_str_in_output
    length_penalty min_keep min_tokens mirostat mirostat_eta mirostat_tau no_stop_trim penalize_nl random_seed
    repeat_last_n repeat_penalty samplers skip_special_tokens smoothing_factor spaces_between_special_tokens
    stop_token_ids tfs_z top_a top_n_sigma typical_p xtc_probability xtc_threshold
"""
_FORM: Final = """
    ebnf function_call functions grammar guided_choice guided_grammar guided_json guided_regex json_schema
    modalities output_format parallel_tool_calls regex structured_outputs suffix
"""
_THINKING: Final = """
    context_management enable_thinking include_reasoning output_config prompt_mode reasoning reasoning_effort
    reasoning_format safe_prompt thinking thinking_budget verbosity
"""
_SEAM: Final = "add_generation_prompt add_special_tokens cache_prompt continue_final_message"
_TOLD: Final = "include_usage return_token_ids return_tokens_as_token_ids timings_per_token"

SAFE_FIELDS: Final = frozenset(" ".join((_OWN, _LABELS, _SAMPLING, _FORM, _THINKING, _SEAM, _TOLD)).split())


def leave_out(asked: Asked, passing: AbstractSet[str]) -> tuple[Asked, list[str]]:
    """A request with no other fields than those that pass, and the names of the others."""
    extra = asked.request.extra
    if extra.keys() <= SAFE_FIELDS:  # nearly always
        return asked, []
    kept = {name: value for name, value in extra.items() if _passes(name, passing)}
    left_out = sorted(extra.keys() - kept.keys())
    return (replace(asked, request=replace(asked.request, extra=kept)) if left_out else asked), left_out


def _passes(name: str, passing: AbstractSet[str]) -> bool:
    if name in SAFE_FIELDS:
        return True
    return name.lower() not in LIMIT_FIELDS and (name in passing or ALL_FIELDS in passing)


def left_out_header(names: Sequence[str]) -> Mapping[str, str]:
    """What tells a client which of its fields were left out."""
    shown = [name for name in names if _NAME.fullmatch(name)][:_MAX_SHOWN]
    return {"x-llm-spec-left-out": ", ".join(shown)} if shown else {}
