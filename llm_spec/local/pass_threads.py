"""Runs forward passes that use several threads.

torch and llama.cpp share a pass between cores by OpenMP. OpenMP keeps a team of threads for each
thread that has ever called it. Once a process has more of them than cores, they all sleep instead
of spinning while they wait, and a pass takes up to twice as long. Each request has a thread of its
own. So requests hand their passes to a fixed set of threads, as many as the cores can run.
Everything else that a model computes while it is loaded runs in a thread that then ends
(`call_in_own_thread`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeAlias, TypeVar

from llm_spec.local.forks import call_in_forked_child
from llm_spec.local.threads import count_usable_cores

__all__ = ["run_pass"]

T = TypeVar("T")


class _ThreadKind(threading.local):
    is_for_passes = False  # True in the threads for passes


_current = _ThreadKind()


def run_pass(compute: Callable[[], T], *, num_threads: int) -> T:
    """Run a forward pass of `num_threads` threads; return or raise what `compute` does.

    With one thread it runs here, with several in a thread for passes, in the order of calls. The
    pass has ended when this returns or raises, even if the wait was interrupted.
    """
    if num_threads == 1 or _current.is_for_passes:
        return compute()
    waiting = _Pass(compute)
    _open_queue(num_threads).put(waiting)
    return waiting.wait()


class _Pass(Generic[T]):
    """One call, from the thread that waits for it to the thread that runs it.

    It is not a `Future`, whose lock and condition cost more: there is a call for every token.
    """

    def __init__(self, compute: Callable[[], T]) -> None:
        self._compute = compute
        self._ended: SimpleQueue[None] = SimpleQueue()
        self._outcomes: list[T] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._outcomes.append(self._compute())
        except BaseException as error:  # noqa: BLE001 - it is raised where the pass is waited for
            self._error = error
        self._ended.put(None)

    def wait(self) -> T:
        interrupt: BaseException | None = None
        while not self._outcomes and self._error is None:
            try:
                self._ended.get()
            except BaseException as error:  # noqa: BLE001 - a signal's; the pass must end first
                interrupt = error
        raised = interrupt or self._error
        try:
            if raised is not None:
                raise raised
            return self._outcomes[0]
        finally:
            # otherwise the error and this frame would reference each other
            del raised, interrupt, self


_PassQueue: TypeAlias = "SimpleQueue[_Pass[Any]]"
_queues: dict[int, _PassQueue] = {}  # by the number of threads of their passes
_opening = threading.Lock()


@call_in_forked_child
def _reset_after_fork() -> None:
    """Reset the queues and the lock: the child has none of the parent's threads."""
    global _opening  # noqa: PLW0603 - a lock that may be held cannot be released
    _opening = threading.Lock()
    _queues.clear()


def _open_queue(num_threads: int) -> _PassQueue:
    """Return the queue of passes with `num_threads` threads; start its threads if it is new."""
    with _opening:
        if num_threads not in _queues:
            queue = _queues[num_threads] = SimpleQueue()
            for _ in range(max(1, count_usable_cores() // num_threads)):
                threading.Thread(target=_run_passes, args=(queue,), name="llm_spec_pass", daemon=True).start()
        return _queues[num_threads]


def _run_passes(queue: _PassQueue) -> None:
    _current.is_for_passes = True
    while True:
        queue.get().run()
