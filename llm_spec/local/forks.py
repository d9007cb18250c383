"""Resets threads, locks and counts of requests after a fork.

Only the forking thread exists in the child. A lock that another thread held stays locked, and what
that thread was about to do is never done. So every object shared between threads or requests is
reset in a child.

Open connections still belong to the parent. Finalizing a copy of one in the child can write to the
parent's connection, remove its sockets from the shared epoll, or wait for threads that do not
exist. `leave_to_parent` prevents this.
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
        """Reset in a child: no lock is held, no request is under way, and no other thread runs."""
        ...


_objects: Final[WeakSet[ForkedObject]] = WeakSet()


def call_in_forked_child(reset: Callable[[], None]) -> Callable[[], None]:
    """Have a module's function called in each child forked from now on; a decorator."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=reset)
    return reset


def reset_in_forked_child(shared: ForkedObject) -> None:
    """Have `shared.reset_after_fork` called in each later child, as long as `shared` lives."""
    _objects.add(shared)


def leave_to_parent(opened: object) -> None:
    """Never finalize `opened`, nor what it refers to, even when the child's interpreter ends."""
    # every Python reference is cleared when the interpreter ends
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(opened))


@call_in_forked_child
def _reset_all_objects() -> None:
    for each in list(_objects):
        each.reset_after_fork()
