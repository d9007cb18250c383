"""The running calls of an object that can be closed: closing it ends each of them with one error.

Closing connections is not enough. aiohttp wakes nobody who waits for a response of a closed
session, and a model in a thread has no connection. So a waiting task is cancelled, as
`asyncio.timeout` does it, and gets ClosedError in place of the cancellation. A response that has
arrived is closed, which wakes its reader. A reader that is busy elsewhere gets the error when it
asks for more.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager, suppress
from functools import partial
from types import AsyncGeneratorType, TracebackType
from typing import Any, Final, NoReturn, Protocol, Self, TypeVar

from llm_spec.contract.errors import ClosedError
from llm_spec.measure.clock import get_asyncio_loop

__all__ = ["OpenCall", "OpenCalls"]

T = TypeVar("T")

_END_S: Final = 10.0  # `aclose` waits so long for the calls that it ends


class Closable(Protocol):
    """A response; closing it wakes its reader."""

    def close(self) -> Awaitable[None] | None: ...


ClosableT = TypeVar("ClosableT", bound=Closable)


class OpenCalls:
    """The running calls of `name`. `aclose` ends them; afterwards none can be opened.

    The calls of its children are closed with it. Safe to use from several threads and event loops.
    """

    def __init__(self, name: str) -> None:
        self.is_closed = False
        self._name: Final = name
        self.under_way: Final[set[OpenCall]] = set()
        self._responses: Final[dict[weakref.ref[Any], asyncio.AbstractEventLoop]] = {}
        self._lock: Final = threading.Lock()  # a WeakSet cannot be listed while it changes
        self._children: Final[weakref.WeakSet[OpenCalls]] = weakref.WeakSet()
        # keeps the tasks alive: an event loop has only weak references to them
        self._closing: Final[set[asyncio.Task[None]]] = set()

    def make_child(self, name: str) -> OpenCalls:
        """Return calls that end with these, and can also be ended alone."""
        child = OpenCalls(name)
        with self._lock:
            self._children.add(child)
            child.is_closed = self.is_closed
        return child

    def open_call(self) -> OpenCall:
        """Return the context of one call.

        Entering it raises ClosedError if these calls are closed.
        """
        return OpenCall(self)

    def add_response(self, response: ClosableT) -> ClosableT:
        """Register a response to be closed with these calls, and return it.

        The code that opened it still closes it otherwise. Raises ClosedError if another thread has
        closed these calls in the meantime.
        """
        responses = self._responses
        responses[weakref.ref(response, responses.pop)] = asyncio.get_running_loop()
        if self.is_closed:  # checked after registering: another thread may be closing
            self._close_on_its_loop(response)
            raise self.make_ended_error()
        return response

    @asynccontextmanager
    async def end_when_closed(
        self, opened: AbstractAsyncContextManager[AsyncIterator[T]]
    ) -> AsyncGenerator[AsyncIterator[T]]:
        """Return the same stream, which ends with ClosedError if these calls are closed."""
        async with AsyncExitStack() as stack:
            with self.open_call():
                items = await stack.enter_async_context(opened)
            call = self.open_call()
            yield await stack.enter_async_context(aclosing(call.attach(_iterate_until_closed(call, items))))

    def check_open(self) -> None:
        """Raise ClosedError if these calls are closed."""
        if self.is_closed:
            raise ClosedError(f"{self._name} is closed; make another")

    def make_ended_error(self, partial_text: str = "") -> ClosedError:
        """Return the error of a call that was running."""
        return ClosedError(f"{self._name} was closed while it answered; make another", partial_text=partial_text)

    async def aclose(self) -> None:
        """End all calls, each on its own event loop, and wait for those of this loop.

        Calling it twice is harmless.
        """
        loop, ended = get_asyncio_loop(), list[asyncio.Future[None]]()
        self.is_closed = True
        # the event loop makes a task now for each generator that its reader has dropped
        for _ in range(2):
            await asyncio.sleep(0)
        with self._lock:
            children = list(self._children)
        for child in children:
            await child.aclose()
        for call in list(self.under_way):
            if call.loop is loop:
                ended += call.end()
            else:
                _call_on_loop(call.loop, call.end)
        for reference, its_loop in self._responses.copy().items():
            response = reference()
            if response is None:
                continue
            if its_loop is loop:
                await _close_quietly(response)
            else:
                _call_on_loop(its_loop, self._close_on_its_loop, response)
        if ended:
            await asyncio.wait(ended, timeout=_END_S)

    # --------------------------------------------------------------------------------------- inside

    def _close_on_its_loop(self, response: Closable) -> None:
        task = asyncio.get_running_loop().create_task(_close_quietly(response))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


class OpenCall:
    """One call, as the context in which its task waits.

    A generator may be read by another task each time, and closed by yet another. So it is attached.
    After each `yield` it sets `reader` to the result of `resume()`, which raises ClosedError once
    the call was ended. If it is closed at the `yield`, it sets `reader` to None.
    """

    partial_text = ""  # for an error that has none
    reader: asyncio.Task[Any] | None = None
    _generator: weakref.ref[AsyncGenerator[Any]] | None = None
    _first_reader: asyncio.Task[Any] | None = None
    _num_cancelling = 0  # cancellations of the first reader before it entered
    _cancelled_reader: asyncio.Task[Any] | None = None
    _left: asyncio.Future[None] | None = None

    def __init__(self, calls: OpenCalls) -> None:
        self._calls = calls
        self.loop = get_asyncio_loop()
        self.resume: Callable[[], asyncio.Task[Any] | None] = partial(asyncio.current_task, self.loop)

    def attach(self, generator: AsyncGenerator[T]) -> AsyncGenerator[T]:
        """Register a generator, in which nobody waits between two items; return it."""
        self._generator = weakref.ref(generator)
        return generator

    def __enter__(self) -> Self:
        self.reader = self._first_reader = reader = self.resume()
        if reader is not None:
            self._num_cancelling = reader.cancelling()
        self._calls.under_way.add(self)
        if self._calls.is_closed:  # checked after registering: another thread may be closing
            self._leave()
            self._calls.check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave()
        if error is None and self._cancelled_reader is None:  # nearly always
            return
        if isinstance(error, ClosedError):
            error.partial_text = error.partial_text or self.partial_text
        ended = self.explain(error)
        if self._cancelled_reader is not None:
            self._cancelled_reader.uncancel()
        if ended is not None and ended is not error:
            raise ended from None

    def explain(self, error: BaseException | None) -> BaseException | None:
        """Return ClosedError for the cancellation that ended the call.

        Any other error is returned unchanged.
        """
        reader = self._cancelled_reader
        if reader is None or not isinstance(error, asyncio.CancelledError):
            return error
        num_others = self._num_cancelling if reader is self._first_reader else 0
        # as `asyncio.timeout` tells its own cancellation from another's
        is_own = reader.cancelling() - 1 <= num_others
        return self._calls.make_ended_error(self.partial_text) if is_own else error

    def end(self) -> list[asyncio.Future[None]]:
        """End the call, on its own event loop.

        If a task is inside the call now, the returned future is done once the task has left it.
        """
        self.resume = self._raise_ended
        reader, generator = self.reader, None if self._generator is None else self._generator()
        is_waited_in = self._generator is None or (isinstance(generator, AsyncGeneratorType) and generator.ag_running)
        if self not in self._calls.under_way or not is_waited_in:
            return []
        if reader is asyncio.current_task():
            return []  # the call itself is closing
        if self._left is None:
            self._left = self.loop.create_future()
            if reader is not None:  # None: the call is being left
                self._cancelled_reader = reader
                reader.cancel()
        return [self._left]

    def _leave(self) -> None:
        self._calls.under_way.discard(self)
        left = self._left
        if left is not None and not left.done():
            left.set_result(None)

    def _raise_ended(self) -> NoReturn:
        raise self._calls.make_ended_error()


async def _iterate_until_closed(call: OpenCall, items: AsyncIterator[T]) -> AsyncGenerator[T]:
    with call:
        async for item in items:
            try:
                yield item
            except GeneratorExit:
                call.reader = None
                raise
            call.reader = call.resume()


async def _close_quietly(response: Closable) -> None:
    with suppress(Exception):  # its reader gets an error anyway
        closing = response.close()
        if closing is not None:
            await closing


def _call_on_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: object) -> None:
    with suppress(RuntimeError):  # the loop has ended meanwhile
        loop.call_soon_threadsafe(function, *arguments)
