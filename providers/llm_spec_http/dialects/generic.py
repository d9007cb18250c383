"""Any other server that speaks OpenAI's chat completions; its address must be said."""

from __future__ import annotations

from typing import Final

from llm_spec_http.dialects.base import ServerDialect

__all__ = ["GENERIC"]

GENERIC: Final = ServerDialect(
    name="generic",
    summary="any OpenAI-compatible server: generic:model@http://host:port/v1",
    base_url=None,
    key_variable="LLM_SPEC_API_KEY",
)
