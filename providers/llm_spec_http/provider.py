"""HttpProvider: a chat model behind an OpenAI-compatible server, over aiohttp.

If a reader closes a stream early, the connection is closed, and the server stops its work.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import Any, Final

import aiohttp

from llm_spec import ChatRequest, ChatResponse, ConfigError, StreamEvent
from llm_spec.contract.endpoint import Feature
from llm_spec.contract.provider import SERVER_FIRST_CHUNK_S, VENDOR_FIRST_CHUNK_S, Capabilities
from llm_spec.contract.response import complete_from_stream
from llm_spec.kit.continuation import ContinuationTest
from llm_spec.kit.openai_chat import create_chunk_reader
from llm_spec.kit.openai_chunks import create_chunk_normalizer
from llm_spec_http.answer import read_http_answer_chunks, read_http_answer_events, read_whole_http_answer
from llm_spec_http.client import WHOLE_ANSWER_TIMEOUT, HttpClient
from llm_spec_http.convert import build_request_body
from llm_spec_http.dialects import DIALECTS, ServerDialect
from llm_spec_http.discovery import ServerFeatures
from llm_spec_http.messages import HttpMessageParser
from llm_spec_http.tokens import HttpTokenEndpoint

__all__ = ["HttpProvider"]

_GENERIC: Final = DIALECTS["generic"]


class HttpProvider:
    """A model at `base_url` (the address that ends in /v1), or at its dialect's default address.

    `api_key` defaults to the environment variable that the vendor documents. It appears in no repr,
    log or error.

    Any number of event loops may use the provider, one after another or at once in several threads.
    Each has its own connections, which are closed with the loop or by `aclose`. A given `session`
    stays the caller's and belongs to one event loop.

    Requests raise InvalidRequestError if the server calls them invalid (400, 413, 422), ConfigError
    if the session belongs to another event loop, and TargetError for every other failure.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        dialect: ServerDialect = _GENERIC,
        api_key: str | None = None,
        session: aiohttp.ClientSession | None = None,
    ) -> None:
        address = base_url or dialect.base_url
        if address is None:
            raise ConfigError(f"{dialect.name} has no address of its own; write {dialect.name}:{model}@http://host/v1")
        self.name = f"{dialect.name}:{model}"
        self._model = model
        self._dialect = dialect
        key = api_key or (os.environ.get(dialect.key_variable) if dialect.key_variable else None)
        # Only a vendor's default address certainly needs a key.
        if key is None and base_url is None and session is None and address.startswith("https://"):
            raise ConfigError(f"{dialect.name} needs a key; set {dialect.key_variable} or give api_key")
        self._client = HttpClient(
            self.name,
            address,
            api_key=key,
            key_variable=dialect.key_variable,
            reuses_connections=dialect.reuses_connections,
            session=session,
        )
        api, message_api = dialect.token_api, dialect.message_api
        tokens = None if api is None else HttpTokenEndpoint(self._client, model, dialect, api, self.mark_feature_lost)
        messages = None
        if tokens is not None and message_api is not None:
            messages = HttpMessageParser(
                self._client, model, dialect, message_api, tokens=tokens, on_lost=self.mark_feature_lost
            )
        self._features = ServerFeatures(
            Capabilities(
                tools=True,
                response_format=True,
                continue_prefix=dialect.continuation is not None,
                prediction=dialect.prediction,
                shares_prompt_cache=dialect.shares_prompt_cache,
                whole_answers=dialect.stops_when_reader_leaves,
                first_chunk_s=VENDOR_FIRST_CHUNK_S if dialect.is_vendor else SERVER_FIRST_CHUNK_S,
            ),
            tokens,
            lambda: ContinuationTest(self.name, self._stream_answer).can_continue(),
            messages=messages,
            # A given session may send requests to any server, whatever the address is.
            server=None if session is not None else (address.rstrip("/"), dialect.name, model, hash(key)),
        )

    @property
    def capabilities(self) -> Capabilities:
        return self._features.capabilities

    def stream(self, request: ChatRequest) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        opened = self._features.try_messages_on_answer(request) or self._stream_answer(request)
        return self._features.turns.watch(opened)

    @asynccontextmanager
    async def _stream_answer(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        async with await self._post_request(request) as response:
            events = self._read_answer_events(request, response)
            async with aclosing(self._features.note_reasoning(events)) as noted:
                yield noted

    def _read_answer_events(
        self, request: ChatRequest, response: aiohttp.ClientResponse
    ) -> AsyncGenerator[StreamEvent]:
        reader = create_chunk_reader(request)
        return read_http_answer_events(self._client, response, reader, repeated=self._get_repeated_text(request))

    def stream_with_token_ids(self, request: ChatRequest) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        tokens = self._features.get_untried_token_endpoint()
        if tokens is None or request.raw:
            return self.stream(request)
        opened = tokens.stream_chat_trying_token_ids(request, on_refusal=self._features.mark_token_ids_missing)
        return self._features.turns.watch(opened)

    def stream_chunks(self, request: ChatRequest) -> AbstractAsyncContextManager[AsyncIterator[Mapping[str, Any]]]:
        return self._features.turns.watch(self._stream_answer_chunks(request))

    @asynccontextmanager
    async def _stream_answer_chunks(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[Mapping[str, Any]]]:
        async with (
            await self._post_request(request) as response,
            aclosing(read_http_answer_chunks(self._client, response, create_chunk_normalizer(request))) as chunks,
        ):
            yield chunks

    async def complete(self, request: ChatRequest) -> ChatResponse:
        if not self._dialect.stops_when_reader_leaves:
            return await complete_from_stream(self, request)
        body = build_request_body(request, self._model, self._dialect, stream=False)
        async with self._features.turns.watch(self._open_whole_answer(request, body)) as events:
            return await read_whole_http_answer(events)

    @asynccontextmanager
    async def _open_whole_answer(
        self, request: ChatRequest, body: dict[str, Any]
    ) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        async with (
            await self._client.post(_get_endpoint_path(request), body, WHOLE_ANSWER_TIMEOUT) as response,
            aclosing(self._read_answer_events(request, response)) as events,
        ):
            yield events

    async def discover(self, feature: Feature) -> None:
        self._client.check_open()
        await self._features.discover(feature)

    def mark_feature_lost(self, feature: Feature) -> None:
        """Mark a feature as missing after a failed call; `discover` tests it again later."""
        self._features.mark_feature_lost(feature)

    async def aclose(self) -> None:
        await self._features.aclose()
        await self._client.aclose()

    # --------------------------------------------------------------------------------------- inside

    async def _post_request(self, request: ChatRequest) -> aiohttp.ClientResponse:
        return await self._client.post(
            _get_endpoint_path(request), build_request_body(request, self._model, self._dialect)
        )

    def _get_repeated_text(self, request: ChatRequest) -> str:
        """Return the request's text that the answer may repeat at its beginning."""
        return request.prefix if self._dialect.repeats_prefix and not request.raw else ""


def _get_endpoint_path(request: ChatRequest) -> str:
    return "completions" if request.raw else "chat/completions"
