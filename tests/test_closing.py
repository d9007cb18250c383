"""`aclose` while answers are under way, and use after it: for each kind of provider and for decoders."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final, Protocol

import aiohttp
import pytest
from aiohttp import web
from anthropic import AsyncAnthropic
from anthropic import DefaultAsyncHttpxClient as AnthropicHttpx
from llm_spec_anthropic import AnthropicProvider
from llm_spec_http import HttpProvider
from llm_spec_openai import OpenAIProvider
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from support.messages_wire import begin, text_frames
from support.wire import chunk

from llm_spec import (
    ChatRequest,
    ChunkStreaming,
    ClosedError,
    LlmProvider,
    RetryPolicy,
    SpeculativeConfig,
    SpeculativeDecoder,
    open_provider,
)

pytestmark = pytest.mark.virtual_clock

ASK: Final = ChatRequest.create("Tell me.", max_tokens=4000, temperature=0.0)
RETRIES: Final = SpeculativeConfig(retry=RetryPolicy(max_attempts=5, first_wait_s=0.01))
LONG_S: Final = 30.0  # a wait that takes so long is one without end
OPENAI_FRAMES: Final = [chunk({"content": "one "}), chunk({"content": "two "})]
ANTHROPIC_FRAMES: Final = [*begin(), *text_frames("one ", "two ")[:3]]


class Server:
    """Speaks both APIs, and stops on its way: before the headers, or behind the first frames."""

    def __init__(self) -> None:
        self.moment = "between"
        self.num_asked = self.num_open = 0
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        self.num_asked += 1
        self.num_open += 1
        try:
            if self.moment == "headers":
                await asyncio.Event().wait()
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for frame in ANTHROPIC_FRAMES if request.path.endswith("messages") else OPENAI_FRAMES:
                await response.write(frame)
            await asyncio.Event().wait()
            return response
        finally:
            self.num_open -= 1


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    app = web.Application()
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/completions"):
        app.router.add_post(path, server.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    server.url = f"http://{host}:{port}/v1"
    yield server
    await runner.cleanup()


# ------------------------------------------------------------------------------------------ kinds of providers


class MakeProvider(Protocol):
    async def __call__(self, url: str, stack: AsyncExitStack) -> LlmProvider: ...


async def make_generic(url: str, _: AsyncExitStack) -> LlmProvider:
    return HttpProvider("m", base_url=url)


async def make_generic_of_session(url: str, stack: AsyncExitStack) -> LlmProvider:
    return HttpProvider("m", base_url=url, session=await stack.enter_async_context(aiohttp.ClientSession()))


async def make_vllm(url: str, _: AsyncExitStack) -> LlmProvider:
    return open_provider(f"vllm:m@{url}")


async def make_openai(url: str, _: AsyncExitStack) -> LlmProvider:
    return OpenAIProvider("m", base_url=url, api_key="k")


async def make_openai_of_client(url: str, stack: AsyncExitStack) -> LlmProvider:
    client = AsyncOpenAI(base_url=url, api_key="k", http_client=DefaultAsyncHttpxClient())
    return OpenAIProvider("m", client=await stack.enter_async_context(client))


async def make_anthropic(url: str, _: AsyncExitStack) -> LlmProvider:
    return AnthropicProvider("claude-haiku-5-5", base_url=url, api_key="k")


async def make_anthropic_of_client(url: str, stack: AsyncExitStack) -> LlmProvider:
    client = AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key="k", http_client=AnthropicHttpx())
    return AnthropicProvider("claude-haiku-5-5", client=await stack.enter_async_context(client))


SERVED: Final[dict[str, MakeProvider]] = {
    "generic": make_generic,
    "generic, given session": make_generic_of_session,
    "vllm": make_vllm,
    "openai": make_openai,
    "openai, given httpx": make_openai_of_client,
    "anthropic": make_anthropic,
    "anthropic, given httpx": make_anthropic_of_client,
}


# ------------------------------------------------------------------------------------------ ways to ask


async def read_stream(provider: LlmProvider) -> None:
    async with provider.stream(ASK) as events:
        async for _ in events:
            pass


async def read_chunks(provider: LlmProvider) -> None:
    assert isinstance(provider, ChunkStreaming)
    async with provider.stream_chunks(ASK) as chunks:
        async for _ in chunks:
            pass


async def ask_whole(provider: LlmProvider) -> None:
    await provider.complete(ASK)


WAYS: Final[dict[str, Callable[[LlmProvider], Awaitable[None]]]] = {
    "streamed": read_stream,
    "whole": ask_whole,
    "chunks": read_chunks,
}
AROUND: Final[dict[str, Callable[[LlmProvider], LlmProvider]]] = {
    "alone": lambda provider: provider,
    "decoder": lambda provider: SpeculativeDecoder(None, provider, RETRIES),
    "decoder, lookup": lambda provider: SpeculativeDecoder("lookup", provider, RETRIES),
    "decoder, draft": lambda provider: SpeculativeDecoder(provider, provider, RETRIES),
}


@asynccontextmanager
async def nothing_left() -> AsyncGenerator[None]:
    """No task is left, and none was lost with its error."""
    before, problems = asyncio.all_tasks(), list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, problem: problems.append(problem))
    yield
    for _ in range(20):
        await asyncio.sleep(0.01)
    gc.collect()
    left = {task for task in asyncio.all_tasks() - before if "RequestHandler" not in repr(task)}
    assert (left, problems) == (set(), [])


async def wait_until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONG_S):
        while not is_so():  # noqa: ASYNC110 - the server is to be watched, not changed
            await asyncio.sleep(0.005)


async def hold_connections_up(monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """From now on no connection comes about; whether one was tried."""
    tried: list[object] = []

    async def never(*_: object) -> None:
        tried.append(None)
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", never)
    return lambda: bool(tried)


async def check_ended(closed: LlmProvider, asking: asyncio.Task[None], *, is_over: bool = True) -> ClosedError:
    """Close it: what is under way ends, with one error."""
    async with asyncio.timeout(LONG_S):
        await closed.aclose()
        await asyncio.wait([asking])
    error = asking.exception()
    assert type(error) is ClosedError, repr(error)
    assert str(error).endswith(f"{closed.name} was closed while it answered; make another")
    with pytest.raises(ClosedError, match="is closed; make another"):
        await closed.complete(ASK)
    if is_over:
        async with asyncio.timeout(LONG_S):
            await asyncio.gather(closed.aclose(), closed.aclose())
    return error


@pytest.mark.parametrize("moment", ["connection", "headers", "between"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("kind", SERVED)
async def test_an_answer_under_way_ends(
    server: Server, monkeypatch: pytest.MonkeyPatch, kind: str, around: str, way: str, moment: str
) -> None:
    """With one error, wherever it waits; the server is rid of it, no other call is made, and nothing is left."""
    server.moment = moment
    async with AsyncExitStack() as stack:
        provider = await SERVED[kind](server.url, stack)
        subject = AROUND[around](provider)
        if way == "chunks" and not isinstance(provider, ChunkStreaming):
            pytest.skip("Anthropic's API has no such chunks")
        async with nothing_left():
            is_tried = await hold_connections_up(monkeypatch) if moment == "connection" else None
            asking = asyncio.create_task(WAYS[way](subject))
            await wait_until(is_tried or (lambda: server.num_open > 0))
            await asyncio.sleep(0.1)
            error = await check_ended(subject, asking)
            await wait_until(lambda: server.num_open == 0)
            if moment == "between" and way == "streamed":
                assert error.partial_text == "one two "
            num_asked = server.num_asked
            await asyncio.sleep(1.0)
            assert server.num_asked == num_asked
            if subject is not provider:
                monkeypatch.undo()
                reading = asyncio.create_task(read_stream(provider))  # what was given is still open
                await wait_until(lambda: server.num_asked == num_asked + 1)
                await check_ended(provider, reading)
