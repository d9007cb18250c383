"""Whoever goes away closes the connection at once: every provider, every moment, every way, through a decoder.

By virtual clock: what counts is that no timer stands between leaving and closing, not how busy the machine is.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any, Final

import pytest
from support.doubles import (
    PIECES,
    PROVIDERS,
    Double,
    Failure,
    by_every_provider,
    forget_environment,
    provider_at,
    serve,
)

from llm_spec import (
    LlmProvider,
    ProviderDraft,
    RetryPolicy,
    SpeculativeConfig,
    SpeculativeDecoder,
    SpeculativeFinish,
    SpeculativeResult,
    TextDelta,
    Timeouts,
)

pytestmark = pytest.mark.virtual_clock

SOON_S: Final = 0.05
STAY_S: Final = 0.02  # how long a caller listens before it goes …
DEADLINE_S: Final = 0.12  # … and how long a decoder does, from the beginning
NUM_READ: Final = 3

MOMENTS = {"no status": Failure(stall_after=-1), "no text": Failure(stall_after=0), "mid-stream": Failure()}
WAYS = ["caller cancelled", "consumer stopped", "deadline"]
AIOHTTP = [("aiohttp", "no status"), ("aiohttp", "mid-stream")]
CELLS = [*itertools.product(WAYS, MOMENTS), ("consumer failed", "mid-stream")]


class OwnError(Exception):
    """The consumer's."""


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_environment(monkeypatch)


@pytest.fixture
async def double() -> AsyncIterator[Double]:
    async with serve() as double:
        yield double


def decoder_for(target: LlmProvider, way: str, **config: Any) -> SpeculativeDecoder:
    deadline_s = DEADLINE_S if way == "deadline" else None
    draft = config.pop("draft", None)
    return SpeculativeDecoder(target=target, draft=draft, config=SpeculativeConfig(deadline_s=deadline_s, **config))


async def warmed(double: Double, kind: str, stack: AsyncExitStack) -> LlmProvider:
    """A provider that has answered once: what is loaded late is there."""
    target = await stack.enter_async_context(provider_at(double.url, kind))
    assert (await SpeculativeDecoder(target=target, draft=None).decode("q")).content
    double.pieces, double.pause_s = [" x"] * 2000, 0.004
    return target


async def until_begun(doubles: list[Double]) -> None:
    async with asyncio.timeout(5):
        while not all(double.num_open for double in doubles):  # noqa: ASYNC110 - a server that sets no events
            await asyncio.sleep(0.001)


async def consume(decoder: SpeculativeDecoder, way: str, moment: str, doubles: list[Double]) -> float:
    """Listen until it is time to go; when that was."""
    clock = asyncio.get_running_loop().time
    started = gone = clock()
    try:
        async with decoder.stream("q") as events:
            if way.startswith("consumer") and moment != "mid-stream":
                waiting = asyncio.ensure_future(anext(events))
                await until_begun(doubles)
                await asyncio.sleep(STAY_S)
                gone = clock()
                waiting.cancel()
                await asyncio.wait([waiting])
                return gone
            num_read = 0
            async for event in events:
                num_read += isinstance(event, TextDelta)
                if way.startswith("consumer") and num_read == NUM_READ:
                    gone = clock()
                    if way == "consumer failed":
                        raise OwnError
                    break
                if isinstance(event, SpeculativeFinish):
                    assert way == "deadline"
                    assert isinstance(event.result, SpeculativeResult)
                    assert event.result.stopped_by == "deadline"
                    return started + DEADLINE_S
            return gone
    except OwnError:
        return gone


async def leave(decoder: SpeculativeDecoder, way: str, moment: str, doubles: list[Double]) -> float:
    """One request that is left; the seconds until every server had seen it."""
    for double in doubles:
        double.reset(MOMENTS[moment])
    consuming = asyncio.create_task(consume(decoder, way, moment, doubles))
    if way == "caller cancelled":
        await until_begun(doubles)
        await asyncio.sleep(STAY_S)
        gone = asyncio.get_running_loop().time()
        consuming.cancel()
        await asyncio.wait([consuming])
        assert consuming.cancelled()
    else:
        gone = await consuming
    for double in doubles:
        await double.until_idle()
        assert double.num_open == 0
        assert len(double.bodies) == 1
    return max(double.closed_at for double in doubles) - gone


