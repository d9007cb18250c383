"""Blocking iteration carried to the loop: in order, cancellable, and never outliving its consumer."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any

import pytest

from llm_spec.local import threads as worker
from llm_spec.local.threads import DaemonThreadPool, call_on_deep_stack, iterate_in_thread

VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("VARIABLE", default="unset")


async def test_items_come_in_order() -> None:
    """Every item of every batch comes, in order; empty batches bring none."""

    def make(_: threading.Event) -> Iterator[list[int]]:
        yield from ([0, 1], [], [2], list(range(3, 100)))

    async with iterate_in_thread(make) as items:
        assert [item async for item in items] == list(range(100))


async def test_items_come_as_they_are_made() -> None:
    """The first item does not wait for the last."""
    extend_guess = threading.Event()

    def make(_: threading.Event) -> Iterator[list[str]]:
        yield ["first"]
        assert extend_guess.wait(10)
        yield ["second"]

    async with iterate_in_thread(make) as items:
        assert await anext(items) == "first"
        extend_guess.set()
        assert await anext(items) == "second"


@pytest.mark.parametrize(("batch_s", "least", "most"), [(0.001, 5, 12), (0.009, 90, 110), (0.1, 201, 201)])
async def test_batches_that_come_soon_come_together(
    monkeypatch: pytest.MonkeyPatch, batch_s: float, least: int, most: int
) -> None:
    """The loop is woken 40 times a second at most, and for each of them where they take longer; all come, in order."""
    now = itertools.count()
    monkeypatch.setattr(worker.time, "perf_counter", lambda: batch_s * next(now))
    loop = asyncio.get_running_loop()
    wake, num_wakes = loop.call_soon_threadsafe, itertools.count()

    def wake_and_count(callback: Callable[[], object], *arguments: Any) -> asyncio.Handle:
        next(num_wakes)
        return wake(callback, *arguments)

    outbox = worker.Outbox[int](loop)
    monkeypatch.setattr(loop, "call_soon_threadsafe", wake_and_count)
    for number in range(200):
        outbox.put([number])
    outbox.close()
    taken = [await outbox.take() for _ in range(201)]
    assert taken == [*([number] for number in range(200)), None]
    assert least <= next(num_wakes) <= most


async def test_a_batch_waits_for_the_next_one_for_a_moment_only() -> None:
    """The next one may take for ever."""
    has_first, has_second = threading.Event(), threading.Event()

    def make(_: threading.Event) -> Iterator[list[str]]:
        yield ["first"]
        assert has_first.wait(10)
        yield ["second"]
        assert has_second.wait(10)
        yield ["third"]

    async with iterate_in_thread(make) as items:
        assert await anext(items) == "first"
        has_first.set()
        assert await anext(items) == "second"
        has_second.set()
        assert await anext(items) == "third"


async def test_the_loop_runs_on_meanwhile() -> None:
    """A thread that is busy does not stop the loop."""
    turned = threading.Event()

    def make(_: threading.Event) -> Iterator[list[bool]]:
        yield [turned.wait(10)]

    asyncio.get_running_loop().call_later(0.001, turned.set)
    async with iterate_in_thread(make) as items:
        assert await anext(items) is True


@pytest.mark.parametrize("num_before", [0, 2])
async def test_what_the_iterator_raises_the_consumer_gets(num_before: int) -> None:
    """After the items before it, the very exception."""
    error = ValueError("from the thread")

    def make(_: threading.Event) -> Iterator[list[int]]:
        yield list(range(num_before))
        raise error

    seen: list[int] = []
    with pytest.raises(ValueError, match="from the thread") as caught:  # noqa: PT012 - in the middle of iterating
        async with iterate_in_thread(make) as items:
            async for item in items:
                seen.append(item)  # noqa: PERF401 - what came before the error counts
    assert caught.value is error
    assert seen == list(range(num_before))


async def test_a_cancelled_error_out_of_the_thread_cancels_nobody() -> None:
    """It is an error of the iterator's; the consumer's task was not cancelled and must not look as if it were."""

    def make(_: threading.Event) -> Iterator[list[int]]:
        yield [1]
        raise asyncio.CancelledError

    async with iterate_in_thread(make) as items:
        assert await anext(items) == 1
        with pytest.raises(RuntimeError, match="CancelledError was raised in a worker thread"):
            await anext(items)


async def test_what_making_the_iterator_raises_the_consumer_gets() -> None:
    """An error before the first item is reported like any other."""

    def make(_: threading.Event) -> Iterator[list[int]]:
        raise ValueError("no iterator")

    with pytest.raises(ValueError, match="no iterator"):
        async with iterate_in_thread(make) as items:
            await anext(items)


async def test_leaving_early_ends_the_thread() -> None:
    """On leaving, the iterator sees `cancelled`, is closed, and has ended before the context has."""
    ended = threading.Event()

    def make(cancelled: threading.Event) -> Iterator[list[int]]:
        try:
            while not cancelled.is_set():
                yield [0]
                time.sleep(0.001)
        finally:
            time.sleep(0.02)
            ended.set()

    async with iterate_in_thread(make) as items:
        await anext(items)
    assert ended.is_set()


async def test_an_error_after_leaving_is_not_told() -> None:
    """Nobody asks any more: the caller's own way out is not replaced by it."""

    def make(cancelled: threading.Event) -> Iterator[list[int]]:
        yield [0]
        cancelled.wait()
        raise ValueError("too late")

    with pytest.raises(KeyError):  # noqa: PT012 - on the way out of a context
        async with iterate_in_thread(make) as items:
            await anext(items)
            raise KeyError("the caller's own")


