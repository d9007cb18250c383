"""SGLang: continues the final message."""

from __future__ import annotations

from typing import Final

from llm_spec_http.dialects.base import Body, Dialect

__all__ = ["SGLANG"]


def _continue(body: Body, prefix: str) -> None:
    body["messages"] = [*body["messages"], {"role": "assistant", "content": prefix}]
    body["continue_final_message"] = True


SGLANG: Final = Dialect(
    name="sglang",
    summary="SGLang",
    base_url="http://127.0.0.1:30000/v1",
    key_variable="SGLANG_API_KEY",
    continuation=_continue,
)
