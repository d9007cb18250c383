"""ConcurrencyLimit: how many requests run at once, and who waits for a place."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack
from itertools import count
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.failing_targets import CONTINUES, WORDS, Failing, plainly
from support.targets import Target

from llm_spec import (
    BreakerPolicy,
    ChatRequest,
    ConcurrencyLimit,
    ConfigError,
    DraftError,
    ProviderDraft,
    ReferenceDraft,
    SpeculativeConfig,
    SpeculativeDecoder,
    SpeculativeResult,
    TargetError,
)
from llm_spec.contract.provider import Capabilities
from llm_spec.decoder.breaker import CircuitBreaker, GuardedDraft
from llm_spec.testing import LocalProvider, ScriptedProvider, TableModel
from llm_spec.testing.clock import run_virtual

pytestmark = pytest.mark.virtual_clock

# ------------------------------------------------------------------------------------------ limits


@pytest.mark.parametrize("max_requests", [1, 3])
def test_no_more_answers_than_places(max_requests: int) -> None:
    """Of all decoders that share the limit; places are given back also by answers that fail or are cancelled."""

    async def check() -> None:
        limit, most = ConcurrencyLimit(max_requests), 0
        targets = [Failing((0, TargetError("no")), delay_piece_s=0.01) for _ in range(3)]
        decoders = [plainly(target, limit=limit) for target in targets]

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, sum(target.num_open for target in targets))
                await asyncio.sleep(0.001)

        watching = asyncio.create_task(watch())
        tasks = [asyncio.create_task(decoders[n % 3].decode("q")) for n in range(12)]
        await asyncio.sleep(0.2)
        tasks[-1].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        watching.cancel()
        assert most == max_requests
        assert sum(isinstance(result, SpeculativeResult) for result in results) == 8
        assert (await asyncio.wait_for(decoders[0].decode("q"), 5.0)).content == WORDS

    run_virtual(check())


def test_waiting_for_a_place_ends_with_the_deadline() -> None:
    """No place is taken, and none is given back that was not taken."""

    async def check() -> None:
        limit = ConcurrencyLimit(1)
        slow = plainly(ScriptedProvider(WORDS, delay_piece_s=1.0), limit=limit)
        first = asyncio.create_task(slow.decode("q"))
        await asyncio.sleep(0.1)
        late = plainly(ScriptedProvider(WORDS), limit=limit, deadline_s=2.0)
        result = await late.decode("q")
        assert (result.content, result.stopped_by) == ("", "deadline")
        second = asyncio.create_task(late.decode("q"))
        assert (await first).content == WORDS
        await second
        assert await num_free(limit) == 1

    run_virtual(check())


@pytest.mark.parametrize("strategy", ["race", "regenerate"])
def test_a_pair_that_shares_one_place_does_not_wait_for_itself(strategy: Any) -> None:
    """The draft is left out."""

    async def check() -> None:
        target = ScriptedProvider(WORDS, capabilities=CONTINUES, delay_piece_s=0.01)
        draft = ScriptedProvider(WORDS, delay_piece_s=0.001)
        config = SpeculativeConfig(strategy=strategy, limit=ConcurrencyLimit(1))
        result = await asyncio.wait_for(SpeculativeDecoder(target=target, draft=draft, config=config).decode("q"), 30.0)
        assert result.content == WORDS
        assert draft.requests == []

    run_virtual(check())


@pytest.mark.parametrize("strategy", ["race", "regenerate"])
def test_a_draft_that_copies_takes_no_place(strategy: Any) -> None:
    """It asks no server: the only place is the target's, and the text is drafted all the same."""
    target = ScriptedProvider(WORDS, capabilities=CONTINUES, delay_piece_s=0.01)
    config = SpeculativeConfig(strategy=strategy, limit=ConcurrencyLimit(1))
    result = run_virtual(SpeculativeDecoder(target=target, draft=ReferenceDraft(WORDS), config=config).decode("q"))
    assert result.content == WORDS
    assert result.fallbacks == ()
    assert result.stats.num_draft_tokens > 0


