"""Deadlines: an answer ends in time, and so does the work for it, whatever its consumer is doing then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.failing_targets import CONTINUES, Failing
from support.targets import Target

from llm_spec import (
    ChatRequest,
    ReferenceDraft,
    Retry,
    RetryPolicy,
    SpeculativeConfig,
    SpeculativeDecoder,
    SpeculativeFinish,
    SpeculativeResult,
    TextDelta,
    TransientError,
)
from llm_spec.contract.provider import Capabilities
from llm_spec.measure.clock import Deadline
from llm_spec.measure.tokens import split_into_pieces
from llm_spec.testing import LocalProvider, ScriptedProvider, TableModel, VirtualClockEventLoop, run_virtual

WORDS = " ".join(f"word{i}" for i in range(40))


async def result_of(decoder: SpeculativeDecoder, pause_s: float, **options: Any) -> SpeculativeResult:
    """What a consumer gets that takes `pause_s` for every piece."""
    async with decoder.stream("q", **options) as events:
        async for event in events:
            if isinstance(event, SpeculativeFinish) and event.result is not None:
                return event.result
            await asyncio.sleep(pause_s)
    raise AssertionError


# ------------------------------------------------------------------------------------------ of whole answers


@pytest.mark.parametrize("strategy", ["plain", "race", "regenerate"])
@pytest.mark.parametrize("pause_s", [0.0, 0.3, 50.0])
def test_an_answer_ends_at_its_deadline_however_slow_its_consumer(strategy: Any, pause_s: float) -> None:
    """The target is left at that moment, also while the consumer is busy; what was emitted is a beginning."""
    target = ScriptedProvider(WORDS, capabilities=Capabilities(continue_prefix=True), delay_piece_s=0.1)
    options: dict[str, Any] = {"baseline_every": 0, "deadline_s": 2.05, "max_concurrent_streams": 2}
    config = SpeculativeConfig(strategy=strategy, **options)

    async def check() -> None:
        decoder = SpeculativeDecoder(
            target=target, draft=None if strategy == "plain" else ReferenceDraft(WORDS), config=config
        )
        before = asyncio.all_tasks()
        asking = asyncio.create_task(result_of(decoder, pause_s))
        await asyncio.sleep(2.04)
        assert target.num_open >= 1
        await asyncio.sleep(0.02)
        assert target.num_open == 0
        assert asyncio.all_tasks() - {asking} == before
        result = await asking
        assert (result.finish_reason, result.stopped_by) == ("length", "deadline")
        assert WORDS.startswith(result.content)
        assert asyncio.get_running_loop().time() <= max(2.06, 2.05 + pause_s)
        if strategy == "plain":
            assert len(split_into_pieces(result.content)) == {0.0: 21, 0.3: 6, 50.0: 1}[pause_s]

    run_virtual(check())


def test_pieces_that_wait_are_not_emitted_after_the_deadline() -> None:
    """A target that never lets anybody wait is not read any more."""

    class Instant(ScriptedProvider):
        async def _play_script(self, request: ChatRequest) -> AsyncGenerator[Any]:
            for event in self._make_answer_events(WORDS, request):
                yield event

    decoder = SpeculativeDecoder(target=Instant(""), draft=None, config=SpeculativeConfig(deadline_s=1.0))
    result = run_virtual(result_of(decoder, 0.3))
    assert (len(split_into_pieces(result.content)), result.stopped_by) == (4, "deadline")
    assert result.timings.total_s == pytest.approx(1.2)


@pytest.mark.virtual_clock
async def test_the_thread_of_a_local_model_ends_while_the_consumer_sleeps() -> None:
    """Nobody asks for the next piece, and no forward pass is made any more."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualClockEventLoop)
    model = TableModel(WORDS, forward_s=1000.0, order=12, sleep=loop.sleep_in_thread)
    decoder = SpeculativeDecoder(target=LocalProvider(model), draft=None, config=SpeculativeConfig(deadline_s=9500.0))
    async with decoder.stream("q") as events:
        await anext(events)
        await asyncio.sleep(20_000.0)
        assert (model.num_open, model.num_closed) == (0, 1)
        num_forwards = len(model.widths)
        *_, last = [event async for event in events]
    assert len(model.widths) == num_forwards
    assert isinstance(last, SpeculativeFinish)
    assert last.stopped_by == "deadline"


