"""Seeds for requests without one, in a module of their own: sampling needs numpy."""

from __future__ import annotations

import os

__all__ = ["draw_random_seed"]


def draw_random_seed() -> int:
    """Return 64 random bits."""
    return int.from_bytes(os.urandom(8), "little")