class Crowd:
    """Targets and drafts that come to a limit, stay and go."""

    def __init__(self, max_requests: int) -> None:
        self.limit = ConcurrencyLimit(max_requests)
        self.inside = {"target": 0, "draft": 0}
        self.members: list[tuple[str, asyncio.Task[None], asyncio.Event]] = []

    def come(self, kind: str) -> None:
        leave = asyncio.Event()
        self.members.append((kind, asyncio.create_task(self._stay(kind, leave)), leave))

    def leave(self, number: int) -> None:
        if self.members:
            self.members[number % len(self.members)][2].set()

    def cancel(self, number: int) -> None:
        if self.members:
            self.members[number % len(self.members)][1].cancel()

    @property
    def num_targets(self) -> int:
        return sum(kind == "target" and not task.done() for kind, task, _ in self.members)

    async def _stay(self, kind: str, leave: asyncio.Event) -> None:
        async with self.limit.hold_place() if kind == "target" else self.limit.hold_draft_place():
            self.inside[kind] += 1
            try:
                await leave.wait()
            finally:
                self.inside[kind] -= 1


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 3),
    st.lists(
        st.one_of(
            st.sampled_from(["target", "draft"]),
            st.tuples(st.sampled_from(["leave", "cancel", "turns"]), st.integers(0, 4)),
        ),
        max_size=40,
    ),
    st.booleans(),
)
@example(1, ["target", "target", ("turns", 4), ("leave", 0), ("turns", 1), ("cancel", 1)], False)
def test_every_place_is_given_back_once(
    max_requests: int, steps: list[str | tuple[str, int]], is_cancelled: bool
) -> None:
    """Whoever comes, goes, or is cancelled when: never too many inside, and a target waits for targets alone."""

    async def check() -> None:
        crowd = Crowd(max_requests)
        for step in steps:
            match step:
                case str():
                    crowd.come(step)
                case "leave", number:
                    crowd.leave(number)
                case "cancel", number:
                    crowd.cancel(number)
                case _, number:
                    for _ in range(number):
                        await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        assert crowd.inside["target"] == min(crowd.num_targets, max_requests)
        assert sum(crowd.inside.values()) <= max_requests
        for number in range(len(crowd.members)):
            crowd.cancel(number) if is_cancelled else crowd.leave(number)
        outcomes = await asyncio.gather(*(task for _, task, _ in crowd.members), return_exceptions=True)
        assert all(isinstance(outcome, asyncio.CancelledError | DraftError | None) for outcome in outcomes)
        assert await num_free(crowd.limit) == max_requests

    run_virtual(check())


async def num_free(limit: ConcurrencyLimit) -> int:
    """How many places nobody has."""
    async with AsyncExitStack() as stack:
        for number in count():
            try:
                await stack.enter_async_context(limit.hold_draft_place())
            except DraftError:
                return number
    raise AssertionError


@pytest.mark.parametrize("deadline_s", [None, 90.0])
@pytest.mark.parametrize("cancelled_at", [(2.0, 0.5), (2.0, 0.5, 0.25), (0.0, 0.0), (40.5, 0.1), (2.0, 3.0)])
def test_a_request_that_is_cancelled_while_it_closes_gives_its_place_back(
    cancelled_at: tuple[float, ...], deadline_s: float | None
) -> None:
    """Once, however often it is cancelled; nothing of it goes on."""

    async def check() -> None:
        limit = ConcurrencyLimit(1)
        target = Target(WORDS, call_s=1.0, close_s=1.0)
        before = asyncio.all_tasks()
        task = asyncio.create_task(plainly(target, limit=limit, deadline_s=deadline_s).decode("q"))
        for seconds in cancelled_at:
            await asyncio.sleep(seconds)
            task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert asyncio.all_tasks() == before
        assert target.num_open == 0
        assert await num_free(limit) == 1

    run_virtual(check())


async def test_a_local_model_that_is_cancelled_twice_gives_its_place_back() -> None:
    """While its thread is in a forward pass."""
    reading, extend_guess = threading.Event(), threading.Event()

    class Held(TableModel):
        def open(self, *, exact: bool = True) -> Any:
            reading.set()
            assert extend_guess.wait(10)
            return super().open(exact=exact)

    limit = ConcurrencyLimit(1)
    decoder = plainly(LocalProvider(Held("abc")), limit=limit)
    task = asyncio.create_task(decoder.decode("q"))
    assert await asyncio.to_thread(reading.wait, 10)
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
    assert await num_free(limit) == 0
    extend_guess.set()
    await asyncio.wait([task])
    assert task.cancelled()
    assert await num_free(limit) == 1
    assert (await decoder.decode("q")).content == "abc"


