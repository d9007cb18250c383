"""Ollama's OpenAI-compatible address."""

from __future__ import annotations

from typing import Final

from llm_spec_http.dialects.base import ServerDialect

__all__ = ["OLLAMA"]

OLLAMA: Final = ServerDialect(
    name="ollama",
    summary="Ollama",
    base_url="http://127.0.0.1:11434/v1",
    reasoning_fields=("reasoning_content", "reasoning"),  # it reads the second
    renders_templates=True,
)
