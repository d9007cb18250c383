"""TokenModelProvider: the base of all providers of a model in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Generic, TypeVar

from llm_spec.contract.events import ChatResponse, StreamEvent
from llm_spec.contract.provider import Capabilities
from llm_spec.contract.request import ChatRequest
from llm_spec.contract.response import complete_from_stream
from llm_spec.contract.token_model import MessageFormatTokenizer, TokenModel
from llm_spec.kit.open_calls import OpenCalls
from llm_spec.local.answer import stream_token_model
from llm_spec.local.grammar import supports_response_format

__all__ = ["TokenModelProvider"]

ModelT = TypeVar("ModelT", bound=TokenModel)


class TokenModelProvider(Generic[ModelT]):
    """An `LlmProvider` that answers with a token model, in a worker thread.

    `aclose` ends its answers.
    """

    def __init__(self, model: ModelT) -> None:
        tokenizer = model.tokenizer
        self.name = model.name
        self.capabilities = Capabilities(
            context_length=model.context_length,
            continue_prefix=True,
            response_format=supports_response_format(tokenizer),
            tools=isinstance(tokenizer, MessageFormatTokenizer) and tokenizer.message_format is not None,
            token_model=model,
        )
        self._model = model
        self._calls = OpenCalls(self.name)

    @property
    def model(self) -> ModelT:
        """The loaded model."""
        return self._model

    def stream(self, request: ChatRequest) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        return self._calls.end_when_closed(stream_token_model(self._model, request))

    async def complete(self, request: ChatRequest) -> ChatResponse:
        return await complete_from_stream(self, request)

    async def aclose(self) -> None:
        """End all answers; the model's memory is freed with the last reference to it."""
        await self._calls.aclose()
