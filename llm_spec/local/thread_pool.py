"""Threads that wait for calls. They hold up neither the end of the program nor a process that is forked."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import SimpleQueue
from typing import ParamSpec, TypeAlias, TypeVar

from llm_spec.local.forks import reset_in_forked_child

__all__ = ["DaemonThreadPool"]

T = TypeVar("T")
P = ParamSpec("P")


class _PooledCall:
    """One call, and where its outcome goes."""

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
            del self  # or the error would hold this frame, and the frame it
        else:
            self._outcome.set_result(result)


_CallQueue: TypeAlias = "SimpleQueue[_PooledCall]"


class DaemonThreadPool(Executor):
    """At most `max_threads`, each made when it is needed; those that are idle are used again.

    A `ThreadPoolExecutor` keeps a program from ending until its last call has returned, and has no threads in a forked
    child, which waits for them.
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
