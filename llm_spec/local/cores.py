"""How many processors there are to use."""

from __future__ import annotations

import os

__all__ = ["count_usable_cores"]


def count_usable_cores() -> int:
    """Cores that this process may use, as far as the system reports it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
