"""Fireworks: accepts predicted outputs."""

from __future__ import annotations

from typing import Final

from llm_spec_http.dialects.base import ServerDialect

__all__ = ["FIREWORKS"]

FIREWORKS: Final = ServerDialect(
    name="fireworks",
    summary="Fireworks' API",
    base_url="https://api.fireworks.ai/inference/v1",
    key_variable="FIREWORKS_API_KEY",
    prediction=True,
    renders_templates=True,
)
