"""HttpProvider: a chat model behind an OpenAI-compatible server, on aiohttp directly.

A reader that goes away closes the connection, and with it the server's work.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any, Final

import aiohttp

from llm_spec import (
    Capabilities,
    ChatRequest,
    ChatResponse,
    ConfigError,
    StreamEvent,
    complete_from_stream,
)
from llm_spec.continuation import ContinuationTrial
from llm_spec.provider import Feature
from llm_spec_http.answer import read_answer, read_chunks, read_whole
from llm_spec_http.client import HttpClient
from llm_spec_http.convert import request_body
from llm_spec_http.dialects import DIALECTS, Dialect
from llm_spec_http.discovery import scores_tokens, works_on_tokens
from llm_spec_http.tokens import HttpTokens

__all__ = ["HttpProvider"]

_GENERIC: Final = DIALECTS["generic"]
_DISCOVERY_S: Final = 60.0  # a server may compile something for its first scored prompt


class HttpProvider:
    """A model at `base_url` (the address that ends in /v1), or at its dialect's own.

    `api_key` is by default taken from the environment variable that the vendor documents; it is in no repr, log or
    error. Any number of event loops may use the provider, one after another or each in a thread of its own; each has
    its own connections, which are closed with the loop or by `aclose`. A `session` that is given stays the caller's and
    belongs to one loop. Requests raise InvalidRequestError for what the server calls invalid (400, 413, 422),
    ConfigError for a session of another event loop, TargetError for everything else that goes wrong.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        dialect: Dialect = _GENERIC,
        api_key: str | None = None,
        session: aiohttp.ClientSession | None = None,
    ) -> None:
        address = base_url or dialect.base_url
        if address is None:
            raise ConfigError(f"{dialect.name} has no address of its own; write {dialect.name}:{model}@http://host/v1")
        self.name = f"{dialect.name}:{model}"
        self.capabilities = Capabilities(
            tools=True,
            response_format=True,
            continue_prefix=dialect.continuation is not None,
            prediction=dialect.prediction,
            whole_answers=dialect.stops_whole,
        )
        self._model = model
        self._dialect = dialect
        self._client = HttpClient(
            self.name,
            address,
            api_key=api_key or (os.environ.get(dialect.key_variable) if dialect.key_variable else None),
            key_variable=dialect.key_variable,
            keeps_alive=dialect.keeps_alive,
            session=session,
        )
        api = dialect.token_api
        self._tokens = None if api is None else HttpTokens(self._client, model, dialect, api, self._lose)
        self._continuation = ContinuationTrial(self.name, self.stream)
        self._tried: set[Feature] = set()
        self._discovering = asyncio.Lock()

    @asynccontextmanager
    async def stream(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        async with await self._open(request) as response:
            events = read_answer(self._client, response, repeated=self._repeated(request))
            async with aclosing(events):
                yield events

    @asynccontextmanager
    async def stream_chunks(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[Mapping[str, Any]]]:
        async with await self._open(request) as response, aclosing(read_chunks(self._client, response)) as chunks:
            yield chunks

    async def complete(self, request: ChatRequest) -> ChatResponse:
        if not self._dialect.stops_whole:
            return await complete_from_stream(self, request)
        answer = await self._client.ask(_path(request), request_body(request, self._model, self._dialect, stream=False))
        return read_whole(self._client, answer, repeated=self._repeated(request))

    async def discover(self, feature: Feature) -> None:
        if feature == "continue_prefix":
            if self.capabilities.continue_prefix and not await self._continuation.is_continuing():
                self.capabilities = replace(self.capabilities, continue_prefix=False)
            return
        tokens = self._tokens
        async with self._discovering:
            if tokens is None or feature in self._tried:
                return
            if "token_endpoint" not in self._tried and await self._works(works_on_tokens(tokens)):
                self.capabilities = replace(self.capabilities, token_endpoint=tokens)
            self._tried.add("token_endpoint")
            scores = feature == "token_scorer" and tokens.max_top and self.capabilities.token_endpoint is not None
            if scores and await self._works(scores_tokens(tokens)):
                self.capabilities = replace(self.capabilities, token_scorer=tokens)
            self._tried.add(feature)

    async def aclose(self) -> None:
        await self._client.aclose()

    # ------------------------------------------------------------------------------------------ inside

    async def _open(self, request: ChatRequest) -> aiohttp.ClientResponse:
        return await self._client.open(_path(request), request_body(request, self._model, self._dialect))

    def _repeated(self, request: ChatRequest) -> str:
        """The text that the answer begins with although it is in the request."""
        return request.prefix if self._dialect.repeats_prefix and not request.raw else ""

    async def _works(self, check: Awaitable[bool]) -> bool:
        try:
            async with asyncio.timeout(_DISCOVERY_S):
                return await check
        except Exception:  # noqa: BLE001 - whatever the server does instead, it is not this
            return False

    def _lose(self, feature: Feature) -> None:
        self.capabilities = replace(self.capabilities, token_scorer=None)
        if feature == "token_endpoint":
            self.capabilities = replace(self.capabilities, token_endpoint=None)


def _path(request: ChatRequest) -> str:
    return "completions" if request.raw else "chat/completions"
