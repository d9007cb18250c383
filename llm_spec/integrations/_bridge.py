"""EventLoopBridge: coroutines of one object on one event loop, called from any thread and any loop.

A provider may hold what belongs to an event loop (connections, locks), so all its work has to happen on one: its home.
For what an adapter opened itself that is a loop on a thread of its own, which no caller can end too early. A provider
that the caller made may already be in use on the caller's loop, so there the home is the loop of the first call, and
calls on it go straight through; a first call from synchronous code has none, and gets the thread. Every other call is
carried: a task on the home loop does the work, from beginning to end, and its items come back through a queue.
"""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, Generic, Self, TypeAlias, TypeVar

__all__ = ["EventLoopBridge", "Opens"]

T = TypeVar("T")

Opens: TypeAlias = Callable[[], AbstractAsyncContextManager[AsyncIterator[T]]]

_END_S: Final = 10.0  # to end what was under way when the bridge was closed


@dataclass(frozen=True, slots=True)
class _End:
    """After the last item; `error` is what ended the work, None where it ended well."""

    error: BaseException | None

    def check(self, name: str) -> None:
        """Raise the error, if any."""
        if isinstance(self.error, asyncio.CancelledError):  # not the caller's own: the home loop was ended
            raise RuntimeError(f"{name} was closed while it answered") from self.error
        if self.error is not None:
            raise self.error


@dataclass(frozen=True, slots=True)
class _Item(Generic[T]):
    value: T


class EventLoopBridge:
    """Brings calls to the home loop of what `name` says.

    `owns_loop`: home is a thread of its own from the start, else the loop of the first call. Any method may raise
    RuntimeError: after `close`, when the home loop has ended, or when a blocking call on the home loop's own thread
    would wait for itself. Whoever made the bridge closes it: what was carried ends, then `finish()` is awaited at home.
    A forgotten one takes its thread along.
    """

    def __init__(self, name: str, *, owns_loop: bool, finish: Callable[[], Awaitable[None]] | None = None) -> None:
        self._name = name
        self._owns_loop = owns_loop
        self._finish = finish
        self._under_way: set[asyncio.Task[None]] = set()
        self._lock = threading.Lock()
        self._home: asyncio.AbstractEventLoop | None = None
        self._thread: _LoopThread | None = None
        self._is_closed = False

    # -------------------------------------------------------------------------------------------- calls

    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Await `work()` at home and wait for it here; interrupted, it cancels the work and waits for its end."""
        with closing(self.stream(partial(_single, work))) as results:
            return next(results)

    async def arun(self, work: Callable[[], Awaitable[T]]) -> T:
        """Await `work()` at home; cancellation reaches it, and is passed on when it has ended."""
        async with aclosing(self.astream(partial(_single, work))) as results:
            return await anext(results)

    def stream(self, opens: Opens[T]) -> Generator[T]:
        """Yield the items of the context that `opens()` gives, entered and left at home; closing it ends the work."""
        if self._is_home():
            raise RuntimeError(f"{self._name}: a blocking call on its own event loop; await the async method instead")
        items: queue.SimpleQueue[_Item[T] | _End] = queue.SimpleQueue()
        carried = self._carry(opens, items.put)
        item: _Item[T] | _End | None = None
        try:
            while not isinstance(item := items.get(), _End):
                yield item.value
            item.check(self._name)
        finally:
            carried.cancel()
            # a forgotten stream may be collected at home, and when the process ends home does not run any more
            while not (isinstance(item, _End) or carried.is_at_home() or sys.is_finalizing()):
                item = items.get()

    def astream(self, opens: Opens[T]) -> AsyncGenerator[T] | _Arriving[T]:
        """As `stream`, for a coroutine, which has to close it."""
        if self._is_home(may_become=True):
            return _straight(opens)
        return _Arriving(partial(self._carry, opens), self._name)

    # -------------------------------------------------------------------------------------------- ending

    def close(self) -> None:
        """Finish at home, then end the thread, if there is one, and what it was doing; twice is harmless."""
        try:
            if self._finish is not None and not self._is_closed:
                self.run(self._end_work)
        finally:
            thread = self._end()
            if thread is not None:
                thread.join()

    async def aclose(self) -> None:
        """As `close`, for a coroutine."""
        try:
            if self._finish is not None and not self._is_closed:
                await self.arun(self._end_work)
        finally:
            thread = self._end()
            if thread is not None:
                await asyncio.to_thread(thread.join)

    async def _end_work(self) -> None:
        async with asyncio.timeout(_END_S):
            others = self._under_way - {asyncio.current_task()}
            for task in others:
                task.cancel()
            if others:
                await asyncio.wait(others)
            if self._finish is not None:
                await self._finish()

    def _end(self) -> _LoopThread | None:
        with self._lock:
            self._is_closed = True
            if self._thread is not None:
                self._thread.stop()
            return self._thread

    # -------------------------------------------------------------------------------------------- inside

    def _is_home(self, *, may_become: bool = False) -> bool:
        """Whether the running loop, if any, is the home (now: `may_become`, where there is none yet)."""
        running = _running_loop()
        if running is None:
            return False
        with self._lock:
            self._check_open()
            if may_become and self._home is None and not self._owns_loop:
                self._home = running
            return self._home is running

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError(f"{self._name} is closed")

    def _carry(self, opens: Opens[T], put: Callable[[_Item[T] | _End], object]) -> _Carried[T]:
        """Start the work as a task at home; its items and its end are given to `put` there."""
        with self._lock:  # so that it is begun, and then cancelled, before a loop that is being closed has ended
            self._check_open()
            if self._home is None:
                self._thread = _LoopThread(self._name)
                self._home = self._thread.loop
                weakref.finalize(self, self._thread.stop).atexit = False  # at exit a daemon thread just ends
            if not self._home.is_running():
                raise RuntimeError(
                    f"{self._name} belongs to the event loop that used it first, which has ended; make another"
                )
            carried = _Carried(self._home, opens, put)
            self._home.call_soon_threadsafe(carried.begin, self._under_way)
        return carried


class _Carried(Generic[T]):
    """Work as a task on another thread's loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, opens: Opens[T], put: Callable[[_Item[T] | _End], object]
    ) -> None:
        self._loop = loop
        self._opens = opens
        self._put = put
        self._task: asyncio.Task[None] | None = None

    def begin(self, under_way: set[asyncio.Task[None]]) -> None:
        self._task = self._loop.create_task(self._work())
        under_way.add(self._task)
        self._task.add_done_callback(under_way.discard)
        self._task.add_done_callback(self._ended)

    def is_at_home(self) -> bool:
        """Whether this is the thread that does the work."""
        return _running_loop() is self._loop

    def cancel(self) -> None:
        """End the work, from any thread; after its end this does nothing."""
        if self._task is None or not self._task.done():
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:  # runs after `begin`: a loop keeps the order of its callbacks
        if self._task is not None:
            self._task.cancel()

    async def _work(self) -> None:
        async with self._opens() as values:
            async for value in values:
                self._put(_Item(value))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._put(_End(asyncio.CancelledError() if task.cancelled() else task.exception()))


