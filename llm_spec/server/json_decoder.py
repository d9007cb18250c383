"""Decodes request bodies as JSON (RFC 8259), without delaying other answers for long.

The time to decode depends on the number of values, since texts are read at 100 MB/s or more. No
other thread runs meanwhile. So the values of a long body are counted first, piece by piece, and
their number is limited. The length of numbers is limited too, because long ones are read slowly.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

from llm_spec.local.threads import DaemonThreadPool

__all__ = [
    "LONG_BYTES",
    "MAX_MEMBERS",
    "MAX_NUMBER_CHARS",
    "MAX_VALUES",
    "decode_json",
    "decode_long_json",
    "run_in_body_thread",
]

T = TypeVar("T")

LONG_BYTES: Final = 64 * 1024  # a shorter body is decoded in 5 ms
# No model's context holds a prompt of so many token ids. Decoded in 50 ms
MAX_VALUES: Final = 250_000
MAX_MEMBERS: Final = 10_000  # of an object, or of a list that holds objects or lists
MAX_NUMBER_CHARS: Final = 4300  # Python's limit for an integer
_KEY_VALUES: Final = 4  # a key counts as so many: a new name takes as long to decode
_PIECE_BYTES: Final = 64 * 1024  # counted in about a millisecond

# One thread: the event loop waits for it at most once (5 ms). Long bodies wait for each other
_body_executor: Final = DaemonThreadPool(1, "llm_spec_bodies")


def decode_json(data: bytes | bytearray) -> Any:
    """Decode a JSON text of UTF-8.

    Raises ValueError if it is not valid; NaN, Infinity and lone surrogates are not.
    """
    return _decode_json_with(data, _DECODER)


def decode_long_json(data: bytes | bytearray) -> Any:
    """Decode as `decode_json`; raises ValueError also if the text exceeds this module's bounds.

    A bytearray is emptied, because its text takes as much memory again.
    """
    _check_num_values(data)
    value = _decode_json_with(data, _LONG_DECODER)
    _check_num_members(value)
    return value


async def run_in_body_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Run a function in the thread for long bodies, which runs one at a time."""
    return await asyncio.get_running_loop().run_in_executor(_body_executor, function, *arguments)


def _decode_json_with(data: bytes | bytearray, decoder: json.JSONDecoder) -> Any:
    text = data.decode()
    if isinstance(data, bytearray):
        data.clear()
    value = decoder.decode(text)
    if _has_lone_surrogate(text):
        raise ValueError("a text in it has a lone surrogate; surrogates come in pairs")
    return value


def _reject_nan_or_infinity(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON")


def _parse_finite_float(digits: str) -> float:
    value = float(_check_number_length(digits))
    if math.isinf(value):
        raise ValueError(f"the number {digits[:40]} is too large")
    return value


def _check_number_length(digits: str) -> str:
    if len(digits) > MAX_NUMBER_CHARS:
        raise ValueError(f"a number in it has more than {MAX_NUMBER_CHARS} characters")
    return digits


_DECODER: Final = json.JSONDecoder(parse_constant=_reject_nan_or_infinity, parse_float=_parse_finite_float)
_LONG_DECODER: Final = json.JSONDecoder(
    parse_constant=_reject_nan_or_infinity,
    parse_float=_parse_finite_float,
    parse_int=lambda digits: int(_check_number_length(digits)),
)

# Of valid JSON. A pair of surrogates is one match, and so is any other escape, so that its second
# half does not begin a match
_ESCAPES: Final = re.compile(r"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]|(?P<half>u[dD][89a-fA-F])|.)")


def _has_lone_surrogate(text: str) -> bool:
    has_surrogates = "\\ud" in text or "\\uD" in text
    return has_surrogates and any(escape["half"] for escape in _ESCAPES.finditer(text))


_NO_BACKSLASH: Final = re.compile(rb"[^\\]")


def _check_num_values(data: bytes | bytearray) -> None:
    """Raise ValueError if there are too many values, judged by separators outside of texts."""
    num_values = start = 0
    is_in_text = False
    while start < len(data):
        end = _find_piece_end(data, start + _PIECE_BYTES)
        parts = data[start:end].replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[is_in_text::2])
        num_values += sum(map(outside.count, (b",", b"[", b"{"))) + _KEY_VALUES * outside.count(b":")
        if num_values > MAX_VALUES:
            raise ValueError(f"it has more than {MAX_VALUES} values (a key counts as {_KEY_VALUES})")
        is_in_text ^= len(parts) % 2 == 0
        start = end


def _find_piece_end(data: bytes | bytearray, end: int) -> int:
    """Return the first position from `end` on that does not split an escape."""
    if data[end - 1 : end] != b"\\":
        return end
    after = _NO_BACKSLASH.search(data, end)
    return len(data) if after is None else after.end()


def _check_num_members(value: object) -> None:
    """Raise ValueError if an object or nested list has too many members."""
    left: list[object] = [value] if isinstance(value, dict | list) else []
    while left:
        container = left.pop()
        is_object = isinstance(container, dict)
        members = list(cast("dict[str, object]", container).values()) if is_object else cast("list[object]", container)
        inner: list[object] = [member for member in members if isinstance(member, dict | list)]
        if len(members) > MAX_MEMBERS and (inner or is_object):
            raise ValueError(f"an object or list in it has {len(members)} members; it may have at most {MAX_MEMBERS}")
        left += inner
