"""A target's own chunks, within a decoder's limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from llm_spec import (
    ChatRequest,
    ChatResponse,
    CircuitOpenError,
    ConcurrencyLimit,
    SpeculativeConfig,
    SpeculativeDecoder,
    StreamEvent,
    TransientError,
)
from llm_spec.contract.provider import Capabilities
from llm_spec.contract.response import complete_from_stream
from llm_spec.testing import ScriptedProvider, run_virtual

REQUEST = ChatRequest.create("q", extra={"n": 2})
NUM = 10


class Choosing:
    """A target that streams chunks, one a second; `fail_at` raises instead of the chunk of that index."""

    name = "choosing:target"
    capabilities = Capabilities()

    def __init__(self, fail_at: int | None = None) -> None:
        self.num_open = self.num_requests = 0
        self.fail_at = fail_at

    @asynccontextmanager
    async def stream(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        async with ScriptedProvider("text").stream(request) as events:
            yield events

    @asynccontextmanager
    async def stream_chunks(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[Mapping[str, Any]]]:  # noqa: ARG002 - all are answered alike
        self.num_requests += 1
        self.num_open += 1
        try:
            yield self._chunks()
        finally:
            self.num_open -= 1

    async def _chunks(self) -> AsyncGenerator[Mapping[str, Any]]:
        for index in range(NUM):
            await asyncio.sleep(1.0)
            if index == self.fail_at:
                raise TransientError("it broke")
            yield {"choices": [{"index": index % 2, "delta": {"content": "x"}}]}

    async def complete(self, request: ChatRequest) -> ChatResponse:
        return await complete_from_stream(self, request)

    async def aclose(self) -> None:
        """Nothing to release."""


def decoder_of(target: Choosing, **config: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder(target=target, draft=None, config=SpeculativeConfig(**config))


async def num_chunks(decoder: SpeculativeDecoder, pause_s: float = 0.0) -> int:
    number = 0
    async with decoder.stream_chunks(REQUEST) as chunks:
        async for _ in chunks:
            number += 1
            await asyncio.sleep(pause_s)
    return number


@pytest.mark.parametrize("max_requests", [1, 2])
def test_chunks_take_a_place(max_requests: int) -> None:
    """As any answer, and give it back when they end, break or are left."""

    async def check() -> None:
        target = Choosing()
        decoder = decoder_of(target, limit=ConcurrencyLimit(max_requests))
        tasks = [asyncio.create_task(num_chunks(decoder)) for _ in range(6)]
        tasks.append(asyncio.create_task(decoder.decode("q")))  # type: ignore[arg-type]
        await asyncio.sleep(0.5)
        tasks[0].cancel()
        tasks[4].cancel()
        while not all(task.done() for task in tasks):
            assert target.num_open <= max_requests
            await asyncio.sleep(0.1)
        assert [task.cancelled() for task in tasks] == [True, False, False, False, True, False, False]
        assert {task.result() for task in tasks[1:4]} == {NUM}
        target.fail_at = 3
        with pytest.raises(TransientError, match="it broke"):
            await num_chunks(decoder)
        assert target.num_open == 0
        assert (await decoder.decode("q")).content == "text"

    run_virtual(check())


@pytest.mark.parametrize("pause_s", [0.0, 60.0])
def test_chunks_end_at_the_deadline(pause_s: float) -> None:
    """With an error, the target left at that moment, also while the consumer is busy with one; nobody is blamed."""

    async def check() -> None:
        target = Choosing()
        decoder = decoder_of(target, deadline_s=4.5, limit=ConcurrencyLimit(1))
        for _ in range(6):
            reading = asyncio.create_task(num_chunks(decoder, pause_s))
            await asyncio.sleep(4.4)
            assert target.num_open == 1
            await asyncio.sleep(0.2)
            assert target.num_open == 0
            with pytest.raises(TransientError, match="did not finish by the deadline"):
                await reading
        assert not decoder.is_target_circuit_open

    run_virtual(check())


def test_waiting_for_a_place_ends_with_the_deadline() -> None:
    """Nothing is asked."""

    async def check() -> None:
        target = Choosing()
        decoder = decoder_of(target, deadline_s=2.0, limit=ConcurrencyLimit(1))
        first = asyncio.create_task(num_chunks(decoder.with_config(SpeculativeConfig(limit=decoder.config.limit))))
        await asyncio.sleep(0.1)
        with pytest.raises(TransientError, match="deadline"):
            await num_chunks(decoder)
        assert await first == NUM
        assert target.num_requests == 1

    run_virtual(check())


def test_a_trial_lasts_until_its_chunks_have_ended() -> None:
    """A target that begins well again is not taken to be well before its end."""

    async def check() -> None:
        target = Choosing(fail_at=0)
        decoder = decoder_of(target)
        for _ in range(5):
            with pytest.raises(TransientError):
                await num_chunks(decoder)
        target.fail_at = None
        await asyncio.sleep(30.0)
        trial = asyncio.create_task(num_chunks(decoder))
        await asyncio.sleep(5.5)
        with pytest.raises(CircuitOpenError, match="one trial"):
            await num_chunks(decoder)
        assert await trial == NUM
        assert await num_chunks(decoder) == NUM

    run_virtual(check())
