"""A request's body to a JSON value: by RFC 8259, and without holding up other answers for long.

To decode takes a time that depends on how many values there are (texts are read at 100 MB/s or more), and no other
thread runs meanwhile. So a long body is read value by value, in a thread of its own, and may have only so many; nor may
a number in it be long, which is read slowly and at once.
"""

from __future__ import annotations

import asyncio
import json
import json.decoder
import json.scanner
import math
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeAlias, TypeVar, cast

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
ScannedValue: TypeAlias = tuple[Any, int]  # a value, and where it ends

LONG_BYTES: Final = 64 * 1024  # what is shorter is decoded in 5 ms
MAX_VALUES: Final = 250_000  # no model's context takes a prompt of as many token ids
MAX_MEMBERS: Final = 10_000  # of an object, or of a list of other things than numbers and texts
MAX_NUMBER_CHARS: Final = 4300  # what Python reads of an integer

# One thread: the event loop has to wait for it at most once, 5 ms, and long bodies wait for each other
_body_executor: Final = ThreadPoolExecutor(1, thread_name_prefix="llm_spec_bodies")


def decode_json(data: bytes | bytearray) -> Any:
    """The value of a text: UTF-8, without NaN and Infinity, every character whole; raises ValueError for others."""
    return _decode_json_with(data, _DECODER)


def decode_long_json(data: bytes | bytearray) -> Any:
    """As `decode_json`, letting other threads run; ValueError also for what exceeds the bounds of this module.

    A bytearray is empty afterwards: its text takes as much memory again.
    """
    return _decode_json_with(data, _BoundedJsonDecoder())


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
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"{digits[:40]} is too large a number")
    return value


# In valid JSON; a pair and an escaped backslash are each one match, so that their second half begins none
_ESCAPES: Final = re.compile(r"\\(?:\\|u[dD][89abAB]..\\u[dD][c-fC-F]|(?P<half>u[dD][89a-fA-F]))")
_DECODER: Final = json.JSONDecoder(parse_constant=_reject_nan_or_infinity, parse_float=_parse_finite_float)


_scan_string: Callable[[str, int, bool], tuple[str, int]] = cast("Any", json.decoder).scanstring
_STEP_CHARS: Final = 256 * 1024  # characters of a string that are read at once, in about a millisecond
_LONGEST_ESCAPE: Final = 12  # a pair
_ESCAPE: Final = re.compile(r"\\(?:u[dD][89abAB]..\\u....|u....|.)")
_LONG_NUMBER: Final = re.compile(rf"[-+.eE0-9]{{{MAX_NUMBER_CHARS + 1}}}")


class _BoundedJsonDecoder(json.JSONDecoder):
    """The standard library's decoder in Python, which reads only texts in C, with a count of values; for one text."""

    def __init__(self) -> None:
        super().__init__(parse_constant=_reject_nan_or_infinity, parse_float=_parse_finite_float)
        self._num_values = 0
        self._counting_scanner: Callable[[str, int], ScannedValue] | None = None
        self.parse_string = _scan_string_in_steps
        self.parse_object = self._parse_object
        self.parse_array = self._parse_array
        self.scan_once = cast("Any", json.scanner).py_make_scanner(self)

    def raw_decode(self, s: str, idx: int = 0) -> ScannedValue:
        _check_number_length(s, idx)
        return super().raw_decode(s, idx)

    def _parse_object(
        self, start: tuple[str, int], strict: bool, scan: Callable[[str, int], ScannedValue], *hooks: Any
    ) -> ScannedValue:
        value, end = cast("Any", json.decoder).JSONObject(start, strict, self._wrap_scanner(scan), *hooks)
        return _check_num_members(value), end

    def _parse_array(self, start: tuple[str, int], scan: Callable[[str, int], ScannedValue]) -> ScannedValue:
        values, end = cast("Any", json.decoder).JSONArray(start, self._wrap_scanner(scan))
        if len(values) > MAX_MEMBERS and any(isinstance(value, dict | list) for value in values):
            _check_num_members(values)
        return values, end

    def _wrap_scanner(self, scan: Callable[[str, int], ScannedValue]) -> Callable[[str, int], ScannedValue]:
        """`scan`, which is the same each time, with a count."""
        if self._counting_scanner is None:

            def count_and_scan(text: str, position: int) -> ScannedValue:
                self._num_values += 1
                if self._num_values > MAX_VALUES:
                    raise ValueError(f"it has more than {MAX_VALUES} values")
                _check_number_length(text, position)
                return scan(text, position)

            self._counting_scanner = count_and_scan
        return self._counting_scanner


def _scan_string_in_steps(text: str, begin: int, strict: bool) -> tuple[str, int]:
    """A string of a JSON text from after its quote, and where it ends: read in C, some of it at a time.

    A text of line breaks alone takes 5 ns a character, during which no other thread runs.
    """
    texts: list[str] = []
    start = begin
    while True:
        end = _find_string_step_end(text, start)
        try:
            if end >= len(text):
                last, after = _scan_string(text, start, strict)
                return "".join([*texts, last]), after
            value, num_read = _scan_string(text[start:end] + '"', 0, strict)
        except json.JSONDecodeError as error:
            is_unterminated = end >= len(text) and error.pos == start - 1
            position = begin - 1 if is_unterminated else error.pos if end >= len(text) else start + error.pos
            raise json.JSONDecodeError(error.msg, text, position) from None
        texts.append(value)
        if num_read <= end - start:
            return "".join(texts), start + num_read
        start = end


def _find_string_step_end(text: str, start: int) -> int:
    """Where the step that begins at `start` ends: after a whole escape, and a pair of surrogates is not parted."""
    end = start + _STEP_CHARS
    if end >= len(text):
        return end
    last_slash = text.rfind("\\", max(start, end - _LONGEST_ESCAPE), end)
    if last_slash < 0:
        return end
    before = text[start : last_slash + 1]
    if (len(before) - len(before.rstrip("\\"))) % 2 == 0:  # the second half of an escaped backslash
        return end
    escape = _ESCAPE.match(text, last_slash)
    return end if escape is None else max(end, escape.end())


def _has_lone_surrogate(text: str) -> bool:
    start = 0
    while start < len(text):
        end = _find_string_step_end(text, start)
        has_surrogates = text.find("\\ud", start, end) >= 0 or text.find("\\uD", start, end) >= 0
        if has_surrogates and any(escape["half"] for escape in _ESCAPES.finditer(text, start, end)):
            return True
        start = end
    return False


def _check_number_length(text: str, position: int) -> None:
    if _LONG_NUMBER.match(text, position):
        raise ValueError(f"a number in it has more than {MAX_NUMBER_CHARS} characters")


def _check_num_members(members: Any) -> Any:
    if len(members) > MAX_MEMBERS:
        raise ValueError(f"an object or list in it has {len(members)} members; it may have {MAX_MEMBERS}")
    return members
