"""Mistral: continues a last message marked as prefix, and accepts predicted outputs.

The answer may repeat the prefix.
"""

from __future__ import annotations

from typing import Final

from llm_spec_http.dialects.base import ServerDialect, make_continuation

__all__ = ["MISTRAL"]

MISTRAL: Final = ServerDialect(
    name="mistral",
    summary="Mistral's API",
    base_url="https://api.mistral.ai/v1",
    key_variable="MISTRAL_API_KEY",
    continuation=make_continuation(prefix=True),
    repeats_prefix=True,
    prediction=True,
    reasoning_fields=(),  # "extra inputs are not permitted"
    renders_templates=True,
)
