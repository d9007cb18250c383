"""Parts of error messages: a number that is out of range, and a guess at a misspelt name."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable

__all__ = [
    "check_number",
    "suggest_name",
]


def check_number(
    error: type[Exception],
    name: str,
    value: object,
    low: float,
    high: float | None = None,
    *,
    above: bool = False,
    integer: bool = False,
) -> None:
    """Raise `error` unless `value` is None or a finite number from `low` to `high`.

    With `above`, `value` must be greater than `low`. With `integer`, it must be an integer.
    """
    if value is None:
        return
    inside = (
        isinstance(value, int if integer else (int, float))
        and not isinstance(value, bool)
        and (isinstance(value, int) or math.isfinite(value))  # isfinite fails for huge integers
        and (value > low if above else value >= low)
        and (high is None or value <= high)
    )
    if not inside:
        kind = "an integer" if integer else "a number"
        bound = f"greater than {low}" if above else f"at least {low}"
        limit = "" if high is None else f" and at most {high}"
        raise error(f"{name} is {value!r}; it must be {kind} {bound}{limit}")


def suggest_name(name: object, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?`, or an empty string if no known name is similar."""
    found = difflib.get_close_matches(str(name).lower(), list(known), n=1)
    return f"; did you mean {found[0]!r}?" if found else ""
