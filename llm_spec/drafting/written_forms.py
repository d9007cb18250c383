"""The forms in which a model may write an agent's texts again, and that its prompt does not have.

A file that a tool read stands in the prompt as it is. A call that writes it has it as a JSON string, whose escaped line
breaks and quotes are other tokens; a unified diff has a sign before each line. What a call wrote stands in the prompt
escaped, and an answer shows it as it is. Line numbers, which tools put before a file's lines, nobody writes again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final, cast

from llm_spec.contract.messages import ChatMessage
from llm_spec.contract.request import ChatRequest

__all__ = [
    "escape_for_json_string",
    "iterate_diff_marked_texts",
    "iterate_json_escaped_texts",
    "iterate_unescaped_tool_texts",
    "uses_tools",
]

_MAX_CHARACTERS: Final = 65_536  # of the texts that are read, the newest first; of one that is too long, its end
_LINE_NUMBER: Final = re.compile(r"^ *\d+(?:\t|→|:|\| )", re.MULTILINE)  # cat -n, and what agents' own tools write


def uses_tools(request: ChatRequest) -> bool:
    """Whether anything of a request was, or may be, written in another form: it has tools, or results of some."""
    return bool(request.tools) or any(message.role == "tool" for message in request.messages)


def escape_for_json_string(text: str) -> str:
    """A text as it stands between the quotes of a JSON string; characters that are not ASCII stay."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def iterate_json_escaped_texts(request: ChatRequest, max_characters: int = _MAX_CHARACTERS) -> Iterator[str]:
    """The texts of messages (the system's left out) as they stand in a JSON string, the newest first.

    Those that escaping leaves as they are in the prompt are left out.
    """
    for text in _take_last_characters(_iterate_message_texts(request), max_characters):
        escaped = escape_for_json_string(_remove_line_numbers(text))
        if escaped != text:
            yield escaped


def iterate_diff_marked_texts(request: ChatRequest, max_characters: int = _MAX_CHARACTERS) -> Iterator[str]:
    """The texts of messages (the system's left out) as a diff repeats lines that stay, the newest first."""
    for text in _take_last_characters(_iterate_message_texts(request), max_characters):
        if "\n" in text:
            yield _remove_line_numbers(text).replace("\n", "\n ")


def iterate_unescaped_tool_texts(request: ChatRequest, max_characters: int = _MAX_CHARACTERS) -> Iterator[str]:
    """The strings in calls' arguments and in JSON results as they are without escapes, the newest first.

    Also results without their line numbers. Those that stand in the prompt as they are are left out.
    """
    room = max_characters
    for source in _iterate_tool_texts(request):
        if len(source) > room:
            continue
        room -= len(source)
        value = _parse_json_or_none(source)
        if isinstance(value, (dict, list)):
            yield from (
                text for text in _iterate_json_strings(cast("object", value)) if escape_for_json_string(text) != text
            )
        elif (text := _remove_line_numbers(source)) != source:
            yield text


def _iterate_message_texts(request: ChatRequest) -> Iterator[str]:
    return (message.text for message in reversed(request.messages) if message.role not in ("system", "developer"))


def _iterate_tool_texts(request: ChatRequest) -> Iterator[str]:
    """Results and calls' arguments, the newest first."""
    return chain.from_iterable(_list_tool_texts(message) for message in reversed(request.messages))


def _list_tool_texts(message: ChatMessage) -> list[str]:
    result = [message.text] if message.role == "tool" else []
    return [*result, *(call.arguments for call in reversed(message.tool_calls))]


def _take_last_characters(texts: Iterator[str], room: int) -> Iterator[str]:
    for text in texts:
        if not room:
            return
        kept = text[-room:]
        room -= len(kept)
        yield kept


def _parse_json_or_none(text: str) -> Any:
    try:
        return json.loads(text) if text.lstrip()[:1] in ("{", "[") else None
    except (ValueError, RecursionError):
        return None


def _iterate_json_strings(value: object) -> Iterator[str]:
    """The strings in a JSON value, in order; `json` bounds how deep it is."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for member in cast("Mapping[str, object]", value).values():
            yield from _iterate_json_strings(member)
    elif isinstance(value, Sequence):
        for member in cast("Sequence[object]", value):
            yield from _iterate_json_strings(member)


def _remove_line_numbers(text: str) -> str:
    """A text whose lines are mostly numbered, without the numbers; another one as it is."""
    stripped, num_numbers = _LINE_NUMBER.subn("", text)
    return stripped if num_numbers > text.count("\n") // 2 else text
