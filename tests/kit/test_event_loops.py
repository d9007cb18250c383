"""One of something for each event loop, and the loop of something that was given."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, TypeVar

import pytest

from llm_spec import ConfigError
from llm_spec.kit.event_loops import PerLoopResource, SingleLoopGuard

T = TypeVar("T")


class Made:
    """What is made for a loop, and where it was closed."""

    all: ClassVar[list[Made]] = []

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.closed_on: list[asyncio.AbstractEventLoop] = []
        self.all.append(self)

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.closed_on.append(asyncio.get_running_loop())


@pytest.fixture(autouse=True)
def nothing_made() -> None:
    Made.all.clear()


def run_unclosed(work: Callable[[], Awaitable[T]]) -> T:
    """As programs do that know nothing of asyncio.run: the loop closes none of its generators."""
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(work())
    finally:
        loop.close()


def test_one_after_another() -> None:
    """Each loop has its own, the same one each time, and closes it as it ends."""
    each = PerLoopResource(Made)

    async def use() -> None:
        made = await each.get()
        assert made.loop is asyncio.get_running_loop()
        assert await asyncio.gather(each.get(), each.get()) == [made, made]

    for _ in range(3):
        asyncio.run(use())
    assert len(Made.all) == 3
    assert [made.closed_on for made in Made.all] == [[made.loop] for made in Made.all]


def test_at_the_same_time() -> None:
    """Loops of several threads share nothing."""
    barrier = threading.Barrier(4)
    each = PerLoopResource(Made)

    async def use() -> Made:
        barrier.wait(10)
        return await each.get()

    with ThreadPoolExecutor(4) as pool:
        used = list(pool.map(lambda _: asyncio.run(use()), range(4)))
    assert len({id(made) for made in used}) == 4
    assert all(made.closed_on == [made.loop] for made in used)


def test_closing() -> None:
    """It closes once what the running loop has; afterwards there is a new one."""
    each = PerLoopResource(Made)

    async def use() -> None:
        first = await each.get()
        await asyncio.gather(each.aclose(), each.aclose())
        assert first.closed_on == [first.loop]
        assert await each.get() is not first

    asyncio.run(use())
    assert [len(made.closed_on) for made in Made.all] == [1, 1]


def test_a_loop_that_closes_nothing() -> None:
    """What it leaves is closed by the next that comes."""
    each = PerLoopResource(Made)
    first = run_unclosed(each.get)
    assert first.closed_on == []
    second = asyncio.run(_returned(each.get()))
    assert first.closed_on == second.closed_on == [second.loop]


async def _returned(waiting: Awaitable[T]) -> T:
    return await waiting


def test_closing_what_another_thread_uses() -> None:
    """Its own loop closes it, soon."""
    each = PerLoopResource(Made)
    is_used, was_closed = threading.Event(), threading.Event()

    async def use() -> None:
        made = await each.get()
        is_used.set()
        while not made.closed_on:  # noqa: ASYNC110 - the other thread is another party, it sets no event here
            await asyncio.sleep(0.001)
        was_closed.set()

    thread = threading.Thread(target=lambda: asyncio.run(use()))
    thread.start()
    assert is_used.wait(10)
    asyncio.run(each.aclose())
    thread.join(10)
    assert was_closed.is_set()
    (made,) = Made.all
    assert made.closed_on == [made.loop]


def test_something_given_belongs_to_the_first_loop() -> None:
    """Another that comes while it is open is refused; where it is closed, a failure is explained."""
    given = SingleLoopGuard("the session", "give another")

    async def use() -> None:
        given.check_running_loop()
        assert given.explain_loop_error(RuntimeError("something else")) is None  # the loop is the right one
        with (
            ThreadPoolExecutor(1) as pool,
            pytest.raises(ConfigError, match="the session belongs to another event loop"),
        ):
            pool.submit(lambda: asyncio.run(_check(given))).result()

    asyncio.run(use())

    async def use_again() -> None:
        given.check_running_loop()
        assert given.explain_loop_error(OSError("the network")) is None
        wrapped = OSError("as some libraries hide it")
        wrapped.__cause__ = RuntimeError("Event loop is closed")
        for error in (wrapped.__cause__, wrapped):
            assert "the session belongs to another event loop; give another" in str(given.explain_loop_error(error))

    asyncio.run(use_again())


async def _check(given: SingleLoopGuard) -> None:
    given.check_running_loop()
