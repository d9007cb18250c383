"""`aclose` while answers are under way, and use after it: for each kind of provider and for decoders."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
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
    ClosedError,
    LlmProvider,
    RetryPolicy,
    SpeculativeConfig,
    SpeculativeDecoder,
    TransientError,
    open_provider,
)
from llm_spec.contract.provider import ChunkStreaming
from llm_spec.decoder.breaker import CircuitBreaker
from llm_spec.testing import ScriptedProvider

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
    async def __call__(self, url: str, stack: AsyncExitStack, /) -> LlmProvider: ...


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


WAYS: Final[dict[str, Callable[[LlmProvider], Coroutine[Any, Any, None]]]] = {
    "streamed": read_stream,
    "whole": ask_whole,
    "chunks": read_chunks,
}
AROUND: Final[dict[str, Callable[[LlmProvider], LlmProvider]]] = {
    "alone": lambda provider: provider,
    "decoder": lambda provider: SpeculativeDecoder(target=provider, draft=None, config=RETRIES),
    "decoder, lookup": lambda provider: SpeculativeDecoder(target=provider, draft="lookup", config=RETRIES),
    "decoder, draft": lambda provider: SpeculativeDecoder(
        target=provider, draft=provider, config=replace(RETRIES, strategy="regenerate")
    ),
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
    *, server: Server, monkeypatch: pytest.MonkeyPatch, kind: str, around: str, way: str, moment: str
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


# ------------------------------------------------------------------------------------------ models in this process

LOCAL_AROUND: Final[dict[str, Callable[[], LlmProvider]]] = {
    "provider": lambda: open_provider("builtin:target"),
    "decoder": lambda: SpeculativeDecoder(target="builtin:target", draft=None),
    "decoder, draft": lambda: SpeculativeDecoder(target="builtin:target", draft="builtin:draft"),
    "decoder, lookup": lambda: SpeculativeDecoder(target="builtin:target", draft="lookup"),
    "decoder, given": lambda: SpeculativeDecoder(
        target=open_provider("builtin:target"), draft=open_provider("builtin:draft")
    ),
}
LONG_ASK: Final = ChatRequest.create("def f():", max_tokens=1_000_000, seed=1, temperature=1.5)


@pytest.mark.parametrize("way", ["streamed", "whole", "loop body"])
@pytest.mark.parametrize("around", LOCAL_AROUND)
async def test_an_answer_of_a_local_model_ends(around: str, way: str) -> None:
    """Its thread has ended then; also closed from within the loop over the answer."""
    subject, begun = LOCAL_AROUND[around](), asyncio.Event()

    async def ask() -> None:
        if way == "whole":
            begun.set()
            await subject.complete(LONG_ASK)
            return
        async with subject.stream(LONG_ASK) as events:
            async for _ in events:
                begun.set()
                if way == "loop body":
                    await subject.aclose()

    async with nothing_left():
        asking = asyncio.create_task(ask())
        async with asyncio.timeout(LONG_S):
            await begun.wait()
            for _ in range(5):
                await asyncio.sleep(0)
        await check_ended(subject, asking)


# ------------------------------------------------------------------------------------------ other ways to close


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("kind", SERVED)
async def test_closed_from_within_the_loop_over_the_answer(server: Server, kind: str, around: str) -> None:
    """The next event is the error, not a word about connections."""
    async with AsyncExitStack() as stack, nothing_left():
        subject = AROUND[around](await SERVED[kind](server.url, stack))

        async def close_midway() -> None:
            async with subject.stream(ASK) as events:
                async for _ in events:
                    await subject.aclose()

        async with asyncio.timeout(LONG_S):
            with pytest.raises(ClosedError, match="was closed while it answered"):
                await close_midway()
        await wait_until(lambda: server.num_open == 0)
        assert 1 <= server.num_asked <= 2  # the draft, too


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("kind", SERVED)
async def test_several_answers_end_and_who_is_cancelled_is_cancelled(server: Server, kind: str, around: str) -> None:
    """Each has an error of its own; cancellation just before, or just after, passes through."""
    async with AsyncExitStack() as stack, nothing_left():
        subject = AROUND[around](await SERVED[kind](server.url, stack))
        asking = [asyncio.create_task(read_stream(subject)) for _ in range(6)]
        await wait_until(lambda: server.num_open >= len(asking))
        await asyncio.sleep(0.1)
        asking[0].cancel()
        async with asyncio.timeout(LONG_S):
            closing = [asyncio.create_task(subject.aclose()) for _ in range(2)]
            await asyncio.sleep(0)
            asking[1].cancel()
            await asyncio.gather(*closing)
            await asyncio.wait(asking)
        assert asking[0].cancelled()
        errors = [task.exception() for task in asking[2:]]
        assert [type(error) for error in errors] == [ClosedError] * 4
        assert len(set(map(id, errors))) == 4
        if around != "alone":  # else its error may have come before
            assert asking[1].cancelled()
        if not asking[1].cancelled():
            asking[1].exception()


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("kind", [kind for kind in SERVED if "given" not in kind])
def test_closed_from_another_event_loop(kind: str, around: str) -> None:
    """The loop that reads ends the answer itself."""
    ready, found, made = threading.Event(), list[BaseException](), list[LlmProvider]()

    async def answer_and_read() -> None:
        server = Server()
        app = web.Application()
        app.router.add_post("/v1/{tail:.*}", server.answer)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with AsyncExitStack() as stack:
            stack.push_async_callback(runner.cleanup)
            host, port = runner.addresses[0][:2]
            made.append(AROUND[around](await SERVED[kind](f"http://{host}:{port}/v1", stack)))
            asking = asyncio.create_task(read_stream(made[0]))
            await wait_until(lambda: server.num_open > 0)
            ready.set()
            await asyncio.wait([asking], timeout=LONG_S)
            asking.cancel()
            found.extend(error for error in await asyncio.gather(asking, return_exceptions=True) if error is not None)
            await wait_until(lambda: server.num_open == 0)

    thread = threading.Thread(target=lambda: asyncio.run(answer_and_read()))
    thread.start()
    assert ready.wait(LONG_S)
    asyncio.run(made[0].aclose())
    thread.join(LONG_S)
    assert [type(error) for error in found] == [ClosedError]


# ------------------------------------------------------------------------------------------ what decoders make of it


@pytest.mark.parametrize("moment", ["headers", "between"])
@pytest.mark.parametrize("kind", SERVED)
async def test_a_target_closed_by_its_owner_is_neither_asked_again_nor_blamed(
    server: Server, kind: str, moment: str
) -> None:
    """Its decoder passes the error on; its circuit stays closed."""
    server.moment = moment
    async with AsyncExitStack() as stack, nothing_left():
        provider = await SERVED[kind](server.url, stack)
        decoder = SpeculativeDecoder(target=provider, draft="lookup", config=RETRIES)
        asking = asyncio.create_task(read_stream(decoder))
        await wait_until(lambda: server.num_open > 0)
        await asyncio.sleep(0.1)
        async with asyncio.timeout(LONG_S):
            await provider.aclose()
            await asyncio.wait([asking])
        assert type(asking.exception()) is ClosedError
        num_asked = server.num_asked
        for _ in range(10):
            with pytest.raises(ClosedError, match="is closed; make another"):
                await decoder.decode(ASK)
        assert not decoder.is_target_circuit_open
        assert server.num_asked == num_asked


async def test_a_draft_closed_by_its_owner_costs_no_answer(server: Server) -> None:
    """The target goes on alone."""
    draft = HttpProvider("m", base_url=server.url)
    decoder = SpeculativeDecoder(target=ScriptedProvider("word " * 50), draft=draft)
    async with nothing_left():
        await draft.aclose()
        for _ in range(10):
            assert (await decoder.decode(ASK)).content == "word " * 50
        assert not decoder.is_draft_circuit_open
    assert server.num_asked == 0


async def test_a_retry_that_is_waited_for_is_not_made() -> None:
    """Whoever waits for the next attempt gets the error at once."""
    target = ScriptedProvider("never", fail_at={0: TransientError("down", retry_after_s=20.0)})
    decoder = SpeculativeDecoder(target=target, draft=None, config=RETRIES)
    async with nothing_left():
        asking = asyncio.create_task(ask_whole(decoder))
        await wait_until(lambda: len(target.requests) == 1)
        await asyncio.sleep(0.1)
        await check_ended(decoder, asking)
        await asyncio.sleep(60.0)
    assert len(target.requests) == 1
    assert target.num_acloses == 0


async def test_a_variant_ends_with_its_decoder_and_can_be_closed_alone(server: Server) -> None:
    """Closing a variant ends its own answers; closing the decoder ends those of all variants."""
    decoder = SpeculativeDecoder(target=f"generic:m@{server.url}", draft=None)
    one, other = decoder.with_config(RETRIES), decoder.copy_for_new_client().with_config(RETRIES)
    async with nothing_left():
        asking = [asyncio.create_task(read_stream(each)) for each in (one, other, decoder)]
        await wait_until(lambda: server.num_open == 3)
        await check_ended(one, asking[0])
        assert not asking[1].done()
        assert not asking[2].done()
        await check_ended(decoder, asking[2])
        await asyncio.wait([asking[1]], timeout=LONG_S)
        assert type(asking[1].exception()) is ClosedError
        for each in (one, other, decoder):
            with pytest.raises(ClosedError, match="is closed; make another"):
                await each.decode(ASK)
            with pytest.raises(ClosedError, match="is closed; make another"):
                await each.discover("continue_prefix")


async def test_the_end_of_async_with_ends_what_another_task_reads(server: Server) -> None:
    """As `aclose` does."""
    async with nothing_left():
        async with SpeculativeDecoder(target=f"generic:m@{server.url}", draft=None) as decoder:
            asking = asyncio.create_task(read_stream(decoder))
            await wait_until(lambda: server.num_open > 0)
        await asyncio.wait([asking], timeout=LONG_S)
        assert type(asking.exception()) is ClosedError


async def test_a_breaker_learns_nothing_from_being_closed() -> None:
    """An open circuit stays open, a closed one closed."""
    breaker = CircuitBreaker("m")
    breaker.record_outcome(ClosedError("closed"))
    assert not breaker.is_open
    for _ in range(100):
        breaker.record_outcome(TransientError("down"))
    breaker.record_outcome(ClosedError("closed"))
    assert breaker.is_open
