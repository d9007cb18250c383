"""JSON (RFC 8259) to values and back: by orjson where it is installed, in a quarter of the time or less."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, Final, cast

from llm_spec.kit.surrogates import mend_escapes

__all__ = ["MAX_INT", "dumps", "dumps_ascii", "loads"]

MAX_INT: Final = 2**53  # beyond it neither JSON nor a float is exact (RFC 8259, section 6)

try:
    import orjson
except ImportError:
    _loads: Callable[[str | bytes], Any] = json.loads
    _dumps: Callable[[object], bytes] | None = None
else:
    _loads, _dumps = orjson.loads, orjson.dumps

_to_text = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_HALF: Final = "\\ud"  # how the escape of half a character begins in lower case, as the encoder writes it


def loads(data: str | bytes) -> Any:
    """The value of a text; raises ValueError if it is not valid JSON.

    Servers' NaN, Infinity and halves of characters are taken. An integer of over 64 bits may become a float.
    """
    try:
        return _loads(data)
    except ValueError:
        return json.loads(data)


def dumps(value: object) -> bytes:
    """A value's text in UTF-8, without spaces; raises TypeError for what JSON has no words for.

    What is written is always JSON that every reader takes: NaN and infinities are null, and halves of characters, which
    UTF-8 has no bytes for, are joined or U+FFFD.
    """
    if _dumps is not None:
        try:
            return _dumps(value)
        except TypeError:  # also for integers of over 64 bits and halves of characters
            pass
    return dumps_ascii(value)


def dumps_ascii(value: object) -> bytes:
    """As `dumps`, in ASCII: for readers that cut lines also at U+0085 or U+2028."""
    try:
        text = _to_text(value)
    except ValueError:
        text = _to_text(_replace_numbers_that_are_none(value))
    if _HALF in text:  # which may be of a whole character, too
        text = mend_escapes(text)
    return text.encode()


def _replace_numbers_that_are_none(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _replace_numbers_that_are_none(of) for name, of in cast("dict[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_replace_numbers_that_are_none(of) for of in cast("list[Any]", value)]
    return value
