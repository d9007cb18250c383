"""The calls under way of something that can be closed: each ends with one error when it is.

To close connections is not enough. aiohttp wakes nobody who waits for a response of a session that is closed, and a
model in a thread has no connection. So a task that waits is cancelled, as `asyncio.timeout` does it, and gets
ClosedError in place of that; a response that has come is closed, which wakes whoever reads it. One that is busy
elsewhere gets the error where it comes back for more.
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

_END_S: Final = 10.0  # how long `aclose` waits for what it has ended


class Closable(Protocol):
    """A response; closing it wakes whoever reads it."""

    def close(self) -> Awaitable[None] | None: ...


ClosableT = TypeVar("ClosableT", bound=Closable)


class OpenCalls:
    """The calls of `name` that are under way. `aclose` ends them, and none can be opened any more.

    Those of its children are closed with it. Safe to use from several threads and event loops.
    """

    def __init__(self, name: str) -> None:
        self.is_closed = False
        self._name: Final = name
        self.under_way: Final[set[OpenCall]] = set()
        self._responses: Final[dict[weakref.ref[Any], asyncio.AbstractEventLoop]] = {}
        self._lock: Final = threading.Lock()  # for the children: they cannot be listed while that changes
        self._children: Final[weakref.WeakSet[OpenCalls]] = weakref.WeakSet()
        self._closing: Final[set[asyncio.Task[None]]] = set()  # an event loop itself does not keep its tasks

    def make_child(self, name: str) -> OpenCalls:
        """Calls that end with these, and can be ended alone."""
        child = OpenCalls(name)
        with self._lock:
            self._children.add(child)
            child.is_closed = self.is_closed
        return child

    def open_call(self) -> OpenCall:
        """One call, for `with`; that raises ClosedError once these are closed."""
        return OpenCall(self)

    def add_response(self, response: ClosableT) -> ClosableT:
        """Have a response closed with these, and give it back. Whoever opened it closes it otherwise.

        Raises ClosedError where these were closed meanwhile, by another thread.
        """
        responses = self._responses
        responses[weakref.ref(response, responses.pop)] = asyncio.get_running_loop()
        if self.is_closed:  # after it can be found
            self._close_on_its_loop(response)
            raise self.make_ended_error()
        return response

    @asynccontextmanager
    async def end_when_closed(
        self, opened: AbstractAsyncContextManager[AsyncIterator[T]]
    ) -> AsyncGenerator[AsyncIterator[T]]:
        """The same stream, which ends with ClosedError where these are closed."""
        async with AsyncExitStack() as stack:
            with self.open_call():
                items = await stack.enter_async_context(opened)
            call = self.open_call()
            yield await stack.enter_async_context(aclosing(call.attach(_iterate_until_closed(call, items))))

    def check_open(self) -> None:
        """Raise ClosedError once these are closed."""
        if self.is_closed:
            raise ClosedError(f"{self._name} is closed; make another")

    def make_ended_error(self, partial_text: str = "") -> ClosedError:
        """The error of a call that was under way."""
        return ClosedError(f"{self._name} was closed while it answered; make another", partial_text=partial_text)

    async def aclose(self) -> None:
        """End all of them, each on its own event loop, and wait for those of this one; twice is harmless."""
        loop, ended = get_asyncio_loop(), list[asyncio.Future[None]]()
        self.is_closed = True
        for _ in range(2):  # a generator that its reader dropped is closed by a task that the event loop makes now
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

    # ------------------------------------------------------------------------------------------ inside

    def _close_on_its_loop(self, response: Closable) -> None:
        task = asyncio.get_running_loop().create_task(_close_quietly(response))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


class OpenCall:
    """One call, as the context in which its task waits.

    A generator may be read by another task each time, and closed by yet another. So it is attached. After each `yield`
    it sets `reader` to what `resume()` returns, which raises ClosedError once the call was ended; to None where it is
    closed there.
    """

    partial_text = ""  # the error's, where that has none
    reader: asyncio.Task[Any] | None = None
    _generator: weakref.ref[AsyncGenerator[Any]] | None = None
    _first_reader: asyncio.Task[Any] | None = None
    _num_cancelling = 0  # of the first reader, when it came
    _cancelled_reader: asyncio.Task[Any] | None = None
    _left: asyncio.Future[None] | None = None

    def __init__(self, calls: OpenCalls) -> None:
        self._calls = calls
        self.loop = get_asyncio_loop()
        self.resume: Callable[[], asyncio.Task[Any] | None] = partial(asyncio.current_task, self.loop)

    def attach(self, generator: AsyncGenerator[T]) -> AsyncGenerator[T]:
        """Between two items of this generator nobody waits; gives it back."""
        self._generator = weakref.ref(generator)
        return generator

    def __enter__(self) -> Self:
        self.reader = self._first_reader = reader = self.resume()
        if reader is not None:
            self._num_cancelling = reader.cancelling()
        self._calls.under_way.add(self)
        if self._calls.is_closed:  # after it can be found: another thread may be closing
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
        """ClosedError in place of the cancellation by which it was ended; any other error as it is."""
        reader = self._cancelled_reader
        if reader is None or not isinstance(error, asyncio.CancelledError):
            return error
        num_others = self._num_cancelling if reader is self._first_reader else 0
        # as `asyncio.timeout` tells its own cancellation from another's
        is_own = reader.cancelling() - 1 <= num_others
        return self._calls.make_ended_error(self.partial_text) if is_own else error

    def end(self) -> list[asyncio.Future[None]]:
        """End it, on its own event loop; gives what is done once it has been left, if somebody is in it now."""
        self.resume = self._raise_ended
        reader, generator = self.reader, None if self._generator is None else self._generator()
        is_waited_in = self._generator is None or (isinstance(generator, AsyncGeneratorType) and generator.ag_running)
        if self not in self._calls.under_way or not is_waited_in:
            return []
        if reader is asyncio.current_task():
            return []  # what closes is a part of the call
        if self._left is None:
            self._left = self.loop.create_future()
            if reader is not None:  # else it is being left
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
    with suppress(Exception):  # whoever reads it gets an error anyway
        closing = response.close()
        if closing is not None:
            await closing


def _call_on_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: object) -> None:
    with suppress(RuntimeError):  # it has ended meanwhile
        loop.call_soon_threadsafe(function, *arguments)
