"""Unpacks request bodies piece by piece, since a few bytes may stand for gigabytes."""

from __future__ import annotations

import zlib
from typing import Final

from llm_spec.server.problems import HttpProblem

__all__ = ["BodyUnpacker", "find_content_encoding"]

_GZIP_WBITS: Final = 16 + zlib.MAX_WBITS
_KNOWN: Final = ("gzip", "deflate")
_PIECE_BYTES: Final = 256 * 1024  # unpacked in about a millisecond
# Given to zlib at a time, because it copies the rest of them at the end of a member
_WINDOW_BYTES: Final = 64 * 1024
# A body may hold several gzip files; each can cost as much as a whole window
_MAX_MEMBERS: Final = 1000
_DEFLATE_METHOD: Final = 8  # half of a zlib header's first byte; some clients omit the header


def find_content_encoding(header: str | None) -> str | None:
    """Return a body's encoding, or None if it has none; raises HttpProblem if it is unsupported."""
    encoding = (header or "identity").strip().lower()
    if encoding == "identity":
        return None
    if encoding in _KNOWN:
        return encoding
    message = f"Content-Encoding is {encoding[:40]!r}; send the body as it is, or as {' or '.join(_KNOWN)}"
    raise HttpProblem(415, message, code="unsupported_content_encoding")


class BodyUnpacker:
    """Unpacks a body."""

    def __init__(self, encoding: str, packed: bytes | bytearray) -> None:
        is_bare = encoding == "deflate" and packed[:1] != b"" and packed[0] & 0xF != _DEFLATE_METHOD
        self._wbits = _GZIP_WBITS if encoding == "gzip" else -zlib.MAX_WBITS if is_bare else zlib.MAX_WBITS
        self._packed = memoryview(packed)
        self._position = 0
        self._num_members = 1
        self._member = zlib.decompressobj(self._wbits)

    def read_piece(self) -> bytes:
        """Return the next piece, empty at the end; raises ValueError if the body is not valid."""
        while not (self._member.eof and self._position == len(self._packed)):
            if self._member.eof:
                self._begin_next_member()
            window = self._packed[self._position : self._position + _WINDOW_BYTES]
            try:
                piece = self._member.decompress(window, _PIECE_BYTES)
            except zlib.error as error:
                raise ValueError(str(error)) from None
            self._position += len(window) - len(self._member.unconsumed_tail) - len(self._member.unused_data)
            if piece:
                return piece
            if not window and not self._member.eof:
                raise ValueError("its end is missing")
        return b""

    def _begin_next_member(self) -> None:
        self._num_members += 1
        if self._num_members > _MAX_MEMBERS:
            raise ValueError(f"it has more than {_MAX_MEMBERS} parts")
        self._member = zlib.decompressobj(self._wbits)
