"""GgufProvider: a chat model from a GGUF file, in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Unpack

from llm_spec import (
    Capabilities,
    ChatRequest,
    ChatResponse,
    StreamEvent,
    complete_from_stream,
    stream_token_model,
)
from llm_spec.provider_kit import supports_response_format
from llm_spec_gguf.model import GgufModel
from llm_spec_gguf.options import GgufOptions

__all__ = ["GgufProvider"]


class GgufProvider:
    """Answers with a GGUF file through llama.cpp, in a worker thread; arguments and errors are GgufModel's."""

    def __init__(self, path: str | Path, *, name: str | None = None, **options: Unpack[GgufOptions]) -> None:
        self._model = GgufModel(path, name=name, **options)
        self.name = self._model.name
        self.capabilities = Capabilities(
            context_length=self._model.context_length,
            continue_prefix=True,
            response_format=supports_response_format(self._model.tokenizer),
            tools=self._model.tokenizer.message_format is not None,
            token_model=self._model,
        )

    def stream(self, request: ChatRequest) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        return stream_token_model(self._model, request)

    async def complete(self, request: ChatRequest) -> ChatResponse:
        return await complete_from_stream(self, request)

    async def aclose(self) -> None:
        """Release the caches of earlier answers. The weights go with the last reference to the provider."""
        self._model.close()
