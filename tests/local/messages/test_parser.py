"""Answers as models write them, to text, reasoning and calls: in one piece, and cut at random."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any, NamedTuple

import pytest

from llm_spec.contract.events import ReasoningDelta, StreamEvent, TextDelta, ToolCallDelta
from llm_spec.contract.formats import FORMATS, MessageFormat, ReasoningMarks
from llm_spec.local.messages.parser import MessageParser

NAMES = frozenset({"get_weather", "write_file", "now"})
THINK = ReasoningMarks("<think>", "</think>")
BY_NAME = {row.name: row for row in FORMATS}


class Message(NamedTuple):
    text: str
    calls: list[tuple[str, str]]
    reasoning: str


def open_parser(message_format: MessageFormat | None, **options: Any) -> MessageParser:
    options = {"is_reasoning": False, "make_call_id": "call_{}".format, **options}
    return MessageParser(message_format, options.pop("names", NAMES), options.pop("reasoning", THINK), **options)


def collect(events: list[StreamEvent]) -> Message:
    calls = [event for event in events if isinstance(event, ToolCallDelta)]
    assert [call.index for call in calls] == list(range(len(calls)))
    assert [call.id for call in calls] == [f"call_{index}" for index in range(len(calls))]
    return Message(
        "".join(event.text for event in events if isinstance(event, TextDelta)),
        [(call.name or "", call.arguments) for call in calls],
        "".join(event.text for event in events if isinstance(event, ReasoningDelta)),
    )


def parse(pieces: list[str], message_format: MessageFormat | None, **options: Any) -> Message:
    parser = open_parser(message_format, **options)
    events = [event for piece in pieces for event in parser.push(TextDelta(piece))]
    return collect([*events, *parser.flush()])


def cut(text: str, rng: random.Random) -> list[str]:
    places = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(8)))
    return [text[a:b] for a, b in pairwise([0, *places, len(text)])]


WEATHER = '{"city": "Zürich"}'
NESTED = '{"path": "a\\"b.py", "lines": [[1, {"x": "]}"}], "</tool_call>"], "text": "{\\n"}'
ANSWERS = [
    ("hermes", f'<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>', "", 1),
    (
        "hermes",
        f'Let me see.\n<tool_call>{{"arguments":{WEATHER},"name":"get_weather"}}</tool_call>\n',
        "Let me see.",
        1,
    ),
    (
        "hermes",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>',
        "",
        2,
    ),
    ("llama3", f'{{"name": "get_weather", "parameters": {WEATHER}}}', "", 1),
    ("llama3", f'<|python_tag|>{{"name": "get_weather", "parameters": {WEATHER}}}', "", 1),
    (
        "llama3",
        f'{{"name": "get_weather", "parameters": {WEATHER}}}; {{"name": "get_weather", "parameters": {WEATHER}}}',
        "",
        2,
    ),
    ("mistral_list", f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {WEATHER}, "id": "a"}}]', "", 1),
    (
        "mistral_list",
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {WEATHER}}}, '
        f'{{"name": "get_weather", "arguments": {WEATHER}}}]',
        "",
        2,
    ),
    ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{WEATHER}", "", 1),
    (
        "mistral",
        f"Yes.[TOOL_CALLS]get_weather[CALL_ID]a1[ARGS]{WEATHER}[TOOL_CALLS]get_weather[ARGS]{WEATHER}",
        "Yes.",
        2,
    ),
]


@pytest.mark.parametrize(("name", "answer", "text", "num_calls"), ANSWERS)
def test_calls_are_read_however_the_text_is_cut(name: str, answer: str, text: str, num_calls: int) -> None:
    """Arguments stay as the model wrote them; what surrounds calls is not text."""
    expected = Message(text, [("get_weather", WEATHER)] * num_calls, "")
    assert parse([answer], BY_NAME[name]) == expected
    assert parse([*answer], BY_NAME[name]) == expected
    rng = random.Random(answer)  # noqa: S311 - cases, no secrets
    for _ in range(50):
        assert parse(cut(answer, rng), BY_NAME[name]) == expected


def test_marks_within_a_text_of_the_arguments_end_nothing() -> None:
    answer = f'<tool_call>\n{{"name": "write_file", "arguments": {NESTED}}}\n</tool_call>'
    assert parse([*answer], BY_NAME["hermes"]).calls == [("write_file", NESTED)]


@pytest.mark.parametrize("name", ["functiongemma", "gemma4"])
def test_fields_without_quotes_become_json(name: str) -> None:
    row = BY_NAME[name]
    mark = row.text_mark
    fields = f'path:{mark}a {{b}}, c:d.py{mark},lines:[1,2.5,{{ok:true,none:null}}],text:{mark}"x"\n{mark}'
    body = f"call:write_file{{{fields}}}"
    answer = f"{row.call_open}{body}{row.call_close}"
    for pieces in ([answer], [*answer]):
        [(tool, arguments)] = parse(pieces, row).calls
        assert tool == "write_file"
        assert json.loads(arguments) == {
            "path": "a {b}, c:d.py",
            "lines": [1, 2.5, {"ok": True, "none": None}],
            "text": '"x"\n',
        }


@pytest.mark.parametrize(
    "answer",
    [
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"\n</tool_call>',
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome}}\n</tool_call>',
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ro',
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": 01}}\n</tool_call>',
        '<tool_call>\n{"name": "get_weather", "arguments": ["Rome"]}\n</tool_call>',
        '<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": 7, "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"arguments": {}}\n</tool_call>',
        "<tool_call>\nget_weather\n</tool_call>",
        "<tool_call>\n[]\n</tool_call>",
        "<tool_call>\n[5]\n</tool_call>",
        "<tool_call>\n5\n</tool_call>",
        '<tool_call>\n{"function": 5}\n</tool_call>',
        "<tool_call>" + "[" * 200 + "]" * 200 + "</tool_call>",
        '<tool_call>\n{"name": "get_weather"}}\n</tool_call>',
        "a < b, <tool",
        "<tool_call>",
        "\n \n",
    ],
)
def test_what_is_not_a_call_is_text_to_the_letter(answer: str) -> None:
    """Broken JSON, an unknown tool, a call that is cut off."""
    rng = random.Random(answer)  # noqa: S311 - cases, no secrets
    for pieces in ([answer], [*answer], *(cut(answer, rng) for _ in range(20))):
        assert parse(pieces, BY_NAME["hermes"]) == Message(answer, [], "")


def test_a_call_may_follow_a_broken_one() -> None:
    answer = (
        f'<tool_call>{{"name": }}</tool_call>\n<tool_call>{{"name": "get_weather", "arguments": {WEATHER}}}</tool_call>'
    )
    assert parse([*answer], BY_NAME["hermes"]) == Message(
        '<tool_call>{"name": }</tool_call>', [("get_weather", WEATHER)], ""
    )


def test_arguments_may_be_left_out_or_be_a_text() -> None:
    answer = '<tool_call>{"name": "now"}</tool_call><tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>'
    assert parse([answer], BY_NAME["hermes"]).calls == [("now", "{}"), ("now", '{"a": 1}')]


@pytest.mark.parametrize("arguments", ["null", '"null"', '""', '" "', '"{}"', "{}", " null "])
@pytest.mark.parametrize("key", ["arguments", "parameters"])
def test_no_arguments_are_an_empty_object(key: str, arguments: str) -> None:
    """However a model says that there are none."""
    body = f'{{"name": "now", "{key}": {arguments}}}'
    for name, answer in {
        "hermes": f"<tool_call>{body}</tool_call>",
        "mistral_list": f"[TOOL_CALLS] [{body}]",
        "llama3": body,
    }.items():
        assert parse([answer], BY_NAME[name]).calls == [("now", "{}")]


UNCLOSED = {
    "hermes": ('<tool_call>\n{"name": "get_weather", "arguments": {"a": 1}}', '{"a": 1}'),
    "gemma4": ('<|tool_call>call:get_weather{a:<|"|>x}<|"|>}', '{"a":"x}"}'),
    "functiongemma": ("<start_function_call>call:get_weather{a:1}", '{"a":1}'),
}


@pytest.mark.parametrize("end", ["", "\n", " \n", "partial"])
@pytest.mark.parametrize("row", FORMATS, ids=lambda row: row.name)
def test_a_call_may_lack_the_mark_behind_it(row: MessageFormat, end: str) -> None:
    """At the end of an answer and before the next call; not where a limit cut the answer off."""
    if not row.call_close:
        pytest.skip("a call of this format ends with its body")
    body, arguments = UNCLOSED[row.name]
    call = ("get_weather", arguments)
    answer = body + (row.call_close[:3] if end == "partial" else end)
    rng = random.Random(answer)  # noqa: S311 - cases, no secrets
    for pieces in ([answer], [*answer], *(cut(answer, rng) for _ in range(20))):
        assert parse(pieces, row) == Message("", [call], "")
        parser = open_parser(row)
        events = [event for piece in pieces for event in parser.push(TextDelta(piece))]
        assert collect([*events, *parser.flush(is_cut_off=True)]) == Message(answer, [], "")
    if end != "partial":
        several = f"See. {answer}{answer}{body}{row.call_close}"
        for pieces in ([several], [*several], *(cut(several, rng) for _ in range(20))):
            assert parse(pieces, row) == Message("See.", [call] * 3, "")


@pytest.mark.parametrize("is_cut_off", [False, True])
@pytest.mark.parametrize("row", FORMATS, ids=lambda row: row.name)
def test_a_call_that_is_not_whole_is_text(row: MessageFormat, is_cut_off: bool) -> None:
    """Wherever its body is cut, whoever cut it."""
    bodies = {
        "json": f'{{"name": "get_weather", "{row.arguments_key}": {WEATHER}}}',
        "named_json": f"get_weather[ARGS]{WEATHER}",
        "named_fields": f"call:get_weather{{city:{row.text_mark}Zürich{row.text_mark}}}",
    }
    answer = row.call_open + bodies[row.body]
    for length in range(len(row.call_open), len(answer)):
        parser = open_parser(row)
        events = parser.push(TextDelta(answer[:length]))
        assert collect([*events, *parser.flush(is_cut_off=is_cut_off)]) == Message(answer[:length], [], "")


def test_json_in_the_middle_of_an_answer_is_text_where_calls_have_no_mark() -> None:
    answer = f'Such as {{"name": "get_weather", "parameters": {WEATHER}}}'
    assert parse([*answer], BY_NAME["llama3"]) == Message(answer, [], "")
    answer = '{"name": "Ada", "parameters": {}}'
    assert parse([*answer], BY_NAME["llama3"]) == Message(answer, [], "")


@pytest.mark.parametrize("is_opened", [False, True])
def test_reasoning_is_what_stands_between_its_marks(is_opened: bool) -> None:
    answer = "The city is Rome.\n</tool_call> Good.\n</think>\n\n<think> is a mark."
    expected = Message("<think> is a mark.", [], "The city is Rome.\n</tool_call> Good.")
    if not is_opened:
        answer = "\n<think>\n" + answer
    rng = random.Random(1)  # noqa: S311 - cases, no secrets
    for pieces in ([answer], [*answer], *(cut(answer, rng) for _ in range(50))):
        assert parse(pieces, BY_NAME["hermes"], is_reasoning=is_opened) == expected
        assert parse(pieces, None, is_reasoning=is_opened) == expected


def test_a_call_may_follow_reasoning_and_reasoning_may_be_cut_off() -> None:
    answer = f'<think>\nRome.\n</think>\n\n<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>'
    assert parse([*answer], BY_NAME["hermes"]) == Message("", [("get_weather", WEATHER)], "Rome.")
    assert parse([*"<think>\nRome is </thi"], None) == Message("", [], "Rome is </thi")


def test_without_tools_calls_are_text() -> None:
    answer = f'<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>'
    assert parse([answer], BY_NAME["hermes"], names=frozenset()) == Message(answer, [], "")


def test_the_answer_is_over_after_the_calls_that_it_may_have() -> None:
    call = f'<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>\n'
    parser = open_parser(BY_NAME["hermes"], max_calls=1)
    events = parser.push(TextDelta(call))
    assert parser.is_over
    events += parser.push(TextDelta(call))
    assert collect([*events, *parser.flush()]).calls == [("get_weather", WEATHER)]


def test_text_keeps_where_it_came_from() -> None:
    parser = open_parser(BY_NAME["hermes"])
    events = [*parser.push(TextDelta("a <to", "accepted")), *parser.push(TextDelta("ol b", "bonus"))]
    assert [*events, *parser.flush()] == [
        TextDelta("a", "accepted"),
        TextDelta(" <to", "accepted"),
        TextDelta("ol b", "bonus"),
    ]


@pytest.mark.parametrize("row", FORMATS, ids=lambda row: row.name)
def test_whatever_a_model_writes_nothing_is_lost_and_cuts_do_not_matter(row: MessageFormat) -> None:
    """Texts put together of pieces of marks, calls and JSON at random."""
    rng = random.Random(row.name)  # noqa: S311 - cases, no secrets
    parts = [
        row.call_open,
        row.call_close,
        row.text_mark,
        "call:now",
        "now[ARGS]",
        "{",
        "}",
        "[",
        "]",
        '"',
        ",",
        ":",
        "\\",
    ]
    parts += ['{"name": "now", "arguments": {}}', "<think>", "</think>", "\n", " ", "; ", "é", "name"]
    for _ in range(1500):
        text = "".join(rng.choice(parts) for _ in range(rng.randrange(14)))
        whole = parse([text], row)
        assert parse(cut(text, rng), row) == whole, text
        assert parse([*text], row) == whole, text
        if not whole.calls and "<think>" not in text:
            assert whole.text == text
