"""EventLoopBridge: runs an object's coroutines on one loop, for callers on any thread or loop.

A provider may hold objects that belong to an event loop, such as connections and locks. So all its
work has to run on one loop, its home loop.

If an adapter opened the provider itself, the home loop runs on its own thread, so that no caller
can end it too early. If the caller made the provider, it may already be in use on the caller's
loop. Then the home loop is the loop of the first call, and calls on it need no bridge. A first call
from synchronous code has no loop, so it starts the thread. When the caller's loop has ended, the
next call chooses again, since providers work on any number of loops.

For every other call, a task on the home loop does the whole work and returns its items through a
queue.

A forked process has its parent's loops, but no thread that runs them. So every bridge starts anew
there.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import queue
import selectors
import sys
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Generic, Self, TypeAlias, TypeVar

from llm_spec.contract.errors import ClosedError
from llm_spec.local.forks import leave_to_parent, reset_in_forked_child

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

__all__ = ["EventLoopBridge", "OpenStream"]

T = TypeVar("T")

OpenStream: TypeAlias = Callable[[], AbstractAsyncContextManager[AsyncIterator[T]]]

_CLOSE_TIMEOUT_S: Final = 10.0  # to end running work when the bridge is closed
_EXIT_TIMEOUT_S: Final = 2.0  # to close connections when the process ends


@dataclass(frozen=True, slots=True)
class _StreamEnd:
    """The end of a stream; `error` is the error that ended it, or None."""

    error: BaseException | None

    def raise_if_failed(self, name: str) -> None:
        """Raise the error, if any."""
        # the home loop ended, not the caller's task
        if isinstance(self.error, asyncio.CancelledError):
            raise ClosedError(f"{name} was closed while it answered; make another") from self.error
        if self.error is not None:
            raise self.error


@dataclass(frozen=True, slots=True)
class _StreamItem(Generic[T]):
    value: T


class EventLoopBridge:
    """Runs calls on a home loop; `name` names its owner in errors.

    With `owns_loop`, the home loop runs on the bridge's own thread. Otherwise it is the loop of the
    first call. After `close` any method may raise ClosedError. A blocking call on the home loop's
    own thread would wait for itself, so it raises RuntimeError.

    The bridge's owner closes it: this ends all work and then awaits `finish()` on the home loop.
    The thread ends also when the bridge is garbage-collected or the process ends.
    """

    def __init__(self, name: str, *, owns_loop: bool, finish: Callable[[], Awaitable[None]] | None = None) -> None:
        self._name = name
        self._owns_loop = owns_loop
        self._finish = finish
        self._tasks: set[asyncio.Task[None]] = set()
        self._lock = threading.Lock()
        self._home_loop: asyncio.AbstractEventLoop | None = None
        self._thread: _LoopThread | None = None
        self._finalizer: weakref.finalize[[], EventLoopBridge] | None = None
        self._is_closed = False
        _bridges.add(self)
        reset_in_forked_child(self)

    # ---------------------------------------------------------------------------------------- calls

    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work()` on the home loop and block until it ends.

        An interrupt cancels the work and waits for its end.
        """
        with closing(self.stream(partial(_open_single_item_stream, work))) as results:
            return next(results)

    async def arun(self, work: Callable[[], Awaitable[T]]) -> T:
        """Await `work()` on the home loop. A cancellation waits for the work's end."""
        async with aclosing(self.astream(partial(_open_single_item_stream, work))) as results:
            return await anext(results)

    def stream(self, open_stream: OpenStream[T]) -> Generator[T]:
        """Yield the items of the context from `open_stream()`; closing the generator ends the work.

        The context is entered and left on the home loop.
        """
        if self._is_on_home_loop():
            raise RuntimeError(f"{self._name}: a blocking call on its own event loop; await the async method instead")
        items: queue.SimpleQueue[_StreamItem[T] | _StreamEnd] = queue.SimpleQueue()
        home_task = self._start_on_home_loop(open_stream, items.put)
        item: _StreamItem[T] | _StreamEnd | None = None
        try:
            while not isinstance(item := items.get(), _StreamEnd):
                yield item.value
                home_task.check_process(self._name)
            item.raise_if_failed(self._name)
        finally:
            home_task.cancel()
            # a forgotten stream may be collected on the home loop, which does not run at the end of
            # the process
            while not (isinstance(item, _StreamEnd) or home_task.is_unwaitable() or sys.is_finalizing()):
                item = items.get()

    def astream(self, open_stream: OpenStream[T]) -> AsyncGenerator[T] | _HomeLoopItems[T]:
        """Do the same as `stream` for a coroutine, which has to close it."""
        if self._is_on_home_loop(may_become=True):
            return _iterate_on_this_loop(open_stream)
        return _HomeLoopItems(partial(self._start_on_home_loop, open_stream), self._name)

    # --------------------------------------------------------------------------------------- ending

    def close(self) -> None:
        """End all work, finish on the home loop, and end the thread; twice is harmless."""
        try:
            if self._finish is not None and not self._is_closed:
                self.run(self._cancel_tasks)
        finally:
            thread = self._stop_thread()
            if thread is not None:
                thread.join()

    async def aclose(self) -> None:
        """Do the same as `close` for a coroutine."""
        try:
            if self._finish is not None and not self._is_closed:
                await self.arun(self._cancel_tasks)
        finally:
            thread = self._stop_thread()
            if thread is not None:
                await asyncio.to_thread(thread.join)

    async def _cancel_tasks(self) -> None:
        async with asyncio.timeout(_CLOSE_TIMEOUT_S):
            other_tasks = self._tasks - {asyncio.current_task()}
            for task in other_tasks:
                task.cancel()
            if other_tasks:
                await asyncio.wait(other_tasks)
            if self._finish is not None:
                await self._finish()

    def stop_at_exit(self) -> None:
        """Tell the thread to end and to close its connections, so that none gives a warning."""
        self._stop_thread()

    def reset_after_fork(self) -> None:
        """Forget everything that belongs to the parent's threads, in a forked process."""
        if self._finalizer is not None:
            self._finalizer.detach()
        if self._thread is not None:
            self._thread.leave_loop()
        leave_to_parent((self._home_loop, self._thread, self._tasks))
        self._lock, self._tasks = threading.Lock(), set()
        self._home_loop = self._thread = self._finalizer = None

    def _stop_thread(self) -> _LoopThread | None:
        with self._lock:
            self._is_closed = True
            if self._thread is not None:
                self._thread.stop()
            return self._thread

    # --------------------------------------------------------------------------------------- inside

    def _is_on_home_loop(self, *, may_become: bool = False) -> bool:
        """Return True if the running loop is the home loop.

        With `may_become`, the running loop becomes the home loop if there is none yet.
        """
        running = _get_running_loop()
        if running is None:
            return False
        with self._lock:
            self.check_open()
            self._forget_ended_home()
            if may_become and self._home_loop is None and not self._owns_loop:
                self._home_loop = running
            return self._home_loop is running

    def _forget_ended_home(self) -> None:
        """Forget a caller's loop that has ended."""
        if self._thread is None and self._home_loop is not None and not self._home_loop.is_running():
            self._home_loop = None
            self._tasks.clear()  # they ended with it

    def check_open(self) -> None:
        """Raise ClosedError if the bridge is closed."""
        if self._is_closed:
            raise ClosedError(f"{self._name} is closed; make another")

    def _start_on_home_loop(
        self, open_stream: OpenStream[T], put: Callable[[_StreamItem[T] | _StreamEnd], object]
    ) -> _HomeLoopTask[T]:
        """Start the work as a task on the home loop; `put` gets its items and its end there."""
        with self._lock:  # so that a loop that is being closed starts and cancels it before it ends
            self.check_open()
            self._forget_ended_home()
            if self._home_loop is None:
                self._thread = _LoopThread(self._name)
                self._home_loop = self._thread.loop
                self._finalizer = weakref.finalize(self, self._thread.stop)
                self._finalizer.atexit = False  # `_stop_all_at_exit` waits for the end, too
            home_task = _HomeLoopTask(self._home_loop, open_stream, put)
            self._home_loop.call_soon_threadsafe(home_task.start, self._tasks)
        return home_task


