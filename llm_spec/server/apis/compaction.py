"""Compaction in the responses API: the model summarizes a conversation that is too long. Pure.

OpenAI encrypts the summary. Here it is text behind a mark, so that a summary of OpenAI is not shown
to a model.
"""

from __future__ import annotations

from typing import Final

from llm_spec.contract.messages import ChatMessage
from llm_spec.server.apis.fields import Body, Json, get_object_list_field

__all__ = ["COMPACTION_REQUEST", "build_compaction_item", "is_compaction_requested", "read_compaction_item"]

COMPACTION_REQUEST: Final = ChatMessage(
    "user",
    "Summarize this conversation, so that somebody who has read nothing else can continue it. Say what the user wants, "
    "what has been done, which files, names and facts matter, and what is left to do. Write the summary alone.",
)
_MARK: Final = "llm-spec-summary:"
_INTRODUCTION: Final = "Summary of the conversation before:\n\n"


def is_compaction_requested(body: Body) -> bool:
    """Return True if a response is to be a summary."""
    return any(item.get("type") == "compaction_trigger" for item in _list_items(body)[-1:])


def _list_items(body: Body) -> list[Json]:
    return get_object_list_field(body, "input") if isinstance(body.get("input"), list) else []


def build_compaction_item(item_id: str, summary: str) -> Json:
    """Build the item that stands for the conversation."""
    return {"id": item_id, "type": "compaction", "encrypted_content": _MARK + summary}


def read_compaction_item(item: Json) -> ChatMessage | None:
    """Return the summary for the model, or None if another server wrote it."""
    content = item.get("encrypted_content")
    if not isinstance(content, str) or not content.startswith(_MARK):
        return None
    return ChatMessage("user", _INTRODUCTION + content.removeprefix(_MARK))
