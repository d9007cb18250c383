"""What a forked process leaves behind of its parent: threads, locks that they hold, and requests under way.

Of all threads only the one that forks is in the child. What others held there stays held, and what they were about to
do is never done. So whoever shares something between threads or requests begins anew in a child.
"""

from __future__ import annotations

import os
from typing import Final, Protocol
from weakref import WeakSet

__all__ = ["ForkedObject", "reset_in_forked_child"]


class ForkedObject(Protocol):
    """Something with locks, or with counts of requests under way."""

    def reset_after_fork(self) -> None:
        """Begin anew in a child: no lock is held, and no request is under way. No other thread runs meanwhile."""
        ...


_objects: Final[WeakSet[ForkedObject]] = WeakSet()


def reset_in_forked_child(shared: ForkedObject) -> None:
    """Have its `reset_after_fork` called in each child that is forked from now on, as long as it lives."""
    _objects.add(shared)


def _reset_all_objects() -> None:
    for each in list(_objects):
        each.reset_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_all_objects)
