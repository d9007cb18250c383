"""What makes a recording repeatable: a clock that models advance, threads that the loop waits for, no random bytes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, wait
from contextlib import contextmanager
from typing import Any, Final
from unittest import mock

from llm_spec.testing import VirtualClockEventLoop

__all__ = ["SteadyLoop", "WorkClock", "fixed_bytes"]

_MOST_WAIT_S: Final = 20.0  # real seconds for the work of a thread


class SteadyLoop(VirtualClockEventLoop):
    """Waits until a thread has ended before it goes on: what comes of two at once does not hang on the machine."""

    def run_in_executor(self, executor: Executor | None, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        kept: list[Any] = []
        threads = executor or self._threads

        class Kept(Executor):
            def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
                kept.append(threads.submit(fn, *args, **kwargs))
                return kept[-1]

        future = super().run_in_executor(Kept(), func, *args)
        wait(kept, _MOST_WAIT_S)
        return future


class WorkClock:
    """A clock in place of the process's own, which only the forward passes of models move on."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def advance(self, seconds: float) -> None:
        self.now_s += seconds

    def read(self) -> float:
        return self.now_s

    @contextmanager
    def replacing(self) -> Iterator[None]:
        with mock.patch("time.perf_counter", self.read), mock.patch("time.monotonic", self.read):
            yield


@contextmanager
def fixed_bytes(name: str) -> Iterator[None]:
    """The operating system's random bytes, and Python's own random numbers, are those of this name alone.

    Of bytes the same come each time, so that nothing hangs on how often they are wanted. So it is with generators that
    are given no seed.
    """
    state = random.getstate()
    random.seed(name)
    given = random.Random(f"bytes {name}").randbytes(4096)  # noqa: S311 - repeatable, not secret

    class Seeded(random.Random):
        def __init__(self, seed: Any = None) -> None:
            super().__init__(name if seed is None else seed)

    def urandom(num: int) -> bytes:
        return (given * (num // len(given) + 1))[:num]

    try:
        with mock.patch("os.urandom", urandom), mock.patch("random.Random", Seeded):
            yield
    finally:
        random.setstate(state)
