"""The formats in which families of models write reasoning and tool calls: data, one row a format.

A model's format is found by its chat template, which shows it the same marks. To add one, add a row; `calls.py` knows
the kinds of bodies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

__all__ = [
    "ARGUMENTS_KEYS",
    "FORMATS",
    "SPACE",
    "CallBody",
    "MessageFormat",
    "ReasoningMarks",
    "find_message_format",
    "find_reasoning_marks",
    "list_format_marks",
]

SPACE: Final = " \t\r\n"  # as JSON has it

# json: an object with the function's name and arguments, or an array of such. named_json: the name, then the arguments.
# named_fields: the name, then fields without quotes, whose texts stand between `text_mark`s.
CallBody = Literal["json", "named_json", "named_fields"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFormat:
    """How a model writes a tool call, and its reasoning.

    name: what it is called in errors and docs.
    template_marks: texts that a chat template of this format has, all of them; one of an inner tuple is enough.
    call_open: what a call begins with.
    call_close: what it ends with; "" where it ends with its body.
    is_bare: a call may also begin without `call_open`, where the answer begins or the last call ended.
    body: what stands between the two.
    header: a regular expression for what precedes the arguments, with a group `name`; "" in a `json` body.
    arguments_key: what the arguments are called in a `json` body that is written by a grammar; any of
        `ARGUMENTS_KEYS` is read.
    separator: what stands between two calls.
    padding: what stands between a body and what opens and closes it.
    text_mark: what stands around a text in a body.
    id_characters: letters and digits of a call's id, where the template takes only that many.
    """

    name: str
    template_marks: tuple[str | tuple[str, ...], ...] = ()
    call_open: str
    call_close: str = ""
    is_bare: bool = False
    body: CallBody = "json"
    header: str = ""
    arguments_key: str = "arguments"
    separator: str = ""
    padding: str = ""
    text_mark: str = '"'
    id_characters: int | None = None


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """What a model's reasoning begins and ends with."""

    open: str
    close: str


ARGUMENTS_KEYS: Final = ("arguments", "parameters")

FORMATS: Final = (
    MessageFormat(
        name="gemma4",
        template_marks=("<|tool_call>", "<tool_call|>"),
        call_open="<|tool_call>",
        call_close="<tool_call|>",
        body="named_fields",
        header=r"call:(?P<name>[\w.-]+)",
        text_mark='<|"|>',
    ),
    MessageFormat(
        name="functiongemma",
        template_marks=("<start_function_call>", "<escape>"),
        call_open="<start_function_call>",
        call_close="<end_function_call>",
        body="named_fields",
        header=r"call:(?P<name>[\w.-]+)",
        text_mark="<escape>",
    ),
    MessageFormat(
        name="mistral",  # since the tokenizer's version 11
        template_marks=("[TOOL_CALLS]", "[ARGS]"),
        call_open="[TOOL_CALLS]",
        body="named_json",
        header=r"(?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]",
        id_characters=9,
    ),
    MessageFormat(
        name="mistral_list",
        template_marks=("[TOOL_CALLS]",),
        call_open="[TOOL_CALLS]",
        padding=" ",
        id_characters=9,
    ),
    MessageFormat(
        name="hermes",  # Hermes, Qwen 2.5 and 3, SmolLM3
        template_marks=("<tool_call>", ('"name"', "'name'", '\\"name\\"')),
        call_open="<tool_call>",
        call_close="</tool_call>",
        separator="\n",
        padding="\n",
    ),
    MessageFormat(
        name="llama3",
        template_marks=(("<|python_tag|>", "Environment: ipython"), "parameters"),
        call_open="<|python_tag|>",
        is_bare=True,
        arguments_key="parameters",
        separator="; ",
    ),
)
_REASONING: Final = (
    ReasoningMarks("<think>", "</think>"),  # DeepSeek R1, Qwen 3, SmolLM3
    ReasoningMarks("[THINK]", "[/THINK]"),  # Magistral
    ReasoningMarks("<seed:think>", "</seed:think>"),
)


def find_message_format(chat_template: str) -> MessageFormat | None:
    """The format that a chat template shows its model; None: it shows no tools, or in a way that is not known."""
    if "tools" not in chat_template:
        return None
    return next(
        (row for row in FORMATS if all(_template_has_mark(chat_template, mark) for mark in row.template_marks)), None
    )


def find_reasoning_marks(chat_template: str) -> ReasoningMarks | None:
    """What a model's reasoning stands between; None: its chat template knows no reasoning."""
    return next((marks for marks in _REASONING if marks.close in chat_template), None)


def list_format_marks(row: MessageFormat | ReasoningMarks | None) -> tuple[str, ...]:
    """The texts of a format that a tokenizer may have as control tokens."""
    if isinstance(row, MessageFormat):
        header = row.header.replace("\\", "")
        return tuple(mark for mark in (row.call_open, row.call_close, row.text_mark, header) if mark)
    return () if row is None else (row.open, row.close)


def _template_has_mark(chat_template: str, mark: str | tuple[str, ...]) -> bool:
    return any(text in chat_template for text in ((mark,) if isinstance(mark, str) else mark))
