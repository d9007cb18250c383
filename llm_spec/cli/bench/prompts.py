"""The prompts of a measurement: from files of several formats, or from the package."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, NoReturn, cast

from llm_spec.contract.errors import InvalidRequestError
from llm_spec.contract.messages import ChatMessage

__all__ = ["BenchPrompt", "get_default_prompts", "load_prompts", "prompt_from_text", "sample_prompts"]

_LISTED_FIELDS: Final = "'prompt', 'messages', 'turns' or 'conversations'"
_HUMANS: Final = ("human", "user")  # in ShareGPT files
_SHOWN: Final = 60  # characters of a value that an error shows


@dataclass(frozen=True, kw_only=True)
class BenchPrompt:
    """A conversation: the messages of each turn before the model answers.

    The target's own answers come between the turns, so that all contenders have the same
    conversation.
    """

    id: str
    turns: tuple[tuple[ChatMessage, ...], ...]
    category: str | None = None


def prompt_from_text(text: str, number: int) -> BenchPrompt:
    """Return a prompt of one user message."""
    if not text.strip():
        raise InvalidRequestError("a prompt is empty; give the user's message")
    return BenchPrompt(id=f"prompt {number}", turns=((ChatMessage("user", text),),))


def load_prompts(path: str) -> list[BenchPrompt]:
    """Load the prompts of a file: JSON lines, or one JSON array.

    A record has one of these fields:

    - `prompt`: a text.
    - `messages`: messages in OpenAI's format. Answers at the end are left out.
    - `turns`: texts of the user, as in Spec-Bench.
    - `conversations`: ShareGPT's format. The human's messages are the turns; a record without any
      is left out.

    It may also have `category`, and `id` or `question_id`. Raises InvalidRequestError with the
    number of the line that cannot be read.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeError) as error:
        raise InvalidRequestError(f"the data {path} cannot be read: {error}") from error
    return _parse_prompts_text(text, path)


def get_default_prompts(target: str) -> list[BenchPrompt]:
    """Return the package's own prompts: code for the built-in models, which know it, else chat."""
    name = "code_prompts.jsonl" if target.startswith("builtin:") else "chat_prompts.jsonl"
    return _parse_prompts_text((files("llm_spec.cli.bench") / name).read_text(encoding="utf-8"), name)


def sample_prompts(
    prompts: Sequence[BenchPrompt], *, seed: int, num_prompts: int | None = None, max_turns: int | None = None
) -> list[BenchPrompt]:
    """Draw `num_prompts` prompts by the seed, keep their order, and cut each to `max_turns`."""
    if num_prompts is not None and num_prompts < len(prompts):
        drawn = random.Random(seed).sample(range(len(prompts)), num_prompts)  # noqa: S311 - no secret
        prompts = [prompts[index] for index in sorted(drawn)]
    return [replace(prompt, turns=prompt.turns[:max_turns]) for prompt in prompts]


def _parse_prompts_text(text: str, name: str) -> list[BenchPrompt]:
    iterate = _iterate_json_array if text.lstrip().startswith("[") else _iterate_json_lines
    found: list[BenchPrompt] = []
    for line, value in iterate(text, name):
        try:
            prompt = _parse_prompt_record(value, len(found) + 1)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{name}, line {line}: {error}") from error
        if prompt is not None:
            found.append(prompt)
    if not found:
        raise InvalidRequestError(f"{name} has no prompts; give records with {_LISTED_FIELDS}")
    return found


def _iterate_json_lines(text: str, name: str) -> Iterator[tuple[int, object]]:
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines: a text may contain U+2028
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise InvalidRequestError(f"{name}, line {number} is not valid JSON: {error}") from error


