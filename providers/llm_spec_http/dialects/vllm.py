"""vLLM: continues the final message; both marks are needed, else it answers 400."""

from __future__ import annotations

from typing import Final

from llm_spec_http.dialects.base import Body, Dialect

__all__ = ["VLLM"]


def _continue(body: Body, prefix: str) -> None:
    body["messages"] = [*body["messages"], {"role": "assistant", "content": prefix}]
    body |= {"continue_final_message": True, "add_generation_prompt": False}


VLLM: Final = Dialect(
    name="vllm",
    summary="vLLM",
    base_url="http://127.0.0.1:8000/v1",
    key_variable="VLLM_API_KEY",
    continuation=_continue,
)
