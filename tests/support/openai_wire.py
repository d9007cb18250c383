"""What the tests of `llm_spec_openai` share: ways to a `Wire`."""

from __future__ import annotations

import httpx2
from llm_spec_openai import OpenAIProvider
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from llm_spec import ChatRequest, StreamEvent
from llm_spec.testing.server import ScriptedModelServer
from support.wire import Wire

KEY = "sk-very-secret"
QUESTION = ChatRequest.create("question")

__all__ = ["KEY", "QUESTION", "events_of", "openai_itself", "provider_of"]


class Detour(httpx2.AsyncHTTPTransport):
    """Brings what is meant for OpenAI's own address to a server on loopback."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._there = httpx2.URL(url)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        request.url = request.url.copy_with(scheme="http", host=self._there.host, port=self._there.port)
        return await super().handle_async_request(request)


def openai_itself(wire: Wire) -> AsyncOpenAI:
    """A client of api.openai.com, which is the wire; whoever asks for it closes it."""
    return AsyncOpenAI(
        api_key=KEY,
        base_url="https://api.openai.com/v1",
        http_client=DefaultAsyncHttpxClient(transport=Detour(wire.url)),
    )


def provider_of(wire: Wire | ScriptedModelServer, model: str = "gpt-4.1") -> OpenAIProvider:
    return OpenAIProvider(model, base_url=wire.url, api_key=KEY)


async def events_of(wire: Wire, request: ChatRequest = QUESTION) -> list[StreamEvent]:
    provider = provider_of(wire)
    try:
        async with provider.stream(request) as events:
            return [event async for event in events]
    finally:
        await provider.aclose()
