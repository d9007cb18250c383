"""Converts reasoning between pydantic-ai's parts and what targets send and need back. Pure.

A `ThinkingPart` has the form that pydantic-ai's own model of the same API gives it:

- Anthropic's messages: the text with its signature, or redacted data with the id
  `redacted_thinking`.
- Chat completions: the text with the name of its field as id. The items of `reasoning_details` are
  in `provider_details` of the first such part, whole, as JSON.
- Text between tags: the id is `content`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias, cast

from pydantic_ai.messages import ModelResponse, ModelResponsePart, TextPart, ThinkingPart
from pydantic_ai.profiles import DEFAULT_THINKING_TAGS, ModelProfile

from llm_spec.contract.messages import ReasoningDetail

__all__ = [
    "CONTENT_ID",
    "REASONING_ID",
    "REDACTED_ID",
    "ThoughtSplitter",
    "can_only_be_text",
    "collect_reasoning",
    "describe_chat_details",
    "get_thinking_tags",
    "separate_thoughts",
]

CONTENT_ID: Final = "content"
REASONING_ID: Final = "reasoning_content"
REDACTED_ID: Final = "redacted_thinking"
_REDACTED_IDS: Final = (REDACTED_ID, "redacted_content")  # the second is Bedrock's
_WHOLE_ITEMS: Final = "reasoning_details"
_TEXT_FIELDS: Final = {"reasoning.text": "text", "reasoning.summary": "summary"}
# Fields of an item that pydantic-ai's own model keeps besides its text
_ITEM_FIELDS: Final = ("type", "format", "index")
_SEPARATOR: Final = "\n\n"

Tags: TypeAlias = tuple[str, str]


def get_thinking_tags(profile: ModelProfile) -> Tags:
    """Return the tags that enclose reasoning in a model's text."""
    return profile.get("thinking_tags", DEFAULT_THINKING_TAGS)


def separate_thoughts(parts: Iterable[ModelResponsePart], tags: Tags, system: str) -> Iterator[ModelResponsePart]:
    """Yield the parts of a whole answer, with text between tags as reasoning.

    Text after a tag that is not closed is not reasoning.
    """
    start, end = tags
    for part in parts:
        if not isinstance(part, TextPart) or start not in part.content:
            yield part
            continue
        rest = part.content
        while start in rest:
            text, _, rest = rest.partition(start)
            if text:
                yield replace(part, content=text)
            thought, closing, behind = rest.partition(end)
            if closing:
                yield ThinkingPart(thought, id=CONTENT_ID, provider_name=system)
                rest = behind
        if rest:
            yield replace(part, content=rest)


class ThoughtSplitter:
    """Separates the text between tags from other text, if a text comes in pieces.

    A tag may be cut anywhere: text that may be the start of a tag is held back until that is known.
    """

    def __init__(self, tags: Tags) -> None:
        self._tags = tags
        self._is_thought = False
        self._held_text = ""

    def push(self, piece: str) -> Iterator[tuple[bool, str]]:
        """Yield the next parts: True if a part is reasoning, and its text.

        An empty text marks the start of reasoning, which may stay empty.
        """
        text, self._held_text = self._held_text + piece, ""
        while True:
            tag = self._tags[self._is_thought]
            before, found, behind = text.partition(tag)
            if not found:
                break
            if before:
                yield self._is_thought, before
            self._is_thought = not self._is_thought
            if self._is_thought:
                yield True, ""
            text = behind
        num_held = next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if tag.startswith(text[-n:])), 0)
        shown = text[: len(text) - num_held]
        self._held_text = text[len(shown) :]
        if shown:
            yield self._is_thought, shown

    def flush(self) -> Iterator[tuple[bool, str]]:
        """Yield the text that was held back; it was not a tag."""
        held, self._held_text = self._held_text, ""
        if held:
            yield self._is_thought, held


def describe_chat_details(items: Sequence[Mapping[str, Any]]) -> tuple[str | None, dict[str, Any]]:
    """Return the signature and `provider_details` of a part that keeps these items."""
    first = items[0]
    signature = first.get("signature") or first.get("data")
    details = {name: first[name] for name in _ITEM_FIELDS if name in first}
    return signature if isinstance(signature, str) else None, {**details, _WHOLE_ITEMS: [dict(item) for item in items]}


def collect_reasoning(
    response: ModelResponse, is_accepted: Callable[[ModelResponse, ThinkingPart], bool], profile: ModelProfile
) -> tuple[str, tuple[ReasoningDetail, ...]]:
    """Return the reasoning that a target reads again, and the details that it needs, unchanged.

    Reasoning of another provider and text between tags are left out (see `can_only_be_text`).
    """
    if _get_way_back(profile) not in ("auto", "field"):
        return "", ()
    parts = [part for part in response.parts if isinstance(part, ThinkingPart) and is_accepted(response, part)]
    parts = [part for part in parts if _is_native(part)]
    details = [detail for part in parts for detail in _build_details(part)]
    return _SEPARATOR.join(part.content for part in parts if part.content), tuple(details)


def can_only_be_text(
    response: ModelResponse,
    part: ThinkingPart,
    is_accepted: Callable[[ModelResponse, ThinkingPart], bool],
    profile: ModelProfile,
) -> bool:
    """Return True if reasoning goes back only as text (`render_replayed_thinking`).

    The rule is that of pydantic-ai's own chat model.
    """
    way = _get_way_back(profile)
    is_text = way == "tags" or (way == "auto" and not (_is_native(part) and is_accepted(response, part)))
    return is_text and bool(part.content)


def _get_way_back(profile: ModelProfile) -> Any:
    return cast("Mapping[str, Any]", profile).get("openai_chat_send_back_thinking_parts", "auto")


def _is_native(part: ThinkingPart) -> bool:
    """Return True if a part came in a field of its own, not between tags."""
    return part.id != CONTENT_ID and bool(part.id or part.signature or part.provider_details)


def _build_details(part: ThinkingPart) -> Iterator[ReasoningDetail]:
    fields = part.provider_details or {}
    items, kind = fields.get(_WHOLE_ITEMS), str(fields.get("type", ""))
    if isinstance(items, list):
        for item in cast("list[Mapping[str, Any]]", items):
            yield ReasoningDetail("chat", item)
    elif kind.startswith("reasoning."):
        yield ReasoningDetail("chat", _build_chat_item(part, fields, kind))
    elif part.signature and part.id in _REDACTED_IDS:
        yield ReasoningDetail("messages", {"type": REDACTED_ID, "data": part.signature})
    elif part.signature:
        yield ReasoningDetail("messages", {"type": "thinking", "thinking": part.content, "signature": part.signature})


def _build_chat_item(part: ThinkingPart, fields: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Rebuild the item that pydantic-ai's own model made this part of."""
    item: dict[str, Any] = {name: fields[name] for name in _ITEM_FIELDS if fields.get(name) is not None}
    if part.id is not None:
        item["id"] = part.id
    if kind in _TEXT_FIELDS:
        item[_TEXT_FIELDS[kind]] = part.content
    if part.signature is not None:
        item["data" if kind == "reasoning.encrypted" else "signature"] = part.signature
    return item