async def _straight(opens: Opens[T]) -> AsyncGenerator[T]:
    async with opens() as values:
        async for value in values:
            yield value


class _Arriving(Generic[T]):
    """The items of carried work, for a coroutine.

    No generator: a loop that ends closes all of those at once, and complains of any that another one is closing.
    """

    def __init__(self, carry: Callable[[Callable[[_Item[T] | _End], object]], _Carried[T]], name: str) -> None:
        here = asyncio.get_running_loop()
        self._items: asyncio.Queue[_Item[T] | _End] = asyncio.Queue()
        self._carried = carry(lambda item: here.call_soon_threadsafe(self._items.put_nowait, item))
        self._name = name
        self._has_ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        if self._has_ended:
            raise StopAsyncIteration
        item = await self._items.get()
        if isinstance(item, _Item):
            return item.value
        self._has_ended = True
        item.check(self._name)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End the work, and wait until it has ended."""
        self._carried.cancel()
        while not self._has_ended:
            self._has_ended = isinstance(await self._items.get(), _End)


class _LoopThread:
    """An event loop on a daemon thread, until `stop`."""

    def __init__(self, name: str) -> None:
        ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = threading.Thread(target=_serve, args=(ready,), name=f"llm_spec {name}", daemon=True)
        self._thread.start()
        self.loop, self._stopping = ready.result()

    def stop(self) -> None:
        """Cancel what runs there and end the thread, soon; twice is harmless."""
        with suppress(RuntimeError):  # it has ended
            self.loop.call_soon_threadsafe(self._stopping.set)

    def join(self) -> None:
        """Wait for the end, unless this is that thread."""
        if threading.current_thread() is not self._thread:
            self._thread.join(_END_S)


def _serve(ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]) -> None:
    async def serve() -> None:
        stopping = asyncio.Event()
        ready.set_result((asyncio.get_running_loop(), stopping))
        await stopping.wait()

    asyncio.run(serve())


def _running_loop() -> asyncio.AbstractEventLoop | None:
    with suppress(RuntimeError):
        return asyncio.get_running_loop()
    return None


@asynccontextmanager
async def _single(work: Callable[[], Awaitable[T]]) -> AsyncGenerator[AsyncIterator[T]]:
    """What `work()` gives as a stream of one item, done before its context is left."""

    async def values() -> AsyncGenerator[T]:
        yield await work()

    async with aclosing(values()) as stream:
        yield stream
