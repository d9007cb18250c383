"""Converts items of the Agents SDK to messages. Pure.

The SDK's own converter is used; reasoning and files are added to its result.

The SDK's converter decides to which message an item of reasoning belongs. It is given the item's
index in place of its text. The index that it puts into `reasoning_content` leads to the item.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeAlias, cast

from agents import TResponseInputItem
from agents.models.chatcmpl_converter import Converter
from agents.models.reasoning_content_replay import (
    ReasoningContentReplayContext,
    ShouldReplayReasoningContent,
    default_should_replay_reasoning_content,
)

from llm_spec.contract.messages import ApiName, ChatMessage, ReasoningDetail

__all__ = ["REASONING_DETAILS", "convert_items_to_messages"]

# In an item's `provider_data`, beside the SDK's `thinking_blocks`
REASONING_DETAILS: Final = "reasoning_details"
_Json: TypeAlias = dict[str, Any]


def convert_items_to_messages(
    items: str | Iterable[TResponseInputItem],
    *,
    instructions: str | None,
    model: str,
    target: str,
    api: ApiName,
    should_replay: ShouldReplayReasoningContent | None,
) -> list[ChatMessage]:
    """Convert a conversation for a model, given the name of its target and its API.

    Reasoning goes back to the model that it came from; `should_replay` overrides this. Signatures
    go only to that model. If the API takes only texts from tools, files in their results follow in
    a user message.
    """
    reasoning: list[_Json] = []
    found: list[_Json] = [{"role": "system", "content": instructions}] if instructions else []
    converted = Converter.items_to_messages(
        items if isinstance(items, str) else [_put_index_for_reasoning(item, reasoning) for item in items],
        model=model,
        preserve_tool_output_all_content=True,
        should_replay_reasoning_content=_restore_item(reasoning, should_replay or partial(_should_replay, target)),
    )
    found += cast("list[_Json]", converted)
    placed = _mark_cached_parts(found) if api == "messages" else _move_files_of_tools(found)
    return [
        _build_message(message, f"messages[{index}]", reasoning, model, target) for index, message in enumerate(placed)
    ]


def _should_replay(target: str, context: ReasoningContentReplayContext) -> bool:
    data = _get_provider_data(cast("_Json", context.reasoning.item))
    return _is_from(data, context.model, target) or default_should_replay_reasoning_content(context)


def _is_from(data: _Json, model: str, target: str) -> bool:
    """Return True if an item is this model's. Vendors share model names, so its target decides."""
    report = data.get("llm_spec")
    origin = report.get("target") if isinstance(report, dict) else None
    return data.get("model") == model and origin in (None, target)


# ---------------------------------------------------------------------------------------- reasoning


def _put_index_for_reasoning(item: TResponseInputItem, reasoning: list[_Json]) -> TResponseInputItem:
    fields = cast("_Json", item)
    if not isinstance(item, Mapping) or fields.get("type") != "reasoning":
        return item
    reasoning.append(fields)
    index = {"type": "summary_text", "text": str(len(reasoning) - 1)}
    return cast("TResponseInputItem", {**fields, "provider_data": _get_provider_data(fields), "summary": [index]})


def _restore_item(reasoning: list[_Json], should_replay: ShouldReplayReasoningContent) -> ShouldReplayReasoningContent:
    """Wrap the hook so that it sees the original items."""

    def should_replay_item(context: ReasoningContentReplayContext) -> bool:
        index = int(context.reasoning.item["summary"][0]["text"])
        return should_replay(replace(context, reasoning=replace(context.reasoning, item=reasoning[index])))

    return should_replay_item


def _build_message(message: _Json, where: str, reasoning: list[_Json], model: str, target: str) -> ChatMessage:
    index = message.pop("reasoning_content", None)
    built = ChatMessage.from_openai(message, where)
    if index is None:
        return built
    item = reasoning[int(index)]
    is_same = _is_from(_get_provider_data(item), model, target)
    return replace(built, reasoning=_get_text(item), reasoning_details=_get_details(item) if is_same else ())


def _get_text(item: _Json) -> str:
    parts = [*(item.get("summary") or ())] or [*(item.get("content") or ())]
    return "\n".join(part["text"] for part in parts if part.get("text"))


def _get_details(item: _Json) -> tuple[ReasoningDetail, ...]:
    """Return the details that the API needs back. It refuses unsigned blocks of thinking."""
    data = _get_provider_data(item)
    blocks = [block for block in data.get("thinking_blocks") or () if block.get("signature") or block.get("data")]
    return (
        *(ReasoningDetail("messages", block) for block in blocks),
        *(ReasoningDetail("chat", detail) for detail in data.get(REASONING_DETAILS) or ()),
    )


def _get_provider_data(item: _Json) -> _Json:
    return item.get("provider_data") or {}


# -------------------------------------------------------------------------------------------- parts


def _move_files_of_tools(messages: Iterable[_Json]) -> list[_Json]:
    """Move files of tool results to a user message: chat completions take only texts from tools."""
    placed: list[_Json] = []
    moved: list[_Json] = []
    for message in messages:
        is_tool = message["role"] == "tool"
        if moved and not is_tool:
            placed.append({"role": "user", "content": moved})
            moved = []
        content, files = _split_tool_content(message) if is_tool else (message.get("content"), [])
        placed.append({**message, "content": content})
        moved += files
    return [*placed, {"role": "user", "content": moved}] if moved else placed


def _split_tool_content(message: _Json) -> tuple[Any, list[_Json]]:
    """Return the content of a tool message, and the parts for a user message."""
    content = message["content"]
    if not isinstance(content, list):
        return content, []
    parts = cast("list[_Json]", content)
    texts = [part for part in parts if part["type"] == "text"]
    files = [part for part in parts if part["type"] != "text"]
    if not files:
        return texts, []
    title = {"type": "text", "text": f"Files of the result of call {message['tool_call_id']}:"}
    return texts or "The result follows in files.", [title, *files]


def _mark_cached_parts(messages: Iterable[_Json]) -> list[_Json]:
    """Convert the SDK's marks for prompt caching to Anthropic's."""
    return [
        {**message, "content": [_mark_cached_part(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def _mark_cached_part(part: _Json) -> _Json:
    if "prompt_cache_breakpoint" not in part:
        return part
    others = {name: value for name, value in part.items() if name != "prompt_cache_breakpoint"}
    return {**others, "cache_control": {"type": "ephemeral"}}
