"""Any other server with OpenAI's chat completions API; it needs an address."""

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
