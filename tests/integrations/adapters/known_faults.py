"""Rows in which an adapter is not as its framework's own model yet, each with its reason; the tests let it only shrink."""

from collections.abc import Mapping
from typing import Final

__all__ = ["KNOWN_FAULTS"]

KNOWN_FAULTS: Final[Mapping[tuple[str, str], str]] = {}
