"""Together: documents no continuation."""

from __future__ import annotations

from typing import Final

from llm_spec_http.dialects.base import ServerDialect

__all__ = ["TOGETHER"]

TOGETHER: Final = ServerDialect(
    name="together",
    summary="Together's API",
    base_url="https://api.together.xyz/v1",
    key_variable="TOGETHER_API_KEY",
    renders_templates=True,
)