class _HomeLoopTask(Generic[T]):
    """A task on another thread's loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        open_stream: OpenStream[T],
        put: Callable[[_StreamItem[T] | _StreamEnd], object],
    ) -> None:
        self._loop = loop
        self._opens = open_stream
        self._put = put
        self._task: asyncio.Task[None] | None = None
        self._process_id = os.getpid()

    def start(self, tasks: set[asyncio.Task[None]]) -> None:
        self._task = self._loop.create_task(self._put_stream_items())
        tasks.add(self._task)
        self._task.add_done_callback(tasks.discard)
        self._task.add_done_callback(self._put_stream_end)

    def check_process(self, name: str) -> None:
        """Raise RuntimeError in a fork of the process that does the work."""
        if self._is_of_parent():
            raise RuntimeError(f"{name} answers in the parent of this process; ask anew after a fork")

    def is_unwaitable(self) -> bool:
        """Return True if waiting here would never end.

        This is so in the thread that does the work, and in another process.
        """
        return _get_running_loop() is self._loop or self._is_of_parent()

    def _is_of_parent(self) -> bool:
        return os.getpid() != self._process_id

    def cancel(self) -> None:
        """Cancel the work, from any thread; has no effect after its end."""
        if not self._is_of_parent() and (self._task is None or not self._task.done()):
            self._loop.call_soon_threadsafe(self._cancel_on_its_loop)

    # runs after `start`: a loop keeps the order of its callbacks
    def _cancel_on_its_loop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _put_stream_items(self) -> None:
        async with self._opens() as values:
            async for value in values:
                self._put(_StreamItem(value))

    def _put_stream_end(self, task: asyncio.Task[None]) -> None:
        self._put(_StreamEnd(asyncio.CancelledError() if task.cancelled() else task.exception()))


async def _iterate_on_this_loop(open_stream: OpenStream[T]) -> AsyncGenerator[T]:
    async with open_stream() as values:
        async for value in values:
            yield value


class _HomeLoopItems(Generic[T]):
    """The items of a task on the home loop, for a coroutine.

    It is not a generator: a loop that ends closes all its generators at once, and reports an error
    for any that another one is closing.
    """

    def __init__(
        self, start: Callable[[Callable[[_StreamItem[T] | _StreamEnd], object]], _HomeLoopTask[T]], name: str
    ) -> None:
        here = asyncio.get_running_loop()
        self._items: asyncio.Queue[_StreamItem[T] | _StreamEnd] = asyncio.Queue()
        self._home_task = start(lambda item: here.call_soon_threadsafe(self._items.put_nowait, item))
        self._name = name
        self._has_ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        if self._has_ended:
            raise StopAsyncIteration
        item = await self._items.get()
        if isinstance(item, _StreamItem):
            return item.value
        self._has_ended = True
        item.raise_if_failed(self._name)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Cancel the work and wait for its end."""
        self._home_task.cancel()
        while not self._has_ended:
            self._has_ended = isinstance(await self._items.get(), _StreamEnd)


