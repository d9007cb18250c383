"""Short reprs for printing objects interactively."""

from __future__ import annotations

import dataclasses
import reprlib
from typing import Any

__all__ = ["cut_repr", "format_short_repr"]


class _Cutter(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 3, 80, 320
        self.maxtuple = self.maxlist = self.maxdict = self.maxset = self.maxfrozenset = 3

    def repr_float(self, number: float, _level: int) -> str:
        return f"{number:.6g}"


_CUTTER = _Cutter()


def cut_repr(value: object) -> str:
    """Return the repr of a value, without the middle of long texts and the end of long lists."""
    return _CUTTER.repr(value)


def format_short_repr(self: Any) -> str:
    """Return a dataclass's `__repr__` with only non-default fields, and long values cut.

    Fields with `field(repr=False)` are not shown, as usual.
    """
    fields = [field for field in dataclasses.fields(self) if field.repr and not _has_default(self, field)]
    shown = [f"{field.name}={cut_repr(getattr(self, field.name))}" for field in fields]
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _has_default(instance: Any, field: dataclasses.Field[Any]) -> bool:
    factory = field.default_factory
    default = field.default if factory is dataclasses.MISSING else factory()
    return bool(getattr(instance, field.name) == default)
