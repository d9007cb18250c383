"""Joins pieces of streamed reasoning into the details that the next turn sends back. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias

from llm_spec.contract.events import ReasoningDelta
from llm_spec.contract.messages import ReasoningDetail

__all__ = ["build_thinking_blocks", "merge_chat_details", "merge_reasoning_details"]

_Reasoning: TypeAlias = ReasoningDelta | ReasoningDetail
_Json: TypeAlias = dict[str, Any]
# Fields of an item of `reasoning_details` that come in pieces
_JOINED_FIELDS: Final = ("text", "summary", "data")


def merge_reasoning_details(events: Iterable[_Reasoning]) -> tuple[ReasoningDetail, ...]:
    """Return the details of an answer, each complete, in the format of its API.

    For messages they are blocks of thinking with their signatures. Unsigned blocks are left out,
    since the API refuses them. For chat completions they are items of `reasoning_details`.
    """
    events = tuple(events)
    signed = [block for block in build_thinking_blocks(events) if block.get("signature", block.get("data"))]
    return (
        *(ReasoningDetail("messages", block) for block in signed),
        *(ReasoningDetail("chat", item) for item in merge_chat_details(events)),
    )


def build_thinking_blocks(events: Iterable[_Reasoning]) -> list[_Json]:
    """Build Anthropic's blocks of thinking: signed, unsigned and redacted ones."""
    blocks: list[_Json] = []
    open_block: _Json | None = None
    for event in events:
        if isinstance(event, ReasoningDetail) and event.value.get("type") == "redacted_thinking":
            blocks.append(dict(event.value))
            open_block = None
            continue
        if isinstance(event, ReasoningDetail) and event.api != "messages":
            continue
        if open_block is None:
            open_block = {"type": "thinking", "thinking": "", "signature": ""}
            blocks.append(open_block)
        if isinstance(event, ReasoningDelta):
            open_block["thinking"] += event.text
        else:
            open_block["signature"] = event.value["signature"]
            open_block = None
    return blocks


def merge_chat_details(events: Iterable[_Reasoning]) -> list[_Json]:
    """Return the items of `reasoning_details`.

    Neighbours of the same type and index become one, their texts joined.
    """
    merged: list[_Json] = []
    for event in events:
        if not isinstance(event, ReasoningDetail) or event.api != "chat":
            continue
        piece = _drop_nulls(event.value)
        last = merged[-1] if merged else {}
        if last and all(last.get(name) == piece.get(name) for name in ("type", "index")):
            texts = {name: last[name] + piece[name] for name in _JOINED_FIELDS if name in last and name in piece}
            merged[-1] = last | piece | texts
        else:
            merged.append(piece)
    return merged


def _drop_nulls(fields: Mapping[str, Any]) -> _Json:
    return {name: value for name, value in fields.items() if value is not None}
