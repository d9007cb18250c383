"""OpenRouter: passes predicted outputs to models that accept them."""

from __future__ import annotations

from typing import Final

from llm_spec_http.dialects.base import ServerDialect

__all__ = ["OPENROUTER"]

OPENROUTER: Final = ServerDialect(
    name="openrouter",
    summary="OpenRouter",
    base_url="https://openrouter.ai/api/v1",
    key_variable="OPENROUTER_API_KEY",
    prediction=True,
)
