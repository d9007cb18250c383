"""Kimi (Moonshot): continues a last message marked as partial."""

from __future__ import annotations

from typing import Final

from llm_spec_http.dialects.base import Dialect, make_continuation

__all__ = ["KIMI"]

KIMI: Final = Dialect(
    name="kimi",
    summary="Kimi's API",
    base_url="https://api.moonshot.ai/v1",
    key_variable="MOONSHOT_API_KEY",
    continuation=make_continuation(partial=True),
)
