"""Places images and files in results of tools so that a target can take them. Pure.

Chat completions take only text from a tool. So what a tool shows goes into a message of the user
behind the results of that turn. A target that takes only text is told in the text what it is not
shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

from llm_spec.contract.messages import ChatMessage, ContentPart, NativeMessage
from llm_spec.contract.system_texts import SYSTEM_ROLES, keep_unless_changed
from llm_spec.server.apis.fields import ParsedRequest

__all__ = ["place_images_of_request", "place_tool_images"]

_DATA_URL: Final = re.compile(r"data:(?P<type>[^;,]{1,100})?(?:;[^,]{0,200})?,")
_MAX_NAME_CHARS: Final = 200  # of an address or the name of a file in a text


def place_images_of_request(parsed: ParsedRequest, *, sees_images: bool) -> ParsedRequest:
    """Place a request's images, or name them if its target takes only text."""
    before = parsed.request.messages
    messages = place_tool_images(before, sees_images=sees_images)
    if messages is before:
        return parsed
    kept = set(map(id, messages))
    changes = {"tool-images" if message.role == "tool" else "images" for message in before if id(message) not in kept}
    return replace(parsed, request=replace(parsed.request, messages=messages), changes=(*parsed.changes, *changes))


def place_tool_images(messages: Sequence[ChatMessage], *, sees_images: bool) -> tuple[ChatMessage, ...]:
    """Make results of tools text; each turn's images follow in one message of the user.

    Each result says where its images are, and each image says which call it belongs to. If the
    target does not see images, texts replace all images and files, also those of users. If nothing
    changes, the messages themselves are returned.
    """
    if not any(isinstance(message.content, tuple) for message in messages):  # nearly always
        return tuple(messages)
    placed: list[ChatMessage] = []
    shown = _ShownParts()
    for message in messages:
        # Some system messages stand between results
        if message.role != "tool" and message.role not in SYSTEM_ROLES:
            placed += shown.take_message()
        if not _has_other_parts(message):
            placed.append(message)
        elif not sees_images:
            placed.append(_replace_content(message, _describe_parts(message)))
        elif message.role == "tool":
            placed.append(_replace_content(message, shown.add_result(message)))
        else:
            placed.append(message)
    placed += shown.take_message()
    return keep_unless_changed(messages, tuple(placed))


@dataclass
class _ShownParts:
    """The images and files that the tools of one turn show."""

    parts: list[ContentPart] = field(default_factory=list[ContentPart])
    num_shown: int = 0

    def add_result(self, message: ChatMessage) -> str:
        """Add what a result shows; return the result's text."""
        lines: list[str] = []
        for piece in _iterate_texts_and_other_parts(message):
            if isinstance(piece, str):
                lines.append(piece)
                continue
            self.num_shown += 1
            name = f"{_find_kind(piece)} {self.num_shown}"
            lines.append(f"[{name}: in the message after the results of tools]")
            self.parts += ({"type": "text", "text": f"[{name}, of tool call {message.tool_call_id}]"}, piece)
        return "\n".join(lines)

    def take_message(self) -> list[ChatMessage]:
        """Return the message with all of it, if there is any."""
        parts, self.parts, self.num_shown = tuple(self.parts), [], 0
        return [ChatMessage("user", parts)] if parts else []


def _has_other_parts(message: ChatMessage) -> bool:
    return isinstance(message.content, tuple) and any(part.get("type") != "text" for part in message.content)


def _replace_content(message: ChatMessage, text: str) -> ChatMessage:
    native = message.native
    if native is not None:
        native = NativeMessage("chat", {**native.value, "content": text}) if native.api == "chat" else None
    return replace(message, content=text, native=native)


def _describe_parts(message: ChatMessage) -> str:
    lines = [
        piece if isinstance(piece, str) else f"[{_describe_part(piece)}: not shown, as this model takes text alone]"
        for piece in _iterate_texts_and_other_parts(message)
    ]
    return "\n".join(lines)


def _iterate_texts_and_other_parts(message: ChatMessage) -> Iterable[str | ContentPart]:
    """Yield the parts in their order; neighbouring texts are joined."""
    texts: list[str] = []
    for part in message.content if isinstance(message.content, tuple) else ():
        if part.get("type") == "text":
            texts.append(str(part.get("text", "")))
            continue
        if any(texts):
            yield "".join(texts)
        texts.clear()
        yield part
    if any(texts):
        yield "".join(texts)


def _find_kind(part: ContentPart) -> str:
    kind = str(part.get("type"))
    return "image" if "image" in kind else "audio" if "audio" in kind else "file"


def _describe_part(part: ContentPart) -> str:
    """Describe a part: type and size of its data, its address, or the name of its file."""
    kind = _find_kind(part)
    inside = part.get(str(part.get("type")))
    fields = cast("Mapping[str, Any]", inside) if isinstance(inside, Mapping) else {"url": inside}
    data = next((str(fields[name]) for name in ("url", "file_data", "data") if fields.get(name)), "")
    names = [str(fields[name]) for name in ("filename", "file_id") if fields.get(name)]
    found = _DATA_URL.match(data)
    if found is not None:
        return ", ".join([found["type"] or kind, *names, _format_size(len(data) - found.end())])
    if data.startswith(("http://", "https://")):
        names.append(data)
    elif data:  # its base64 alone
        names.append(_format_size(len(data)))
    return " ".join([kind, *(name[:_MAX_NAME_CHARS] for name in names)])


def _format_size(num_base64_characters: int) -> str:
    return f"{max(1, round(num_base64_characters * 3 / 4 / 1000))} kB"
