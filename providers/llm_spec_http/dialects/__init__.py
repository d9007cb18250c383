"""The dialects of servers, one file each; `base` holds what they share."""

from __future__ import annotations

from typing import Final

from llm_spec_http.dialects.base import ServerDialect
from llm_spec_http.dialects.cerebras import CEREBRAS
from llm_spec_http.dialects.deepseek import DEEPSEEK
from llm_spec_http.dialects.fireworks import FIREWORKS
from llm_spec_http.dialects.generic import GENERIC
from llm_spec_http.dialects.kimi import KIMI
from llm_spec_http.dialects.llamacpp import LLAMACPP
from llm_spec_http.dialects.lmstudio import LMSTUDIO
from llm_spec_http.dialects.mistral import MISTRAL
from llm_spec_http.dialects.ollama import OLLAMA
from llm_spec_http.dialects.openrouter import OPENROUTER
from llm_spec_http.dialects.qwen import QWEN
from llm_spec_http.dialects.sglang import SGLANG
from llm_spec_http.dialects.together import TOGETHER
from llm_spec_http.dialects.vllm import VLLM

__all__ = ["DIALECTS", "ServerDialect"]

DIALECTS: Final = {
    dialect.name: dialect
    for dialect in (
        CEREBRAS,
        DEEPSEEK,
        FIREWORKS,
        GENERIC,
        KIMI,
        LLAMACPP,
        LMSTUDIO,
        MISTRAL,
        OLLAMA,
        OPENROUTER,
        QWEN,
        SGLANG,
        TOGETHER,
        VLLM,
    )
}
