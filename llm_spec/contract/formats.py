"""The formats of reasoning and tool calls in families of models: data, one row a format.

A model's format is found by its chat template, which contains the same marks. To add a format, add
a row. `llm_spec.local.messages.calls` implements the kinds of bodies.
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

# json: an object with the function's name and arguments, or an array of such objects.
# named_json: the name, then the arguments.
# named_fields: the name, then fields without quotes, whose strings stand between `text_mark`s.
CallBody = Literal["json", "named_json", "named_fields"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFormat:
    """A family's format of tool calls and their surroundings.

    `name`: the name in errors and docs.
    `template_marks`: texts that a chat template of this format contains, all of them; one of an
    inner tuple is enough.
    `call_open`: the text that begins a call.
    `call_close`: the text that ends a call; "" if it ends with its body.
    `is_bare`: a call may also begin without `call_open`, at the beginning of the answer or after
    the last call.
    `body`: the kind of text between the two.
    `header`: a regular expression for the text before the arguments, with a group `name`; "" in a
    `json` body.
    `arguments_key`: the key of the arguments in a `json` body that a grammar writes. When reading,
    any of `ARGUMENTS_KEYS` is accepted.
    `separator`: the text between two calls.
    `padding`: the text between a body and the call's opening and closing.
    `text_mark`: the text around a string in a body.
    `id_characters`: the number of letters and digits in a call's id, if the template takes only
    that many.
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
    """The texts around a model's reasoning."""

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
    """Return the format that a chat template shows its model.

    Returns None if the template shows no tools, or shows them in an unknown format.
    """
    if "tools" not in chat_template:
        return None
    return next(
        (row for row in FORMATS if all(_template_has_mark(chat_template, mark) for mark in row.template_marks)), None
    )


def find_reasoning_marks(chat_template: str) -> ReasoningMarks | None:
    """Return the marks around a model's reasoning, or None if its chat template has none."""
    return next((marks for marks in _REASONING if marks.close in chat_template), None)


def list_format_marks(row: MessageFormat | ReasoningMarks | None) -> tuple[str, ...]:
    """Return the texts of a format that a tokenizer may have as control tokens."""
    if isinstance(row, MessageFormat):
        header = row.header.replace("\\", "")
        return tuple(mark for mark in (row.call_open, row.call_close, row.text_mark, header) if mark)
    return () if row is None else (row.open, row.close)


def _template_has_mark(chat_template: str, mark: str | tuple[str, ...]) -> bool:
    return any(text in chat_template for text in ((mark,) if isinstance(mark, str) else mark))
