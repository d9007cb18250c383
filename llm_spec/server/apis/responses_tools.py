"""Converts the tools of a responses request to functions of chat completions. Pure.

Tools in namespaces become functions named `namespace__name`, custom tools functions with one text.
Tools that OpenAI runs itself are left out, because nothing here could run them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from llm_spec.contract.errors import InvalidRequestError
from llm_spec.contract.messages import ToolCallKind
from llm_spec.server.apis.custom_tool_input import INPUT_FIELD
from llm_spec.server.apis.fields import Body, ClientTool, Json, get_object_field, get_object_list_field

__all__ = ["ResponsesTools", "read_client_tool"]

_FUNCTION_FIELDS: Final = ("name", "description", "parameters", "strict")
_SEPARATOR: Final = "__"
_VALID_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")  # of a function, at OpenAI
_MAX_NAME_BEGINNING: Final = 53  # characters of a name that is cut, in front of its digest
_INPUT_PARAMETERS: Final[Json] = {
    "type": "object",
    "properties": {INPUT_FIELD: {"type": "string", "description": "the tool's whole input, as free text"}},
    "required": [INPUT_FIELD],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class ResponsesTools:
    """A request's tools as functions for its target.

    `names`: the function's name for each tool of the client.
    `left_out`: the types of tools without a function.
    """

    functions: tuple[Json, ...]
    names: Mapping[ClientTool, str]
    left_out: tuple[str, ...]

    @classmethod
    def read(cls, body: Body) -> ResponsesTools:
        """Read the tools of a body and of its input's items; of equal tools, the last one counts.

        Raises InvalidRequestError, which names the wrong tool.
        """
        definitions: dict[ClientTool, Json] = {}
        left_out: dict[str, None] = {}
        for place, tools in _iterate_tool_lists(body):
            for index, tool in enumerate(tools):
                try:
                    found = list(_read_tool(tool))
                except InvalidRequestError as error:
                    raise InvalidRequestError(f"{place}[{index}] is wrong: {error}") from error
                definitions.update(found)
                if not found and tool.get("type") != "namespace":
                    left_out[str(tool.get("type"))] = None
        names = _assign_names(definitions)
        functions = tuple(
            {"type": "function", "function": {**fields, "name": names[tool]}} for tool, fields in definitions.items()
        )
        return cls(functions, names, tuple(left_out))

    @property
    def client_tools(self) -> Mapping[str, ClientTool]:
        """The client's tools by the names that the target knows."""
        return {name: tool for tool, name in self.names.items()}

    def get_target_name(self, tool: ClientTool) -> str:
        """Return the target's name for a tool of the client.

        A tool that is not among them has the name that it would get.
        """
        return self.names.get(tool) or _make_target_name(tool, ())

    def convert_tool_choice(self, body: Body) -> str | Json | None:
        """Convert `tool_choice` to chat completions.

        Raises InvalidRequestError for a tool that is not there.
        """
        choice = body.get("tool_choice")
        if choice is None or not (self.functions or self.left_out):
            return None
        tool: Json = {} if isinstance(choice, str) else get_object_field(body, "tool_choice")
        allowed = list(self.functions)
        if tool.get("type") == "allowed_tools":
            listed = get_object_list_field(tool, "tools")
            allowed = [self._convert_named_tool(named) for named in listed if named.get("type") not in self.left_out]
        if "required" in (choice, tool.get("mode")) and not allowed:
            raise InvalidRequestError(
                f"tool_choice is 'required'; this server runs none of these tools: {', '.join(self.left_out)}"
            )
        if isinstance(choice, str):
            return choice if self.functions else None
        if tool.get("type") != "allowed_tools":
            return self._convert_named_tool(tool)
        if not allowed:
            return "none" if self.functions else None
        return {"type": "allowed_tools", "allowed_tools": {"mode": tool.get("mode"), "tools": allowed}}

    def _convert_named_tool(self, named: Json) -> Json:
        kind = named.get("type")
        if kind not in ("function", "custom"):
            raise InvalidRequestError(f"tool_choice is {kind!r}; only functions and custom tools are supported here")
        tool = read_client_tool(named, "custom" if kind == "custom" else "function")
        if tool not in self.names:
            raise InvalidRequestError(f"tool_choice names {_join_names(tool)!r}, which is not among the tools")
        return {"type": "function", "function": {"name": self.names[tool]}}


