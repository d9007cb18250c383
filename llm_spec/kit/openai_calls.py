"""The tool calls of chat completions, assembled from the pieces that servers send. Pure.

OpenAI's pieces have the index of their call. The first piece also has its id and name, the others
only arguments. Servers and gateways differ in each of these: a new id with every piece, no ids, no
index, one index for all calls, an index that counts pieces, the name repeated in every piece, or
sent later than the id. But every server sends the name of a call when it begins. So a piece with a
name begins a call, unless it repeats the name of a call whose arguments are incomplete. A piece
without a name continues the call of its id or index, or else the latest call.

A call without a name at the end, or with arguments that are neither a text nor an object, is an
error: nobody could run it.
"""

from __future__ import annotations

import itertools
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from llm_spec.contract.events import ToolCallDelta
from llm_spec.contract.messages import ToolCallKind
from llm_spec.kit.answer_parts import BrokenAnswerError
from llm_spec.kit.json import dumps
from llm_spec.kit.surrogates import EscapeMender, SurrogateJoiner, mend_text

__all__ = ["ToolCallReader"]

_MARKS: Final = re.compile(r'[{}\[\]"\\]')


@dataclass(frozen=True, slots=True)
class _Piece:
    index: int | None
    id: str | None
    name: str | None
    arguments: str
    kind: ToolCallKind


class _Call:
    """A call that has begun.

    Its pieces are held back until its name has arrived, and its id or an argument.
    """

    def __init__(self, numbers: Iterator[int], call_id: str, kind: ToolCallKind, *, has_own_id: bool) -> None:
        self._numbers = numbers  # numbers calls in the order in which they are passed on
        self._number: int | None = None
        self.id = call_id
        self.kind: ToolCallKind = kind
        self.has_own_id = has_own_id
        self.name: str | None = None
        self._held_arguments = ""
        self._mender = EscapeMender() if kind == "function" else SurrogateJoiner()
        self._extent = _JsonExtent()

    @property
    def is_complete(self) -> bool:
        """True if its JSON arguments are complete; a text may always continue."""
        return self.kind == "function" and self._extent.is_complete

    def add(self, piece: _Piece) -> ToolCallDelta | None:
        """Take in a piece; return the part that can be passed on."""
        self._extent.add(piece.arguments)
        arguments = self._held_arguments + self._mender.push(piece.arguments)
        self.name = self.name or piece.name
        if self.name is None or not (self.is_handed_on or self.has_own_id or arguments):
            self._held_arguments = arguments
            return None
        return self._hand_on(arguments)

    @property
    def is_handed_on(self) -> bool:
        """True if its name and id were passed on; they do not change afterwards."""
        return self._number is not None

    def begin(self) -> ToolCallDelta:
        """Return the call without an argument, since another one follows."""
        return self._hand_on(self._held_arguments)

    def flush(self) -> ToolCallDelta | None:
        """Return the held pieces, at the end of the answer."""
        arguments = self._held_arguments + self._mender.flush()
        return self._hand_on(arguments) if arguments or not self.is_handed_on else None

    def _hand_on(self, arguments: str) -> ToolCallDelta:
        self._held_arguments = ""
        if self._number is not None:
            return ToolCallDelta(self._number, arguments=arguments, kind=self.kind)
        self._number = next(self._numbers)
        return ToolCallDelta(self._number, self.id, self.name, arguments, self.kind)


class _JsonExtent:
    """Tells if a JSON object or list that comes in pieces is closed.

    The pieces are scanned only when `is_complete` is read.
    """

    def __init__(self) -> None:
        self._unread: list[str] = []
        self._depth = 0
        self._is_in_text = self._is_escaped = self._has_begun = False

    def add(self, piece: str) -> None:
        if piece:
            self._unread.append(piece)

    @property
    def is_complete(self) -> bool:
        text = "".join(self._unread)
        self._unread.clear()
        if self._is_escaped:
            self._is_escaped, text = not text, text[1:]
        position = 0
        while match := _MARKS.search(text, position):
            position = match.end()
            self._read_mark(match[0])
            if match[0] == "\\" and self._is_in_text:
                self._is_escaped = position == len(text)
                position += 1
        return self._has_begun and self._depth <= 0

    def _read_mark(self, mark: str) -> None:
        if mark == '"':
            self._is_in_text = not self._is_in_text
        elif not self._is_in_text and mark != "\\":
            self._depth += 1 if mark in "{[" else -1
            self._has_begun = True


