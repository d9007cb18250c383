"""A request's body to a JSON value: by RFC 8259, and without holding up other answers for long.

To decode takes a time that depends on how many values there are (texts are read at 100 MB/s or more), and no other
thread runs meanwhile. So the values of a long body are counted first, a piece at a time, and it may have only so many;
nor may a number in it be long, which is read slowly.
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

LONG_BYTES: Final = 64 * 1024  # what is shorter is decoded in 5 ms
MAX_VALUES: Final = 250_000  # no model's context takes a prompt of as many token ids; decoded in 50 ms
MAX_MEMBERS: Final = 10_000  # of an object, or of a list of other things than numbers and texts
MAX_NUMBER_CHARS: Final = 4300  # what Python reads of an integer
_KEY_VALUES: Final = 4  # what a key counts: a name that is new takes as long as so many numbers
_PIECE_BYTES: Final = 64 * 1024  # counted in about a millisecond

# One thread: the event loop has to wait for it at most once, 5 ms, and long bodies wait for each other
_body_executor: Final = DaemonThreadPool(1, "llm_spec_bodies")


def decode_json(data: bytes | bytearray) -> Any:
    """The value of a text: UTF-8, without NaN and Infinity, every character whole; raises ValueError for others."""
    return _decode_json_with(data, _DECODER)


def decode_long_json(data: bytes | bytearray) -> Any:
    """As `decode_json`; ValueError also for what exceeds the bounds of this module.

    A bytearray is empty afterwards: its text takes as much memory again.
    """
    _check_num_values(data)
    value = _decode_json_with(data, _LONG_DECODER)
    _check_num_members(value)
    return value


async def run_in_body_thread(function: Callable[..., T], *arguments: Any) -> T:
    """What a function returns or raises in the thread for long bodies, which takes one after the other."""
    return await asyncio.get_running_loop().run_in_executor(_body_executor, function, *arguments)


def _decode_json_with(data: bytes | bytearray, decoder: json.JSONDecoder) -> Any:
    text = data.decode()
    if isinstance(data, bytearray):
        data.clear()
    value = decoder.decode(text)
    if _has_lone_surrogate(text):
        raise ValueError("a text in it has half a character: surrogates come in pairs")
    return value


def _reject_nan_or_infinity(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON")


def _parse_finite_float(digits: str) -> float:
    value = float(_check_number_length(digits))
    if math.isinf(value):
        raise ValueError(f"{digits[:40]} is too large a number")
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

# In valid JSON; a pair is one match, and so is every other escape, so that its second half begins none
_ESCAPES: Final = re.compile(r"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]|(?P<half>u[dD][89a-fA-F])|.)")


def _has_lone_surrogate(text: str) -> bool:
    has_surrogates = "\\ud" in text or "\\uD" in text
    return has_surrogates and any(escape["half"] for escape in _ESCAPES.finditer(text))


_NO_BACKSLASH: Final = re.compile(rb"[^\\]")


def _check_num_values(data: bytes | bytearray) -> None:
    """Count what parts or begins values, and names them, outside of texts."""
    num_values = start = 0
    is_in_text = False
    while start < len(data):
        end = _find_piece_end(data, start + _PIECE_BYTES)
        parts = data[start:end].replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[is_in_text::2])
        num_values += sum(map(outside.count, (b",", b"[", b"{"))) + _KEY_VALUES * outside.count(b":")
        if num_values > MAX_VALUES:
            raise ValueError(f"it has more than {MAX_VALUES} values, where a key counts as {_KEY_VALUES}")
        is_in_text ^= len(parts) % 2 == 0
        start = end


def _find_piece_end(data: bytes | bytearray, end: int) -> int:
    """From there on, where no escape is parted."""
    if data[end - 1 : end] != b"\\":
        return end
    after = _NO_BACKSLASH.search(data, end)
    return len(data) if after is None else after.end()


def _check_num_members(value: object) -> None:
    """Of each object, and of each list that holds others."""
    left: list[object] = [value] if isinstance(value, dict | list) else []
    while left:
        container = left.pop()
        is_object = isinstance(container, dict)
        members = list(cast("dict[str, object]", container).values()) if is_object else cast("list[object]", container)
        inner: list[object] = [member for member in members if isinstance(member, dict | list)]
        if len(members) > MAX_MEMBERS and (inner or is_object):
            raise ValueError(f"an object or list in it has {len(members)} members; it may have {MAX_MEMBERS}")
        left += inner
