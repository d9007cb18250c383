"""Carry blocking work to an event loop: iterate in a thread, consume in a coroutine.

Work has one of asyncio's own threads, of which there are few: on two cores six. That is a bound on what runs at once
for models that set none, and too few for a model that admits eight requests and joins their forward passes. So what a
model has admitted runs in `admitted_threads`, as many as are needed.

Native code that recurses as deep as its input wants takes more stack than any of these threads have, and to overflow it
ends the process: `call_on_deep_stack`.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, closing
from typing import Final, TypeVar

from llm_spec._iterators import as_closable_generator

__all__ = ["admitted_threads", "call_in_own_thread", "call_on_deep_stack", "iterate_in_thread"]

T = TypeVar("T")

_MAX_THREADS: Final = 1024  # far above what models of one process admit together; each is made when it is needed

# Those that are idle are used again: a new one costs little itself, but so does not what a backend keeps for each.
admitted_threads: Final = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="llm_spec")

_STACK_BYTES: Final = 128 * 1024 * 1024  # of addresses; memory is taken as far as it is used
_deep_call = threading.Lock()


def call_in_own_thread(function: Callable[[], T]) -> T:
    """What `function` returns or raises, called in a thread that ends with it: see `pass_threads.py`."""
    return _start_call(function, "llm_spec_load").result()


def call_on_deep_stack(function: Callable[[], T]) -> T:
    """What `function` returns or raises, called in a thread with 128 MiB of stack; one call at a time.

    `threading.stack_size` is the process's. A thread that another part of it starts just then gets as much, which costs
    it addresses alone.
    """
    with _deep_call:
        usual_bytes = threading.stack_size(_STACK_BYTES)
        try:
            call = _start_call(function, "llm_spec_deep")
        finally:
            threading.stack_size(usual_bytes)
        return call.result()


def _start_call(function: Callable[[], T], name: str) -> Future[T]:
    result: Future[T] = Future()

    def run_and_send() -> None:
        try:
            result.set_result(function())
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is taken
            result.set_exception(error)

    threading.Thread(target=contextvars.copy_context().run, args=(run_and_send,), name=name, daemon=True).start()
    return result


@asynccontextmanager
async def iterate_in_thread(
    make: Callable[[threading.Event], Iterator[Sequence[T]]], *, executor: Executor | None = None
) -> AsyncGenerator[AsyncIterator[T]]:
    """Run `make(cancelled)` and its iteration in a worker thread; yield the items of its batches on the loop.

    The thread is one of `executor`'s, by default of the loop's own.

    Batches, because each one wakes the loop, whose work then competes with the thread's for the interpreter.

    Leaving the context sets `cancelled` and returns when the thread has ended, so that nothing of a request outlives
    it; the iterator should look at `cancelled` at least once per step. What the iterator raises, the consumer gets.
    """
    loop = asyncio.get_running_loop()
    batches: asyncio.Queue[Sequence[T] | None] = asyncio.Queue()
    cancelled = threading.Event()
    started = threading.Event()

    def run_and_send() -> None:
        started.set()
        if cancelled.is_set():
            return  # left before its turn came: nobody listens any more
        try:
            with closing(as_closable_generator(make(cancelled))) as produced:
                for batch in produced:
                    loop.call_soon_threadsafe(batches.put_nowait, batch)
                    if cancelled.is_set():
                        return
        except asyncio.CancelledError as error:  # no task runs here, so it is an error like any other
            raise RuntimeError("CancelledError was raised in a worker thread, but nothing was cancelled") from error
        finally:
            loop.call_soon_threadsafe(batches.put_nowait, None)

    thread = loop.run_in_executor(executor, contextvars.copy_context().run, run_and_send)
    try:
        async with aclosing(_receive_items(batches, thread)) as out:
            yield out
    finally:
        cancelled.set()
        if started.is_set():
            await _wait_for_thread(thread)
        else:
            thread.cancel()


async def _receive_items(batches: asyncio.Queue[Sequence[T] | None], thread: asyncio.Future[None]) -> AsyncGenerator[T]:
    while (batch := await batches.get()) is not None:
        for item in batch:
            yield item
    await thread  # raises what the iterator raised


async def _wait_for_thread(thread: asyncio.Future[None]) -> None:
    """Wait for the thread even while being cancelled. Its error was raised already, or no caller is left."""
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
