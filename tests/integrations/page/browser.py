"""Which browser the tests and pictures use, and what a page did in it."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from typing import Final

__all__ = ["CHROMIUM", "Seen"]

CHROMIUM: Final = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")


@dataclass
class Seen:
    """What a page did besides what it shows."""

    console: list[str] = field(default_factory=list)  # warnings, errors, uncaught exceptions
    urls: list[str] = field(default_factory=list)
