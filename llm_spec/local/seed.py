"""Seeds for requests that bring none. Apart from the sampling, which needs numpy."""

from __future__ import annotations

import os

__all__ = ["draw_random_seed"]


def draw_random_seed() -> int:
    """64 random bits."""
    return int.from_bytes(os.urandom(8), "little")
