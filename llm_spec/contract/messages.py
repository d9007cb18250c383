"""Messages of a conversation, and the tool calls in them. Frozen, no I/O.

Field names follow OpenAI's chat completions, if the field exists there. Every public function also
accepts a mapping in that shape (`ChatMessage.from_openai`, `ChatRequest.create`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, cast, get_args

from llm_spec.contract.errors import InvalidRequestError
from llm_spec.contract.short_repr import format_short_repr

__all__ = [
    "ApiName",
    "ChatMessage",
    "NativeMessage",
    "ReasoningDetail",
    "Role",
    "ToolCall",
    "ToolCallKind",
    "check_field_type",
]

Role = Literal["system", "developer", "user", "assistant", "tool"]
_ROLES: Final = get_args(Role)
ContentPart: TypeAlias = Mapping[str, Any]
ToolCallKind: TypeAlias = Literal["function", "custom"]
ApiName: TypeAlias = Literal["chat", "messages"]  # OpenAI's chat completions, Anthropic's messages
_MESSAGE_FIELDS: Final = frozenset({"role", "content", "name", "tool_calls", "tool_call_id"})
_CALL_FIELDS: Final = frozenset({"id", "type", "function", "custom", "index"})


@dataclass(frozen=True)
class ToolCall:
    """One complete call by the model.

    `arguments` is the JSON text as the model wrote it. A custom tool takes a text in place of JSON
    (OpenAI's chat completions); then `arguments` is that text.
    """

    id: str
    name: str
    arguments: str
    kind: ToolCallKind = "function"

    __repr__ = format_short_repr


@dataclass(frozen=True)
class NativeMessage:
    """A message as a client wrote it in one API; targets of that API receive it unchanged."""

    api: ApiName
    value: Mapping[str, Any]


@dataclass(frozen=True)
class ChatMessage:
    """One message of a conversation.

    `content`: text, or OpenAI content parts (kept as they are), or None beside tool calls.
    `reasoning`: the model's reasoning in an earlier turn, for targets that read it again
    (`to_openai` writes it as `reasoning_content`).
    `reasoning_details`: what the API that it came from needs back with it, each detail complete
    (`merge_reasoning_details`).
    `native`: the client's own message, if it has more than these fields hold.
    """

    role: Role
    content: str | tuple[ContentPart, ...] | None = None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    native: NativeMessage | None = None
    reasoning: str = ""
    reasoning_details: tuple[ReasoningDetail, ...] = ()

    __repr__ = format_short_repr

    def __post_init__(self) -> None:
        if self.role not in _ROLES:
            raise InvalidRequestError(f"message role is {self.role!r}; it must be one of {', '.join(_ROLES)}")
        _check_message_content(self.content, "message")

    @classmethod
    def from_openai(cls, message: Mapping[str, Any], where: str = "message") -> ChatMessage:
        """Read an OpenAI chat message.

        `where` names the message in errors. Raises InvalidRequestError naming the field that is
        wrong.
        """
        check_field_type(where, message, Mapping, "a ChatMessage or an OpenAI chat dict")
        role = message.get("role")
        if role not in _ROLES:
            found = "missing" if role is None else repr(role)
            raise InvalidRequestError(f"{where}.role is {found}; it must be one of {', '.join(_ROLES)}")
        content = message.get("content")
        if not isinstance(content, str | None) and isinstance(content, Sequence):
            content = tuple(cast("Sequence[ContentPart]", content))
        _check_message_content(content, where)
        try:
            calls = tuple(
                _parse_openai_tool_call(call, f"{where}.tool_calls[{index}]")
                for index, call in enumerate(message.get("tool_calls") or ())
            )
            native = _keep_native_if_fields_are_lost(message)
            reasoning = _find_openai_reasoning(message)
            return cls(
                cast("Role", role), content, message.get("name"), calls, message.get("tool_call_id"), native, reasoning
            )
        except TypeError as error:
            raise InvalidRequestError(f"{where} is not in OpenAI's chat format: {error!r}") from error

    def to_openai(self) -> dict[str, Any]:
        """Return the message as an OpenAI chat dict, without absent fields."""
        if self.native is not None and self.native.api == "chat":
            return dict(self.native.value)
        out: dict[str, Any] = {"role": self.role}
        out["content"] = list(self.content) if isinstance(self.content, tuple) else self.content
        if self.name is not None:
            out["name"] = self.name
        if self.tool_calls:
            out["tool_calls"] = list(map(_build_openai_tool_call, self.tool_calls))
        if self.tool_call_id is not None:
            out["tool_call_id"] = self.tool_call_id
        if self.reasoning:
            out["reasoning_content"] = self.reasoning
        if details := [dict(detail.value) for detail in self.reasoning_details if detail.api == "chat"]:
            out["reasoning_details"] = details
        return out

    @property
    def text(self) -> str:
        """The message's text, parts joined; parts of other kinds contribute nothing."""
        if isinstance(self.content, tuple):
            return "".join(str(part.get("text", "")) for part in self.content if part.get("type") == "text")
        return self.content or ""


def _check_message_content(content: object, where: str) -> None:
    if type(content) not in (str, tuple, type(None)):
        raise InvalidRequestError(
            f"{where}.content is of type {type(content).__name__}; it must be text, a tuple of parts or None"
        )
    for index, part in enumerate(cast("tuple[object, ...]", content) if isinstance(content, tuple) else ()):
        check_field_type(f"{where}.content[{index}]", part, Mapping, "a part such as {'type': 'text', 'text': …}")


def _parse_openai_tool_call(call: Mapping[str, Any], where: str) -> ToolCall:
    check_field_type(where, call, Mapping, "an object with id and function")
    kind: ToolCallKind = "custom" if call.get("type") == "custom" else "function"
    text = "input" if kind == "custom" else "arguments"
    called = _require_field(call, kind, where)
    check_field_type(f"{where}.{kind}", called, Mapping, f"an object with name and {text}")
    name, arguments = (_require_field(called, field, f"{where}.{kind}") for field in ("name", text))
    return ToolCall(_require_field(call, "id", where), name, arguments, kind)


def _require_field(fields: Mapping[str, Any], name: str, where: str) -> Any:
    if name not in fields:
        raise InvalidRequestError(f"{where}.{name} is missing")
    return fields[name]


def _build_openai_tool_call(call: ToolCall) -> dict[str, Any]:
    if call.kind == "custom":
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _find_openai_reasoning(message: Mapping[str, Any]) -> str:
    """Return the reasoning of an earlier turn, by either of the names that servers use."""
    found = message.get("reasoning_content") or message.get("reasoning")
    return found if isinstance(found, str) else ""


def _keep_native_if_fields_are_lost(message: Mapping[str, Any]) -> NativeMessage | None:
    """Return the message unchanged if it has more than a ChatMessage's own fields, else None.

    Fields that are null or empty do not count.
    """
    calls: Sequence[Mapping[str, Any]] = message.get("tool_calls") or ()
    if message.keys() <= _MESSAGE_FIELDS and all(call.keys() <= _CALL_FIELDS for call in calls):
        return None  # nearly always
    more = any(message[name] for name in message.keys() - _MESSAGE_FIELDS)
    if not more and not any(call[name] for call in calls for name in call.keys() - _CALL_FIELDS):
        return None
    return NativeMessage("chat", {name: value for name, value in message.items() if value or name in _MESSAGE_FIELDS})


def check_field_type(name: str, value: object, kind: type, wanted: str) -> None:
    """Raise InvalidRequestError unless a value from outside has the expected type."""
    if not isinstance(value, kind):
        raise InvalidRequestError(f"{name} is {value!r} of type {type(value).__name__}; it must be {wanted}")


@dataclass(frozen=True, slots=True)
class ReasoningDetail:
    """Data that a provider sends beside its reasoning and needs back with the next turn.

    It is in the format of the provider's API. In a stream of messages it is a `signature_delta` or
    a `redacted_thinking` block; in a stream of chat completions, a piece of one of
    `reasoning_details`. In a message it is a whole block of thinking with its signature, or a whole
    item.
    """

    api: ApiName
    value: Mapping[str, Any]