def read_client_tool(fields: Json, kind: ToolCallKind) -> ClientTool:
    """Return the tool that a call or choice names; raises InvalidRequestError if it names none."""
    namespace = fields.get("namespace")
    if namespace is not None and not isinstance(namespace, str):
        raise InvalidRequestError(f"namespace is {namespace!r}; it must be a text")
    return ClientTool(_get_name(fields), namespace or None, kind)


def _iterate_tool_lists(body: Body) -> Iterator[tuple[str, list[Json]]]:
    yield "tools", get_object_list_field(body, "tools")
    if isinstance(body.get("input"), list):
        for index, item in enumerate(get_object_list_field(body, "input")):
            if item.get("type") == "additional_tools":
                yield f"input[{index}].tools", get_object_list_field(item, "tools")


def _read_tool(tool: Json, namespace: str | None = None) -> Iterator[tuple[ClientTool, Json]]:
    """Yield the functions that stand for a tool, or none if it is run elsewhere."""
    match tool.get("type"):
        case "function":
            fields = {name: tool[name] for name in _FUNCTION_FIELDS if tool.get(name) is not None}
            yield ClientTool(_get_name(tool), namespace), fields
        case "custom":
            fields = {"description": _describe_custom_tool(tool), "parameters": _INPUT_PARAMETERS}
            yield ClientTool(_get_name(tool), namespace, "custom"), fields
        case "namespace" if namespace is None:
            yield from _read_namespace(tool)
        case kind:
            # No tool that OpenAI runs has a name
            if not isinstance(kind, str) or namespace is not None or "name" in tool:
                raise InvalidRequestError(f"type is {kind!r}; it must be the type of a tool, such as 'function'")


def _read_namespace(tool: Json) -> Iterator[tuple[ClientTool, Json]]:
    """Yield the tools of a namespace; the first also says what all of them are for."""
    name, about = _get_name(tool), tool.get("description")
    for index, inner in enumerate(get_object_list_field(tool, "tools")):
        try:
            found = list(_read_tool(inner, name))
        except InvalidRequestError as error:
            raise InvalidRequestError(f"tools[{index}] is wrong: {error}") from error
        for client_tool, fields in found:
            if about and index == 0:
                texts = (fields.get("description"), f"All tools of {name}: {about}")
                yield client_tool, {**fields, "description": "\n\n".join(str(text) for text in texts if text)}
            else:
                yield client_tool, fields


def _get_name(tool: Json) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequestError(f"name is {name!r}; it must be a text")
    return name


def _describe_custom_tool(tool: Json) -> str:
    texts = [str(tool.get("description") or ""), f"`{INPUT_FIELD}` is free text. The tool gets it as it is."]
    form = get_object_field(tool, "format")
    if form.get("definition"):
        texts.append(f"It must match this grammar ({form.get('syntax') or 'lark'}):\n{form['definition']}")
    return "\n\n".join(text for text in texts if text)


# -------------------------------------------------------------------------------------------- names


def _assign_names(tools: Iterable[ClientTool]) -> dict[ClientTool, str]:
    """Assign each tool a name that chat completions take.

    A tool outside of namespaces keeps its own name if that is valid.
    """
    names: dict[ClientTool, str] = {}
    for tool in sorted(tools, key=lambda tool: (tool.namespace is not None, tool.kind == "custom")):
        names[tool] = _make_target_name(tool, names.values())
    return names


def _make_target_name(tool: ClientTool, taken: Iterable[str]) -> str:
    """Return the joined name, or its beginning with a digest if it is too long or taken.

    It is the same in every request.
    """
    name, used = _join_names(tool), frozenset(taken)
    salt = 0
    while name in used or not _VALID_NAME.fullmatch(name):
        said = json.dumps([tool.namespace, tool.name, tool.kind, salt]).encode()
        beginning = re.sub(r"[^a-zA-Z0-9_-]", "_", _join_names(tool))[:_MAX_NAME_BEGINNING]
        name = f"{beginning}_{hashlib.sha256(said).hexdigest()[:10]}"
        salt += 1
    return name


def _join_names(tool: ClientTool) -> str:
    return tool.name if tool.namespace is None else f"{tool.namespace}{_SEPARATOR}{tool.name}"
