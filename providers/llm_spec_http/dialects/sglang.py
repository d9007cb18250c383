"""SGLang: continues the final message."""

from __future__ import annotations

from typing import Final

from llm_spec_http.dialects.base import ServerDialect, make_continuation

__all__ = ["SGLANG"]

SGLANG: Final = ServerDialect(
    name="sglang",
    summary="SGLang",
    base_url="http://127.0.0.1:30000/v1",
    key_variable="SGLANG_API_KEY",
    continuation=make_continuation(fields={"continue_final_message": True}),
    shares_prompt_cache=True,
    renders_templates=True,
)
