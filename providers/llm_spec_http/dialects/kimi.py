"""Kimi (Moonshot): continues a last message marked as partial."""

from __future__ import annotations

from typing import Final

from llm_spec_http.dialects.base import ServerDialect, make_continuation

__all__ = ["KIMI"]

KIMI: Final = ServerDialect(
    name="kimi",
    summary="Kimi's API",
    base_url="https://api.moonshot.ai/v1",
    key_variable="MOONSHOT_API_KEY",
    continuation=make_continuation(partial=True),
    renders_templates=True,
)
