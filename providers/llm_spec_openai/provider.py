"""OpenAIProvider: a model of OpenAI's, or a deployment on Azure, through the official SDK.

Answers are always streamed. So a reader that leaves closes the connection, which ends the model's
work.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any, Self

from openai import AsyncAzureOpenAI, AsyncOpenAI

from llm_spec import ChatRequest, ChatResponse, ConfigError, StreamEvent
from llm_spec.contract.provider import VENDOR_FIRST_CHUNK_S, Capabilities
from llm_spec.contract.response import complete_from_stream
from llm_spec.kit.openai_chat import create_chunk_reader
from llm_spec.kit.openai_chunks import create_chunk_normalizer
from llm_spec_openai.answer import read_sdk_answer_chunks, read_sdk_answer_events
from llm_spec_openai.client import BETWEEN_CHUNKS_S, OpenAIChatClient, create_azure_client, create_openai_client
from llm_spec_openai.convert import Body, build_request_body
from llm_spec_openai.models import supports_predictions

__all__ = ["OpenAIProvider"]


class OpenAIProvider:
    """A model at `base_url`, by default OPENAI_BASE_URL or else OpenAI's own address.

    `api_key` is by default OPENAI_API_KEY. It is in no repr, log or error. A given `client` (of
    OpenAI or of Azure) stays the caller's and belongs to one event loop. It keeps its address, key
    and timeouts, but does not retry. Without one, any number of loops may use the provider.
    `takes_predictions` is True if the model takes predicted outputs. By default OpenAI's names of
    models decide, and deployments on Azure take none.

    Requests raise InvalidRequestError for what the server calls invalid (400, 413, 422),
    TransientError for what may pass, and TargetError for other failures.
    """

    def __init__(
        self,
        model: str,
        *,
        client: AsyncOpenAI | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        takes_predictions: bool | None = None,
    ) -> None:
        if client is not None and (base_url is not None or api_key is not None):
            raise ConfigError("client is given, which has an address and a key; leave out base_url and api_key")
        is_given = client is not None
        client = client or create_openai_client(base_url, api_key)
        is_azure = isinstance(client, AsyncAzureOpenAI)
        if takes_predictions is None:
            takes_predictions = not is_azure and supports_predictions(model)
        self.name = f"{'azure' if is_azure else 'openai'}:{model}"
        self.capabilities = Capabilities(
            tools=True,
            response_format=True,
            prediction=takes_predictions,
            first_chunk_s=VENDOR_FIRST_CHUNK_S,
            between_chunks_s=BETWEEN_CHUNKS_S,
        )
        self._model = model
        self._client = OpenAIChatClient(self.name, client, is_given=is_given)

    @classmethod
    def on_azure(
        cls,
        deployment: str,
        *,
        endpoint: str | None = None,
        api_key: str | None = None,
        api_version: str | None = None,
        takes_predictions: bool = False,
    ) -> Self:
        """Create a provider for a deployment at `endpoint` (https://NAME.openai.azure.com).

        Missing values come from AZURE_OPENAI_ENDPOINT, AZURE_OPENAI_API_KEY (or
        AZURE_OPENAI_AD_TOKEN) and OPENAI_API_VERSION. Raises ConfigError for a value that is in
        neither place.
        """
        client = create_azure_client(endpoint, api_key, api_version)
        provider = cls(deployment, client=client, takes_predictions=takes_predictions)
        provider._client = OpenAIChatClient(provider.name, client, is_given=False)
        return provider

    @asynccontextmanager
    async def stream(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        async with AsyncExitStack() as stack:
            stream = await self._client.open_answer_stream(stack, self._build_request_body(request))
            events = read_sdk_answer_events(self._client, stream, create_chunk_reader(request))
            yield await stack.enter_async_context(aclosing(events))

    @asynccontextmanager
    async def stream_chunks(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[Mapping[str, Any]]]:
        async with AsyncExitStack() as stack:
            stream = await self._client.open_answer_stream(stack, self._build_request_body(request))
            chunks = read_sdk_answer_chunks(self._client, stream, create_chunk_normalizer(request))
            yield await stack.enter_async_context(aclosing(chunks))

    async def complete(self, request: ChatRequest) -> ChatResponse:
        return await complete_from_stream(self, request)

    def _build_request_body(self, request: ChatRequest) -> Body:
        return build_request_body(
            request,
            self._model,
            is_openai=self._client.is_openai,
            takes_predictions=self.capabilities.prediction,
        )

    async def aclose(self) -> None:
        await self._client.aclose()
