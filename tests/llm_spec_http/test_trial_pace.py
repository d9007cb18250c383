"""Trials beside an answer: at once where the server has room, else so that they hold the answer up only a little."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from llm_spec_http import DIALECTS, HttpProvider
from llm_spec_http.trial_pace import TrialPace

from llm_spec import ChatRequest, StreamEvent, TextDelta
from llm_spec.simulation import run_virtual
from llm_spec.testing.server import ScriptedModelServer

STEP_S = 0.02


class Server:
    """Writes an answer of `num_tokens`; a call takes `token_s` for each token that it reads.

    Without room it writes nothing meanwhile.
    """

    def __init__(self, num_tokens: int, token_s: float, *, has_room: bool = False) -> None:
        self.calls: list[tuple[float, float]] = []  # when each began and ended
        self.ended_s = 0.0
        self._num_tokens = num_tokens
        self._token_s = token_s
        self._has_room = has_room
        self._is_reading = asyncio.Lock()

    @asynccontextmanager
    async def open_answer(self) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        yield self._write_answer()

    async def _write_answer(self) -> AsyncGenerator[StreamEvent]:
        for _ in range(self._num_tokens):
            await asyncio.sleep(STEP_S)
            async with self._is_reading:
                pass
            yield TextDelta("word ")

    async def read(self, num_tokens: int) -> int:
        began_s = asyncio.get_running_loop().time()
        if self._has_room:
            await asyncio.sleep(num_tokens * self._token_s)
        else:
            async with self._is_reading:
                await asyncio.sleep(num_tokens * self._token_s)
        self.calls.append((began_s, asyncio.get_running_loop().time()))
        return num_tokens


async def run_beside_answers(
    server: Server, sizes: list[int], *, num_answers: int = 1, pause_s: float = 0.0
) -> list[float]:
    """How long each answer took while calls of so many tokens were made, one after the other; a pause follows each."""
    pace, clock = TrialPace(), asyncio.get_running_loop().time
    began_s, took_s = clock(), list[float]()

    async def make_calls() -> None:
        for size in sizes:
            assert await pace.run_call(size, lambda size=size: server.read(size)) == size

    calls = asyncio.create_task(make_calls())
    for _ in range(num_answers):
        answer_began_s = clock()
        async with pace.watch(server.open_answer()) as events:
            async for _ in events:
                pass
        took_s.append(clock() - answer_began_s)
        server.ended_s = clock() - began_s
        await asyncio.sleep(pause_s)
    await calls
    return took_s


def test_a_call_that_may_take_seconds_waits_until_nobody_asks() -> None:
    """Not in an answer, nor in the short time between two."""

    async def run() -> None:
        server, pace, clock = Server(50, 0.1), TrialPace(), asyncio.get_running_loop().time
        ended_s = began_s = clock()
        call: asyncio.Task[int] | None = None
        for _ in range(3):
            async with pace.watch(server.open_answer()) as events:
                async for _ in events:
                    call = call or asyncio.create_task(pace.run_call_in_idle_time(lambda: server.read(80)))
            ended_s = clock()
            await asyncio.sleep(0.9)
        assert call is not None
        await call
        assert ended_s - began_s == pytest.approx(3 * 50 * STEP_S + 2 * 0.9, rel=0.01)
        assert server.calls == [(pytest.approx(ended_s + 1.0), pytest.approx(ended_s + 9.0))]

    run_virtual(run())


def test_without_an_answer_nothing_waits() -> None:
    async def run() -> None:
        server, pace = Server(0, 0.01), TrialPace()
        for size in (10, 40):
            await pace.run_call(size, lambda size=size: server.read(size))
        assert server.calls == [pytest.approx((0.0, 0.1)), pytest.approx((0.1, 0.5))]

    run_virtual(run())


def test_where_a_server_has_room_calls_follow_one_another() -> None:
    """The answer is not late, and the last call begins when the one before it ends."""

    async def run() -> None:
        server = Server(100, 0.002, has_room=True)
        [took_s] = await run_beside_answers(server, [10, 40, 40])
        assert took_s == pytest.approx(100 * STEP_S)
        (first_s, end_s), (second_s, second_end_s), (third_s, _) = server.calls
        assert first_s == pytest.approx(5 * STEP_S)
        assert second_s - end_s <= STEP_S
        assert third_s - second_end_s <= STEP_S

    run_virtual(run())


@pytest.mark.parametrize("has_room", [True, False])
def test_a_call_waits_for_the_one_before_it_until_that_has_shown_room(*, has_room: bool) -> None:
    """Where the answer goes on in time beside the first call, the second one begins five events later."""

    async def run() -> None:
        server, pace = Server(200, 0.02, has_room=has_room), TrialPace()
        has_seen_room = list[bool]()

        async def call(num_tokens: int) -> None:
            async def read() -> None:
                has_seen_room.append(pace.has_seen_room)
                await server.read(num_tokens)

            await pace.run_call(num_tokens, read)

        async with pace.watch(server.open_answer()) as events, asyncio.TaskGroup() as group:
            group.create_task(call(20))
            group.create_task(call(10))
            async for _ in events:
                pass
        first, second = sorted(server.calls)
        assert first == pytest.approx((5 * STEP_S, 5 * STEP_S + 0.4))
        assert has_seen_room == [False, has_room]
        if has_room:
            assert second[0] == pytest.approx(10 * STEP_S)
        else:
            assert second[0] > first[1] + STEP_S

    run_virtual(run())


def test_room_is_not_taken_for_granted_before_a_slow_server_could_be_late() -> None:
    """An answer whose first token took long is watched for a third of that time."""

    async def run() -> None:
        server, pace, clock = Server(200, 0.05, has_room=True), TrialPace(), asyncio.get_running_loop().time

        @asynccontextmanager
        async def open_answer_late() -> AsyncGenerator[AsyncIterator[StreamEvent]]:
            await asyncio.sleep(0.6)
            async with server.open_answer() as events:
                yield events

        began_s = clock()
        async with pace.watch(open_answer_late()) as events, asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(pace.run_call(10, lambda: server.read(10)))
            async for _ in events:
                pass
        (first_s, _), (second_s, _) = server.calls
        assert first_s - began_s == pytest.approx(0.6 + 5 * STEP_S)
        assert second_s - first_s == pytest.approx(11 * STEP_S)  # the first event after a third of 0.62 s

    run_virtual(run())


@pytest.mark.parametrize("pause_s", [0.0, 0.1, 0.9])
@pytest.mark.parametrize(("num_tokens", "is_tried"), [(40, False), (200, True), (400, True)])
def test_where_it_has_none_no_answer_is_held_up_for_long(num_tokens: int, pause_s: float, *, is_tried: bool) -> None:
    """Of every answer at most an eighth, and what the first call took, whose cost nobody knew."""

    async def run() -> None:
        server = Server(num_tokens, 0.01)
        took_s = await run_beside_answers(server, [10, 30, 30, 30], num_answers=6, pause_s=pause_s)
        for seconds in took_s:
            late_s = seconds - num_tokens * STEP_S
            assert late_s <= 0.125 * seconds + 10 * 0.01
        is_beside_answer = server.calls[1][0] < server.ended_s - STEP_S
        assert is_beside_answer == is_tried  # short answers are left alone: the others come behind the last of them

    run_virtual(run())


def test_short_answers_one_after_another_are_held_up_a_little_in_the_end() -> None:
    """A call that takes more than an eighth of an answer comes when that is little of all answers' time so far."""

    async def run() -> None:
        server, num_tokens, num_answers = Server(40, 0.01), [10, 15, 15], 24
        took_s = await run_beside_answers(server, num_tokens, num_answers=num_answers, pause_s=0.1)
        late_s = [seconds - 40 * STEP_S for seconds in took_s]
        held_up = [at for at, seconds in enumerate(late_s) if seconds > STEP_S]
        assert len(held_up) == 3
        assert held_up[0] == 0  # by the first call, whose cost nobody knew
        for at in held_up[1:]:
            assert late_s[at] <= 0.25 * took_s[at]
            assert sum(late_s[: at + 1]) <= 0.03 * sum(took_s[: at + 1])

    run_virtual(run())


