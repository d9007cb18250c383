"""Which calls a grammar of tools lets a model write, where marks are control tokens and where they are text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from support.space_tokenizers import make_tokenizer
from tokenizers import AddedToken, Tokenizer

from llm_spec.contract.events import TextDelta, ToolCallDelta
from llm_spec.contract.formats import FORMATS, MessageFormat, ReasoningMarks, list_format_marks
from llm_spec.contract.request import ChatRequest
from llm_spec.contract.tools import parse_tool_use
from llm_spec.local.messages.grammar import write_tool_grammar
from llm_spec.local.messages.parser import MessageParser

llguidance = pytest.importorskip("llguidance")
BY_NAME = {row.name: row for row in FORMATS}
FIELD_FORMATS = [row for row in FORMATS if row.body == "named_fields"]
THINK = ReasoningMarks("<think>", "</think>")


def make_vocabulary(row: MessageFormat, *, has_marks: bool) -> tuple[Tokenizer, Mapping[int, str]]:
    """A tokenizer that has the marks of a format as control tokens, or has them not; and those that it has."""
    tokenizer = make_tokenizer("byte_level")
    if not has_marks:
        return tokenizer, {}
    marks = [mark for mark in (*list_format_marks(row)[:3], "[ARGS]", *list_format_marks(THINK)) if mark != '"']
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in dict.fromkeys(marks)])
    return tokenizer, {tokenizer.token_to_id(mark) or 0: mark for mark in marks}


def is_allowed(
    row: MessageFormat,
    properties: Mapping[str, Any],
    answer: str,
    *,
    has_marks: bool,
    reasoning: ReasoningMarks | None = None,
    choice: str = "required",
) -> bool:
    """Whether an answer may be written, and end there."""
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    tools = [{"type": "function", "function": {"name": "w", "parameters": parameters, "strict": True}}]
    tokenizer, marks = make_vocabulary(row, has_marks=has_marks)
    grammar = write_tool_grammar(
        row,
        reasoning,
        parse_tool_use(ChatRequest.create("x", tools=tools, tool_choice=choice)),
        is_reasoning=False,
        mark_tokens=marks,
        dump_schema=lambda schema, _: json.dumps(schema),
    )
    vocabulary = llguidance.LLTokenizer(tokenizer.to_str(), n_vocab=tokenizer.get_vocab_size(), eos_token=2)
    matcher = llguidance.LLMatcher(vocabulary, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    token_ids = tokenizer.encode(answer).ids
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def write_call(row: MessageFormat, value: str) -> str:
    return f"{row.call_open}call:w{{a:{value}}}{row.call_close}"


def read_arguments(row: MessageFormat, answer: str) -> Any:
    parser = MessageParser(row, ("w",), None, is_reasoning=False, make_call_id=str)
    events = [*parser.push(TextDelta(answer)), *parser.flush()]
    [call] = [event for event in events if isinstance(event, ToolCallDelta)]
    return json.loads(call.arguments)


@pytest.mark.parametrize("has_marks", [False, True], ids=["text", "control tokens"])
@pytest.mark.parametrize("row", FIELD_FORMATS, ids=lambda row: row.name)
@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello",
        "a < b",
        "<p>hi</p>",
        "List<String>",
        "<",
        "<|",
        '<|"',
        "<escap",
        "cat <<EOF\n{}\nEOF",
        '"q" \\ {a:1}',
    ],
)
def test_a_text_may_hold_anything_but_its_mark(row: MessageFormat, text: str, has_marks: bool) -> None:
    """Markup and code, up to the mark's last character; and it is read as it was written."""
    answer = write_call(row, f"{row.text_mark}{text}{row.text_mark}")
    assert is_allowed(row, {"a": {"type": "string"}}, answer, has_marks=has_marks)
    assert is_allowed(row, {"a": {"type": "string", "maxLength": len(text)}}, answer, has_marks=has_marks)
    assert is_allowed(row, {"a": {}}, answer, has_marks=has_marks)
    if text:
        assert not is_allowed(row, {"a": {"type": "string", "maxLength": len(text) - 1}}, answer, has_marks=has_marks)
    assert read_arguments(row, answer) == {"a": text}


@pytest.mark.parametrize("has_marks", [False, True], ids=["text", "control tokens"])
@pytest.mark.parametrize("row", FIELD_FORMATS, ids=lambda row: row.name)
@pytest.mark.parametrize("schema", [{"type": "string"}, {"type": "string", "maxLength": 40}, {}])
def test_a_text_ends_at_its_mark(row: MessageFormat, schema: Any, has_marks: bool) -> None:
    """What follows it is the call's again."""
    mark = row.text_mark
    assert not is_allowed(row, {"a": schema}, write_call(row, f"{mark}x{mark}y{mark}"), has_marks=has_marks)
    assert not is_allowed(row, {"a": schema}, write_call(row, f"{mark}x"), has_marks=has_marks)


@pytest.mark.parametrize("row", FIELD_FORMATS, ids=lambda row: row.name)
@pytest.mark.parametrize(
    ("kind", "value", "is_right"),
    [
        ("number", "1e5", True),
        ("number", "-1.5E-10", True),
        ("number", "2e+3", True),
        ("number", "0.30000000000000004", True),
        ("number", "1e", False),
        ("number", "01", False),
        ("integer", "12345678901234567", True),
        ("integer", "1.5", False),
    ],
)
def test_numbers(row: MessageFormat, kind: str, value: str, is_right: bool) -> None:
    """As JSON has them, exponents among them."""
    answer = write_call(row, value)
    assert is_allowed(row, {"a": {"type": kind}}, answer, has_marks=True) == is_right
    assert not is_right or read_arguments(row, answer) == {"a": json.loads(value)}


@pytest.mark.parametrize("has_marks", [False, True], ids=["text", "control tokens"])
@pytest.mark.parametrize("row", FORMATS, ids=lambda row: row.name)
def test_text_and_reasoning_before_a_call(row: MessageFormat, has_marks: bool) -> None:
    """An answer that may call, of a model that reasons; all marks are control tokens, or none is."""
    bodies = {
        "json": f'{row.padding}{{"name": "w", "{row.arguments_key}": {{}}}}{row.padding}',
        "named_json": "w[ARGS]{}",
        "named_fields": "call:w{}",
    }
    body = bodies[row.body]
    if row.name == "mistral_list":
        body = ' [{"name": "w", "arguments": {}}]'
    call = body if row.is_bare else f"{row.call_open}{body}{row.call_close}"
    for choice, answer in {"auto": ("" if row.is_bare else "a < b") + call, "required": call}.items():
        for reasoning in ("", "<think>is a < b?</think>"):
            assert is_allowed(row, {}, reasoning + answer, has_marks=has_marks, reasoning=THINK, choice=choice)
