"""An event loop whose clock jumps to the next timer when nothing else is left to do: tests that wait take no time.

Three cases decide how a turn of the loop waits:

- nothing is in a thread and a timer waits: the clock jumps to it (where sockets are open, they get `socket_grace_s`
  of real time first, since what was sent may still be under way);
- `run_in_executor` has work in a thread: real time passes, because the thread's result arrives at a real moment, and a
  clock that jumped past every timeout meanwhile would make a fast thread look slow;
- no timer waits: real waiting for a socket or for `call_soon_threadsafe`. With no socket open and nothing in a thread
  nothing can happen any more, and after `patience_s` that is reported as a deadlock.

A thread that `run_in_executor` did not start is not seen: timers may overtake it.
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
    """`asyncio.run` by virtual clock: timers cost no time, and the loop's time begins at 0."""
    with asyncio.Runner(loop_factory=VirtualClockEventLoop) as runner:
        return runner.run(coroutine)


class VirtualClockEventLoop(asyncio.SelectorEventLoop):
    """An asyncio event loop by virtual clock; `asyncio.sleep`, `asyncio.timeout` and `call_later` go by `time()`.

    Raises RuntimeError out of `run_until_complete` when it has waited `patience_s` real seconds for nothing.
    `socket_grace_s`: real seconds that sockets have before each jump. Where both ends of all of them are in this loop,
    on the same machine, next to nothing will do.
    """

    def __init__(self, *, patience_s: float = 10.0, socket_grace_s: float = _SOCKET_GRACE_S) -> None:
        self._clock = _ClockJumpingSelector(patience_s, socket_grace_s)
        super().__init__(self._clock)
        self._threads = ThreadPoolExecutor(thread_name_prefix="virtual-clock")
        self.set_default_executor(self._threads)

    def time(self) -> float:
        """Seconds since the loop was made, by its own clock."""
        return self._clock.now_s

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Run `func` in a thread; the clock goes by real time until it has ended."""
        work = (executor or self._threads).submit(func, *args)
        self._clock.num_running_threads += 1
        future = asyncio.wrap_future(work, loop=self)
        work.add_done_callback(self._end_thread_wait)  # after the future's own: the result is on its way by then
        return future

    def sleep_in_thread(self, seconds: float) -> None:
        """Sleep in a thread of `run_in_executor` by this clock, as `time.sleep` does by real time."""
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

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:  # noqa: ARG002, ASYNC109 - asyncio's own signature; by this clock any timeout would be over at once
        await super().shutdown_default_executor()


class _ClockJumpingSelector(selectors.DefaultSelector):
    """The loop's only place to wait: here time passes, by itself or by a jump."""

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
            # the loop's own work since the last call counts
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
