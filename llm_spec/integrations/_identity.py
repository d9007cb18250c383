"""Digests that tell configurations apart: values by content, other objects by identity."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

__all__ = ["compute_digest"]

# References and keys of objects, by their `id`. Python may use an `id` again: the reference decides
_keys: Final[dict[int, tuple[Callable[[], object], str]]] = {}


def compute_digest(value: object) -> str:
    """Return a digest that is equal for equal values and for the same object.

    The digest reveals nothing about the values.
    """
    return hashlib.sha256(json.dumps(_describe(value)).encode()).hexdigest()


def _describe(value: object) -> Any:
    if value is None or isinstance(value, str | int | float):
        return [type(value).__name__, str(value)]
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value).items()
        return ["map", sorted([json.dumps(_describe(key)), _describe(item)] for key, item in items)]
    if isinstance(value, Sequence | set | frozenset):
        parts = [_describe(part) for part in cast("Sequence[object]", value)]
        return ["list", sorted(parts, key=json.dumps) if isinstance(value, set | frozenset) else parts]
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and _is_compared_by_value(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.compare}
        return [f"{type(value).__module__}.{type(value).__qualname__}", _describe(fields)]
    return ["object", type(value).__qualname__, str(getattr(value, "name", "")), _get_object_key(value)]


def _is_compared_by_value(value: object) -> bool:
    return type(value).__eq__ is not object.__eq__


def _get_object_key(value: object) -> str:
    """Return a key for this object. Other processes never repeat it: a cache may be on disk."""
    at = id(value)
    found = _keys.get(at)
    if found is not None and found[0]() is value:
        return found[1]
    key = uuid.uuid4().hex
    try:
        _keys[at] = (weakref.ref(value, lambda gone: _forget(at, gone)), key)
    except TypeError:
        _keys[at] = (lambda: value, key)  # keep the object, and so its `id`
    return key


def _forget(at: int, gone: Callable[[], object]) -> None:
    if at in _keys and _keys[at][0] is gone:
        del _keys[at]
