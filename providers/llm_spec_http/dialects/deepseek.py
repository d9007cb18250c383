"""DeepSeek: continues a prefix only at its beta address.

Use `deepseek:model@https://api.deepseek.com/beta` for that.
"""

from __future__ import annotations

from typing import Final

from llm_spec_http.dialects.base import ServerDialect, make_continuation

__all__ = ["DEEPSEEK"]

DEEPSEEK: Final = ServerDialect(
    name="deepseek",
    summary="DeepSeek's API",
    base_url="https://api.deepseek.com",
    key_variable="DEEPSEEK_API_KEY",
    continuation=make_continuation(prefix=True),
    renders_templates=True,
)
