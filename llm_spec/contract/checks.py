"""One way to refuse a number: name the field, the value and the range."""

from __future__ import annotations

import math

__all__ = ["check_number"]


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
    """Raise `error` unless value is None or a finite number from `low` (with `above`: greater than it) to `high`."""
    if value is None:
        return
    inside = (
        isinstance(value, int if integer else (int, float))
        and not isinstance(value, bool)
        and (isinstance(value, int) or math.isfinite(value))  # an integer may be too large to ask
        and (value > low if above else value >= low)
        and (high is None or value <= high)
    )
    if not inside:
        kind = "an integer" if integer else "a number"
        bound = f"greater than {low}" if above else f"at least {low}"
        limit = "" if high is None else f" and at most {high}"
        raise error(f"{name} is {value!r}; it must be {kind} {bound}{limit}")
