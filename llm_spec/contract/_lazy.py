"""Packages that import their exports on first use (PEP 562), so that importing them is cheap."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping

__all__ = ["make_lazy_exports"]


def make_lazy_exports(
    package: str, names_by_module: Mapping[str, str], *own_names: str
) -> tuple[list[str], Callable[[str], object], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` of a package that exports other modules' names.

    `names_by_module`: the names that each module gives, separated by spaces.
    `own_names`: the names that the package defines itself.

    Type checkers read an `if TYPE_CHECKING` block that imports the same names. A test compares the
    two.
    """
    modules = {name: module for module, names in names_by_module.items() for name in names.split()}
    members = vars(sys.modules[package])

    def import_member(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        member = members[name] = getattr(importlib.import_module(modules[name]), name)
        return member

    def list_member_names() -> list[str]:
        return sorted(members.keys() | modules.keys())

    return sorted([*modules, *own_names]), import_member, list_member_names