class _LoopThread:
    """An event loop on a daemon thread, until `stop`."""

    def __init__(self, name: str) -> None:
        ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._selector = _LeavableSelector()
        self._thread = threading.Thread(
            target=self._run_until_stopped, args=(ready,), name=f"llm_spec {name}", daemon=True
        )
        _running_threads.add(self)
        self._thread.start()
        self.loop, self._stopping = ready.result()

    def _run_until_stopped(self, ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]) -> None:
        try:
            _run_loop_until_stopped(self._selector, ready)
        finally:
            _running_threads.discard(self)

    def stop(self) -> None:
        """Cancel the loop's tasks and let the thread end soon; calling it twice is harmless."""
        with suppress(RuntimeError):  # it has ended
            self.loop.call_soon_threadsafe(self._stopping.set)

    def leave_loop(self) -> None:
        """Keep the loop's remaining connections away from the parent's, in a forked process.

        Both processes share its epoll: the parent's loop would wait in vain for any file that is
        removed from it.
        """
        self._selector.close()

    def join(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Wait for the end, unless this is that thread."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)


class _LeavableSelector(selectors.DefaultSelector):
    """A selector that has no files once it is closed, instead of raising."""

    def get_map(self) -> Mapping[FileDescriptorLike, selectors.SelectorKey]:
        return super().get_map() or {}


def _run_loop_until_stopped(
    selector: selectors.BaseSelector, ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]
) -> None:
    async def wait_for_stop() -> None:
        stopping = asyncio.Event()
        ready.set_result((asyncio.get_running_loop(), stopping))
        await stopping.wait()

    is_forkable = hasattr(os, "fork")  # without forks, the platform's own loop can do more
    with asyncio.Runner(loop_factory=partial(asyncio.SelectorEventLoop, selector) if is_forkable else None) as runner:
        runner.run(wait_for_stop())


def _get_running_loop() -> asyncio.AbstractEventLoop | None:
    with suppress(RuntimeError):
        return asyncio.get_running_loop()
    return None


@asynccontextmanager
async def _open_single_item_stream(work: Callable[[], Awaitable[T]]) -> AsyncGenerator[AsyncIterator[T]]:
    """The result of `work()` as a stream of one item; `work` has ended when the context is left."""

    async def iterate_single_value() -> AsyncGenerator[T]:
        yield await work()

    async with aclosing(iterate_single_value()) as stream:
        yield stream


_bridges: Final[weakref.WeakSet[EventLoopBridge]] = weakref.WeakSet()
# a forgotten bridge's thread ends after the bridge is gone
_running_threads: Final[set[_LoopThread]] = set()


def _stop_all_at_exit() -> None:
    for bridge in list(_bridges):
        bridge.stop_at_exit()
    for thread in list(_running_threads):
        thread.join(_EXIT_TIMEOUT_S)


atexit.register(_stop_all_at_exit)
