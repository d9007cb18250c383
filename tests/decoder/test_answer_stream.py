"""What `decoder.stream` returns: read in a loop, alone or in `async with`, and left in every way."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, TypeAlias

import pytest
from llm_spec_http import DIALECTS, HttpProvider

from llm_spec import (
    ChatRequest,
    ClosedError,
    InvalidRequestError,
    LlmProvider,
    PromptLookup,
    ReferenceDraft,
    SpeculativeConfig,
    SpeculativeDecoder,
    SpeculativeFinish,
    StreamEvent,
    TargetError,
    TextDelta,
)
from llm_spec.contract.draft import DraftProvider
from llm_spec.decoder.answer_stream import AnswerStream
from llm_spec.testing import LocalProvider, ScriptedProvider, TableModel
from llm_spec.testing.hosted_model import SimulatedHostedModel
from llm_spec.testing.server import ScriptedModelServer, ServerLatency, make_disagreeing_draft
from llm_spec.testing.simulated import SimulatedDraft, SimulatedTarget

pytestmark = pytest.mark.virtual_clock

WORDS: Final = " ".join(f"word{i}" for i in range(80))
ASK: Final = ChatRequest.create("Say it.", temperature=0.0)
NUM_TURNS: Final = 20  # of the event loop, after which nothing is left of a stream that nobody holds
MAY_HAVE_READ_ALL: Final = {"judge"}  # before its first text is shown

CountOpen: TypeAlias = Callable[[], int]


class OwnError(Exception):
    """The reader's."""


