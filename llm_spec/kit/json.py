"""JSON (RFC 8259) by orjson if it is installed, in a quarter of the time or less."""

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
_HALF: Final = "\\ud"  # begins the escape of half a character; the encoder writes lower case


def loads(data: str | bytes) -> Any:
    """Parse a text; raise ValueError if it is not valid JSON.

    NaN, Infinity and halves of characters, which some servers send, are accepted. An integer of
    over 64 bits may become a float.
    """
    try:
        return _loads(data)
    except ValueError:
        return json.loads(data)


def dumps(value: object) -> bytes:
    """Encode a value in UTF-8, without spaces; raise TypeError if JSON cannot express it.

    Every reader accepts the output: NaN and infinities become null. Halves of characters, which
    UTF-8 cannot encode, are joined or become U+FFFD.
    """
    if _dumps is not None:
        try:
            return _dumps(value)
        except TypeError:  # orjson raises it for long integers and halves of characters, too
            pass
    return dumps_ascii(value)


def dumps_ascii(value: object) -> bytes:
    """Encode like `dumps`, in ASCII: for readers that also break lines at U+0085 or U+2028."""
    try:
        text = _to_text(value)
    except ValueError:
        text = _to_text(_replace_numbers_that_are_none(value))
    if _HALF in text:  # it may also belong to a whole character
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
