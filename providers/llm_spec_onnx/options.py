"""What may be asked of an OnnxModel, beside its folder."""

from __future__ import annotations

from typing import TypedDict

__all__ = ["OnnxOptions"]


class OnnxOptions(TypedDict, total=False):
    """See OnnxModel."""

    threads: int
    exact: bool
