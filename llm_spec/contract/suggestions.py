"""What somebody probably meant: the end of an error about a name that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["suggest_name"]


def suggest_name(name: object, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or nothing where no known name is like it."""
    found = difflib.get_close_matches(str(name).lower(), list(known), n=1)
    return f"; did you mean {found[0]!r}?" if found else ""
