"""Races whose target fails: the plain answer goes on, and all streams are closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

import pytest
from support.draft_checks import ItemDraft
from support.racing import SLOW, WORDS, Reading, racing, read, request_of
from support.targets import Target

from llm_spec import (
    Fallback,
    Finish,
    ReasoningDelta,
    SpeculativeConfig,
    SpeculativeDecoder,
    StreamEvent,
    TargetError,
    TextDelta,
    ToolCallDelta,
)
from llm_spec.contract.draft import DraftProvider
from llm_spec.measure.tokens import split_into_pieces
from llm_spec.testing.clock import run_virtual
from llm_spec.testing.simulated import SimulatedDraft

# ------------------------------------------------------------------------------------------ faults of the target


async def broken_behind(events: AsyncIterator[StreamEvent], num_events: int) -> AsyncGenerator[StreamEvent]:
    """The first events, and then an error, at once."""
    async for event in events:
        if num_events == 0:
            break
        yield event
        num_events -= 1
    raise TargetError("the stream broke", partial_text="only its own")


async def children_broken(number: int, events: AsyncIterator[StreamEvent]) -> AsyncGenerator[StreamEvent]:
    """All streams but the first fail at their first token."""
    async for event in events:
        if number:
            raise TargetError("the stream broke")
        yield event


@pytest.mark.parametrize("by_ids", [False, True])
def test_streams_that_fail_before_they_take_over_disturb_nothing(by_ids: bool) -> None:
    """The first stream goes on; after three failures speculation is given up, and told once."""

    async def check() -> None:
        target = Target(WORDS, by_ids=by_ids, spoil=children_broken, **SLOW)
        raced = await read(racing(SimulatedDraft(WORDS, 1.0, 0), target), request_of())
        assert raced.text == WORDS
        assert sum(isinstance(event, Fallback) for event in raced.events) == 1
        assert 3 <= len(target.requests) - 1 <= 8

    run_virtual(check())


@pytest.mark.parametrize("by_ids", [False, True])
@pytest.mark.parametrize("num_events", [0, 1, 20])
def test_a_first_stream_that_fails_is_the_targets_error(num_events: int, by_ids: bool) -> None:
    """`partial_text` is what was shown, and everything that came before the error was shown."""

    async def check() -> None:
        target = Target(WORDS, by_ids=by_ids, spoil=lambda _, events: broken_behind(events, num_events), **SLOW)
        reading = Reading()
        with pytest.raises(TargetError, match="the stream broke") as caught:
            await read(racing(ItemDraft(), target), request_of(), reading)
        assert reading.text == "".join(split_into_pieces(WORDS)[:num_events])
        assert caught.value.partial_text in (reading.text, "only its own")  # the provider's own, where it tells one
        assert target.num_open == 0

    run_virtual(check())


@pytest.mark.parametrize("by_ids", [False, True])
def test_an_error_behind_the_finish_is_nobodys_concern(by_ids: bool) -> None:
    """As of plain: the answer is whole, however its stream is closed."""

    async def check() -> None:
        target = Target(WORDS, by_ids=by_ids, spoil=lambda _, events: broken_behind(events, 1 << 30), **SLOW)
        plain = SpeculativeDecoder(target=target, draft=None, config=SpeculativeConfig(strategy="plain"))
        assert (await read(plain, request_of())).text == WORDS
        assert (await read(racing(ItemDraft(), target), request_of())).text == WORDS

    run_virtual(check())


def test_text_that_comes_at_once_with_an_error_is_shown() -> None:
    """As of plain: a delta is not lost because the error came in the same turn of the loop."""

    async def burst(_: int, __: AsyncIterator[StreamEvent]) -> AsyncGenerator[StreamEvent]:
        await asyncio.sleep(0.1)
        yield TextDelta("one")
        yield TextDelta(" two")
        raise TargetError("the stream broke", partial_text="one two")

    async def check() -> None:
        for decoder in (
            SpeculativeDecoder(
                target=Target(WORDS, spoil=burst), draft=None, config=SpeculativeConfig(strategy="plain")
            ),
            racing(ItemDraft(), Target(WORDS, spoil=burst)),
        ):
            reading = Reading()
            with pytest.raises(TargetError):
                await read(decoder, request_of(), reading)
            assert reading.text == "one two"

    run_virtual(check())


def test_an_error_behind_a_stop_string_does_not_lose_the_answer() -> None:
    """The target writes on, as it does not know of stop strings; its connection breaks in the same turn of the loop."""

    async def burst(_: int, __: AsyncIterator[StreamEvent]) -> AsyncGenerator[StreamEvent]:
        await asyncio.sleep(0.1)
        for text in ("one", " two", " STOP", " three"):
            yield TextDelta(text)
        raise TargetError("the stream broke")

    async def check() -> None:
        raced = await read(racing(ItemDraft(), Target(WORDS, spoil=burst)), request_of(stop=[" STOP"]))
        assert (raced.text, raced.finish.stopped_by) == ("one two", "stop_string")

    run_virtual(check())


def test_what_a_target_takes_to_reason_is_not_its_first_tokens_time() -> None:
    """Its text begins 20 s after the request; the next answer, without reasoning, is compared with 3.4 s."""

    async def reason(number: int, events: AsyncIterator[StreamEvent]) -> AsyncGenerator[StreamEvent]:
        for _ in range(0 if number else 1000):
            await asyncio.sleep(0.02)
            yield ReasoningDelta("hm")
        async for event in events:
            yield event

    async def check() -> None:
        decoder = racing(ItemDraft(), Target(WORDS, spoil=reason, **SLOW))
        await decoder.decode(request_of())
        result = await decoder.decode(request_of())
        assert (result.content, result.plain_s) == (WORDS, pytest.approx(3.4, rel=0.1))

    run_virtual(check())


def test_a_request_that_is_cancelled_while_it_closes_leaves_no_draft() -> None:
    """Its streams take a moment to close, and the draft would write on for an hour."""

    async def slow_close(_: int, events: AsyncIterator[StreamEvent]) -> AsyncGenerator[StreamEvent]:
        try:
            async for event in events:
                yield event
        finally:
            await asyncio.sleep(0.2)

    async def check() -> None:
        draft = ItemDraft("wrong", *[1.0] * 3600)
        target = Target(WORDS, spoil=slow_close, **SLOW)
        task = asyncio.create_task(racing(draft, target).decode(request_of()))
        await asyncio.sleep(1.0)
        task.cancel()
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.5)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(check())


@pytest.mark.parametrize("by_ids", [False, True])
def test_the_partial_text_of_a_stream_that_took_over_is_the_whole_answer(by_ids: bool) -> None:
    """Not only what that one stream wrote, which is all that its provider can tell."""

    async def own_text(number: int, events: AsyncIterator[StreamEvent]) -> AsyncGenerator[StreamEvent]:
        text = ""
        async for event in events:
            if isinstance(event, TextDelta):
                text += event.text
            if number and text.endswith("word100"):
                raise TargetError("the stream broke", partial_text=text)
            yield event

    async def check() -> None:
        target = Target(WORDS, by_ids=by_ids, spoil=own_text, **SLOW)
        reading = Reading()
        with pytest.raises(TargetError) as caught:
            await read(racing(SimulatedDraft(WORDS, 1.0, 0), target), request_of(), reading)
        assert reading.num_won > 0
        assert caught.value.partial_text == reading.text

    run_virtual(check())


@pytest.mark.parametrize("which", ["first", "others"])
def test_a_stream_that_just_ends_does_not_hang(which: str) -> None:
    """A provider that gives no Finish breaks its promise: as plain, an error that says so (or the first's answer)."""

    async def unfinished(number: int, events: AsyncIterator[StreamEvent]) -> AsyncGenerator[StreamEvent]:
        async for event in events:
            if not isinstance(event, Finish) or (number == 0) != (which == "first"):
                yield event

    async def check() -> None:
        target = Target(WORDS, spoil=unfinished, **SLOW)
        draft: DraftProvider = SimulatedDraft(WORDS, 1.0, 0) if which == "others" else ItemDraft()
        async with asyncio.timeout(1000):
            with pytest.raises(TargetError, match="without a finish reason"):
                await read(racing(draft, target), request_of())

    run_virtual(check())


@pytest.mark.parametrize("by_ids", [False, True])
@pytest.mark.parametrize("extra", [ReasoningDelta("hm"), ToolCallDelta(0, "a", "f", "{}")])
@pytest.mark.parametrize("at", [0, 30])
def test_what_is_no_text_ends_racing_and_is_passed_through(
    at: int, extra: ReasoningDelta | ToolCallDelta, by_ids: bool
) -> None:
    """In its place among the text, once; the stream that wrote it goes on alone."""

    async def spoiled(number: int, events: AsyncIterator[StreamEvent]) -> AsyncGenerator[StreamEvent]:
        num_seen = 0
        if number:
            await asyncio.sleep(10)  # too late to take over
        async for event in events:
            if number == 0 and num_seen == at:
                yield extra
            num_seen += 1
            yield event

    async def check() -> None:
        target = Target(WORDS, by_ids=by_ids, spoil=spoiled, **SLOW)
        raced = await read(racing(SimulatedDraft(WORDS, 1.0, 0), target), request_of())
        seen = [e for e in raced.events if isinstance(e, TextDelta | ReasoningDelta | ToolCallDelta)]
        before = "".join(e.text for e in seen[: seen.index(extra)] if isinstance(e, TextDelta))
        assert (raced.text, seen.count(extra)) == (WORDS, 1)
        assert before == "".join(split_into_pieces(WORDS)[:at])
        assert raced.num_won == 0
        assert target.num_open == 0

    run_virtual(check())


@pytest.mark.parametrize("extra", [ReasoningDelta("hm"), ToolCallDelta(0, "a", "f", "{}")])
def test_a_later_stream_that_writes_no_text_is_not_used(extra: ReasoningDelta | ToolCallDelta) -> None:
    """What it wrote beside text would be lost if it took over: the first stream's answer stands."""

    async def spoiled(number: int, events: AsyncIterator[StreamEvent]) -> AsyncGenerator[StreamEvent]:
        if number:
            await asyncio.sleep(0.005)
            yield extra
        async for event in events:
            yield event

    async def check() -> None:
        target = Target(WORDS, spoil=spoiled, **SLOW)
        raced = await read(racing(SimulatedDraft(WORDS, 1.0, 0), target), request_of())
        assert (raced.text, raced.num_won) == (WORDS, 0)
        assert len(target.requests) < 12

    run_virtual(check())
