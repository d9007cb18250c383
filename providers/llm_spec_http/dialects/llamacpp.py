"""llama-server of llama.cpp: continues a last message of the assistant, and repeats it."""

from __future__ import annotations

from typing import Final

from llm_spec_http.dialects.base import Dialect, assistant_message

__all__ = ["LLAMACPP"]

LLAMACPP: Final = Dialect(
    name="llamacpp",
    summary="llama.cpp's llama-server",
    base_url="http://127.0.0.1:8080/v1",
    key_variable="LLAMA_API_KEY",
    continuation=assistant_message(),
    repeats_prefix=True,
)
