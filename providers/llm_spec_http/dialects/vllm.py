"""vLLM: continues the final message; both marks are needed, else it answers 400."""

from __future__ import annotations

from typing import Final

from llm_spec_http.dialects.base import Dialect, assistant_message

__all__ = ["VLLM"]

VLLM: Final = Dialect(
    name="vllm",
    summary="vLLM",
    base_url="http://127.0.0.1:8000/v1",
    key_variable="VLLM_API_KEY",
    continuation=assistant_message(fields={"continue_final_message": True, "add_generation_prompt": False}),
)
