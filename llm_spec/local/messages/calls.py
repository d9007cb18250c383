"""One tool call in the text of a model: where it ends, and what it says.

Nothing here raises for what a model writes. A call that is broken, or names no tool of the request, is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from typing import Any, Final, Literal, NamedTuple

from llm_spec.contract.formats import ARGUMENTS_KEYS, SPACE, MessageFormat

__all__ = ["ToolCallScanner", "WrittenToolCall", "parse_tool_calls"]

_BRACKETS: Final = {"{": "}", "[": "]"}
_MAX_DEPTH: Final = 100  # of brackets in each other; json itself gives up at about 1,000
_MAX_HEADER: Final = 256


class WrittenToolCall(NamedTuple):
    """A call as its model wrote it; `arguments` is JSON text."""

    name: str
    arguments: str


class ToolCallScanner:
    """Find the end of one call in text that comes piece by piece; every character is looked at once.

    `state`: `open` while it goes on, `complete` at its end, `broken` where it cannot become a call any more.
    """

    def __init__(self, message_format: MessageFormat) -> None:
        self.message_format = message_format
        self._close = message_format.call_close
        self._mark = mark = message_format.text_mark
        self._header = re.compile(message_format.header)
        self._outside = re.compile(rf"{re.escape(mark)}|[{{}}\[\]]")
        # in JSON a text has no line breaks: where one comes, its end was forgotten
        self._inside = re.compile(rf"{mark}|\\.|[\x00-\x1f]" if mark == '"' else re.escape(mark), re.DOTALL)
        self.state: Literal["open", "complete", "broken"] = "open"
        self.name: str | None = None  # of a header
        self.value_start = self.value_end = -1
        self.end = -1  # of the call, after what closes it
        self._text = ""
        self._at = 0
        self._open_brackets: list[str] = []
        self._in_text = False

    @property
    def num_characters(self) -> int:
        """Characters that it was fed."""
        return len(self._text)

    @property
    def bracketed_text(self) -> str:
        """What stands in the outermost brackets, with them."""
        return self._text[self.value_start : self.value_end]

    def feed(self, piece: str) -> None:
        """Add the text that follows what opened the call."""
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
        """Whether a value begins here; a bracket of a header (`name[ARGS]{`) does not begin one."""
        return self._text[at] == "{" or (self._text[at] == "[" and at == header_start)

    def _find_bracketed_text_end(self) -> None:
        while self.value_end < 0:
            found = (self._inside if self._in_text else self._outside).search(self._text, self._at)
            if found is None:
                self._at = max(self._at, len(self._text) - len(self._mark))  # a mark may be incomplete here
                return
            self._at = found.end()
            self._advance_past(found[0])
            if self.state == "broken":
                return

    def _advance_past(self, found: str) -> None:
        """Go on after a mark, a bracket, an escape or a line break."""
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
        """Nothing follows any more, and the model wanted no more: a call that only lacks its last mark is complete."""
        if self.state == "open" and self.value_end >= 0:
            self.end = len(self._text)
            self.state = "complete"

    def _find_closing_mark(self) -> None:
        rest = self._text[self.value_end :]
        start = len(rest) - len(rest.lstrip(SPACE)) if self._close else 0
        if rest.startswith(self._close, start):
            self.end = self.value_end + start + len(self._close)
            self.state = "complete"
        elif rest.startswith(self.message_format.call_open, start):  # the next one, and the mark was forgotten
            self.end = self.value_end
            self.state = "complete"
        elif not any(mark.startswith(rest[start:]) for mark in (self._close, self.message_format.call_open)):
            self.state = "broken"


def parse_tool_calls(scanner: ToolCallScanner, names: Collection[str]) -> list[WrittenToolCall] | None:
    """The calls that a complete scan holds (several in an array); None: it is text.

    Names must be of `names`. Arguments are a JSON object, and stay as the model wrote them.
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
    """The calls of an object, or of an array of objects; raises ValueError for anything else."""
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
    if arguments.startswith('"'):  # an object that was made a text once more
        arguments = json.loads(arguments)
    is_empty = arguments.strip(SPACE) in ("", "null")
    yield WrittenToolCall(name if isinstance(name, str) else "", "{}" if is_empty else arguments)


def _find_json_members(text: str, *, has_keys: bool) -> dict[Any, tuple[int, int]]:
    """Where the values of an object (by key) or array (by index) stand in its text; raises ValueError for bad JSON."""
    decoder = json.JSONDecoder()
    json.loads(text)  # as a whole it is good, so what follows is about places alone
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
    """The next place that is neither space nor `mark`."""
    while text[at] in SPACE or text[at] == mark:
        at += 1
    return at


def _translate_fields_to_json(text: str, mark: str) -> str:
    """JSON of `{key:value,…}` whose texts stand between marks: every text and every key gets quotes."""
    parts = text.split(mark)
    outside = (re.sub(r"(?<=[{,])\s*([\w.$-]+)\s*:", r'"\1":', part) for part in parts[0::2])
    inside = (json.dumps(part, ensure_ascii=False) for part in parts[1::2])
    return "".join(next(inside if index % 2 else outside) for index in range(len(parts)))