def test_a_reader_that_stops_reading_holds_up_no_trial() -> None:
    """An answer beside it tells the pace, and without one the trial goes on after ten seconds."""

    async def run() -> None:
        server, pace, clock = Server(200, 0.01, has_room=True), TrialPace(), asyncio.get_running_loop().time
        async with pace.watch(server.open_answer()) as stopped:
            for _ in range(3):
                await anext(stopped)
            began_s = clock()
            calls = asyncio.create_task(pace.run_call(10, lambda: server.read(10)))
            async with pace.watch(server.open_answer()) as events:
                async for _ in events:
                    pass
            await calls
            assert server.calls[0][0] - began_s == pytest.approx(1.0, abs=2 * STEP_S)
            await pace.run_call(10, lambda: server.read(10))
            assert server.calls[1][0] - began_s == pytest.approx(10.0, abs=1.0)

    run_virtual(run())


async def test_a_trial_that_was_left_goes_on_where_it_was() -> None:
    """Each call is made once, although the trial is cancelled after every one of them."""
    async with ScriptedModelServer("one two three four five") as server:
        provider = HttpProvider("scripted", base_url=server.url, dialect=DIALECTS["vllm"])
        try:
            for _ in range(30):
                num_before = len(server.paths)
                trial = asyncio.create_task(provider.discover("token_endpoint"))
                while not trial.done() and len(server.paths) < num_before + 5:  # noqa: ASYNC110 - the server is another party
                    await asyncio.sleep(0.001)
                trial.cancel()
                await asyncio.gather(trial, return_exceptions=True)
                if provider.capabilities.token_endpoint is not None:
                    break
            assert provider.capabilities.token_endpoint is not None
        finally:
            await provider.aclose()


async def test_only_answers_that_may_pace_a_trial_are_watched() -> None:
    """Not those of a target that nobody speculates on, nor any more once the trial has ended."""
    async with ScriptedModelServer("one two three") as server:
        provider = HttpProvider("scripted", base_url=server.url, dialect=DIALECTS["vllm"])
        try:
            watched, request = provider._features.pace._answers, ChatRequest.create("tell", max_tokens=3)
            async with provider.stream(request):
                assert watched == []
            async with provider.stream_with_token_ids(request), provider.stream(request):
                assert len(watched) == 2
            assert watched == []
            await provider.discover("token_endpoint")
            async with provider.stream_with_token_ids(request), provider.stream(request):
                assert watched == []
        finally:
            await provider.aclose()


def test_a_call_that_waits_does_not_wake_for_each_token() -> None:
    """A client's time is taken from a server on the same machine."""
    num_looks = 0

    class Noting(TrialPace):
        async def _find_answer_or_idle_time(self) -> Any:
            nonlocal num_looks
            num_looks += 1
            return await super()._find_answer_or_idle_time()

    async def run() -> None:
        server, pace = Server(400, 0.05), Noting()
        async with pace.watch(server.open_answer()) as events:
            calls = asyncio.create_task(make_calls(server, pace))
            async for _ in events:
                pass
        await calls

    async def make_calls(server: Server, pace: TrialPace) -> None:
        for size in (10, 15):  # the second waits until .5 s for the first and .75 s for itself are little
            await pace.run_call(size, lambda size=size: server.read(size))

    run_virtual(run())
    assert num_looks <= 30
