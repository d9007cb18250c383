"""Places system and developer texts in a conversation for another API or a chat template. Pure.

Clients send them anywhere: agents put several before the first turn, and more between later ones.
Most chat templates take one, at the beginning. Many drop or refuse the others, or the role
`developer`. So those before the first answer are joined. Later ones keep their place: at the front
they would change the first bytes of the prompt with every turn, and the server could reuse nothing
from its cache.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from llm_spec.contract.messages import ChatMessage, Role

__all__ = [
    "SYSTEM_ROLES",
    "join_neighbouring_user_messages",
    "keep_unless_changed",
    "mark_system_text",
    "place_later_system_texts",
    "place_system_texts",
    "strip_billing_header",
]

SYSTEM_ROLES: Final = ("system", "developer")
_SEPARATOR: Final = "\n\n"
_BILLING_HEADER: Final = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")


def place_system_texts(messages: Sequence[ChatMessage], *, later_role: Role = "user") -> tuple[ChatMessage, ...]:
    """Join the system texts before the first answer into one at the beginning.

    Later ones are placed as by `place_later_system_texts`. If nothing changes, the messages
    themselves are returned. Applying it twice changes nothing more.
    """
    num_before = _count_messages_before_answers(messages)
    first = [message for message in messages[:num_before] if message.role in SYSTEM_ROLES]
    placed = [message for message in messages[:num_before] if message.role not in SYSTEM_ROLES]
    if len(first) == 1 and messages[0].role == "system":
        placed.insert(0, messages[0])  # as it came
    elif first:
        placed.insert(0, ChatMessage("system", _SEPARATOR.join(message.text for message in first if message.text)))
    return keep_unless_changed(messages, place_later_system_texts([*placed, *messages[num_before:]], role=later_role))


def place_later_system_texts(messages: Sequence[ChatMessage], *, role: Role) -> tuple[ChatMessage, ...]:
    """Give the system texts after the first answer this role, behind adjacent tool results.

    With the role `user` they become marked texts. If nothing changes, the messages themselves are
    returned.
    """
    num_before = _count_messages_before_answers(messages)
    placed = [*messages[:num_before]]
    held: list[ChatMessage] = []  # until the tool results are placed
    for message in messages[num_before:]:
        if message.role in SYSTEM_ROLES:
            held.append(_place_later_system_text(message, role))
            continue
        if message.role != "tool":
            placed += held
            held.clear()
        placed.append(message)
    return keep_unless_changed(messages, (*placed, *held))


def _count_messages_before_answers(messages: Sequence[ChatMessage]) -> int:
    return next((i for i, message in enumerate(messages) if message.role in ("assistant", "tool")), len(messages))


def keep_unless_changed(messages: Sequence[ChatMessage], placed: tuple[ChatMessage, ...]) -> tuple[ChatMessage, ...]:
    """Return the messages themselves if the placed ones are the same.

    A caller can then compare by identity.
    """
    is_equal = len(placed) == len(messages) and all(new is old for new, old in zip(placed, messages, strict=True))
    return tuple(messages) if is_equal else placed


def _place_later_system_text(message: ChatMessage, role: Role) -> ChatMessage:
    if role == "system":
        return message if message.role == "system" else ChatMessage("system", message.text)
    return ChatMessage("user", mark_system_text(message.text))


def strip_billing_header(text: str) -> str:
    """Return a first system text without the line in which Claude Code says who pays.

    The line changes with every request, and only Anthropic's server reads it. For any other model
    it would keep two turns from sharing a cached prefix.
    """
    return _BILLING_HEADER.sub("", text)


def mark_system_text(text: str) -> str:
    """Mark a system text, for a place that only takes a user's messages."""
    return f"<system>\n{text}\n</system>"


def join_neighbouring_user_messages(messages: Iterable[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Join adjacent user messages, which some templates refuse."""
    joined: list[ChatMessage] = []
    for message in messages:
        last = joined[-1] if joined else None
        if last is None or not (last.role == message.role == "user"):
            joined.append(message)
        elif isinstance(last.content, str) and isinstance(message.content, str):
            joined[-1] = replace(last, content=last.content + _SEPARATOR + message.content, native=None)
        else:
            joined[-1] = replace(last, content=(*_list_parts(last), *_list_parts(message)), native=None)
    return tuple(joined)


def _list_parts(message: ChatMessage) -> tuple[Mapping[str, Any], ...]:
    if isinstance(message.content, tuple):
        return message.content
    return ({"type": "text", "text": message.content or ""},)
