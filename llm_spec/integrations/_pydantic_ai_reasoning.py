"""Reasoning as pydantic-ai keeps it, to and from what targets send and need back. Pure.

A `ThinkingPart` is as pydantic-ai's own model of the same API makes it: of messages the text with its signature, or
what may not be read (`redacted_thinking`); of chat completions the text with the field as its id. The items of
`reasoning_details` are in `provider_details` of the first such part, whole, as JSON. Text between tags has the id
`content`.
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
_REDACTED_IDS: Final = (REDACTED_ID, "redacted_content")  # the second of Bedrock
_WHOLE_ITEMS: Final = "reasoning_details"
_TEXT_FIELDS: Final = {"reasoning.text": "text", "reasoning.summary": "summary"}
_ITEM_FIELDS: Final = ("type", "format", "index")  # what pydantic-ai's own model keeps of an item beside its text
_SEPARATOR: Final = "\n\n"

Tags: TypeAlias = tuple[str, str]


def get_thinking_tags(profile: ModelProfile) -> Tags:
    """Between which tags a model's text is reasoning."""
    return profile.get("thinking_tags", DEFAULT_THINKING_TAGS)


def separate_thoughts(parts: Iterable[ModelResponsePart], tags: Tags, system: str) -> Iterator[ModelResponsePart]:
    """The parts of a whole answer, with what is between tags in its texts as reasoning; an open tag begins none."""
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
    """Tells apart what is between tags in a text that comes in pieces, wherever they are cut.

    What may be the beginning of a tag is held back until it is known.
    """

    def __init__(self, tags: Tags) -> None:
        self._tags = tags
        self._is_thought = False
        self._held_text = ""

    def push(self, piece: str) -> Iterator[tuple[bool, str]]:
        """Whether each next part is reasoning, and the part; an empty one begins reasoning that may stay empty."""
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
        """What is held back: it was no tag."""
        held, self._held_text = self._held_text, ""
        if held:
            yield self._is_thought, held


def describe_chat_details(items: Sequence[Mapping[str, Any]]) -> tuple[str | None, dict[str, Any]]:
    """The signature and `provider_details` of a part that keeps these items of `reasoning_details`."""
    first = items[0]
    signature = first.get("signature") or first.get("data")
    details = {name: first[name] for name in _ITEM_FIELDS if name in first}
    return signature if isinstance(signature, str) else None, {**details, _WHOLE_ITEMS: [dict(item) for item in items]}


def collect_reasoning(
    response: ModelResponse, is_accepted: Callable[[ModelResponse, ThinkingPart], bool], profile: ModelProfile
) -> tuple[str, tuple[ReasoningDetail, ...]]:
    """The reasoning of an answer that its target reads again, and the details that it needs; each as it came.

    What another provider wrote, and what came between tags, is none (`can_only_be_text`).
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
    """Whether reasoning goes back as text alone (`render_replayed_thinking`), as pydantic-ai's own model sends it."""
    way = _get_way_back(profile)
    is_text = way == "tags" or (way == "auto" and not (_is_native(part) and is_accepted(response, part)))
    return is_text and bool(part.content)


def _get_way_back(profile: ModelProfile) -> Any:
    return cast("Mapping[str, Any]", profile).get("openai_chat_send_back_thinking_parts", "auto")


def _is_native(part: ThinkingPart) -> bool:
    """Whether a part came in a field of its own; an id alone that is the tags' is none."""
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
    """The item that pydantic-ai's own model made a part of."""
    item: dict[str, Any] = {name: fields[name] for name in _ITEM_FIELDS if fields.get(name) is not None}
    if part.id is not None:
        item["id"] = part.id
    if kind in _TEXT_FIELDS:
        item[_TEXT_FIELDS[kind]] = part.content
    if part.signature is not None:
        item["data" if kind == "reasoning.encrypted" else "signature"] = part.signature
    return item
