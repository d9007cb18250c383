"""Decodes the input of a custom tool: a text, which the model writes as `{"input": …}`. Pure.

Models sometimes write this JSON badly: with line breaks, quotes or backslashes that are not
escaped, or without an end. Whatever they write arrives, since a patch or a program with one wrong
character is better than none.
"""

from __future__ import annotations

import json
import re
from typing import Final

__all__ = ["INPUT_FIELD", "CustomInputDecoder", "decode_custom_input", "encode_custom_input"]

INPUT_FIELD: Final = "input"
_BEGINNING: Final = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_BEGINNING_MARKS: Final = ("{", '"input"', ":", '"')
_END: Final = re.compile(r'"\s*\}?\s*\Z')
_ESCAPES: Final = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_PIECE: Final = re.compile(r'[^"\\]+|\\u[0-9a-fA-F]{4}|\\[^u]|\\|"', re.DOTALL)
_PARTIAL_ESCAPE: Final = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


def encode_custom_input(text: str) -> str:
    """Return the arguments of a call with this input."""
    return json.dumps({INPUT_FIELD: text}, ensure_ascii=False)


def decode_custom_input(arguments: str) -> str:
    """Return the input in whole arguments; arguments in another form are the input themselves."""
    decoder = CustomInputDecoder()
    return decoder.decode_piece(arguments) + decoder.decode_rest()


class CustomInputDecoder:
    """Decodes the input while the call is being written."""

    def __init__(self) -> None:
        # True inside of the text, False if the arguments have another form, None while unknown
        self._is_inside: bool | None = None
        self._held = ""  # what cannot be decoded before more has come
        self._high_surrogate = ""

    def decode_piece(self, arguments: str) -> str:
        """Return the text that the next piece of the arguments adds."""
        self._held += arguments
        if self._is_inside is None:
            self._find_beginning()
        if self._is_inside is None:
            return ""
        if self._is_inside:
            return self._decode_held(is_end=False)
        text, self._held = self._held, ""
        return text

    def decode_rest(self) -> str:
        """Return what is left at the end of the call."""
        if self._is_inside:
            return self._decode_held(is_end=True)
        text, self._held = self._held, ""
        return "" if text.strip() == "{}" else text

    def _find_beginning(self) -> None:
        found = _BEGINNING.match(self._held)
        if found is not None:
            self._held, self._is_inside = self._held[found.end() :], True
        elif not _may_become_beginning(self._held):
            self._is_inside = False

    def _decode_held(self, *, is_end: bool) -> str:
        """Decode what is held, except an unfinished escape or a quote that may end the text."""
        texts: list[str] = []
        position = 0
        while position < len(self._held):
            if _END.match(self._held, position) is not None:
                if is_end:
                    position = len(self._held)
                break
            if not is_end and _PARTIAL_ESCAPE.match(self._held, position) is not None:
                break
            found = _PIECE.match(self._held, position)
            piece = self._held[position] if found is None else found[0]
            texts.append(self._decode_json_piece(piece))
            position += len(piece)
        self._held = self._held[position:]
        if is_end:
            texts.append(self._take_high_surrogate())
        return "".join(texts)

    def _decode_json_piece(self, piece: str) -> str:
        if not piece.startswith("\\u") or len(piece) < 6:
            text = _ESCAPES.get(piece[1:], piece) if piece.startswith("\\") else piece
            return self._take_high_surrogate() + text
        character = chr(int(piece[2:], 16))
        if "\udc00" <= character <= "\udfff":
            high, self._high_surrogate = self._high_surrogate, ""
            return _join_surrogates(high, character) if high else _REPLACEMENT
        text = self._take_high_surrogate()
        if "\ud800" <= character <= "\udbff":
            self._high_surrogate = character
            return text
        return text + character

    def _take_high_surrogate(self) -> str:
        """Return U+FFFD if the second half of a surrogate pair did not come, else nothing."""
        high, self._high_surrogate = self._high_surrogate, ""
        return _REPLACEMENT if high else ""


def _join_surrogates(high: str, low: str) -> str:
    return (high + low).encode("utf-16", "surrogatepass").decode("utf-16")


def _may_become_beginning(text: str) -> bool:
    """Return True if `text` may begin `{"input": "…`, or is the empty object."""
    rest = text.lstrip()
    for mark in _BEGINNING_MARKS:
        if not rest.startswith(mark):
            return mark.startswith(rest) or (mark == '"input"' and rest.rstrip() == "}")
        rest = rest[len(mark) :].lstrip()
    return False
