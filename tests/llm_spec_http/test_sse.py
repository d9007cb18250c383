"""Server-sent events: what the standard says, what servers send, and that blocks do not matter."""

from __future__ import annotations

import itertools
import os
import random
import re
import sys
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llm_spec_http.sse import ServerSentEvent, SseReader

NUM_SPLITS = int(os.environ.get("LLM_SPEC_SPLITS", "20000"))  # LLM_SPEC_SPLITS=1000000: the whole test, some minutes

OPENAI = (
    b'data: {"id":"chatcmpl-9","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"role":"assistant",'
    b'"content":""},"finish_reason":null}]}\n\n'
    b'data: {"id":"chatcmpl-9","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"Hi: you"},'
    b'"finish_reason":null}]}\n\n'
    b'data: {"id":"chatcmpl-9","object":"chat.completion.chunk","choices":[{"index":0,"delta":{},'
    b'"finish_reason":"stop"}]}\n\n'
    b"data: [DONE]\n\n"
)
ANTHROPIC = (
    'event: message_start\ndata: {"type":"message_start","message":{"id":"msg_01","role":"assistant","content":[]}}\n\n'
    'event: ping\ndata: {"type": "ping"}\n\n'
    'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta",'
    '"text":"Grüße, 世界 \u2028 🦉"}}\n\n'
    'event: message_stop\ndata: {"type":"message_stop"}\n\n'
).encode()
KEEP_ALIVES = (
    b"\xef\xbb\xbf: OPENROUTER PROCESSING\n\n: OPENROUTER PROCESSING\r\n\r\n"
    b'retry: 3000\nid: 41\ndata: {"choices":[]}\n\n:\n\nevent: ping\n\n: \rid\ndata\ndata: two\r\rdata: [DONE]\n\n'
)
STREAMS = {
    "openai": OPENAI,
    "openai-crlf": OPENAI.replace(b"\n", b"\r\n"),
    "anthropic": ANTHROPIC,
    "anthropic-crlf": ANTHROPIC.replace(b"\n", b"\r\n"),
    "keep-alives": KEEP_ALIVES,
    "no-final-newline": OPENAI.rstrip(b"\n"),
    "cr-only": ANTHROPIC.replace(b"\n", b"\r"),
    "not-utf-8": b"data: \xe2\x82\ndata: \xff\xc3\n\nid: \xf0\x9f\r\ndata: \xe2\r\n\r\n",
}
PARTS = [b"data", b"event", b"id", b"retry", b"nope", b":", b" ", b"\n", b"\r", b"\r\n", b"\n\n", b"x", b"\0"]
PARTS += ["é".encode(), "🦉".encode(), "\u2028\x85\x0b".encode(), b"\xef\xbb\xbf", b"\xe2\x82", b"data: y\n"]
MESSY_STREAMS = st.lists(st.sampled_from(PARTS), max_size=40).map(b"".join)


def read(blocks: Iterable[bytes]) -> list[ServerSentEvent]:
    reader = SseReader()
    events = [event for block in blocks for event in reader.feed(block)]
    return events + reader.finish()


def data_of(*blocks: bytes) -> list[str]:
    return [event.data for event in read(blocks)]


def split(stream: bytes, cuts: Iterable[int]) -> list[bytes]:
    ends = [0, *sorted(cuts), len(stream)]
    return [stream[start:end] for start, end in itertools.pairwise(ends)]


def read_by_definition(stream: bytes) -> list[ServerSentEvent]:
    """The standard's own steps, on the whole text at once, with the two departures of sse.py."""
    text = stream.decode(errors="replace").removeprefix("\ufeff")
    name, data, last_id = "", list[str](), None
    events: list[ServerSentEvent] = []
    for line in [*re.split("\r\n|\r|\n", text), ""]:
        field, _, value = line.partition(":")
        value = value[1:] if value[:1] == " " else value
        if not line:
            if "\n".join(data):
                events.append(ServerSentEvent(name or "message", "\n".join(data), last_id))
            name, data = "", []
        elif field == "data":
            data.append(value)
        elif field == "event":
            name = value
        elif field == "id" and "\0" not in value:
            last_id = value
    return events


def test_an_openai_stream() -> None:
    """Chunks without names are messages, and the end mark is data like any other."""
    events = read([OPENAI])
    assert len(events) == 4
    assert '"content":"Hi: you"' in events[1].data
    assert events[3] == ServerSentEvent("message", "[DONE]", None)


def test_an_anthropic_stream() -> None:
    """Events carry their names, and text arrives as it was written."""
    events = read([ANTHROPIC])
    assert [event.event for event in events] == ["message_start", "ping", "content_block_delta", "message_stop"]
    assert "Grüße, 世界 \u2028 🦉" in events[2].data


