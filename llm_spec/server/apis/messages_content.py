"""Converts blocks of Anthropic's messages to content of chat completions. Pure.

https://platform.claude.com/docs/en/api/messages

A block without a counterpart in chat completions becomes text if a text can say it. A client sends
its whole history with each turn, so a block that is refused would end the conversation.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Final, cast

from llm_spec.contract.errors import InvalidRequestError
from llm_spec.contract.messages import ContentPart
from llm_spec.server.apis.fields import Json, get_object_field, get_object_list_field

__all__ = ["convert_blocks_to_content", "convert_tool_result_to_content", "has_unread_document"]

_ERROR_MARK: Final = "Error: "  # chat completions have no other way to say that a tool failed


def convert_blocks_to_content(blocks: Sequence[Json]) -> str | tuple[ContentPart, ...]:
    """Convert blocks to a chat message's content: a text if all of it is text, else parts.

    Raises InvalidRequestError for a block that is not supported.
    """
    parts = [part for block in blocks for part in _convert_block_to_parts(block)]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return tuple(parts)


def convert_tool_result_to_content(block: Json) -> str | tuple[ContentPart, ...]:
    """Convert a tool's result to a message's content, which begins with a mark if it failed."""
    given: object = block.get("content")
    if isinstance(given, list):
        content = convert_blocks_to_content(get_object_list_field(block, "content"))
    elif isinstance(given, str | None):
        content = given or ""
    else:
        raise InvalidRequestError(f"a tool_result's content is of type {type(given).__name__}; it must be a text")
    if block.get("is_error") is not True:
        return content
    return (_text(_ERROR_MARK), *content) if isinstance(content, tuple) else _ERROR_MARK + content


def has_unread_document(blocks: Sequence[Json]) -> bool:
    """Return True if a target that knows no documents is only told the name of one.

    Documents in results of tools count too.
    """
    inner: list[object] = [block.get("content") for block in blocks if block.get("type") == "tool_result"]
    in_results = [part for content in inner if isinstance(content, list) for part in cast("list[Json]", content)]
    all_blocks = [*blocks, *in_results]
    return any(
        block.get("type") == "document" and get_object_field(block, "source").get("type") in ("base64", "url")
        for block in all_blocks
    )


def _convert_block_to_parts(block: Json) -> Iterator[Json]:
    match block.get("type"):
        case "text":
            yield _text(str(block["text"]))
        case "image":
            yield {"type": "image_url", "image_url": {"url": _build_image_url(get_object_field(block, "source"))}}
        case "document":
            yield from _convert_document_to_parts(block)
        case "search_result":
            texts = "\n".join(str(part.get("text", "")) for part in get_object_list_field(block, "content"))
            yield _text(_tag("search_result", texts, title=block.get("title"), source=block.get("source")))
        case "tool_reference":
            yield _text(f"Tool: {block['tool_name']}\n")
        case kind:
            raise InvalidRequestError(f"a block of type {kind!r} is not supported here")


def _convert_document_to_parts(block: Json) -> Iterator[Json]:
    """Yield a document's text under its title.

    Few servers read documents that are not text, so only their type or address is named.
    """
    source, title, context = get_object_field(block, "source"), block.get("title"), block.get("context")
    match source.get("type"):
        case "text":
            yield _text(_tag("document", str(source["data"]), title=title, context=context))
        case "content" if isinstance(source.get("content"), str):
            yield _text(_tag("document", source["content"], title=title, context=context))
        case "content":
            yield _text(f"{_open_tag('document', title=title, context=context)}\n")
            for inner in get_object_list_field(source, "content"):
                yield from _convert_block_to_parts(inner)
            yield _text("\n</document>\n")
        case "base64":
            media_type, num_bytes = source.get("media_type"), len(str(source.get("data", ""))) * 3 // 4
            words = f"[{media_type}, {num_bytes} bytes, which this model was not shown]"
            yield _text(_tag("document", words, title=title, context=context))
        case "url":
            words = f"[{source.get('url')}, which this model was not shown]"
            yield _text(_tag("document", words, title=title, context=context))
        case kind:
            raise InvalidRequestError(
                f"a document's source is of type {kind!r}; it must be text, content, base64 or url"
            )


def _build_image_url(source: Json) -> str:
    match source.get("type"):
        case "base64":
            return f"data:{source['media_type']};base64,{source['data']}"
        case "url":
            return str(source["url"])
        case kind:
            raise InvalidRequestError(f"an image's source is of type {kind!r}; it must be base64 or url")


def _tag(name: str, text: str, **attributes: object) -> str:
    return f"{_open_tag(name, **attributes)}\n{text}\n</{name}>\n"


def _open_tag(name: str, **attributes: object) -> str:
    given = "".join(
        f" {key}={json.dumps(str(value), ensure_ascii=False)}" for key, value in attributes.items() if value
    )
    return f"<{name}{given}>"


def _text(text: str) -> Json:
    return {"type": "text", "text": text}
