"""Qwen on DashScope: continues a last message marked as partial, for models that do not reason."""

from __future__ import annotations

from typing import Final

from llm_spec_http.dialects.base import ServerDialect, make_continuation

__all__ = ["QWEN"]

QWEN: Final = ServerDialect(
    name="qwen",
    summary="Qwen on DashScope",
    base_url="https://dashscope-intl.aliyuncs.com/compatible-mode/v1",
    key_variable="DASHSCOPE_API_KEY",
    continuation=make_continuation(partial=True),
    renders_templates=True,
)