def test_a_stream_of_keep_alives() -> None:
    """Comments and events without data leave only the events that say something."""
    assert read([KEEP_ALIVES]) == [
        ServerSentEvent("message", '{"choices":[]}', "41"),
        ServerSentEvent("message", "\ntwo", ""),
        ServerSentEvent("message", "[DONE]", ""),
    ]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_each_line_end(end: bytes) -> None:
    """LF, CRLF and CR end a line, and two of them an event."""
    assert data_of(b"data: a" + end + b"data: b" + end * 2 + b"data: c" + end * 2) == ["a\nb", "c"]


def test_an_event_is_given_out_with_its_last_byte() -> None:
    """A CR ends the line when it comes; nobody waits to see whether an LF follows."""
    assert SseReader().feed(b"data: a\r\n\r") == [ServerSentEvent("message", "a", None)]


def test_crlf_over_two_blocks_is_one_line_end() -> None:
    """The LF belongs to the CR before it, also after an empty block."""
    assert data_of(b"data: a\r", b"", b"\ndata: b\r", b"\n", b"\r", b"\n") == ["a\nb"]


def test_lf_after_crlf_is_a_second_line_end() -> None:
    """Only one LF belongs to a CR."""
    reader = SseReader()
    assert reader.feed(b"data: a\r") + reader.feed(b"\n") == []
    assert reader.feed(b"\n") == [ServerSentEvent("message", "a", None)]


def test_a_lone_cr_at_the_end_ends_a_line() -> None:
    """The stream's last CR is no part of the data."""
    assert data_of(b"data: a\r") == ["a"]


def test_other_separators_are_text() -> None:
    """U+2028, U+0085, vertical tab and form feed end no line."""
    text = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg"
    assert data_of(f"data: {text}\n\n".encode()) == [text]


def test_a_character_over_two_blocks() -> None:
    """A character is whole, wherever its bytes were cut."""
    owl = "🦉".encode()
    assert data_of(b"data: " + owl[:1], owl[1:3], owl[3:] + b"\n\n") == ["🦉"]


def test_bytes_that_are_not_utf_8() -> None:
    """They become the replacement character, and the line end behind them stays one."""
    assert data_of(b"data: a\xff\xe2\x82\n\ndata: b\n\n") == ["a\ufffd\ufffd", "b"]


def test_a_byte_order_mark_at_the_start() -> None:
    """It is dropped, also when it comes in pieces."""
    assert data_of(b"\xef", b"\xbb\xbfda", b"ta: a\n\n") == ["a"]


def test_a_byte_order_mark_later_is_part_of_the_name() -> None:
    """Only the first is dropped."""
    assert data_of(b"\n\xef\xbb\xbfdata: a\n\ndata: b\n\n") == ["b"]


def test_comments() -> None:
    """A line that starts with a colon says nothing, also inside an event."""
    assert data_of(b": hello\n\n:\ndata: a\n:data: no\ndata: b\n\n") == ["a\nb"]


def test_one_space_after_the_colon_is_dropped() -> None:
    """One and no more; none is needed."""
    assert data_of(b"data:a\ndata: b\ndata:  c\ndata:\td\n\n") == ["a\nb\n c\n\td"]


def test_a_field_without_a_colon() -> None:
    """Its value is empty."""
    assert data_of(b"data\ndata: a\ndata\n\n") == ["\na\n"]


def test_unknown_fields() -> None:
    """They are ignored, and so are names in capitals or with a space, and retry."""
    assert data_of(b"foo: a\nDATA: b\n data: c\ndata : d\nretry: 10\nbar\ndata: e\n\n") == ["e"]


def test_the_last_event_name_counts_for_one_event() -> None:
    """The next event is a message again, and an empty name is none."""
    stream = b"event: a\nevent: b\ndata: 1\n\ndata: 2\n\nevent: c\nevent\ndata: 3\n\n"
    assert [event.event for event in read([stream])] == ["b", "message", "message"]


@pytest.mark.parametrize("empty", [b"\n\n\n", b"event: ping\n\n", b"event: ping\ndata:\n\n", b"data\n\n"])
def test_an_event_without_data_is_dropped(empty: bytes) -> None:
    """And its name with it."""
    assert read([empty + b"data: a\n\n"]) == [ServerSentEvent("message", "a", None)]


def test_an_id_stays_until_the_next() -> None:
    """As the standard's last event id; an event without data sets it too."""
    stream = b"data: 0\n\nid: 1\ndata: a\n\ndata: b\n\nid: 2\n\ndata: c\n\nid\ndata: d\n\n"
    assert [event.id for event in read([stream])] == [None, "1", "1", "2", ""]


def test_an_id_with_nul_is_ignored() -> None:
    """The id before it stays."""
    assert read([b"id: 1\nid: 2\0\ndata: a\n\n"]) == [ServerSentEvent("message", "a", "1")]


