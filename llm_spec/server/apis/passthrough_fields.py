"""Which fields of a request go to a target that this server does not read itself (`llm_spec.contract.fields`). Pure.

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

from llm_spec.contract.fields import LIMIT_FIELDS, PASSED_FIELDS, find_local_field_use
from llm_spec.server.apis.request_fields import ParsedRequest

__all__ = ["ALL_FIELDS", "build_dropped_fields_header", "drop_unsafe_fields"]

ALL_FIELDS: Final = "*"
_HEADER_SAFE_NAME: Final = re.compile(r"[\w.-]{1,60}", re.ASCII)  # that a header can carry
_MAX_REPORTED_FIELDS: Final = 16


def drop_unsafe_fields(
    parsed: ParsedRequest, allowed_fields: AbstractSet[str], *, is_local: bool
) -> tuple[ParsedRequest, list[str]]:
    """A request with no other fields than those that pass, and the names of the others.

    `is_local`: its target runs in this process, and reads what it understands.
    """
    extra = parsed.request.extra
    if is_local:
        kept = {name: value for name, value in extra.items() if find_local_field_use(name, value) != "left_out"}
    else:
        kept = {name: value for name, value in extra.items() if _is_field_allowed(name, allowed_fields)}
    dropped_fields = sorted(extra.keys() - kept.keys())
    return (replace(parsed, request=replace(parsed.request, extra=kept)) if dropped_fields else parsed), dropped_fields


def _is_field_allowed(name: str, allowed_fields: AbstractSet[str]) -> bool:
    if name in PASSED_FIELDS:
        return True
    return name.lower() not in LIMIT_FIELDS and (name in allowed_fields or ALL_FIELDS in allowed_fields)


def build_dropped_fields_header(names: Sequence[str]) -> Mapping[str, str]:
    """What tells a client which of its fields were left out."""
    if not names:
        return {}
    shown = [name for name in names if _HEADER_SAFE_NAME.fullmatch(name)][:_MAX_REPORTED_FIELDS]
    return {"x-llm-spec-left-out": ", ".join(shown)} if shown else {}
