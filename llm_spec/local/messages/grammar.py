"""Writes the grammar of answers with tool calls, in llguidance's variant of Lark.

It is used for answers that must call tools, or whose calls must follow a schema.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeGuard, cast

from llm_spec.contract.formats import MessageFormat, ReasoningMarks
from llm_spec.contract.tools import Tool, ToolUse

__all__ = ["write_tool_grammar"]

_VALUE_RULES: Final = {
    "string": "text_value",
    "integer": "INTEGER",
    "number": "NUMBER",
    "boolean": '("true" | "false")',
    "array": "list_value",
    "object": "object_value",
}
_ANY_OBJECT: Final[Mapping[str, Any]] = {"type": "object"}


def write_tool_grammar(
    message_format: MessageFormat,
    reasoning: ReasoningMarks | None,
    tool_use: ToolUse,
    *,
    is_reasoning: bool,
    mark_tokens: Mapping[int, str],
    dump_schema: Callable[[Mapping[str, Any], str], str],
    content_schema: str | None = None,
) -> str:
    """Write the grammar of a whole answer, which begins after its prompt.

    If the model reasons, reasoning may come first. `is_reasoning`: the prompt has opened it.
    `mark_tokens` are control tokens by id, which a grammar names by id.
    `dump_schema(schema, where)` returns a schema's text. `content_schema` constrains an answer
    without calls; with None, it is free. Arguments that are not JSON (`named_fields`) are
    constrained only in the names and types of their outermost fields.
    """
    quote = _GrammarQuoter(mark_tokens)
    writer = _ToolCallGrammarWriter(message_format, tool_use, quote, dump_schema)
    if tool_use.must_call:
        answer = "calls"
    elif content_schema is not None:
        answer = "calls | content"
    else:
        answer = writer.write_free_answer()
    rules = [f"answer: {answer}", *writer.rules, r"TEXT: /(.|\n)*/", r"SPACE: /[ \t\r\n]{0,8}/"]
    if content_schema is not None:
        rules.append(f"content: %json {content_schema}")
    start = "answer"
    if reasoning is not None:
        opening = "" if is_reasoning else f"SPACE {quote(reasoning.open)} "
        rules.append(quote.write_text_up_to("reasoning_end", reasoning.close))
        rules.append(f"reasoning: {opening}reasoning_end SPACE")
        start = "reasoning answer" if is_reasoning else "reasoning? answer"
    return "\n".join([f"start: {start}", *rules])


class _GrammarQuoter:
    """Writes texts for a grammar: quoted, or by id if they are control tokens."""

    def __init__(self, mark_tokens: Mapping[int, str]) -> None:
        self._ids = {text: token_id for token_id, text in mark_tokens.items()}

    def __call__(self, *texts: str) -> str:
        parts: list[str] = []
        for text in filter(None, texts):
            token_id = self._ids.get(text)
            parts.append(json.dumps(text, ensure_ascii=False) if token_id is None else f"<[{token_id}]>")
        return " ".join(parts)

    def write_text_up_to(self, name: str, mark: str, text: str = "TEXT") -> str:
        """Write a rule of text up to and including the first mark.

        Text has no control tokens, and may begin any other mark.
        """
        return f"{name}{'' if mark in self._ids else '[lazy]'}: {text} {self(mark)}"


class _ToolCallGrammarWriter:
    """The rules of calls in one format."""

    def __init__(
        self,
        message_format: MessageFormat,
        tool_use: ToolUse,
        quote: _GrammarQuoter,
        dump_schema: Callable[[Mapping[str, Any], str], str],
    ) -> None:
        self._format = message_format
        self._quote_without_key = quote
        self._dump_schema = dump_schema
        self._has_one = tool_use.max_calls == 1
        self._text_lengths = _find_text_lengths(tool_use) if message_format.body == "named_fields" else ()
        bodies = [self._write_call_body(index, tool) for index, tool in enumerate(tool_use.tools)]
        self.rules = [
            *self._write_call_rules(),
            "body: " + " | ".join(f"body_{index}" for index in range(len(bodies))),
            *(f"body_{index}: {body}" for index, body in enumerate(bodies)),
            *(
                f"arguments_{index}: {self._write_arguments_rule(tool, tool_use)}"
                for index, tool in enumerate(tool_use.tools)
            ),
        ]
        if message_format.body == "named_fields":
            self.rules += _write_unquoted_value_rules(quote, message_format.text_mark, self._text_lengths)

    def write_free_answer(self) -> str:
        """Write an answer that may call: text, in which calls follow the rules."""
        row, quote = self._format, self._quote_without_key
        if row.is_bare:
            self.rules.append(r"OTHER: /[^{ \t\r\n](.|\n)*/")
            return "SPACE calls SPACE | SPACE OTHER | SPACE"
        self.rules += [
            quote.write_text_up_to("call_open", row.call_open),
            f"free_call: call_open {self._write_call_after_opening_mark()}",
        ]
        return "free_call* TEXT"

    def _write_call_rules(self) -> list[str]:
        row, quote = self._format, self._quote_without_key
        if self._writes_calls_as_list:
            return [f"calls: {quote(row.call_open)} {self._write_call_after_opening_mark()}"]
        opening = "" if row.is_bare else quote(row.call_open)
        more = "" if self._has_one else f" ({quote(row.separator)} call)*"
        return [f"calls: call{more}", f"call: {opening} {self._write_call_after_opening_mark()}"]

    @property
    def _writes_calls_as_list(self) -> bool:
        """True if all calls stand in one array."""
        return self._format.body == "json" and not self._format.call_close and not self._format.is_bare

    def _write_call_after_opening_mark(self) -> str:
        """Write the rest of a call after its opening mark."""
        row, quote = self._format, self._quote_without_key
        if self._writes_calls_as_list:
            more = "" if self._has_one else '(", " body)*'
            return f'{quote(row.padding + "[")} body {more} "]"'
        return f"{quote(row.padding)} body {quote(row.padding, row.call_close)}"

    def _write_call_body(self, index: int, tool: Tool) -> str:
        if self._format.body == "named_json":
            return f"{self._quote_without_key(tool.name, '[ARGS]')} arguments_{index}"
        if self._format.body == "named_fields":
            return f"{self._quote_without_key(f'call:{tool.name}')} arguments_{index}"
        name = json.dumps(tool.name, ensure_ascii=False)
        opening = f'{{"name": {name}, "{self._format.arguments_key}": '
        return f'{self._quote_without_key(opening)} arguments_{index} "}}"'

    def _write_arguments_rule(self, tool: Tool, tool_use: ToolUse) -> str:
        schema = _get_enforced_schema(tool, tool_use)
        if self._format.body == "named_fields":
            return _write_fields_rule(schema, self._quote_without_key(self._format.text_mark))
        return "%json " + self._dump_schema(schema, f"parameters of tool {tool.name!r}")


def _write_fields_rule(schema: Mapping[str, Any], mark: str) -> str:
    """Write `{key:value,…}` of an object's outermost properties.

    The required ones come first, in their order.
    """
    properties: Mapping[str, Any] = schema.get("properties") or {}
    required = [name for name in schema.get("required") or () if name in properties]
    if not properties:
        return "object_value"
    fields = {name: f"{json.dumps(f'{name}:')} {_write_value_rule(value, mark)}" for name, value in properties.items()}
    others = " | ".join(field for name, field in fields.items() if name not in required)
    if not required:
        return f'"{{" (({others}) ("," ({others}))*)? "}}"'
    more = f' ("," ({others}))*' if others else ""
    return '"{" ' + ' "," '.join(fields[name] for name in required) + more + ' "}"'


def _write_value_rule(schema: object, mark: str) -> str:
    """Write the rule of a value by its type.

    Any value is allowed if the schema has more than a type and texts to choose from.
    """
    if not isinstance(schema, Mapping):
        return "any_value"
    fields = cast("Mapping[str, Any]", schema)
    choices: list[Any] = fields.get("enum") or []
    if choices and all(isinstance(choice, str) for choice in choices):
        texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
        return f"{mark} ({texts}) {mark}"
    kind, longest = fields.get("type"), fields.get("maxLength")
    if kind == "string" and _is_text_length(longest):
        return f"{mark} text_end_{longest}"
    return _VALUE_RULES.get(kind, "any_value") if isinstance(kind, str) else "any_value"


def _is_text_length(longest: object) -> TypeGuard[int]:
    return isinstance(longest, int) and not isinstance(longest, bool) and longest >= 0


def _find_text_lengths(tool_use: ToolUse) -> Sequence[int]:
    """Return each `maxLength` of an outermost property, once."""
    lengths: set[int] = set()
    for tool in tool_use.tools:
        properties: Mapping[str, Any] = _get_enforced_schema(tool, tool_use).get("properties") or {}
        for schema in properties.values():
            longest = cast("Mapping[str, Any]", schema).get("maxLength") if isinstance(schema, Mapping) else None
            if _is_text_length(longest):
                lengths.add(longest)
    return sorted(lengths)


def _write_unquoted_value_rules(quote: _GrammarQuoter, mark: str, text_lengths: Iterable[int]) -> list[str]:
    """Write the rules of unquoted values; their texts go from one mark to the next."""
    return [
        f"text_value: {quote(mark)} text_end",
        quote.write_text_up_to("text_end", mark),
        *(quote.write_text_up_to(f"text_end_{n}", mark, rf"/(.|\n){{0,{n}}}/") for n in text_lengths),
        r"NUMBER: /-?(0|[1-9][0-9]{0,19})(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,3})?/",
        "INTEGER: /-?(0|[1-9][0-9]{0,19})/",
        "KEY: /[A-Za-z_][A-Za-z0-9_]{0,40}/",
        'list_value: "[" (any_value ("," any_value)*)? "]"',
        'object_value: "{" (KEY ":" any_value ("," KEY ":" any_value)*)? "}"',
        'any_value: text_value | NUMBER | "true" | "false" | "null" | list_value | object_value',
    ]


def _get_enforced_schema(tool: Tool, tool_use: ToolUse) -> Mapping[str, Any]:
    """Return the schema of a tool's arguments: any object unless the request demands more."""
    if not (tool.is_strict or tool_use.must_call) or not tool.parameters:
        return _ANY_OBJECT
    return {**tool.parameters, "type": "object"}