@pytest.mark.parametrize("end", [b"", b"\n", b"\r", b"\r\n"])
def test_a_last_event_without_its_blank_line(end: bytes) -> None:
    """It is given out at the end of the stream, once."""
    reader = SseReader()
    assert reader.feed(b"event: x\ndata: a" + end) == []
    assert reader.finish() == [ServerSentEvent("x", "a", None)]
    assert reader.finish() == []


@pytest.mark.parametrize("stream", [b"", b"\r", b"\xef\xbb", b"event: x", b"data: \n", b": bye"])
def test_an_end_without_data(stream: bytes) -> None:
    """Nothing is given out for it."""
    assert read([stream]) == []


@pytest.mark.parametrize("stream", [b"data: 12345", b"data: 1234567890\n\n", b": 1234567890\n", b"nope" * 9])
def test_a_line_over_the_limit(stream: bytes) -> None:
    """It raises in one line, without waiting for the line's end."""
    with pytest.raises(ValueError, match=r"^the event stream holds a longer line than max_event_bytes=10$"):
        SseReader(max_event_bytes=10).feed(stream)


def test_a_line_that_grows_over_the_limit() -> None:
    """The limit is on the line, not on the block."""
    reader = SseReader(max_event_bytes=10)
    assert reader.feed(b"data: 1234") == []
    with pytest.raises(ValueError, match="longer line"):
        reader.feed(b"5")


def test_many_short_lines_over_the_limit() -> None:
    """An event's data is bounded, however short its lines, newlines included."""
    reader = SseReader(max_event_bytes=10)
    assert reader.feed(b"data\n" * 11) == []
    with pytest.raises(ValueError, match="longer event than max_event_bytes=10"):
        reader.feed(b"data\n")


def test_the_limit_is_for_one_event() -> None:
    """A stream may be as long as it likes, and so may its comments."""
    reader = SseReader(max_event_bytes=10)
    events = reader.feed(b": waiting\ndata: 1234\ndata: 5678\n: waiting\n\n" * 100)
    assert [event.data for event in events] == ["1234\n5678"] * 100


def test_cut_events_cost_no_more_than_whole_ones() -> None:
    """A block that begins and ends inside an event is not read line by line: it takes about as many calls."""
    event = b'data: {"choices": [{"delta": {"content": "hello "}}]}\n\n'
    stream, size = event * 1000, 40 * len(event)
    whole = [stream[at : at + size] for at in range(0, len(stream), size)]
    cut = [stream[:7], *(stream[at : at + size] for at in range(7, len(stream), size))]
    assert count_calls(cut) < 1.3 * count_calls(whole)


def count_calls(blocks: Sequence[bytes]) -> int:
    """Calls of Python functions to read a stream."""
    calls: list[str] = []
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        read(blocks)
    finally:
        sys.setprofile(None)
    return len(calls)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_that_makes_no_sense(limit: int) -> None:
    """The error names the option, the value and the range."""
    with pytest.raises(ValueError, match=f"max_event_bytes is {limit}; it must be at least 1"):
        SseReader(max_event_bytes=limit)


@pytest.mark.parametrize("name", STREAMS)
def test_recorded_streams_read_as_defined(name: str) -> None:
    """Whole, and one byte at a time."""
    stream = STREAMS[name]
    expected = read_by_definition(stream)
    assert expected
    assert read([stream]) == expected
    assert read(split(stream, range(len(stream)))) == expected


@pytest.mark.parametrize("name", STREAMS)
def test_recorded_streams_do_not_depend_on_the_blocks(name: str) -> None:
    """Random cuts, few and many, give the events of the whole stream."""
    stream = STREAMS[name]
    expected = read([stream])
    rng = random.Random(name)  # noqa: S311 - picks test cases
    for _ in range(NUM_SPLITS // len(STREAMS)):
        cuts = [rng.randint(0, len(stream)) for _ in range(rng.choice((1, 2, 5, 20, 80)))]
        assert read(split(stream, cuts)) == expected, cuts


@given(MESSY_STREAMS, st.lists(st.integers(0, 100), max_size=10))
def test_messy_streams_read_as_defined(stream: bytes, cuts: list[int]) -> None:
    """Any mixture of fields, line ends and broken text reads as the standard's steps read it, in any blocks."""
    blocks = split(stream, [min(cut, len(stream)) for cut in cuts])
    assert read(blocks) == read([stream]) == read_by_definition(stream)


@pytest.mark.parametrize("name", sorted(STREAMS.keys() - {"not-utf-8"}))
def test_recorded_streams_read_as_openai_reads_them(name: str) -> None:
    """openai-python gives the same events, but for a mark at the start, empty events and a last event left open."""
    streaming = pytest.importorskip("openai._streaming")
    stream = STREAMS[name].removeprefix(b"\xef\xbb\xbf")
    theirs = [
        ServerSentEvent(event.event or "message", event.data, event.id)
        for event in streaming.SSEDecoder().iter_bytes(iter([stream]))
        if event.data
    ]
    reader = SseReader()
    assert theirs == reader.feed(stream)
