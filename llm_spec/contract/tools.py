"""The tools of a request: names, schemas, and constraints on the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from llm_spec.contract.endpoint import MessagePart
from llm_spec.contract.errors import InvalidRequestError
from llm_spec.contract.fields import prevents_multi_call_answer
from llm_spec.contract.request import ChatRequest

__all__ = ["Tool", "ToolUse", "find_constrained_part", "find_message_parts", "parse_tool_use"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call; `parameters` is a JSON schema.

    `is_strict`: calls must match the schema.
    """

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request, and how they may be used.

    `must_call`: the answer must be a call of one of `tools`. If one tool was named, `tools` has
    only that.
    `max_calls`: the most calls in an answer, or None if there is no limit.
    """

    tools: tuple[Tool, ...] = ()
    must_call: bool = False
    max_calls: int | None = None

    @property
    def names(self) -> frozenset[str]:
        """The names of the tools."""
        return frozenset(tool.name for tool in self.tools)

    @property
    def is_constrained(self) -> bool:
        """True if a grammar must constrain the answer."""
        return self.must_call or any(tool.is_strict for tool in self.tools)


def parse_tool_use(request: ChatRequest) -> ToolUse:
    """Parse the tools of a request, in OpenAI's form.

    Raises InvalidRequestError naming the field that is wrong.
    """
    tools = tuple(_parse_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools))
    choice = request.tool_choice
    fields = _as_mapping_or_empty(choice)
    if fields.get("type") == "allowed_tools":
        choice, tools = _parse_allowed_tools(fields, tools)
    max_calls = 1 if request.extra.get("parallel_tool_calls") is False else None
    if choice is None or choice == "auto":
        return ToolUse(tools, max_calls=max_calls)
    if choice == "none":
        return ToolUse()
    if not tools:
        raise InvalidRequestError(f"tool_choice is {choice!r}, and the request has no tools; add tools")
    if choice in ("required", "any"):
        return ToolUse(tools, must_call=True, max_calls=max_calls)
    name = _parse_chosen_tool_name(choice)
    named = tuple(tool for tool in tools if tool.name == name)
    if not named:
        raise InvalidRequestError(f"tool_choice names {name!r}, which is not one of the request's tools")
    return ToolUse(named, must_call=True, max_calls=1)


def find_constrained_part(request: ChatRequest) -> Literal["calls", "answer"] | None:
    """Return the part of an answer that a server's decoding constrains, or None.

    The part is `calls`, or `answer` for all of the answer but its reasoning.
    """
    if prevents_multi_call_answer("response_format", request.response_format or None):
        return "answer"
    try:
        use = parse_tool_use(request)
    except InvalidRequestError:
        return "answer"
    if use.must_call:
        return "answer"
    return "calls" if use.is_constrained else None


def find_message_parts(request: ChatRequest, *, separates_reasoning: bool) -> frozenset[MessagePart]:
    """Return the parts beside text that a target's answer may have.

    `separates_reasoning`: the target's server removes reasoning from the text of answers.
    """
    may_have: dict[MessagePart, bool] = {
        "tool_calls": bool(request.tools),
        "reasoning": separates_reasoning and not request.raw,
        "form_after_reasoning": find_constrained_part(request) == "answer",
    }
    return frozenset(part for part, is_possible in may_have.items() if is_possible)


def _parse_allowed_tools(choice: Mapping[str, Any], tools: tuple[Tool, ...]) -> tuple[str, tuple[Tool, ...]]:
    """Return mode and tools of OpenAI's `tool_choice` of type `allowed_tools`.

    Its form is `{"type": "allowed_tools", "allowed_tools": {"mode": …, "tools": […]}}`.
    """
    allowed = _as_mapping_or_empty(choice.get("allowed_tools"))
    mode, listed = allowed.get("mode"), allowed.get("tools")
    if mode not in ("auto", "required") or not isinstance(listed, Sequence) or not listed:
        raise InvalidRequestError("tool_choice.allowed_tools must have a mode, auto or required, and a list of tools")
    names = {_parse_chosen_tool_name(tool) for tool in cast("Sequence[object]", listed)}
    if unknown := names - {tool.name for tool in tools}:
        raise InvalidRequestError(f"tool_choice names {min(unknown)!r}, which is not one of the request's tools")
    return mode, tuple(tool for tool in tools if tool.name in names)


def _as_mapping_or_empty(value: object) -> Mapping[str, Any]:
    """Return a mapping as it is, an empty one for anything else."""
    empty: Mapping[str, Any] = {}
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else empty


def _parse_tool(tool: object, where: str) -> Tool:
    if not isinstance(tool, Mapping):
        raise InvalidRequestError(f"{where} is of type {type(tool).__name__}; it must be an object")
    fields = cast("Mapping[str, Any]", tool)
    kind = fields.get("type", "function")
    if kind != "function":
        raise InvalidRequestError(f"{where} is of type {kind!r}; a model in this process takes only functions")
    function = fields.get("function")
    if not isinstance(function, Mapping):
        found = "missing" if function is None else f"of type {type(function).__name__}"
        raise InvalidRequestError(f"{where}.function is {found}; it must be an object with name and parameters")
    fields = cast("Mapping[str, Any]", function)
    name, parameters = fields.get("name"), fields.get("parameters")
    if not isinstance(name, str) or not name:
        raise InvalidRequestError(f"{where}.function.name is {name!r}; it must be a text")
    if not isinstance(parameters, Mapping | None):
        raise InvalidRequestError(f"{where}.function.parameters is not an object; it must be a JSON schema")
    return Tool(name, cast("Mapping[str, Any]", parameters or {}), fields.get("strict") is True)


def _parse_chosen_tool_name(choice: object) -> str:
    """Return the name in OpenAI's `{"type": "function", "function": {"name": …}}`."""
    function: object = cast("Mapping[str, Any]", choice).get("function") if isinstance(choice, Mapping) else None
    name: object = cast("Mapping[str, Any]", function).get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        kinds = 'auto, none, required or {"type": "function", "function": {"name": …}}'
        raise InvalidRequestError(f"tool_choice is {choice!r}; it must be {kinds}")
    return name