class ToolCallReader:
    """Reads the calls of one answer.

    Each call gets a number, an id (generated if the server sends none) and a name.
    """

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._by_index: dict[int, _Call] = {}  # the latest call with that index
        self._by_id: dict[str, _Call] = {}
        self._numbers = itertools.count()

    @property
    def has_calls(self) -> bool:
        return bool(self._calls)

    @property
    def is_nameless(self) -> bool:
        """True if a call has no name."""
        return any(call.name is None for call in self._calls)

    def read_delta(self, delta: Mapping[str, Any], *, is_whole: bool = False) -> list[ToolCallDelta]:
        """Return the pieces of calls in a delta, or in a whole message.

        Raises BrokenAnswerError for calls that cannot be read.
        """
        if not delta.get("tool_calls") and not delta.get("function_call"):
            return []
        events: list[ToolCallDelta] = []
        for piece in list(_iter_pieces(delta)):
            call = None if is_whole else self._find_call(piece)
            if call is None:
                if self._calls and self._calls[-1].name and not self._calls[-1].is_handed_on:
                    events.append(self._calls[-1].begin())
                call = self._begin_call(piece)
            self._mark(call, piece)
            if (event := call.add(piece)) is not None:
                events.append(event)
        return events

    def flush(self) -> list[ToolCallDelta]:
        """Return the held pieces, at the end of the answer."""
        flushed = [call.flush() for call in self._calls if call.name is not None]
        return [event for event in flushed if event is not None]

    def _mark(self, call: _Call, piece: _Piece) -> None:
        """Register a call by the piece's index, and by its id if the call had none."""
        if piece.index is not None:
            self._by_index[piece.index] = call
        if piece.id is not None and piece.id not in self._by_id and not (call.has_own_id or call.is_handed_on):
            call.id, call.has_own_id = piece.id, True
            self._by_id[piece.id] = call

    def _find_call(self, piece: _Piece) -> _Call | None:
        """Return the call that a piece continues, or None if it begins one."""
        at_index = None if piece.index is None else self._by_index.get(piece.index)
        of_id = None if piece.id is None else self._by_id.get(piece.id)
        find = self._find_nameless if piece.name is None else self._find_named
        return find(piece, at_index, of_id)

    def _find_nameless(self, piece: _Piece, at_index: _Call | None, of_id: _Call | None) -> _Call | None:
        is_id_new = piece.id is not None and of_id is None
        if of_id is not None or (at_index is not None and not is_id_new):
            return of_id or at_index
        if not piece.arguments.strip():  # an id alone: its name may follow
            return at_index if at_index is not None or is_id_new else self._latest
        latest = at_index or self._latest
        return None if latest is None or latest.is_complete else latest

    def _find_named(self, piece: _Piece, at_index: _Call | None, of_id: _Call | None) -> _Call | None:
        call = of_id or at_index
        if call is None and piece.id is None and self._latest is not None and self._latest.has_own_id:
            call = self._latest  # a server sends ids for all its calls, or for none
            if call.is_complete:
                return None
        if call is None or call.name is None:
            return call
        if (call.name, call.kind) != (piece.name, piece.kind):
            return None
        is_id_new = piece.id is not None and of_id is None
        return None if call.is_complete and (piece.arguments.strip() or is_id_new) else call

    @property
    def _latest(self) -> _Call | None:
        """The latest call that has a name."""
        return next((call for call in reversed(self._calls) if call.name is not None), None)

    def _begin_call(self, piece: _Piece) -> _Call:
        # a repeated id is replaced, so that clients can tell the two calls apart
        is_new = piece.id is not None and piece.id not in self._by_id
        call_id = piece.id if piece.id is not None and is_new else f"call_{uuid.uuid4().hex[:24]}"
        call = _Call(self._numbers, call_id, piece.kind, has_own_id=is_new)
        self._calls.append(call)
        self._by_id[call_id] = call
        return call


def _iter_pieces(delta: Mapping[str, Any]) -> Iterator[_Piece]:
    together = _list_calls(delta.get("tool_calls") or [])
    for position, call in enumerate(together):
        if not isinstance(call, dict):
            raise BrokenAnswerError(f"sent a tool call of type {type(call).__name__}")
        yield _read_piece(cast("Mapping[str, Any]", call), position if len(together) > 1 else None)
    if legacy := delta.get("function_call"):  # replaced by tool_calls; there is one
        yield _read_piece({"function": legacy}, 0)


def _list_calls(value: object) -> list[object]:
    """Return the calls of a delta; some servers send a single one without a list."""
    kind = type(value).__name__
    if isinstance(value, dict):
        call = cast("Mapping[str, Any]", value)
        if "function" in call or "custom" in call:
            return [call]
    if isinstance(value, list):
        return cast("list[object]", value)
    raise BrokenAnswerError(f"sent tool_calls of type {kind}")


def _read_piece(call: Mapping[str, Any], position: int | None) -> _Piece:
    is_custom = call.get("custom") is not None and call.get("function") is None
    field, text_field = ("custom", "input") if is_custom else ("function", "arguments")
    function = call.get(field)
    if function is None:
        function = {}
    if not isinstance(function, dict):
        raise BrokenAnswerError(f"sent a tool call whose {field} is of type {type(function).__name__}")
    fields = cast("Mapping[str, Any]", function)
    name = fields.get("name")
    if not isinstance(name, str | None):
        raise BrokenAnswerError(f"sent a tool call whose name is of type {type(name).__name__}")
    return _Piece(
        _read_index(call.get("index"), position),
        _read_id(call.get("id")),
        mend_text(name) if name else None,
        _read_arguments(fields.get(text_field)),
        "custom" if is_custom else "function",
    )


def _read_index(value: object, position: int | None) -> int | None:
    """Return an index.

    If it is invalid, the position among several calls of a delta is used.
    """
    if isinstance(value, str) and value.isdecimal() and value.isascii():
        value = int(value[:9])
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else position


def _read_id(value: object) -> str | None:
    """Return an id, or None if there is none; then one is generated."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)[:40]
    return mend_text(value) if isinstance(value, str) and value else None


def _read_arguments(value: object) -> str:
    """Return arguments as a text; some servers send the object itself."""
    if isinstance(value, dict):
        return dumps(cast("object", value)).decode()
    if not isinstance(value, str | None):
        raise BrokenAnswerError(f"sent a tool call whose arguments are of type {type(value).__name__}")
    return value or ""