@pytest.mark.parametrize("strategy", ["race", "regenerate", "predict", "judge"])
@pytest.mark.parametrize("max_requests", [2, 3])
def test_a_draft_delays_nobodys_target(strategy: Any, max_requests: int) -> None:
    """Requests that share a limit begin as they would without drafts; those lose their places, and are not blamed."""
    can = Capabilities(continue_prefix=True, prediction=True)

    async def run(strategy: Any) -> list[SpeculativeResult]:
        target = ScriptedProvider(WORDS, capabilities=can, delay_piece_s=0.05)
        draft = ScriptedProvider(WORDS, name="scripted:draft", delay_first_s=0.3, delay_piece_s=0.3)
        config = SpeculativeConfig(strategy=strategy, baseline_every=0, limit=ConcurrencyLimit(max_requests))
        decoder = SpeculativeDecoder(target=target, draft=draft, config=config)

        async def ask(after_s: float) -> SpeculativeResult:
            await asyncio.sleep(after_s)
            return await decoder.decode("q", temperature=0.0)

        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                await asyncio.sleep(0.0101)  # never at the moment at which a place changes hands
                most = max(most, target.num_open + draft.num_open)

        watching = asyncio.create_task(watch())
        results = await asyncio.gather(*(ask(0.1 * number) for number in range(2 * max_requests)))
        watching.cancel()
        assert most == max_requests or strategy == "race"  # an answer's own streams share its place
        assert draft.num_open == target.num_open == 0
        assert not decoder.is_draft_circuit_open
        assert {result.content for result in results} == {WORDS}
        return results

    plain, drafted = run_virtual(run("plain")), run_virtual(run(strategy))
    if strategy in {"race", "regenerate"}:  # the others also wait for the draft, or ask the target for a verdict
        for one, other in zip(plain, drafted, strict=True):
            assert other.timings.total_s <= one.timings.total_s + 0.01
    fallbacks = [fallback for result in drafted for fallback in result.fallbacks]
    assert any("needed the draft's place" in fallback for fallback in fallbacks)


def test_a_draft_that_lost_its_place_is_not_blamed() -> None:
    """Not for its silence either; what a draft itself raises stays what it is."""

    async def check() -> None:
        limit, breaker = ConcurrencyLimit(1), CircuitBreaker("a draft", BreakerPolicy(max_failures=1))
        guarded = GuardedDraft(ProviderDraft(ScriptedProvider("a b", delay_first_s=60.0)), breaker, limit, 90.0)

        async def draft() -> None:
            async with guarded.draft(ChatRequest.create("q"), 10) as pieces:
                await anext(pieces)

        drafting = asyncio.create_task(draft())
        await asyncio.sleep(50.0)
        async with limit.hold_place():
            with pytest.raises(DraftError, match="needed the draft's place"):
                await drafting
            assert await num_free(limit) == 0
        assert not breaker.is_open
        assert await num_free(limit) == 1
        with pytest.raises(TimeoutError, match="its own"):
            async with limit.hold_draft_place():
                raise TimeoutError("its own")
        assert await num_free(limit) == 1

    run_virtual(check())


def test_a_limit_serves_one_event_loop_after_another() -> None:
    """Also one that had to let requests wait."""
    decoder = plainly(ScriptedProvider(WORDS, delay_piece_s=0.01), limit=ConcurrencyLimit(1))

    async def ask() -> list[SpeculativeResult]:
        return await asyncio.gather(*(decoder.decode("q") for _ in range(3)))

    for _ in range(2):
        assert [result.content for result in run_virtual(ask())] == [WORDS] * 3


def test_a_limit_in_use_on_two_event_loops_is_refused() -> None:
    """Until the other one has given back what it took, or is closed."""
    limit = ConcurrencyLimit(1)
    decoder = plainly(ScriptedProvider(WORDS), limit=limit)
    place = limit.hold_place()
    with asyncio.Runner() as first, asyncio.Runner() as second:
        first.run(place.__aenter__())
        with pytest.raises(ConfigError, match="another event loop"):
            second.run(decoder.decode("q"))
        first.run(place.__aexit__(None, None, None))
        assert second.run(decoder.decode("q")).content == WORDS
    place = limit.hold_place()
    with asyncio.Runner() as first:
        first.run(place.__aenter__())
    with asyncio.Runner() as second:
        assert second.run(decoder.decode("q")).content == WORDS
        second.run(place.__aexit__(None, None, None))  # too late to count
        assert second.run(num_free(limit)) == 1