class CountedHostedModel(SimulatedHostedModel):
    """A hosted model that knows how many streams are open."""

    num_open = 0

    @asynccontextmanager
    async def stream(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        self.num_open += 1
        try:
            async with super().stream(request) as events:
                yield events
        finally:
            self.num_open -= 1


# ------------------------------------------------------------------------------------------ targets


@asynccontextmanager
async def open_pair(strategy: str) -> AsyncGenerator[tuple[LlmProvider, DraftProvider, CountOpen]]:
    """A target for a strategy, a draft, and how many streams of the target are open."""
    draft = SimulatedDraft(WORDS, 0.8, 4, token_s=0.001)
    if strategy == "tokens":
        model = TableModel(WORDS)
        yield LocalProvider(model), PromptLookup(), lambda: model.num_open
    elif strategy in ("predict", "judge"):
        hosted = CountedHostedModel(WORDS, first_token_s=0.1, token_s=0.01)
        guess = ReferenceDraft(make_disagreeing_draft(WORDS, 0.9, 3))
        yield hosted, guess, lambda: hosted.num_open
    elif strategy == "score":
        async with ScriptedModelServer(WORDS, latency=ServerLatency(first_token_s=0.01, token_s=0.002)) as server:
            provider = HttpProvider("any", base_url=server.url, dialect=DIALECTS["vllm"])
            await provider.discover("token_scorer")
            yield provider, draft, lambda: server.num_open_streams
            await provider.aclose()
    else:
        target = SimulatedTarget(WORDS, first_token_s=0.1, token_s=0.01, by_ids=True)
        yield target, draft, lambda: target.num_open


@asynccontextmanager
async def nothing_left() -> AsyncGenerator[None]:
    """No task is left, the loop heard no complaint, and Python had nothing to warn of."""
    complaints: list[dict[str, Any]] = []
    loop, tasks = asyncio.get_running_loop(), asyncio.all_tasks()
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
            gc.collect()
            await asyncio.sleep(0.5)
            assert asyncio.all_tasks() - tasks == set()
        finally:
            loop.set_exception_handler(None)
    assert complaints == []
    assert [str(warning.message) for warning in caught] == []


# ------------------------------------------------------------------------------------------ ways to leave


async def read_and_break(decoder: SpeculativeDecoder, count_open: CountOpen) -> None:
    async for event in decoder.stream(ASK):
        if isinstance(event, TextDelta):
            assert count_open() or decoder.config.strategy in MAY_HAVE_READ_ALL
            break


async def read_and_raise(decoder: SpeculativeDecoder, count_open: CountOpen) -> None:
    async def read() -> None:
        async for event in decoder.stream(ASK):
            if isinstance(event, TextDelta):
                assert count_open() or decoder.config.strategy in MAY_HAVE_READ_ALL
                raise OwnError

    with pytest.raises(OwnError):
        await read()


async def read_and_be_cancelled(decoder: SpeculativeDecoder, count_open: CountOpen) -> None:
    async def read() -> None:
        async for _ in decoder.stream(ASK):
            pass

    reading = asyncio.create_task(read())
    while not count_open() and not reading.done():  # noqa: ASYNC110 - a target that sets no events
        await asyncio.sleep(0.001)
    reading.cancel()
    await asyncio.wait([reading])
    assert reading.cancelled()


async def read_and_be_collected(decoder: SpeculativeDecoder, count_open: CountOpen) -> None:
    """What holds the stream is a circle that only the garbage collector finds."""
    stream = decoder.stream(ASK)
    circle: list[Any] = [stream]
    circle.append(circle)
    while not isinstance(await anext(stream), TextDelta):
        pass
    assert count_open() or decoder.config.strategy in MAY_HAVE_READ_ALL
    del stream, circle
    gc.collect()


async def read_to_the_end(decoder: SpeculativeDecoder, _: CountOpen) -> None:
    stream = decoder.stream(ASK)
    shown = "".join([event.text async for event in stream if isinstance(event, TextDelta)])
    assert shown == stream.result.content == WORDS
    assert stream.result.strategy == decoder.config.strategy


WAYS: Final = [read_and_break, read_and_raise, read_and_be_cancelled, read_and_be_collected, read_to_the_end]
STRATEGIES: Final = ["plain", "tokens", "race", "probe", "score", "predict", "judge", "regenerate"]


@pytest.mark.parametrize("leave", WAYS)
@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_stream_that_nobody_holds_is_closed(
    strategy: str, leave: Callable[[SpeculativeDecoder, CountOpen], Awaitable[None]]
) -> None:
    """By the next turns of the event loop, in which nothing has to wait; over a socket, once that is closed."""
    async with nothing_left(), open_pair(strategy) as (target, draft, count_open):
        decoder = SpeculativeDecoder(target=target, draft=draft, config=SpeculativeConfig(strategy=strategy))
        await leave(decoder, count_open)
        for _ in range(NUM_TURNS):
            await asyncio.sleep(0)
        if strategy in ("score", "tokens"):  # a connection, a thread
            await asyncio.sleep(0.2)
        assert count_open() == 0


@pytest.mark.parametrize("is_local", [False, True])
async def test_a_stream_that_is_never_read_opens_nothing(is_local: bool) -> None:
    model = TableModel(WORDS)
    target = LocalProvider(model) if is_local else ScriptedProvider(WORDS)
    decoder = SpeculativeDecoder(target=target, draft=None)
    async with nothing_left():
        decoder.stream(ASK)
        async with decoder.stream(ASK):
            pass
        stream = decoder.stream(ASK)
        await stream.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
    assert model.num_closed == 0
    assert isinstance(target, LocalProvider) or target.requests == []
    assert decoder.stats.num_requests == 0


def test_a_stream_may_be_made_before_the_event_loop_runs() -> None:
    async def read(stream: AnswerStream) -> str:
        return "".join([event.text async for event in stream if isinstance(event, TextDelta)])

    decoder = SpeculativeDecoder(target=ScriptedProvider(WORDS), draft=None)
    assert asyncio.run(read(decoder.stream(ASK))) == WORDS


# ------------------------------------------------------------------------------------------ reading


async def test_the_result_is_there_after_the_last_event() -> None:
    decoder = SpeculativeDecoder(target=ScriptedProvider(WORDS), draft=None)
    stream = decoder.stream("Say it.")
    with pytest.raises(RuntimeError, match="no result before its last event"):
        _ = stream.result
    events = [event async for event in stream]
    assert isinstance(events[-1], SpeculativeFinish)
    assert stream.result is events[-1].result
    assert stream.result.content == WORDS


async def test_reading_goes_on_after_a_break_while_the_stream_is_held() -> None:
    target = ScriptedProvider(WORDS)
    decoder, shown = SpeculativeDecoder(target=target, draft=None), ""
    async with decoder.stream("Say it.") as events:
        async for event in events:
            assert isinstance(event, TextDelta)
            shown += event.text
            break
        assert target.num_open == 1
        shown += "".join([event.text async for event in events if isinstance(event, TextDelta)])
    assert shown == WORDS
    assert len(target.requests) == 1


async def test_leaving_the_context_closes_before_the_next_statement() -> None:
    target = ScriptedProvider(WORDS)
    async with SpeculativeDecoder(target=target, draft=None).stream("Say it.") as events:
        await anext(events)
        assert target.num_open == 1
    assert target.num_open == 0
    assert target.num_closed == 1


@pytest.mark.parametrize("end", ["read", "closed", "failed"])
async def test_a_second_loop_says_that_the_stream_has_ended(end: str) -> None:
    """In place of showing nothing."""
    fail_at = {2: TargetError("broken")} if end == "failed" else {}
    stream = SpeculativeDecoder(target=ScriptedProvider(WORDS, fail_at=fail_at), draft=None).stream("Say it.")
    if end == "closed":
        await anext(stream)
        await stream.aclose()
        await stream.aclose()
    elif end == "failed":
        with pytest.raises(TargetError, match="broken"):
            [event async for event in stream]
    else:
        assert [event async for event in stream]
    with pytest.raises(RuntimeError, match="call `stream` again"):
        [event async for event in stream]
    with pytest.raises(StopAsyncIteration):  # an iterator's own end stays what Python expects
        await anext(stream)


async def test_a_wrong_option_is_told_at_the_call() -> None:
    decoder = SpeculativeDecoder(target=ScriptedProvider(WORDS), draft=None)
    with pytest.raises(InvalidRequestError, match="max_token"):
        decoder.stream("Say it.", max_token=3)  # type: ignore[call-arg] # pyright: ignore[reportCallIssue]


async def test_a_decoder_is_a_provider() -> None:
    """Its stream fits the contract, so that a decoder may be another's target."""
    inner = SpeculativeDecoder(target=ScriptedProvider(WORDS), draft=None)
    assert isinstance(inner, LlmProvider)
    provider: LlmProvider = inner
    result = await SpeculativeDecoder(target=provider, draft=None).decode("Say it.")
    assert result.content == WORDS


# ------------------------------------------------------------------------------------------ a closed decoder


ASKS: Final[dict[str, Callable[[SpeculativeDecoder], Any]]] = {
    "decode": lambda decoder: decoder.decode("Say it."),
    "stream": lambda decoder: anext(decoder.stream("Say it.")),
    "discover": lambda decoder: decoder.discover(),
    "async with": lambda decoder: decoder.__aenter__(),
}


@pytest.mark.parametrize("ask", ASKS)
async def test_a_closed_decoder_says_so(ask: str) -> None:
    target = ScriptedProvider(WORDS)
    async with SpeculativeDecoder(target=target, draft=None) as decoder:
        pass
    with pytest.raises(ClosedError) as raised:
        await ASKS[ask](decoder)
    assert str(raised.value) == "decoder scripted:script is closed; make another"
    assert target.requests == []


async def test_a_decoder_shows_what_it_is_made_of() -> None:
    async with SpeculativeDecoder(target=ScriptedProvider(WORDS), draft=PromptLookup()) as decoder:
        assert repr(decoder) == "SpeculativeDecoder(target='scripted:script', draft='lookup')"
        with_config = decoder.with_config(SpeculativeConfig(strategy="plain"))
        shown = (
            "SpeculativeDecoder(target='scripted:script', draft='lookup', config=SpeculativeConfig(strategy='plain'))"
        )
        assert repr(with_config) == shown
    assert repr(decoder) == "<closed SpeculativeDecoder(target='scripted:script', draft='lookup')>"
