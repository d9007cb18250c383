"""Runs blocking work in threads beside an event loop: iterate in a thread, consume in a coroutine.

A model that admits eight requests joins their forward passes, and needs a thread for each. Models
without a bound of their own share a bound on concurrent work for each event loop (six on two
cores).

The program ends when its main thread does. If an event loop in a daemon thread is then still
running, its work is cancelled and ends within a step, its consumers are cancelled, and nothing new
begins.

Native code that recurses as deeply as its input demands needs more stack than these threads have,
and an overflow ends the process. `call_on_deep_stack` gives it more.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import math
import os
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Executor, Future
from contextlib import aclosing, asynccontextmanager, closing
from functools import partial
from queue import SimpleQueue
from typing import Final, Generic, ParamSpec, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

from llm_spec.local.forks import call_in_forked_child, reset_in_forked_child

__all__ = [
    "DaemonThreadPool",
    "Outbox",
    "as_closable_generator",
    "call_in_own_thread",
    "call_on_deep_stack",
    "count_usable_cores",
    "iterate_in_thread",
]


def count_usable_cores() -> int:
    """Return the number of cores that this process may use, as far as the system reports it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


T = TypeVar("T")


def as_closable_generator(items: Iterator[T]) -> Generator[T]:
    """Turn an iterator into a generator that `contextlib.closing` can close.

    Closing it runs the clean-up of `items` if that is a generator.
    """
    yield from items


P = ParamSpec("P")


class _PooledCall:
    def __init__(self, function: Callable[[], object], outcome: Future[object]) -> None:
        self._function = function
        self._outcome = outcome

    def run(self) -> None:
        if not self._outcome.set_running_or_notify_cancel():
            return
        try:
            result = self._function()
        except BaseException as error:  # noqa: BLE001 - it is raised where the outcome is taken
            self._outcome.set_exception(error)
            del self  # otherwise the error and this frame would reference each other
        else:
            self._outcome.set_result(result)


_CallQueue: TypeAlias = "SimpleQueue[_PooledCall]"


class DaemonThreadPool(Executor):
    """Runs calls in at most `max_threads` threads, started when needed and used again.

    A `ThreadPoolExecutor` keeps a program from ending until its last call has returned. In a forked
    child it has no threads, and the child waits for them.
    """

    def __init__(self, max_threads: int, name: str) -> None:
        self._max_threads = max_threads
        self._name = name
        self.reset_after_fork()
        reset_in_forked_child(self)

    def reset_after_fork(self) -> None:
        self._lock = threading.Lock()
        self._calls: _CallQueue = SimpleQueue()
        self._num_threads = self._num_idle = 0

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        outcome: Future[T] = Future()
        with self._lock:
            if self._num_idle:
                self._num_idle -= 1
            elif self._num_threads < self._max_threads:
                threading.Thread(target=self._run_calls, args=(self._calls,), name=self._name, daemon=True).start()
                self._num_threads += 1
            self._calls.put(_PooledCall(partial(fn, *args, **kwargs), outcome))  # type: ignore[arg-type] # of any result
        return outcome

    def _run_calls(self, calls: _CallQueue) -> None:
        while True:
            calls.get().run()
            with self._lock:
                self._num_idle += 1


_MAX_THREADS: Final = 1024  # far above what models of one process admit together

# Idle threads are used again: a new one is cheap, but a backend keeps memory for each.
_threads: Final = DaemonThreadPool(_MAX_THREADS, "llm_spec")

_NUM_PLACES: Final = min(32, count_usable_cores() + 4)  # asyncio's own default
_places: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]] = WeakKeyDictionary()

# how long the end of the program waits for steps under way; one of torch may take this long
_MAX_END_S: Final = 2.0
_under_way: Final[set[threading.Event]] = set()  # the `cancelled` of each iteration
_program_is_ending = threading.Event()

_WAKE_INTERVAL_S: Final = 0.025  # 40 times a second looks smooth

_STACK_BYTES: Final = 128 * 1024 * 1024  # of address space; only the part that is used takes memory
_deep_call = threading.Lock()


def call_in_own_thread(function: Callable[[], T]) -> T:
    """Call `function` in a thread that ends with it; return or raise what it does.

    `pass_threads.py` says why.
    """
    return _start_call(function, "llm_spec_load").result()


def call_on_deep_stack(function: Callable[[], T]) -> T:
    """Call `function` in a thread with 128 MiB of stack, one call at a time.

    Returns or raises what `function` does. `threading.stack_size` applies to the whole process, so
    a thread that starts elsewhere at the same moment gets the same size. That costs it only address
    space.
    """
    with _deep_call:
        usual_bytes = threading.stack_size(_STACK_BYTES)
        try:
            call = _start_call(function, "llm_spec_deep")
        finally:
            threading.stack_size(usual_bytes)
        return call.result()


def _start_call(function: Callable[[], T], name: str) -> futures.Future[T]:
    result: futures.Future[T] = futures.Future()

    def run_and_send() -> None:
        try:
            result.set_result(function())
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is taken
            result.set_exception(error)

    threading.Thread(target=contextvars.copy_context().run, args=(run_and_send,), name=name, daemon=True).start()
    return result


