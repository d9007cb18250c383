"""What tells one configuration from another: texts by what they say, objects by which they are."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

__all__ = ["compute_digest"]

_keys: Final[dict[int, tuple[Callable[[], object], str]]] = {}  # of objects by their `id`, which may be used again


def compute_digest(value: object) -> str:
    """The same for values that say the same, and for the same object; nothing of them can be read in it."""
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
    """A name for this object alone, in this process alone: caches may be kept on a disk."""
    at = id(value)
    found = _keys.get(at)
    if found is not None and found[0]() is value:
        return found[1]
    key = uuid.uuid4().hex
    try:
        _keys[at] = (weakref.ref(value, lambda gone: _forget(at, gone)), key)
    except TypeError:
        _keys[at] = (lambda: value, key)  # kept, so that its `id` stays its own
    return key


def _forget(at: int, gone: Callable[[], object]) -> None:
    if at in _keys and _keys[at][0] is gone:
        del _keys[at]
