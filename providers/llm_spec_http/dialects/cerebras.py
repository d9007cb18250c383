"""Cerebras: accepts predicted outputs."""

from __future__ import annotations

from typing import Final

from llm_spec_http.dialects.base import ServerDialect

__all__ = ["CEREBRAS"]

CEREBRAS: Final = ServerDialect(
    name="cerebras",
    summary="Cerebras' API",
    base_url="https://api.cerebras.ai/v1",
    key_variable="CEREBRAS_API_KEY",
    prediction=True,
    reasoning_fields=("reasoning",),  # it refuses the usual name
    renders_templates=True,
)