async def test_cancellation_waits_for_the_thread_and_stays_cancellation() -> None:
    """A cancelled consumer ends cancelled, however often it is cancelled, and the thread has ended by then."""
    ended, busy, release = threading.Event(), threading.Event(), threading.Event()

    def make(cancelled: threading.Event) -> Iterator[list[int]]:
        busy.set()
        cancelled.wait()
        release.wait()
        ended.set()
        yield []

    async def consume() -> None:
        async with iterate_in_thread(make) as items:
            await anext(items)

    task = asyncio.create_task(consume())
    while not busy.is_set():  # noqa: ASYNC110 - set by a thread
        await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.sleep(0.01)
    assert not task.done()
    task.cancel()
    await asyncio.sleep(0.01)
    assert not task.done()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_context_variables_go_along() -> None:
    """What is bound where the context is entered (a request id) is seen in the thread."""

    def make(_: threading.Event) -> Iterator[list[str]]:
        yield [VARIABLE.get()]

    token = VARIABLE.set("bound")
    try:
        async with iterate_in_thread(make) as items:
            assert await anext(items) == "bound"
    finally:
        VARIABLE.reset(token)


async def test_leaving_before_its_turn_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that never got a thread is dropped, without waiting for those that have one and without being made."""
    monkeypatch.setattr(worker, "_threads", DaemonThreadPool(1, "one"))
    release, made = threading.Event(), threading.Event()

    def busy(_: threading.Event) -> Iterator[list[int]]:
        yield [0]
        release.wait()

    def waiting(_: threading.Event) -> Iterator[list[int]]:
        made.set()
        yield [0]

    async with iterate_in_thread(busy) as items:
        await anext(items)
        async with asyncio.timeout(60):
            async with iterate_in_thread(waiting):
                await asyncio.sleep(0)
        release.set()
    assert not made.is_set()


async def test_no_more_threads_than_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Consumers wait for their turn; all are served."""
    monkeypatch.setattr(worker, "_NUM_PLACES", 2)
    under_way: list[int] = []
    most = 0

    def make(_: threading.Event) -> Iterator[list[int]]:
        nonlocal most
        under_way.append(0)
        for i in range(5):
            most = max(most, len(under_way))
            yield [i]
        under_way.pop()

    async def consume() -> list[int]:
        async with iterate_in_thread(make, is_bounded=True) as items:
            return [item async for item in items]

    async with asyncio.timeout(60):
        assert await asyncio.gather(*(consume() for _ in range(30))) == [list(range(5))] * 30
    assert most <= 2


async def test_a_place_is_free_when_its_thread_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Consumers that have not read to the end, and wait for each other's, hold nobody up."""
    monkeypatch.setattr(worker, "_NUM_PLACES", 1)

    def make(_: threading.Event) -> Iterator[list[int]]:
        yield [1]
        yield [2]

    async with asyncio.timeout(60), AsyncExitStack() as stack:
        for _ in range(3):
            items = await stack.enter_async_context(iterate_in_thread(make, is_bounded=True))
            assert await anext(items) == 1


async def test_as_many_threads_as_consumers() -> None:
    """Twelve that all must run before one can end, while the loop's own executor has one thread."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    together = threading.Barrier(12)

    def make(_: threading.Event) -> Iterator[list[int]]:
        yield [together.wait(60)]

    async def consume() -> list[int]:
        async with iterate_in_thread(make) as items:
            return [item async for item in items]

    assert sorted(await asyncio.gather(*(consume() for _ in range(12)))) == [[n] for n in range(12)]


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()], ids=["Exception", "BaseException"])
def test_a_deep_call_raises_what_it_raises(error: BaseException) -> None:
    """And leaves the stacks of other threads as they were."""

    def fail() -> None:
        raise error

    before = threading.stack_size()
    with pytest.raises(type(error)) as caught:
        call_on_deep_stack(fail)
    assert caught.value is error
    assert threading.stack_size() == before


def test_one_deep_call_at_a_time() -> None:
    """Each of them may take much memory."""
    inside: list[int] = []

    def call(number: int) -> int:
        inside.append(number)
        assert inside == [number]
        time.sleep(0.001)
        inside.remove(number)
        return number

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda number: call_on_deep_stack(lambda: call(number)), range(20))) == list(range(20))
