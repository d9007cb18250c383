"""OnnxProvider: a chat model from a folder on this machine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from llm_spec import (
    Capabilities,
    ChatRequest,
    ChatResponse,
    StreamEvent,
    complete_from_stream,
    stream_token_model,
)
from llm_spec.provider_kit import supports_response_format
from llm_spec_onnx.model import OnnxModel

__all__ = ["OnnxProvider"]


class OnnxProvider:
    """Answers with a local ONNX model on the CPU, in a worker thread; arguments and errors are OnnxModel's."""

    def __init__(self, folder: str | Path, *, name: str | None = None, threads: int = 1, exact: bool = True) -> None:
        self._model = OnnxModel(folder, name=name, threads=threads, exact=exact)
        self.name = self._model.name
        self.capabilities = Capabilities(
            context_length=self._model.context_length,
            response_format=supports_response_format(self._model.tokenizer),
            continue_prefix=True,
            tools=self._model.tokenizer.message_format is not None,
            token_model=self._model,
        )

    def stream(self, request: ChatRequest) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        return stream_token_model(self._model, request)

    async def complete(self, request: ChatRequest) -> ChatResponse:
        return await complete_from_stream(self, request)

    async def aclose(self) -> None:
        """Nothing to do: the model's memory goes with the last reference to it."""
