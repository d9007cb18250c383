"""TorchProvider: a chat model from a checkpoint, in this process."""

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
from llm_spec_torch.model import TorchModel
from llm_spec_torch.options import TorchOptions

__all__ = ["TorchProvider"]


class TorchProvider:
    """Answers with a local checkpoint, in a worker thread; arguments and errors are TorchModel's.

    `model` may be a loaded TorchModel, to share its weights: `TorchProvider(target_model.make_early_exit_draft(4))`
    drafts with the first four layers of a target.
    """

    def __init__(
        self, model: TorchModel | str | Path, *, name: str | None = None, **options: Unpack[TorchOptions]
    ) -> None:
        self._model = model if isinstance(model, TorchModel) else TorchModel(model, name=name, **options)
        self.name = self._model.name
        self.capabilities = Capabilities(
            context_length=self._model.context_length,
            continue_prefix=True,
            response_format=supports_response_format(self._model.tokenizer),
            tools=self._model.tokenizer.message_format is not None,
            token_model=self._model,
        )

    @property
    def model(self) -> TorchModel:
        """The loaded checkpoint."""
        return self._model

    def stream(self, request: ChatRequest) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        return stream_token_model(self._model, request)

    async def complete(self, request: ChatRequest) -> ChatResponse:
        return await complete_from_stream(self, request)

    async def aclose(self) -> None:
        """Nothing to do: the model's memory goes with the last reference to it."""
