"""A parser for server-sent events, from bytes to values, as WHATWG HTML 9.2.6 defines it. No I/O.

https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation

The stream is cut into lines as bytes and decoded afterwards. In UTF-8 no byte of a longer character
is a CR or LF. So a character that is split over two blocks is whole again when its line is.
`bytes.splitlines` cuts at exactly the three line ends of the standard; `str.splitlines` would also
cut at U+2028, which JSON may contain.

The parser departs from the standard in three ways, because servers do:

- An event at the end of the stream counts without its blank line (`SseReader.finish`).
- An event with empty data (`data:` alone, sent to keep a connection open) is dropped, like an event
  without data.
- A field named `error` is the data of an event with that name.
"""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from typing import Final, NamedTuple

__all__ = ["ServerSentEvent", "SseReader"]

_DATA: Final = b"data: "


class ServerSentEvent(NamedTuple):
    """One event: its name ("message" by default), its data, and the stream's last id so far."""

    event: str
    data: str
    id: str | None


class SseReader:
    """Reads one event stream, in blocks of any size.

    `max_event_bytes` limits a line and the data of an event. A longer one raises ValueError, and
    the reader cannot be used afterwards. Bytes that are not UTF-8 become U+FFFD.
    """

    def __init__(self, *, max_event_bytes: int = 32 * 1024 * 1024) -> None:
        if max_event_bytes < 1:
            raise ValueError(f"max_event_bytes is {max_event_bytes}; it must be at least 1")
        self._max_event_bytes = max_event_bytes
        self._at_start = True
        # The last block ended in CR: an LF at the start of the next one belongs to that line end.
        self._after_cr = False
        self._partial = bytearray()  # a line without its end
        self._data: list[bytes] = []  # the event's lines of data
        self._num_data_bytes = 0  # of those lines, each with an LF
        self._event = b""
        self._id: str | None = None

    def feed(self, block: bytes) -> list[ServerSentEvent]:
        """Return the events that `block` completes; raises ValueError if one is too long."""
        values, rest = self._read_whole_events(block)
        return [ServerSentEvent("message", value, self._id) for value in values] + self._read_block(rest)

    def feed_data(self, block: bytes) -> list[str]:
        """Return the data of the events that `block` completes, as JSON; raises as `feed`.

        The data of an event named `error` is an object with the key `error`.
        """
        values, rest = self._read_whole_events(block)
        return values + list(map(_get_data, self._read_block(rest))) if rest else values

    def finish_data(self) -> list[str]:
        """Return the data of the last event; see `finish`."""
        return list(map(_get_data, self.finish()))

    def finish(self) -> list[ServerSentEvent]:
        """Return the last event at the end of the stream, if it has data but no closing blank line.

        The standard would drop it, but servers leave out the last newline. A broken connection
        looks the same, so the data of this event may be cut short.
        """
        last_line = bytes(self._partial)
        self._partial.clear()
        return self._read_lines([last_line, b""] if last_line else [b""])

    def _read_whole_events(self, block: bytes) -> tuple[list[str], bytes]:
        """Return the data of the events that a block completes, and the rest of the block.

        This covers events with a single line of data, which servers nearly always send. Reading
        them line by line takes four times as long. If the block holds anything else, all of it is
        the rest.
        """
        if self._data or self._event or self._after_cr:
            return [], block
        end = block.rfind(b"\n\n") + 2
        whole = bytes(self._partial) + block[:end] if end > 1 else b""
        if not whole.startswith(_DATA) or b"\r" in whole or len(whole) > self._max_event_bytes:
            return [], block
        values = whole[len(_DATA) : -2].split(b"\n\n" + _DATA)
        if whole.count(b"\n") != 2 * len(values):
            return [], block
        self._partial.clear()
        self._at_start = False
        return [value.decode(errors="replace") for value in values if value], block[end:]

    def _read_block(self, block: bytes) -> list[ServerSentEvent]:
        """Return the events that a block completes, reading it line by line."""
        if not block:
            return []
        if self._after_cr:
            block = block.removeprefix(b"\n")
        self._after_cr = block.endswith(b"\r")
        lines = block.splitlines()
        rest = b"" if block.endswith((b"\n", b"\r")) or not lines else lines.pop()
        if lines and self._partial:
            lines[0] = bytes(self._partial) + lines[0]
            self._partial.clear()
        events = self._read_lines(lines)
        self._partial += rest
        if len(self._partial) > self._max_event_bytes:
            raise self._build_too_long_error("line")
        return events

    def _read_lines(self, lines: list[bytes]) -> list[ServerSentEvent]:
        if self._at_start and lines:
            self._at_start = False
            lines[0] = lines[0].removeprefix(BOM_UTF8)
        events: list[ServerSentEvent] = []
        for line in lines:
            if line:
                self._read_field(line)
            elif self._data:
                if self._num_data_bytes > 1:
                    name = self._event.decode(errors="replace") if self._event else "message"
                    data = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
                    events.append(ServerSentEvent(name, data.decode(errors="replace"), self._id))
                self._data.clear()
                self._num_data_bytes, self._event = 0, b""
            else:
                self._event = b""
        return events

    def _read_field(self, line: bytes) -> None:
        if len(line) > self._max_event_bytes:
            raise self._build_too_long_error("line")
        name, _, value = line.partition(b":")  # a comment is a field without a name
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
            self._num_data_bytes += len(value) + 1
            if self._num_data_bytes > self._max_event_bytes + 1:
                raise self._build_too_long_error("event")
        elif name == b"event":
            self._event = value
        elif name == b"error" and value:
            self._read_field(b"data: " + value)
            self._event = name
        elif name == b"id" and b"\0" not in value:
            self._id = value.decode(errors="replace")

    def _build_too_long_error(self, what: str) -> ValueError:
        return ValueError(f"the event stream holds a longer {what} than max_event_bytes={self._max_event_bytes}")


def _get_data(event: ServerSentEvent) -> str:
    if event.event != "error":
        return event.data
    try:
        error: object = json.loads(event.data)
    except ValueError:
        error = event.data
    has_name = isinstance(error, dict) and "error" in error
    return event.data if has_name else json.dumps({"error": error or "no reason"})
