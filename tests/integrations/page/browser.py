"""Which browser the tests and pictures use."""

from __future__ import annotations

import os
import shutil
from typing import Final

__all__ = ["CHROMIUM"]

CHROMIUM: Final = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
