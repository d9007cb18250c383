"""One decoder and its remote target in many event loops: one after another, and several at once in threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import aiohttp
import pytest
from anthropic import AsyncAnthropic
from llm_spec_anthropic import AnthropicProvider
from llm_spec_http import DIALECTS, HttpProvider
from llm_spec_openai import OpenAIProvider, client
from openai import AsyncOpenAI
from support.doubles import KEY, TEXT, Double, forget_environment, serve

from llm_spec import ChatRequest, ConfigError, LlmProvider, SpeculativeDecoder

OWN = ("openai", "openai on httpx2", "anthropic", "aiohttp")
GIVEN = ("openai", "anthropic", "aiohttp")
QUESTION = ChatRequest.create("q")


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_environment(monkeypatch)


@pytest.fixture
def double() -> Iterator[Double]:
    """A server on a loop of its own, which outlives those of the test."""
    with _serving() as double:
        yield double


@contextmanager
def _serving() -> Iterator[Double]:
    double, is_ready = Double(), threading.Event()
    loop, stopping = asyncio.new_event_loop(), asyncio.Event()

    async def run() -> None:
        async with serve(double):
            is_ready.set()
            await stopping.wait()

    thread = threading.Thread(target=lambda: (loop.run_until_complete(run()), loop.close()))
    thread.start()
    try:
        assert is_ready.wait(10)
        yield double
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join(10)


def provider_of(double: Double, kind: str, monkeypatch: pytest.MonkeyPatch) -> LlmProvider:
    if kind == "aiohttp":
        return HttpProvider("any", base_url=double.url)
    if kind == "anthropic":
        return AnthropicProvider("claude-haiku-5-5", base_url=double.url, api_key=KEY)
    if kind == "openai on httpx2":
        monkeypatch.setattr(client, "DefaultAioHttpClient", client.DefaultAsyncHttpxClient)
    return OpenAIProvider("gpt-4.1", base_url=double.url, api_key=KEY)


@pytest.mark.parametrize("kind", OWN)
def test_one_loop_after_another(double: Double, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder that is kept answers in every `asyncio.run`, and leaves no connection open behind it."""
    provider = provider_of(double, kind, monkeypatch)
    decoder = SpeculativeDecoder(target=provider, draft=None)
    for _ in range(3):
        assert asyncio.run(decoder.decode(QUESTION)).content == TEXT
    asyncio.run(provider.aclose())
    assert len(double.bodies) == 3


@pytest.mark.parametrize("kind", OWN)
def test_loops_in_threads(double: Double, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has connections of its own."""
    provider = provider_of(double, kind, monkeypatch)
    decoder = SpeculativeDecoder(target=provider, draft=None)
    barrier = threading.Barrier(3)

    async def answers() -> list[str]:
        barrier.wait(10)
        return [result.content for result in await asyncio.gather(*(decoder.decode(QUESTION) for _ in range(3)))]

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda _: asyncio.run(answers()), range(3))) == [[TEXT] * 3] * 3
    asyncio.run(provider.aclose())


@pytest.mark.parametrize("kind", OWN)
def test_a_provider_that_is_closed_without_use(double: Double, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was opened, nothing is left."""
    asyncio.run(provider_of(double, kind, monkeypatch).aclose())


@pytest.mark.parametrize("kind", GIVEN)
async def test_a_client_that_is_given_belongs_to_one_loop(double: Double, kind: str) -> None:
    """A second loop gets one error that says so, and no answer; the first is answered as before."""
    given: aiohttp.ClientSession | AsyncOpenAI | AsyncAnthropic
    provider: LlmProvider
    if kind == "openai":
        given = AsyncOpenAI(base_url=double.url, api_key=KEY)
        provider = OpenAIProvider("gpt-4.1", client=given)
    elif kind == "anthropic":
        given = AsyncAnthropic(base_url=double.url.removesuffix("/v1"), api_key=KEY)
        provider = AnthropicProvider("claude-haiku-5-5", client=given)
    else:
        given = aiohttp.ClientSession()
        provider = HttpProvider("any", base_url=double.url, session=given)
    try:
        assert (await provider.complete(QUESTION)).content == TEXT
        with pytest.raises(ConfigError, match=r"given to .* belongs to another event loop; "):
            await asyncio.to_thread(lambda: asyncio.run(provider.complete(QUESTION)))
        assert (await provider.complete(QUESTION)).content == TEXT
    finally:
        await given.close()
    assert len(double.bodies) == 2


def test_a_session_whose_loop_has_ended(double: Double) -> None:
    """The same error, instead of asyncio's own."""

    async def make() -> aiohttp.ClientSession:
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))

    with asyncio.Runner() as runner:
        session = runner.run(make())
        provider = HttpProvider("any", base_url=double.url, dialect=DIALECTS["generic"], session=session)
        assert runner.run(provider.complete(QUESTION)).content == TEXT
    with pytest.raises(
        ConfigError, match="the session given to generic:any belongs to another event loop; leave it out"
    ):
        asyncio.run(provider.complete(QUESTION))
    asyncio.run(session.close())
