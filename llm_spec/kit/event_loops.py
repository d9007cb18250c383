"""What belongs to an event loop, such as open connections, in objects that any number of loops may use; for providers.

A program may call `asyncio.run` again and again, or run a loop in each of several threads, and keep its decoder: what a
loop owns must not outlive it, and must never be used by another.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Final, Generic, Protocol, TypeVar

from llm_spec.contract.errors import ConfigError
from llm_spec.local.forks import leave_to_parent, reset_in_forked_child
from llm_spec.measure.clock import get_asyncio_loop

__all__ = ["PerLoopResource", "SingleLoopGuard"]


class Closable(Protocol):
    """Something that holds connections."""

    async def close(self) -> None: ...


T = TypeVar("T", bound=Closable)


class PerLoopResource(Generic[T]):
    """One of something for each event loop that uses it.

    It is made where a loop first needs it, and closed with its loop or by `aclose`. Safe to use from several threads.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make: Final = make
        self._held: dict[asyncio.AbstractEventLoop, tuple[AsyncGenerator[T], T]] = {}
        self._closing: set[asyncio.Task[None]] = set()  # an event loop itself does not keep its tasks
        self.reset_after_fork()
        reset_in_forked_child(self)

    def reset_after_fork(self) -> None:
        """In a forked child: leave the parent's alone, which shares its sockets, and what its loops wait for."""
        if self._held or self._closing:
            leave_to_parent((self._held, self._closing))
        self._lock = threading.Lock()
        self._held, self._closing = {}, set()

    async def get(self) -> T:
        """That of the running loop."""
        loop = asyncio.get_running_loop()
        held = self._held.get(loop)
        if held is None:
            holder = self._keep_open_for_loop(loop)
            held = self._held[loop] = (holder, await anext(holder))
            await self._close_for_loops(self._find_closed_loops())
        return held[1]

    async def aclose(self) -> None:
        """Close that of the running loop and what is left of ended ones; another running loop closes its own, soon."""
        await self._close_for_loops([get_asyncio_loop(), *self._find_closed_loops()])
        for loop in list(self._held):
            with suppress(RuntimeError):  # it has ended meanwhile
                loop.call_soon_threadsafe(self._close_on_its_loop, loop)

    # ------------------------------------------------------------------------------------------ inside

    async def _keep_open_for_loop(self, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[T]:
        """Keep it open. A generator, for `asyncio.run` and its like close those before they close their loop."""
        held, process_id = self._held, os.getpid()
        with self._lock:
            made = self._make()
        try:
            yield made
        finally:
            if os.getpid() == process_id:  # the loop may end in a child that was forked in it, too
                held.pop(loop, None)
                await made.close()

    def _find_closed_loops(self) -> list[asyncio.AbstractEventLoop]:
        """Loops that were closed without closing their generators."""
        return [loop for loop in list(self._held) if loop.is_closed()]

    async def _close_for_loops(self, loops: list[asyncio.AbstractEventLoop]) -> None:
        for loop in loops:
            held = self._held.pop(loop, None)
            if held is not None and not loop.is_closed():
                await held[0].aclose()
            elif held is not None:
                with suppress(Exception):  # there is nothing left of it that could be closed well
                    await held[0].aclose()

    def _close_on_its_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        task = loop.create_task(self._close_for_loops([loop]))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


class SingleLoopGuard:
    """The loop of something that the caller made, which belongs to one loop: that of its first use.

    `what` begins the errors, `advice` ends them.
    """

    def __init__(self, what: str, advice: str) -> None:
        self._what = what
        self._advice = advice
        self._loop: asyncio.AbstractEventLoop | None = None

    def check_running_loop(self) -> None:
        """Call it before each use; raises ConfigError where another loop is still using it."""
        loop = asyncio.get_running_loop()
        self._loop = self._loop or loop
        if self._loop is not loop and not self._loop.is_closed():
            raise self._make_wrong_loop_error()

    def explain_loop_error(self, error: BaseException) -> ConfigError | None:
        """The error to raise instead of one of a use, where that has failed because its loop has ended."""
        link: BaseException | None = error
        while link is not None and not isinstance(link, RuntimeError):  # asyncio's own, which others hide
            link = link.__cause__
        return None if link is None or self._loop is asyncio.get_running_loop() else self._make_wrong_loop_error()

    def _make_wrong_loop_error(self) -> ConfigError:
        return ConfigError(f"{self._what} belongs to another event loop; {self._advice}")
