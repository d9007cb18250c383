"""Joins halves of characters (lone surrogates), or replaces them by U+FFFD. Pure.

JSON can express them, UTF-8 cannot. A server that cuts its answer between the two halves of a
character sends each in a chunk of its own. A client cannot encode a lone half, and `llm-spec serve`
refuses it when the client sends it back.
"""

from __future__ import annotations

import re
from typing import Any, Final, cast

__all__ = ["EscapeMender", "SurrogateJoiner", "is_encodable", "mend_escapes", "mend_text", "mend_value"]

_HIGH_ESCAPE: Final = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
_LOW_ESCAPE: Final = r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_ESCAPE: Final = re.compile(rf"{_HIGH_ESCAPE}{_LOW_ESCAPE}|(?P<lone>{_HIGH_ESCAPE}|{_LOW_ESCAPE})|\\.", re.DOTALL)
# also an escape that is cut off
_ANY_ESCAPE: Final = re.compile(r"\\(?:u[0-9a-fA-F]{0,4}|.|\Z)", re.DOTALL)
_FIRST_HALF: Final = re.compile(_HIGH_ESCAPE)
_ESCAPE_LENGTH: Final = len("\\ud83d")


def is_encodable(text: str) -> bool:
    """True if a text has no half of a character."""
    if text.isascii() or text.isprintable():  # False for a half; a fifth of encoding's cost
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def mend_text(text: str) -> str:
    """Join adjacent halves in a text, and replace lone ones by U+FFFD."""
    return text if is_encodable(text) else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def mend_value(value: Any) -> Any:
    """Mend the texts and names of a JSON value."""
    if isinstance(value, str):
        return mend_text(value)
    if isinstance(value, dict):
        return {mend_text(str(name)): mend_value(of) for name, of in cast("dict[str, Any]", value).items()}
    return list(map(mend_value, cast("list[Any]", value))) if isinstance(value, list | tuple) else value


def mend_escapes(text: str) -> str:
    """Mend the escapes of a JSON text."""
    return _ESCAPE.sub(lambda found: r"\ufffd" if found["lone"] else found[0], text) if "\\" in text else text


class SurrogateJoiner:
    """Mends one text that comes in pieces.

    A first half at the end of a piece waits for the next piece.
    """

    def __init__(self) -> None:
        self.held = ""

    def push(self, text: str) -> str:
        """Add a piece; return the part that can be passed on."""
        if not self.held and is_encodable(text):
            return text
        text, self.held = self.held + text, ""
        if "\ud800" <= text[-1:] <= "\udbff":
            text, self.held = text[:-1], text[-1]
        return mend_text(text)

    def flush(self) -> str:
        """Return the held text, at the end."""
        text, self.held = mend_text(self.held), ""
        return text


class EscapeMender:
    r"""Mends halves written as escapes (`\ud83d`) in a JSON text that comes in pieces.

    Tool calls' arguments come in this way.
    """

    def __init__(self) -> None:
        self._joiner = SurrogateJoiner()
        self._held = ""

    def push(self, text: str) -> str:
        """Add a piece; return the part that can be passed on."""
        text = self._joiner.push(text)
        if not self._held and "\\" not in text:
            return text
        text = self._held + text
        found = _find_unfinished_escape(text)
        self._held, text = text[found:], text[:found]
        return mend_escapes(text)

    def flush(self) -> str:
        """Return the held text, at the end."""
        text, self._held = self._held + self._joiner.flush(), ""
        return mend_escapes(text)


def _find_unfinished_escape(text: str) -> int:
    """Return the start of the last escape, or of its pair, if more of it may come.

    Otherwise return the end of the text.
    """
    first_half = (-1, -1)
    for match in _ANY_ESCAPE.finditer(text):
        start = first_half[0] if match.start() == first_half[1] else match.start()
        if _FIRST_HALF.fullmatch(match[0]):
            first_half = match.span()
            continue
        first_half = (-1, -1)
        is_cut_off = match[0] == "\\" or (match[0][1] == "u" and len(match[0]) < _ESCAPE_LENGTH)
        if is_cut_off and match.end() == len(text):
            return start
    return first_half[0] if first_half[1] == len(text) else len(text)
