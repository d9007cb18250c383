"""What the tests of `llm_spec_openai` share: a server that can be slower and ruder than `Wire`, and ways to it."""

from __future__ import annotations

import asyncio

import httpx2
from aiohttp import web
from llm_spec_openai import OpenAIProvider
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from llm_spec import ChatRequest, StreamEvent
from llm_spec.testing.server import ScriptedModelServer
from support.wire import Wire

KEY = "sk-very-secret"
QUESTION = ChatRequest.create("question")

__all__ = ["KEY", "QUESTION", "OpenAIWire", "events_of", "openai_itself", "provider_of"]


class OpenAIWire(Wire):
    """`Wire` with the paths it was asked, headers beside a refusal, silence, and when its last answer ended."""

    def __init__(self) -> None:
        super().__init__()
        self.paths: list[str] = []
        self.peers: set[object] = set()  # the connections that requests came by
        self.error_headers: dict[str, str] = {}
        self.is_silent = False  # not even a status comes
        self.cuts_refusal = False  # a status comes, but not the text of the refusal
        self.num_asking = 0
        self.ended_at = 0.0  # of the loop's clock

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.paths.append(request.path_qs)
        self.peers.add(request.transport and request.transport.get_extra_info("peername"))
        self.num_asking += 1
        try:
            if self.is_silent:
                self.bodies.append(await request.json())
                await asyncio.Event().wait()  # until the client leaves
            if self.cuts_refusal:
                response = web.StreamResponse(status=self.status)
                await response.prepare(request)
                await asyncio.Event().wait()
            answer = await super().answer(request)
            if self.status != 200:
                answer.headers.update(self.error_headers)
            return answer
        finally:
            self.num_asking -= 1
            self.ended_at = asyncio.get_running_loop().time()

    async def until_idle(self) -> None:
        """Wait, at most two seconds, until nothing is being answered any more."""
        give_up_at = asyncio.get_running_loop().time() + 2
        while self.num_asking and asyncio.get_running_loop().time() < give_up_at:  # noqa: ASYNC110 - for tests to poll
            await asyncio.sleep(0.002)


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