def _iterate_json_array(text: str, name: str) -> Iterator[tuple[int, object]]:
    """Yield the items of an array, each with the number of its first line."""
    decoder, at, line, counted = json.JSONDecoder(), text.index("[") + 1, 1, 0
    while True:
        at = _skip_whitespace(text, at)
        if text[at : at + 1] == "]":
            return
        line, counted = line + text.count("\n", counted, at), at
        try:
            value, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise InvalidRequestError(f"{name}, line {error.lineno} is not valid JSON: {error.msg}") from error
        yield line, value
        at = _skip_whitespace(text, at)
        if text[at : at + 1] == ",":
            at += 1
        elif text[at : at + 1] != "]":
            raise InvalidRequestError(f"{name} is not valid JSON: the array does not end after the item of line {line}")


def _skip_whitespace(text: str, at: int) -> int:
    while text[at : at + 1] in (" ", "\n", "\r", "\t"):
        at += 1
    return at


def _parse_prompt_record(value: object, number: int) -> BenchPrompt | None:
    """Return a prompt, or None if a recorded conversation has no message of a human."""
    record = _as_mapping_or_none(value)
    if record is None:
        raise InvalidRequestError(f"{_format_value_shortened(value)} is not a JSON object")
    name = next((name for name in _READERS if record.get(name) is not None), None)
    if name is None:
        raise InvalidRequestError(
            f"the record has none of {_LISTED_FIELDS}; it has {_format_value_shortened(sorted(record))}"
        )
    turns = _READERS[name](record[name])
    identity = next((record[field] for field in ("id", "question_id") if record.get(field) is not None), number)
    category = record.get("category")
    return (
        BenchPrompt(id=str(identity), turns=turns, category=None if category is None else str(category))
        if turns
        else None
    )


def _parse_prompt_field(value: object) -> tuple[tuple[ChatMessage, ...], ...]:
    return ((ChatMessage("user", _require_text("prompt", value)),),)


def _parse_turns_field(value: object) -> tuple[tuple[ChatMessage, ...], ...]:
    texts = [_require_text("a text of turns", text) for text in _require_list("turns", value)]
    return tuple((ChatMessage("user", text),) for text in texts)


def _parse_messages_field(value: object) -> tuple[tuple[ChatMessage, ...], ...]:
    messages = [ChatMessage.from_openai(message) for message in _require_list("messages", value)]
    while messages and messages[-1].role == "assistant":  # the recorded answer of another model
        messages.pop()
    if not messages:
        raise InvalidRequestError("messages has only answers; it must end with a message to answer")
    return (tuple(messages),)


def _parse_sharegpt_conversations(value: object) -> tuple[tuple[ChatMessage, ...], ...]:
    said: list[str] = []
    for item in _require_list("conversations", value, may_be_empty=True):
        message = _as_mapping_or_none(item) or {}
        who, text = message.get("from", message.get("role")), message.get("value", message.get("content"))
        if not isinstance(who, str) or not isinstance(text, str):
            _raise_invalid_value("a message of conversations", item, "an object with the texts 'from' and 'value'")
        elif who in _HUMANS and text.strip():
            said.append(text)
    return tuple((ChatMessage("user", text),) for text in said)


_READERS: Final[Mapping[str, Callable[[object], tuple[tuple[ChatMessage, ...], ...]]]] = {
    "messages": _parse_messages_field,
    "turns": _parse_turns_field,
    "conversations": _parse_sharegpt_conversations,
    "prompt": _parse_prompt_field,
}


def _as_mapping_or_none(value: object) -> Mapping[str, Any] | None:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else None


def _as_list_or_none(value: object) -> Sequence[Any] | None:
    return cast("Sequence[Any]", value) if isinstance(value, list) else None


def _require_list(name: str, value: object, *, may_be_empty: bool = False) -> Sequence[Any]:
    items = _as_list_or_none(value)
    if items is None or not (items or may_be_empty):
        _raise_invalid_value(name, value, "a list" if may_be_empty else "a list that is not empty")
    return items


def _require_text(name: str, value: object) -> str:
    return (
        value
        if isinstance(value, str) and value.strip()
        else _raise_invalid_value(name, value, "a text that is not empty")
    )


def _raise_invalid_value(name: str, value: object, expected: str) -> NoReturn:
    raise InvalidRequestError(f"{name} is {_format_value_shortened(value)}; it must be {expected}")


def _format_value_shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
