"""Counts of tokens as servers tell them. What is no count is none: a wrong one would end a budget, or refund it."""

from __future__ import annotations

from llm_spec.kit.json import MAX_INT

__all__ = ["read_token_count"]


def read_token_count(value: object) -> int | None:
    """An integer from 0 to 2**53, also one with a point (`5.0`); None for anything else, true and false among it."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_INT:
        return None
    return value
