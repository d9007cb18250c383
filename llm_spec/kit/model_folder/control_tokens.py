"""Which of a prefix's characters spell control tokens: in an answer, and in what it begins with, those are text."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["ControlTokenFinder"]


class ControlTokenFinder:
    """Finds the texts of control tokens."""

    def __init__(self, texts: Iterable[str]) -> None:
        known = sorted({*filter(None, texts)}, key=len, reverse=True)  # the longest that fits
        self._pattern = re.compile("|".join(map(re.escape, known))) if known else None
        self._num_before = len(known[0]) - 1 if known else 0

    def count_characters_before(self, prompt: str, prefix: str) -> int:
        """Characters of a prefix before the first control token that it spells, or completes; else all of them."""
        if self._pattern is None:
            return len(prefix)
        tail = prompt[len(prompt) - min(len(prompt), self._num_before) :]
        found = (match for match in self._pattern.finditer(tail + prefix) if match.end() > len(tail))
        return next((max(0, match.start() - len(tail)) for match in found), len(prefix))
