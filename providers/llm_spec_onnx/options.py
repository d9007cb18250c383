"""Options of an OnnxModel."""

from __future__ import annotations

from typing import TypedDict

__all__ = ["OnnxOptions"]


class OnnxOptions(TypedDict, total=False):
    """Options of OnnxModel and OnnxProvider, by keyword, or in a string after a question mark.

    OnnxModel explains them.
    """

    threads: int
    exact: bool
    weights: str
