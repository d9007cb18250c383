"""What a forked process leaves behind of its parent: threads, locks that they hold, and requests under way.

Of all threads only the one that forks is in the child. What others held there stays held, and what they were about to
do is never done. So whoever shares something between threads or requests begins anew in a child.

What the parent had open is the parent's still. To finalize a copy of it in the child writes to the parent's
connections, takes its sockets from the epoll that both share, or waits for threads that are not there:
`leave_to_parent`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Final, Protocol
from weakref import WeakSet

__all__ = ["ForkedObject", "call_in_forked_child", "leave_to_parent", "reset_in_forked_child"]


class ForkedObject(Protocol):
    """Something with locks, or with counts of requests under way."""

    def reset_after_fork(self) -> None:
        """Begin anew in a child: no lock is held, and no request is under way. No other thread runs meanwhile."""
        ...


_objects: Final[WeakSet[ForkedObject]] = WeakSet()


def call_in_forked_child(reset: Callable[[], None]) -> Callable[[], None]:
    """Have a module's function called in each child that is forked from now on; gives it back, so it decorates."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=reset)
    return reset


def reset_in_forked_child(shared: ForkedObject) -> None:
    """Have its `reset_after_fork` called in each child that is forked from now on, as long as it lives."""
    _objects.add(shared)


def leave_to_parent(opened: object) -> None:
    """In a forked child: never finalize it, nor what it refers to, not even where the child's interpreter ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(opened))  # whatever holds it in Python is cleared at the end


@call_in_forked_child
def _reset_all_objects() -> None:
    for each in list(_objects):
        each.reset_after_fork()
