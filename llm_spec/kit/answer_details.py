"""Parts of a chat completion that this library does not read (`AnswerDetail`), put together from their pieces. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias, cast

__all__ = ["merge_detail", "merge_detail_value"]

Json: TypeAlias = dict[str, Any]

_JOINED_FIELDS: Final = ("arguments", "data", "transcript")  # of an object: texts that come in pieces


def merge_detail(message: Json, detail: Mapping[str, Any]) -> None:
    """Add a piece to a message: lists and texts grow, objects get what is new."""
    for name, value in detail.items():
        message[name] = merge_detail_value(message.get(name), value)


def merge_detail_value(merged: object, value: object) -> object:
    """A field of a message with one more piece of it."""
    if isinstance(merged, str) and isinstance(value, str):
        return merged + value
    if isinstance(merged, list) and isinstance(value, list):
        return [*cast("list[object]", merged), *cast("list[object]", value)]
    if not isinstance(merged, dict) or not isinstance(value, dict):
        return value
    fields, more = cast("Json", merged), cast("Json", value)
    joined: Json = {name: merge_detail_value(fields.get(name), more[name]) for name in _JOINED_FIELDS if name in more}
    kept: Json = {name: of for name, of in more.items() if of is not None}
    return fields | kept | joined