def _get_places(loop: asyncio.AbstractEventLoop) -> asyncio.Semaphore:
    """Return the semaphore for threads of this event loop that have no other bound."""
    places = _places.get(loop)
    if places is None:
        places = _places[loop] = asyncio.Semaphore(_NUM_PLACES)
    return places


@asynccontextmanager
async def iterate_in_thread(
    make: Callable[[threading.Event], Iterator[Sequence[T]]], *, is_bounded: bool = False
) -> AsyncGenerator[AsyncIterator[T]]:
    """Run `make(cancelled)` and its iteration in a worker thread; yield its items on the loop.

    The iterator gives batches, because waking the loop takes time from the worker: both compete for
    the interpreter and a core. Batches that follow each other within milliseconds are delivered
    together, at most 50 ms late.

    Leaving the context sets `cancelled` and returns when the thread has ended, so that nothing of a
    request outlives it. The iterator should check `cancelled` at least once per step. The consumer
    receives what the iterator raises.

    With `is_bounded`, it waits until few enough such threads work for this event loop. It counts as
    one only until its thread ends: a consumer that waits for another answer of this loop must not
    block that answer.
    """
    loop = asyncio.get_running_loop()
    places = _get_places(loop) if is_bounded else None
    outbox: Outbox[T] = Outbox(loop)
    cancelled = threading.Event()
    started = threading.Event()

    def run_and_send() -> None:
        started.set()
        if cancelled.is_set():
            return  # left before its turn came
        _under_way.add(cancelled)
        try:
            _raise_if_program_is_ending()
            with closing(as_closable_generator(make(cancelled))) as produced:
                for batch in produced:
                    # the last batch of a cut-off answer would say that it is whole
                    if cancelled.is_set():
                        break
                    outbox.put(batch)
            _raise_if_program_is_ending()
        except asyncio.CancelledError as error:  # no task runs here: the error is an ordinary one
            raise RuntimeError("CancelledError was raised in a worker thread, but nothing was cancelled") from error
        finally:
            _under_way.discard(cancelled)
            outbox.close()

    if places is not None:
        await places.acquire()
    thread = loop.run_in_executor(_threads, contextvars.copy_context().run, run_and_send)
    if places is not None:
        thread.add_done_callback(lambda _: places.release())
    try:
        async with aclosing(_receive_items(outbox, thread)) as out:
            yield out
    finally:
        cancelled.set()
        if started.is_set():
            await _wait_for_thread(thread)
        else:
            thread.cancel()


def _raise_if_program_is_ending() -> None:
    """Cancel the consumer: a cut answer must not look complete, and an error would be printed."""
    if _program_is_ending.is_set():
        raise futures.CancelledError  # asyncio raises it as its own


def _end_with_program() -> None:
    """Cancel the work under way and wait for it: native code must not be interrupted."""
    _program_is_ending.set()
    give_up_at_s = time.monotonic() + _MAX_END_S
    while _under_way and time.monotonic() < give_up_at_s:
        for cancelled in tuple(_under_way):
            cancelled.set()
        time.sleep(0.001)


atexit.register(_end_with_program)  # called when all threads but the daemons have ended


@call_in_forked_child
def _reset_after_fork() -> None:
    """Reset what the parent's threads held: none of them exists in the child."""
    global _deep_call  # noqa: PLW0603 - a lock that may be held cannot be released
    _deep_call = threading.Lock()
    _under_way.clear()


class Outbox(Generic[T]):
    """Batches on their way from a worker thread to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._batches: deque[Sequence[T] | None] = deque()  # None: there will be no more
        self._has_news = asyncio.Event()
        self._last_put_s = self._last_woken_s = -math.inf

    def put(self, batch: Sequence[T]) -> None:
        """Add a batch. The loop is woken unless it can wait for the next batch.

        It can wait if a batch that takes as long as this one would still be in time.
        """
        now = time.perf_counter()
        took_s, self._last_put_s = now - self._last_put_s, now
        self._batches.append(batch)
        if now + took_s - self._last_woken_s > _WAKE_INTERVAL_S:
            self._last_woken_s = now
            self._loop.call_soon_threadsafe(self._has_news.set)

    def close(self) -> None:
        """Mark the end of the batches."""
        self._batches.append(None)
        self._loop.call_soon_threadsafe(self._has_news.set)

    async def take(self) -> Sequence[T] | None:
        """Return the next batch, or None after the last."""
        if not self._batches:
            # a batch waits no longer than this for the next one
            timer = self._loop.call_later(2 * _WAKE_INTERVAL_S, self._has_news.set)
            try:
                while not self._batches:
                    self._has_news.clear()
                    await self._has_news.wait()
            finally:
                timer.cancel()
        return self._batches.popleft()


async def _receive_items(outbox: Outbox[T], thread: asyncio.Future[None]) -> AsyncGenerator[T]:
    while (batch := await outbox.take()) is not None:
        for item in batch:
            yield item
    await thread  # raises what the iterator raised


async def _wait_for_thread(thread: asyncio.Future[None]) -> None:
    """Wait for the thread even while being cancelled.

    Its error was raised already, or no caller is left.
    """
    interrupted: asyncio.CancelledError | None = None
    while not thread.done():
        try:
            await asyncio.wait([thread])
        except asyncio.CancelledError as error:
            interrupted = error
    if not thread.cancelled():
        thread.exception()
    if interrupted is not None:
        raise interrupted
