"""JSON (RFC 8259) to values and back: by orjson where it is installed, in a quarter of the time or less."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

__all__ = ["dumps", "dumps_ascii", "loads"]

try:
    import orjson
except ImportError:
    _loads: Callable[[str | bytes], Any] = json.loads
    _dumps: Callable[[object], bytes] | None = None
else:
    _loads, _dumps = orjson.loads, orjson.dumps

_to_text = json.JSONEncoder(separators=(",", ":")).encode


def loads(data: str | bytes) -> Any:
    """The value of a text; raises ValueError if it is not valid JSON.

    Servers' NaN, Infinity and halves of characters are taken. An integer of over 64 bits may become a float.
    """
    try:
        return _loads(data)
    except ValueError:
        return json.loads(data)


def dumps(value: object) -> bytes:
    """A value's text in UTF-8, without spaces; raises TypeError for what JSON has no words for."""
    if _dumps is not None:
        try:
            return _dumps(value)
        except TypeError:  # also for integers of over 64 bits and halves of characters
            pass
    return dumps_ascii(value)


def dumps_ascii(value: object) -> bytes:
    """As `dumps`, in ASCII: for readers that cut lines also at U+0085 or U+2028."""
    return _to_text(value).encode()
