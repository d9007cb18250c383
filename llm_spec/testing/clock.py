"""An event loop whose clock jumps to the next timer when nothing else is left to do.

So tests that wait take no time. Three cases decide how a turn of the loop waits:

- No thread works and a timer waits: the clock jumps to it. If sockets are open, they get
  `socket_grace_s` of real time first, since data may still be under way.
- `run_in_executor` has work in a thread: real time passes, because the thread's result arrives at a
  real moment. If the clock jumped past every timeout meanwhile, a fast thread would look slow.
- No timer waits: the loop really waits for a socket or for `call_soon_threadsafe`. If no socket is
  open and no thread works, nothing can happen any more. After `patience_s` this is reported as a
  deadlock.

Threads that `run_in_executor` did not start are not seen: timers may overtake them.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, Final, TypeVar, TypeVarTuple, Unpack

__all__ = ["VirtualClockEventLoop", "run_virtual"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_SOCKET_GRACE_S: Final = 0.01


def run_virtual(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run like `asyncio.run` by a virtual clock: timers cost no time, and time begins at 0."""
    with asyncio.Runner(loop_factory=VirtualClockEventLoop) as runner:
        return runner.run(coroutine)


class VirtualClockEventLoop(asyncio.SelectorEventLoop):
    """An asyncio event loop by virtual clock.

    `asyncio.sleep`, `asyncio.timeout` and `call_later` use its `time()`. `run_until_complete`
    raises RuntimeError after `patience_s` real seconds in which nothing could happen.

    `socket_grace_s`: real seconds for sockets before each jump. If both ends of all sockets are in
    this loop, a tiny value is enough.
    """

    def __init__(self, *, patience_s: float = 10.0, socket_grace_s: float = _SOCKET_GRACE_S) -> None:
        self._clock = _ClockJumpingSelector(patience_s, socket_grace_s)
        super().__init__(self._clock)
        self._threads = ThreadPoolExecutor(thread_name_prefix="virtual-clock")
        self.set_default_executor(self._threads)

    def time(self) -> float:
        """Return the seconds since the loop was made, by its own clock."""
        return self._clock.now_s

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Run `func` in a thread; the clock follows real time until it has ended."""
        work = (executor or self._threads).submit(func, *args)
        self._clock.num_running_threads += 1
        future = asyncio.wrap_future(work, loop=self)
        # called after the future's own callback, when the result is on its way
        work.add_done_callback(self._end_thread_wait)
        return future

    def sleep_in_thread(self, seconds: float) -> None:
        """Sleep by this clock in a thread of `run_in_executor`, like `time.sleep` in real time."""
        woken = threading.Event()

        def count_thread_as_sleeping() -> None:
            self._clock.num_running_threads -= 1  # it holds up the clock no longer
            self.call_later(seconds, count_thread_as_running)

        def count_thread_as_running() -> None:
            self._clock.num_running_threads += 1
            woken.set()

        self.call_soon_threadsafe(count_thread_as_sleeping)
        woken.wait()

    def _end_thread_wait(self, _: Future[Any]) -> None:
        if not self.is_closed():
            self.call_soon_threadsafe(self._clock.end_thread_wait)

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:  # noqa: ARG002, ASYNC109 - asyncio's signature
        # without a timeout: by this clock any would be over at once
        await super().shutdown_default_executor()


class _ClockJumpingSelector(selectors.DefaultSelector):
    """The loop's only place to wait: here time passes, really or by a jump."""

    def __init__(self, patience_s: float, socket_grace_s: float) -> None:
        super().__init__()
        self.now_s = 0.0
        self.num_running_threads = 0
        self._patience_s = patience_s
        self._socket_grace_s = socket_grace_s
        self._last_select_end_s = time.monotonic()

    def end_thread_wait(self) -> None:
        self.num_running_threads -= 1

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        try:
            return self._wait_or_jump_clock(timeout)
        finally:
            self._last_select_end_s = time.monotonic()

    def _wait_or_jump_clock(self, timeout: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.num_running_threads:
            events = super().select(timeout)
            # includes the loop's own work since the last call
            self.now_s += time.monotonic() - self._last_select_end_s
            return events
        num_sockets = len(self.get_map()) - 1  # the loop's own self-pipe is not one
        if timeout is None:
            return super().select(None) if num_sockets else self._wait_for_thread()
        events = super().select(min(timeout, self._socket_grace_s if num_sockets else 0.0))
        if not events:
            self.now_s += max(0.0, timeout)
        return events

    def _wait_for_thread(self) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(self._patience_s)
        if not events:
            raise RuntimeError(f"deadlock: no timer, socket or thread is left, and {self._patience_s} s passed")
        return events