def test_an_answer_that_is_complete_is_not_ended_by_the_deadline() -> None:
    """Closing may take longer."""

    target = Target("one two", token_s=0.4, close_s=5.0)
    decoder = SpeculativeDecoder(target=target, draft=None, config=SpeculativeConfig(deadline_s=1.0))
    result = run_virtual(decoder.decode("q"))
    assert (result.content, result.finish_reason, result.stopped_by) == ("one two", "stop", "eos")


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 39), max_size=3), st.sampled_from([0.0, 1.0]))
def test_an_answer_goes_on_from_what_the_consumer_got(breaks: list[int], pause_s: float) -> None:
    """Nothing is read ahead of it: where a stream breaks nothing is lost, and nothing comes twice."""
    failures = [(at, TransientError("it broke")) for at in breaks]
    target = Failing(*failures, script=WORDS, capabilities=CONTINUES, delay_piece_s=0.1)
    config = SpeculativeConfig(deadline_s=1000.0, retry=RetryPolicy(max_attempts=9, first_wait_s=0.0))
    assert (
        run_virtual(result_of(SpeculativeDecoder(target=target, draft=None, config=config), pause_s)).content == WORDS
    )


def test_attempts_before_the_deadline_are_in_the_result() -> None:
    """Also where nothing came of them."""
    target = ScriptedProvider(WORDS, fail_at={0: TransientError("not now", retry_after_s=50.0)})
    decoder = SpeculativeDecoder(target=target, draft=None, config=SpeculativeConfig(deadline_s=2.0))

    async def events() -> list[Any]:
        async with decoder.stream("q", rounds=True) as events:
            return [event async for event in events]

    shown = run_virtual(events())
    assert sum(isinstance(event, Retry) for event in shown) == 1
    assert shown[-1].result.retries == ("TransientError: not now",)
    assert shown[-1].result.stopped_by == "deadline"


@pytest.mark.parametrize("at_s", [0.0, 0.25, 1.0])
def test_cancelling_and_leaving_end_the_work_at_once(at_s: float) -> None:
    """Also with a deadline, which is far away; the consumer's own exception stays what it is."""
    target = ScriptedProvider(WORDS, delay_piece_s=0.1)
    decoder = SpeculativeDecoder(target=target, draft=None, config=SpeculativeConfig(deadline_s=100.0))

    async def leave(decoder: SpeculativeDecoder, at_s: float, error: BaseException) -> None:
        async with decoder.stream("q") as events:
            assert isinstance(await anext(events), TextDelta)
            await asyncio.sleep(at_s)
            raise error

    async def check() -> None:
        before = asyncio.all_tasks()
        for error in (KeyError("the consumer's own"), asyncio.CancelledError()):
            with pytest.raises(type(error)) as caught:
                await leave(decoder, at_s, error)
            assert caught.value is error
            assert (asyncio.all_tasks(), target.num_open) == (before, 0)
        task = asyncio.create_task(decoder.decode("q"))
        await asyncio.sleep(at_s)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert (asyncio.all_tasks(), target.num_open) == (before, 0)

    run_virtual(check())


# ------------------------------------------------------------------------------------------ of anything


def test_what_waits_too_long_is_cancelled() -> None:
    """None tells so; a TimeoutError of its own is an error like any other."""

    async def check() -> None:
        deadline = Deadline(2.0)
        assert await deadline.wait_for(asyncio.sleep(1.0, "in time")) == "in time"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await deadline.wait_for(asyncio.sleep(60.0))
        assert not deadline.is_reached
        assert await deadline.wait_for(asyncio.sleep(60.0, "late")) is None
        assert deadline.is_reached
        assert asyncio.get_running_loop().time() == pytest.approx(2.0)

    run_virtual(check())


@pytest.mark.parametrize("seconds", [None, 10.0])
def test_items_pass_as_they_are(seconds: float | None) -> None:
    """With the error that ends them, closed by the task that read them, each begun when it is asked for."""
    done: list[object] = []

    async def items() -> AsyncGenerator[int]:
        task = asyncio.current_task()
        try:
            for number in range(3):
                done.append(number)
                yield number
            raise KeyError("the last")
        finally:
            assert asyncio.current_task() is task
            done.append("closed")

    async def read() -> None:
        async with aclosing(Deadline(seconds).end_stream_at_deadline(items())) as bounded:
            async for item in bounded:
                await asyncio.sleep(1.0)
                assert done == list(range(item + 1))

    async def check() -> None:
        with pytest.raises(KeyError, match="the last"):
            await read()
        assert done == [0, 1, 2, "closed"]

    run_virtual(check())


def test_nothing_is_begun_after_the_deadline() -> None:
    """Items that come too late are not read at all."""

    async def items() -> AsyncGenerator[int]:
        raise AssertionError
        yield 1

    async def check() -> None:
        deadline = Deadline(1.0)
        await deadline.wait_for(asyncio.sleep(2.0))
        assert [item async for item in deadline.end_stream_at_deadline(items())] == []

    run_virtual(check())
