"""One tool call in a model's text: its end, and its name and arguments.

Nothing here raises for a model's text. A call that is broken, or names no tool of the request, is
text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from typing import Any, Final, Literal, NamedTuple

from llm_spec.contract.formats import ARGUMENTS_KEYS, SPACE, MessageFormat

__all__ = ["ToolCallScanner", "WrittenToolCall", "parse_tool_calls"]

_BRACKETS: Final = {"{": "}", "[": "]"}
_MAX_DEPTH: Final = 100  # nested brackets; json itself fails at about 1,000
_MAX_HEADER: Final = 256


class WrittenToolCall(NamedTuple):
    """A call as its model wrote it; `arguments` is JSON text."""

    name: str
    arguments: str


class ToolCallScanner:
    """Finds the end of one call in text that comes in pieces; reads every character once.

    `state` is `open` until the end, `complete` at the end, and `broken` if it cannot become a call.
    """

    def __init__(self, message_format: MessageFormat) -> None:
        self.message_format = message_format
        self._close = message_format.call_close
        self._mark = mark = message_format.text_mark
        self._header = re.compile(message_format.header)
        self._outside = re.compile(rf"{re.escape(mark)}|[{{}}\[\]]")
        # a JSON string has no line breaks: its closing quote was forgotten
        self._inside = re.compile(rf"{mark}|\\.|[\x00-\x1f]" if mark == '"' else re.escape(mark), re.DOTALL)
        self.state: Literal["open", "complete", "broken"] = "open"
        self.name: str | None = None  # from the header
        self.value_start = self.value_end = -1
        self.end = -1  # the end of the call, after its closing mark
        self._text = ""
        self._at = 0
        self._open_brackets: list[str] = []
        self._in_text = False

    @property
    def num_characters(self) -> int:
        """The number of characters fed so far."""
        return len(self._text)

    @property
    def bracketed_text(self) -> str:
        """The text of the outermost brackets, with them."""
        return self._text[self.value_start : self.value_end]

    def feed(self, piece: str) -> None:
        """Add the text that follows the opening mark of the call."""
        self._text += piece
        if self.state == "open" and self.value_start < 0:
            self._find_bracketed_text()
        if self.state == "open" and self.value_start >= 0 and self.value_end < 0:
            self._find_bracketed_text_end()
        if self.state == "open" and self.value_end >= 0:
            self._find_closing_mark()

    def _find_bracketed_text(self) -> None:
        start = len(self._text) - len(self._text.lstrip(SPACE))
        at = next((i for i in range(start, len(self._text)) if self._is_bracketed_text_start(i, start)), None)
        if at is None:
            is_hopeless = len(self._text) - start > (_MAX_HEADER if self._header.pattern else 0)
            self.state = "broken" if is_hopeless else "open"
            return
        header = self._header.fullmatch(self._text[start:at].rstrip(SPACE))
        if header is None:
            self.state = "broken"
            return
        self.name = header.groupdict().get("name")
        self.value_start = self._at = at

    def _is_bracketed_text_start(self, at: int, header_start: int) -> bool:
        """Return True if a value begins here; a bracket of a header (`name[ARGS]{`) begins none."""
        return self._text[at] == "{" or (self._text[at] == "[" and at == header_start)

    def _find_bracketed_text_end(self) -> None:
        while self.value_end < 0:
            found = (self._inside if self._in_text else self._outside).search(self._text, self._at)
            if found is None:
                # a mark may be incomplete here
                self._at = max(self._at, len(self._text) - len(self._mark))
                return
            self._at = found.end()
            self._advance_past(found[0])
            if self.state == "broken":
                return

    def _advance_past(self, found: str) -> None:
        """Update the state after a mark, a bracket, an escape or a line break."""
        if found == self._mark:
            self._in_text = not self._in_text
        elif self._in_text:
            if found[0] != "\\":
                self.state = "broken"
        elif found in _BRACKETS:
            self._open_brackets.append(found)
            if len(self._open_brackets) > _MAX_DEPTH:
                self.state = "broken"
        elif _BRACKETS[self._open_brackets.pop()] != found:
            self.state = "broken"
        elif not self._open_brackets:
            self.value_end = self._at

    def end_answer(self) -> None:
        """End the answer, as its model did: a call that lacks only its last mark is complete."""
        if self.state == "open" and self.value_end >= 0:
            self.end = len(self._text)
            self.state = "complete"

    def _find_closing_mark(self) -> None:
        rest = self._text[self.value_end :]
        start = len(rest) - len(rest.lstrip(SPACE)) if self._close else 0
        if rest.startswith(self._close, start):
            self.end = self.value_end + start + len(self._close)
            self.state = "complete"
        # the next call begins, and the closing mark was forgotten
        elif rest.startswith(self.message_format.call_open, start):
            self.end = self.value_end
            self.state = "complete"
        elif not any(mark.startswith(rest[start:]) for mark in (self._close, self.message_format.call_open)):
            self.state = "broken"


def parse_tool_calls(scanner: ToolCallScanner, names: Collection[str]) -> list[WrittenToolCall] | None:
    """Return the calls of a complete scan (several in an array), or None if it is text.

    Names must be in `names`. Arguments are a JSON object, and stay as the model wrote them.
    """
    value, message_format = scanner.bracketed_text, scanner.message_format
    try:
        if message_format.body == "json":
            calls = list(_parse_json_tool_calls(value))
        elif message_format.body == "named_json":
            calls = [WrittenToolCall(scanner.name or "", value)]
        else:
            calls = [WrittenToolCall(scanner.name or "", _translate_fields_to_json(value, message_format.text_mark))]
        is_right = all(call.name in names and isinstance(json.loads(call.arguments), dict) for call in calls)
    except (ValueError, RecursionError):
        return None
    return calls if calls and is_right else None


def _parse_json_tool_calls(text: str) -> Iterator[WrittenToolCall]:
    """Yield the calls of an object, or of an array of objects; raises ValueError otherwise."""
    if text.startswith("["):
        for start, end in _find_json_members(text, has_keys=False).values():
            yield from _parse_json_tool_calls(text[start:end])
        return
    members = _find_json_members(text, has_keys=True)
    function = members.get("function")
    if function is not None and "name" not in members:  # {"type": "function", "function": {…}}
        text = text[slice(*function)]
        members = _find_json_members(text, has_keys=True)
    if "name" not in members:
        raise ValueError("an object without a name")
    name: Any = json.loads(text[slice(*members["name"])])
    key = next((key for key in ARGUMENTS_KEYS if key in members), None)
    arguments = "" if key is None else text[slice(*members[key])]
    if arguments.startswith('"'):  # an object that was encoded as a string once more
        arguments = json.loads(arguments)
    is_empty = arguments.strip(SPACE) in ("", "null")
    yield WrittenToolCall(name if isinstance(name, str) else "", "{}" if is_empty else arguments)


def _find_json_members(text: str, *, has_keys: bool) -> dict[Any, tuple[int, int]]:
    """Return where the values of an object (by key) or array (by index) stand in its text.

    Raises ValueError for invalid JSON.
    """
    decoder = json.JSONDecoder()
    json.loads(text)  # the whole is valid, so the rest only finds places
    if not text.startswith("{" if has_keys else "["):
        raise ValueError("neither an object nor an array")
    places: dict[Any, tuple[int, int]] = {}
    at = _skip_space_and_mark(text, 1, "")
    while text[at] not in "}]":
        key: Any = len(places)
        if has_keys:
            key, at = decoder.raw_decode(text, at)
            at = _skip_space_and_mark(text, at, ":")
        _, end = decoder.raw_decode(text, at)
        places[key] = (at, end)
        at = _skip_space_and_mark(text, end, ",")
    return places


def _skip_space_and_mark(text: str, at: int, mark: str) -> int:
    """Return the next place that is neither space nor `mark`."""
    while text[at] in SPACE or text[at] == mark:
        at += 1
    return at


def _translate_fields_to_json(text: str, mark: str) -> str:
    """Turn `{key:value,…}` with texts between marks into JSON: quote all texts and keys."""
    parts = text.split(mark)
    outside = (re.sub(r"(?<=[{,])\s*([\w.$-]+)\s*:", r'"\1":', part) for part in parts[0::2])
    inside = (json.dumps(part, ensure_ascii=False) for part in parts[1::2])
    return "".join(next(inside if index % 2 else outside) for index in range(len(parts)))
