"""Finds the control tokens that a prefix spells out.

In an answer, and in the prefix that it continues, they are text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["ControlTokenFinder"]


class ControlTokenFinder:
    """Finds the texts of control tokens."""

    def __init__(self, texts: Iterable[str]) -> None:
        # so that the longest one matches
        known = sorted({*filter(None, texts)}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, known))) if known else None
        self._num_before = len(known[0]) - 1 if known else 0

    def count_characters_before(self, prompt: str, prefix: str) -> int:
        """Count a prefix's characters before the first control token that it spells or completes.

        Returns the length of the prefix if there is none.
        """
        if self._pattern is None:
            return len(prefix)
        tail = prompt[len(prompt) - min(len(prompt), self._num_before) :]
        found = (match for match in self._pattern.finditer(tail + prefix) if match.end() > len(tail))
        return next((max(0, match.start() - len(tail)) for match in found), len(prefix))