@pytest.mark.parametrize("kind", PROVIDERS)
@pytest.mark.parametrize(("way", "moment"), CELLS)
async def test_going_away_closes_the_connection(double: Double, way: str, moment: str, kind: str) -> None:
    """Before the status, before the first text and mid-stream; no other request is made for it."""
    async with AsyncExitStack() as stack:
        target = await warmed(double, kind, stack)
        assert await leave(decoder_for(target, way), way, moment, [double]) < SOON_S


@pytest.mark.parametrize(("kind", "moment"), [("openai", "mid-stream"), ("anthropic", "mid-stream"), *AIOHTTP])
@pytest.mark.parametrize("way", WAYS)
async def test_the_drafts_connection_too(double: Double, way: str, moment: str, kind: str) -> None:
    """With a draft on a server of its own, both are closed."""
    async with AsyncExitStack() as stack:
        other = await stack.enter_async_context(serve())
        target, draft = await warmed(double, kind, stack), await warmed(other, kind, stack)
        decoder = decoder_for(target, way, strategy="regenerate", draft=ProviderDraft(draft))
        assert await leave(decoder, way, moment, [double, other]) < SOON_S


@pytest.mark.parametrize("way", ["caller cancelled", "deadline"])
async def test_going_away_while_an_attempt_is_waited_for(way: str) -> None:
    """Nothing is asked afterwards."""

    async def check(double: Double, kind: str) -> None:
        async with AsyncExitStack() as stack:
            target = await warmed(double, kind, stack)
            double.reset(Failure(status=429, headers={"Retry-After": "0.25"}))
            asking = asyncio.create_task(decoder_for(target, way).decode("q"))
            async with asyncio.timeout(5):
                while not double.bodies or double.num_open:  # noqa: ASYNC110 - a server that sets no events
                    await asyncio.sleep(0.001)
            await asyncio.sleep(STAY_S)
            if way == "caller cancelled":
                asking.cancel()
            (outcome,) = await asyncio.gather(asking, return_exceptions=True)
            assert isinstance(outcome, asyncio.CancelledError if way == "caller cancelled" else SpeculativeResult)
            await asyncio.sleep(0.3)
        assert len(double.bodies) == 1

    await by_every_provider(check)


@pytest.mark.parametrize("moment", ["no status", "no text"])
async def test_an_attempt_that_is_given_up_is_closed_before_the_next(moment: str) -> None:
    """Never two requests of one answer at the server, unless a strategy wants them."""

    async def check(double: Double, kind: str) -> None:
        most = 0
        async with AsyncExitStack() as stack:
            target = await warmed(double, kind, stack)
            double.pieces, double.pause_s = PIECES, 0.0
            double.reset(*[MOMENTS[moment]] * 2)
            policy = RetryPolicy(max_attempts=3, first_wait_s=0.02, max_wait_s=0.02)
            config = SpeculativeConfig(retry=policy, timeouts=Timeouts(first_chunk_s=0.2))
            asking = asyncio.create_task(SpeculativeDecoder(target=target, draft=None, config=config).decode("q"))
            while not asking.done():
                most = max(most, double.num_open)
                await asyncio.sleep(0.005)
            assert asking.result().content
        assert len(double.bodies) == 3
        assert most <= 2  # the server may see the next one a moment before the last one's end

    await by_every_provider(check)


async def test_a_connection_that_stays_open_is_seen(double: Double) -> None:
    """The measurement itself: a target that does not close its stream fails it."""
    async with provider_at(double.url, "aiohttp") as honest, AsyncExitStack() as held:
        double.pieces, double.pause_s = [" x"] * 2000, 0.004

        class Holding:
            name = honest.name
            capabilities = honest.capabilities
            complete = honest.complete
            aclose = honest.aclose

            def stream(self, request: Any) -> Any:
                context = honest.stream(request)
                stack = AsyncExitStack()
                held.push_async_exit(stack)

                class Unclosed:
                    async def __aenter__(self) -> Any:
                        return await stack.enter_async_context(context)

                    async def __aexit__(self, *_: object) -> None:
                        """It is forgotten."""

                return Unclosed()

        double.reset(MOMENTS["no text"])
        with pytest.raises(AssertionError):
            await leave(decoder_for(Holding(), "consumer stopped"), "consumer stopped", "no text", [double])
