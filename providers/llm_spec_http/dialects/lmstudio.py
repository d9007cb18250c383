"""LM Studio's local server."""

from __future__ import annotations

from typing import Final

from llm_spec_http.dialects.base import ServerDialect

__all__ = ["LMSTUDIO"]

LMSTUDIO: Final = ServerDialect(
    name="lmstudio",
    summary="LM Studio",
    base_url="http://127.0.0.1:1234/v1",
    renders_templates=True,
)
