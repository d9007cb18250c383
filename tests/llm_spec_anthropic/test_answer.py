"""Events of messages with something wrong in them: the whole answer or an error, and never a part told as the whole."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import pytest
from llm_spec_anthropic.answer import AnthropicAnswerReader

from llm_spec import Finish, ReasoningDelta, ReasoningDetail, StreamEvent, TextDelta, ToolCallDelta, Usage
from llm_spec.kit.answer_parts import BrokenAnswerError

Json: TypeAlias = dict[str, Any]
Path: TypeAlias = tuple[str, ...]

NO_WORDS: Final = (None, 0, 7, 1.5, math.nan, True, [], [1], {}, {"a": 1}, "")
NO_TEXTS: Final = (0, 7, 1.5, math.nan, True, [], ["4"], {}, {"a": 1})
NO_OBJECTS: Final = (None, *NO_TEXTS[:7], "text")
NO_NUMBERS: Final = (None, -1, 1.5, math.nan, math.inf, 1e308, 10**400, True, "", "text", [], [1], {}, {"a": 1})


def start(index: object, **block: Any) -> Json:
    return {"type": "content_block_start", "index": index, "content_block": block}


def start_call(index: object, **fields: Any) -> Json:
    return start(index, **({"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}} | fields))


def delta(index: object, **piece: Any) -> Json:
    return {"type": "content_block_delta", "index": index, "delta": piece}


def text(index: object, piece: object) -> Json:
    return delta(index, type="text_delta", text=piece)


def arguments(index: object, piece: object) -> Json:
    return delta(index, type="input_json_delta", partial_json=piece)


def stop(index: object) -> Json:
    return {"type": "content_block_stop", "index": index}


def end(reason: object = "end_turn", **fields: Any) -> Json:
    return {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": None}} | fields


BEGIN: Final[Json] = {
    "type": "message_start",
    "message": {"content": [], "usage": {"input_tokens": 3, "output_tokens": 1}},
}
TEXT: Final = (BEGIN, start(0, type="text", text=""), text(0, "4"), text(0, "2."), stop(0), end())
CALL: Final = (BEGIN, start_call(0), arguments(0, '{"x":'), arguments(0, "1}"), stop(0), end("tool_use"))
TWO: Final = (
    *(BEGIN, start(0, type="text", text=""), text(0, "42."), stop(0)),
    *(start_call(1), arguments(1, '{"x":'), arguments(1, "1}"), stop(1), end("tool_use")),
)


def read(events: Sequence[Json]) -> list[StreamEvent]:
    reader = AnthropicAnswerReader()
    return [*(read for event in events for read in reader.read_event(event)), *reader.end()]


def tell(events: Sequence[StreamEvent]) -> tuple[str, list[tuple[str | None, str]], str]:
    """The text, the names and arguments of the calls, and how it ended."""
    finish = events[-1]
    assert isinstance(finish, Finish)
    calls: dict[int, tuple[str | None, str]] = {}
    for event in events:
        if isinstance(event, ToolCallDelta):
            name, before = calls.get(event.index, (event.name, ""))
            calls[event.index] = (name, before + event.arguments)
            assert event.index < len(calls)
    said = "".join(event.text for event in events if isinstance(event, TextDelta))
    return said, list(calls.values()), finish.finish_reason


def change(events: Sequence[Json], number: int, path: Path, value: object) -> list[Json]:
    changed = copy.deepcopy(list(events))
    fields = changed[number]
    for name in path[:-1]:
        fields = fields[name]
    fields[path[-1]] = value
    return changed


def leave_out(events: Sequence[Json], number: int, path: Path) -> list[Json]:
    changed = copy.deepcopy(list(events))
    fields = changed[number]
    for name in path[:-1]:
        fields = fields[name]
    del fields[path[-1]]
    return changed


@pytest.mark.parametrize(
    ("events", "number", "path", "values"),
    [
        (TEXT, 1, ("content_block",), NO_OBJECTS),
        (TEXT, 1, ("content_block", "type"), NO_WORDS),
        (TEXT, 1, ("content_block", "text"), NO_TEXTS),
        (TEXT, 2, ("delta",), NO_OBJECTS),
        (TEXT, 2, ("delta", "type"), NO_WORDS),
        (TEXT, 2, ("delta", "type"), ("input_json_delta",)),
        (TEXT, 2, ("delta", "text"), NO_TEXTS),
        (TEXT, 5, ("delta",), NO_OBJECTS),
        (TEXT, 0, ("message", "content"), ("text", [1], [{"type": "text", "text": "4"}])),
        (CALL, 1, ("content_block",), NO_OBJECTS),
        (CALL, 1, ("content_block", "type"), NO_WORDS),
        (CALL, 1, ("content_block", "type"), ("function",)),  # then nothing is called, but the answer says so
        (CALL, 1, ("content_block", "name"), NO_WORDS),
        (CALL, 2, ("delta",), NO_OBJECTS),
        (CALL, 2, ("delta", "type"), NO_WORDS),
        (CALL, 2, ("delta", "partial_json"), NO_TEXTS),
        *((TEXT, number, ("type",), NO_WORDS) for number in range(len(TEXT))),
        *((CALL, number, ("type",), NO_WORDS) for number in range(len(CALL))),
        (TEXT, 5, ("delta", "stop_reason"), (None, "", 0, "error", "abort", "cancelled")),
        (TWO, 6, ("index",), (0, 2, 7)),
        (CALL, 1, ("type",), ("something_new",)),  # then its arguments are of no call
        (TEXT, 3, ("type",), ("error",)),
    ],
)  # fmt: skip
def test_what_would_shorten_an_answer_is_an_error(
    events: Sequence[Json], number: int, path: Path, values: Sequence[object]
) -> None:
    """Text, arguments and calls are never lost without a word."""
    for value in values:
        with pytest.raises(BrokenAnswerError):
            read(change(events, number, path, value))
    if None in values:
        with pytest.raises(BrokenAnswerError):
            read(leave_out(events, number, path))


@pytest.mark.parametrize(
    ("events", "number", "path", "values"),
    [
        *((TEXT, number, ("index",), NO_NUMBERS) for number in range(1, 5)),
        *((CALL, number, ("index",), NO_NUMBERS) for number in range(1, 5)),
        *((TWO, number, ("index",), NO_NUMBERS) for number in range(1, 8)),
        (TEXT, 2, ("index",), (5,)),  # nothing depends on it
        (CALL, 4, ("index",), (5,)),
        (TEXT, 1, ("content_block", "text"), (None,)),
        (CALL, 1, ("content_block", "input"), (None, [], "", 7, "text", [1], {"y": 2})),  # as arguments follow
        (CALL, 1, ("content_block", "id"), NO_WORDS),
        (TEXT, 0, ("message",), (None, 7, "text", [], {})),
        (TEXT, 0, ("message", "content"), (None, [], "", {})),
        (TEXT, 0, ("message", "usage"), NO_OBJECTS),
        *((TEXT, 0, ("message", "usage", name), (*NO_TEXTS, -1, 10**400, "5")) for name in ("input_tokens", "speed")),
        (TEXT, 0, ("message", "usage", "service_tier"), (*NO_TEXTS, "\ud800")),
        (TEXT, 5, ("delta", "stop_sequence"), (*NO_TEXTS, "\ud800", "text")),
    ],
)  # fmt: skip
def test_what_decides_nothing_is_read_or_left_out(
    events: Sequence[Json], number: int, path: Path, values: Sequence[object]
) -> None:
    """The answer comes as if nothing was wrong with it."""
    for value in values:
        told = read(change(events, number, path, value))
        assert tell(told) == tell(read(events)), value
        finish = told[-1]
        assert isinstance(finish, Finish)
        assert (finish.service_tier, finish.speed, finish.stop_string) in ((None,) * 3, (None, "5", None))
        assert all(isinstance(call_id, str) and call_id for call_id in list_call_ids(told))


def list_call_ids(events: Sequence[StreamEvent]) -> list[str | None]:
    return [event.id for event in events if isinstance(event, ToolCallDelta) and event.name is not None]


def test_ids_that_are_none_are_made_up() -> None:
    """A number is one; the same id for two calls is not, as clients could not tell them apart."""
    events = [BEGIN]
    for index, call_id in enumerate((17, "a", "a", None, {"a": 1})):
        events += [start_call(index, id=call_id), stop(index)]
    ids = list_call_ids(read([*events, end("tool_use")]))
    assert ids[:2] == ["17", "a"]
    assert len(set(ids)) == 5


@pytest.mark.parametrize("value", [7, "text", [1], True])
def test_an_input_that_is_none(value: object) -> None:
    """It is all that there is of the arguments."""
    with pytest.raises(BrokenAnswerError, match="input"):
        read([BEGIN, start_call(0, input=value), stop(0), end("tool_use")])


@pytest.mark.parametrize("closes", [False, True])
def test_blocks_that_are_not_closed(*, closes: bool) -> None:
    """Each call has its arguments, in whichever order they come."""
    ends = [stop(0), stop(1)] if closes else []
    calls = [start_call(0, id="a", input={"x": 1}), start_call(1, id="b"), arguments(1, '{"y":'), arguments(1, "2}")]
    assert tell(read([BEGIN, *calls, *ends, end("tool_use")]))[1] == [("f", '{"x":1}'), ("f", '{"y":2}')]


def test_arguments_that_could_be_of_two_calls() -> None:
    with pytest.raises(BrokenAnswerError, match="not open"):
        read([BEGIN, start_call(0, id="a"), start_call(1, id="b"), arguments(None, "{}"), end("tool_use")])


def test_a_block_whose_number_comes_again() -> None:
    """It ends the one before."""
    events = [BEGIN, start_call(0, id="a"), start_call(0, id="b"), arguments(0, '{"y":2}'), end("tool_use")]
    assert tell(read(events))[1] == [("f", "{}"), ("f", '{"y":2}')]


@pytest.mark.parametrize("kind", ["server_tool_use", "something_new"])
def test_blocks_of_other_kinds(kind: str) -> None:
    """They are passed over with all that is in them, but what says to be text is."""
    block = [start(0, type=kind, id="s", name="web_search", input={}), arguments(0, '{"q": 1}'), text(0, "4"), stop(0)]
    assert tell(read([BEGIN, *block, *TEXT[1:]])) == ("442.", [], "stop")


def test_halves_of_characters() -> None:
    """They are joined, also where they are escapes of arguments; one that stays alone is U+FFFD."""
    thoughts = [delta(0, type="thinking_delta", thinking=half) for half in ("\ud83d", "\ude00", "\ud83d")]
    texts = [start(1, type="text", text="\ud83d"), text(1, "\ude00 \udc00"), text(1, "\ud83d"), stop(1)]
    pieces = [arguments(2, '{"x":"\\ud83d'), arguments(2, '\\ude00 \\ud83d"}')]
    events = [BEGIN, start(0, type="thinking", thinking=""), *thoughts, stop(0), *texts]
    told = read([*events, start_call(2, name="f\ud800", id="\ud800"), *pieces, stop(2), end("tool_use")])
    thought = "".join(event.text for event in told if isinstance(event, ReasoningDelta))
    assert thought == "\U0001f600\ufffd"
    said, ((name, given),), _ = tell(told)
    assert said == "\U0001f600 \ufffd\ufffd"
    assert (name, given) == ("f\ufffd", r'{"x":"\ud83d\ude00 \ufffd"}')
    first_call = next(number for number, event in enumerate(told) if isinstance(event, ToolCallDelta))
    assert not any(isinstance(event, TextDelta) for event in told[first_call:])


def test_arguments_that_are_cut_inside_a_character() -> None:
    """What there is of them comes, with U+FFFD in place of the half."""
    events = [BEGIN, start_call(0), arguments(0, '{"x":"\\ud83d'), end("max_tokens")]
    assert tell(read(events)) == ("", [("f", r'{"x":"\ufffd')], "length")


@pytest.mark.parametrize("value", [*NO_TEXTS, None, "\ud800"])
def test_details_that_cannot_be_read(value: object) -> None:
    """Thinking, its signature and what may not be read of it change no answer."""
    blocks = [
        start(0, type="thinking", thinking=value, signature=value),
        delta(0, type="thinking_delta", thinking=value if value != "\ud800" else None),
        delta(0, type="signature_delta", signature=value),
        stop(0),
        start(1, type="redacted_thinking", data=value),
        stop(1),
    ]
    told = read([BEGIN, *blocks, *TEXT[1:]])
    assert not any(isinstance(event, ReasoningDetail) for event in told)
    assert tell(told) == ("42.", [], "stop")


@pytest.mark.parametrize(
    ("word", "reason", "stopped_by"),
    [
        ("end_turn", "stop", "eos"),
        ("stop_sequence", "stop", "stop_string"),
        ("max_tokens", "length", "max_tokens"),
        ("model_context_window_exceeded", "length", "context_length"),
        ("pause_turn", "length", None),
        ("refusal", "content_filter", "content_filter"),
        ("tool_use", "tool_calls", "tool_calls"),
        ("stop", "stop", None),
        *((word, "length", None) for word in ("something_new", 7, 1.5, math.nan, [1], {"a": 1}, True)),
    ],
)  # fmt: skip
def test_stop_reasons(word: object, reason: str, stopped_by: str | None) -> None:
    """One that nobody knows says that the answer may not be all of it."""
    finish = read([*TEXT[:-1], end(word)])[-1]
    assert isinstance(finish, Finish)
    assert (finish.finish_reason, finish.stopped_by) == (reason, stopped_by)


@pytest.mark.parametrize(
    ("usage", "counted"),
    [
        ({"output_tokens": 9}, Usage(input_tokens=3, output_tokens=9)),
        ({"output_tokens": 9.0}, Usage(input_tokens=3, output_tokens=9)),
        ({}, Usage(input_tokens=3, output_tokens=1)),
        *(({"output_tokens": value}, None) for value in (-1, 1.5, math.nan, 10**400, 2**53 + 1, "9", [9], {}, True)),
        *(({"input_tokens": value}, None) for value in (-1, 1.5, math.nan, 10**400, 2**53 + 1, "9", [9], {}, True)),
        ({"output_tokens": 9, "cache_read_input_tokens": math.nan}, Usage(input_tokens=3, output_tokens=9)),
        ({"output_tokens": 9, "cache_read_input_tokens": 2**53}, None),  # with the rest it is no count
        ({"output_tokens": 9, "output_tokens_details": 7}, Usage(input_tokens=3, output_tokens=9)),
    ],
)  # fmt: skip
def test_counts(usage: Mapping[str, Any], counted: Usage | None) -> None:
    """What is no count leaves the counting to this library."""
    finish = read([*TEXT[:-1], end(usage=usage)])[-1]
    assert isinstance(finish, Finish)
    assert finish.usage == counted
