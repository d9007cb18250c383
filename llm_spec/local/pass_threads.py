"""Where forward passes run that several threads compute.

With OpenMP, by which torch and llama.cpp share a pass between cores, a team of threads belongs to each thread that has
ever called it. Once a process has more of them than cores, all of them wait by sleeping instead of spinning, and a pass
takes up to twice as long. Requests have a thread each. So they leave their passes to threads that are kept for that,
as many as there are cores for, and what else a model computes while it is loaded is done in a thread that ends
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
    is_for_passes = False  # but in threads that are


_current = _ThreadKind()


def run_pass(compute: Callable[[], T], *, num_threads: int) -> T:
    """What `compute` returns or raises: a forward pass with so many threads.

    With one it runs here, with several in a thread for passes, in the order of calls. It has ended when this returns or
    raises, also where the wait was interrupted.
    """
    if num_threads == 1 or _current.is_for_passes:
        return compute()
    waiting = _Pass(compute)
    _open_queue(num_threads).put(waiting)
    return waiting.wait()


class _Pass(Generic[T]):
    """One call, from the thread that waits for it to the one that runs it.

    Not a `Future`, whose lock and condition cost more: there is a call for every token.
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
            except BaseException as error:  # noqa: BLE001 - of a signal, in the main thread: what is read must outlive the pass
                interrupt = error
        raised = interrupt or self._error
        try:
            if raised is not None:
                raise raised
            return self._outcomes[0]
        finally:
            del raised, interrupt, self  # or an error would hold this frame, and the frame it


_PassQueue: TypeAlias = "SimpleQueue[_Pass[Any]]"
_queues: dict[int, _PassQueue] = {}  # by the number of threads of their passes
_opening = threading.Lock()


@call_in_forked_child
def _reset_after_fork() -> None:
    """The child has no threads that run what is in the queues, nor that release the lock."""
    global _opening  # noqa: PLW0603 - a lock that may be held cannot be released
    _opening = threading.Lock()
    _queues.clear()


def _open_queue(num_threads: int) -> _PassQueue:
    """The queue of passes with so many threads; with it come the threads that run what is in it."""
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
