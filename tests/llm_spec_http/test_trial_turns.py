"""Trials do not hold answers up: one call at a time, while no answer is open, or else once a minute."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from llm_spec_http import DIALECTS, HttpProvider
from llm_spec_http.trial_turns import TrialTurns

from llm_spec import ChatRequest
from llm_spec.testing.clock import run_virtual
from llm_spec.testing.server import ScriptedModelServer

CALL_S = 0.5
POLL_S = 0.2  # how late calls may begin, all together


class Trial:
    """Calls of a trial, one after another; each takes `CALL_S`."""

    def __init__(self, turns: TrialTurns) -> None:
        self.began_s: list[float] = []
        self.num_running = self.most_running = 0
        self._turns = turns

    async def run(self, num_calls: int) -> None:
        for _ in range(num_calls):
            await self._turns.run_call(self._call)

    async def _call(self) -> None:
        self.began_s.append(asyncio.get_running_loop().time())
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await asyncio.sleep(CALL_S)
        finally:
            self.num_running -= 1


@asynccontextmanager
async def open_answer() -> AsyncGenerator[None]:
    yield


async def answer(turns: TrialTurns, seconds: float) -> None:
    async with turns.watch(open_answer()):
        await asyncio.sleep(seconds)


def at(*seconds: float) -> list[object]:
    return [pytest.approx(second, abs=POLL_S) for second in seconds]


def test_without_an_answer_nothing_waits() -> None:
    """A program that finds out before its first request waits for the calls alone."""

    async def run() -> None:
        trial = Trial(TrialTurns())
        await trial.run(3)
        assert trial.began_s == at(0.0, 0.5, 1.0)

    run_virtual(run())


def test_calls_wait_for_a_second_without_an_answer() -> None:
    """Not in an answer, nor in the short time between two."""

    async def run() -> None:
        turns = TrialTurns()
        trial = Trial(turns)
        running = asyncio.create_task(trial.run(3))
        await asyncio.sleep(0.1)
        assert trial.began_s == at(0.0)
        for _ in range(3):  # until 9.8 s
            await answer(turns, 2.5)
            await asyncio.sleep(0.75)
        await answer(turns, 1.0)
        await running
        assert trial.began_s == at(0.0, 11.85, 12.35)

    run_virtual(run())


def test_beside_steady_answers_there_is_one_call_a_minute() -> None:
    """The first a minute after it was wanted, and all at once again when a second is idle."""

    async def run() -> None:
        turns = TrialTurns()
        trial = Trial(turns)
        async with turns.watch(open_answer()):
            running = asyncio.create_task(trial.run(5))
            others = [asyncio.create_task(answer(turns, 200.0)) for _ in range(3)]
            await asyncio.gather(*others)
        await running
        assert trial.began_s == at(60.0, 120.0, 180.0, 201.0, 201.5)

    run_virtual(run())


def test_an_answer_that_could_not_be_opened_is_not_open() -> None:
    """A server that refused a request has nothing to do for it."""

    @asynccontextmanager
    async def refuse() -> AsyncGenerator[None]:
        raise ConnectionError
        yield

    async def run() -> None:
        turns = TrialTurns()
        trial = Trial(turns)
        with pytest.raises(ConnectionError):
            async with turns.watch(refuse()):
                pass
        await trial.run(1)
        assert trial.began_s == at(1.0)

    run_virtual(run())


def test_a_later_trial_waits_anew() -> None:
    """A minute from when it begins, whatever was before."""

    async def run() -> None:
        turns = TrialTurns()
        trial = Trial(turns)
        await trial.run(1)
        await asyncio.sleep(1000.0)
        async with turns.watch(open_answer()):
            await trial.run(1)
        assert trial.began_s == at(0.0, 1060.5)

    run_virtual(run())


def test_trials_at_once_make_one_call_at_a_time() -> None:
    """Idle or not."""

    async def run() -> None:
        turns = TrialTurns()
        trial = Trial(turns)
        await asyncio.gather(*(trial.run(2) for _ in range(3)))
        assert (len(trial.began_s), trial.most_running) == (6, 1)
        async with turns.watch(open_answer()):
            began_s = asyncio.get_running_loop().time()
            await asyncio.gather(*(trial.run(1) for _ in range(2)))
        first_s, second_s = trial.began_s[-2:]
        assert [first_s - began_s, second_s - began_s] == at(59.5, 119.5)

    run_virtual(run())


@pytest.mark.parametrize("fails", [True, False])
def test_a_call_that_is_left_or_fails_leaves_its_turn_to_the_next(*, fails: bool) -> None:
    async def run() -> None:
        turns = TrialTurns()

        async def fail() -> None:
            raise OSError("no connection")

        if fails:
            with pytest.raises(OSError, match="no connection"):
                await turns.run_call(fail)
        else:
            left = asyncio.create_task(Trial(turns).run(1))
            await asyncio.sleep(0.1)
            left.cancel()
            await asyncio.gather(left, return_exceptions=True)
        began_s = asyncio.get_running_loop().time()
        trial = Trial(turns)
        await trial.run(1)
        assert trial.began_s == at(began_s)

    run_virtual(run())


def test_an_answer_that_fails_is_open_no_more() -> None:
    async def run() -> None:
        turns = TrialTurns()
        with pytest.raises(OSError, match="broken"):
            async with turns.watch(open_answer()):
                raise OSError("broken")
        trial = Trial(turns)
        await trial.run(1)
        assert trial.began_s == at(1.0)

    run_virtual(run())


async def test_answers_of_other_event_loops_count() -> None:
    """A server does not know of them."""
    turns, is_open, may_end = TrialTurns(), threading.Event(), threading.Event()

    async def hold_answer() -> None:
        async with turns.watch(open_answer()):
            is_open.set()
            await asyncio.to_thread(may_end.wait)

    other = asyncio.create_task(asyncio.to_thread(asyncio.run, hold_answer()))
    await asyncio.to_thread(is_open.wait)
    trial = Trial(turns)
    running = asyncio.create_task(trial.run(1))
    try:
        await asyncio.sleep(0.2)
        assert trial.began_s == []
    finally:
        may_end.set()
        running.cancel()
        await asyncio.gather(running, other, return_exceptions=True)


async def test_a_trial_that_was_left_goes_on_where_it_was() -> None:
    """Each call is made once, although the trial is cancelled after every one of them."""
    async with ScriptedModelServer("one two three four five") as server:
        provider = HttpProvider("scripted", base_url=server.url, dialect=DIALECTS["vllm"])
        try:
            for _ in range(30):
                num_before = len(server.paths)
                trial = asyncio.create_task(provider.discover("token_endpoint"))
                while not trial.done() and len(server.paths) < num_before + 2:  # noqa: ASYNC110 - the server is another party
                    await asyncio.sleep(0.001)
                trial.cancel()
                await asyncio.gather(trial, return_exceptions=True)
                if provider.capabilities.token_endpoint is not None:
                    break
            assert provider.capabilities.token_endpoint is not None
        finally:
            await provider.aclose()


async def test_no_trial_begins_while_an_answer_is_open() -> None:
    """However it is requested; the tokenizer may be asked."""
    async with ScriptedModelServer("one two three") as server:
        provider = HttpProvider("scripted", base_url=server.url, dialect=DIALECTS["vllm"])
        request = ChatRequest.create("tell", max_tokens=3)
        try:
            for opened in (provider.stream, provider.stream_with_token_ids, provider.stream_chunks):
                async with opened(request):
                    trial = asyncio.create_task(provider.discover("token_endpoint"))
                    await asyncio.sleep(0.2)
                    assert not trial.done()
                    trial.cancel()
                    await asyncio.gather(trial, return_exceptions=True)
            asked = [path for path in server.paths if path not in ("/tokenize", "/detokenize")]
            assert asked == ["/v1/chat/completions"] * 3
        finally:
            await provider.aclose()


def test_closing_the_provider_ends_a_trial_that_waits() -> None:
    """Its callers go on, and nothing is left."""

    async def run() -> None:
        async with ScriptedModelServer("one two three") as server:
            provider = HttpProvider("scripted", base_url=server.url, dialect=DIALECTS["vllm"])
            async with provider.stream(ChatRequest.create("tell")):
                trial = asyncio.create_task(provider.discover("token_endpoint"))
                await asyncio.sleep(0.2)
                assert not trial.done()
                await provider.aclose()
                await asyncio.wait_for(trial, 1.0)
                assert provider.capabilities.token_endpoint is None

    asyncio.run(run())
