"""Converts files of a conversation to OpenAI's content parts, as pydantic-ai's own chat model does.

Text files become a part of the prompt. Other files are sent as data. The URL of an image is sent as
it is, unless a download is forced. pydantic-ai downloads, with its limits and its protection of
private addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from pydantic_ai.exceptions import UserError
from pydantic_ai.messages import (
    AudioUrl,
    BinaryContent,
    CachePoint,
    DocumentUrl,
    ImageUrl,
    TextContent,
    UploadedFile,
    UserContent,
)
from pydantic_ai.models import download_item
from pydantic_ai.profiles import ModelProfile

__all__ = ["FormatTextFile", "convert_user_content_to_openai", "is_text_media_type"]

# Takes the text, its media type and the file's identifier
FormatTextFile: TypeAlias = Callable[[str, str, str], str]

_AUDIO_FORMATS: Final = ("wav", "mp3")
# Providers whose prompt caches are marked in the parts of a message
_MARKED_PROVIDERS: Final = ("anthropic", "openrouter")
_TEXT_TYPES: Final = frozenset(
    {"application/json", "application/toml", "application/x-yaml", "application/xml", "application/yaml"}
)


async def convert_user_content_to_openai(
    items: Sequence[UserContent], profile: ModelProfile, system: str, format_text_file: FormatTextFile
) -> tuple[Mapping[str, Any], ...]:
    """Convert a user's content to parts. Raises UserError for content that chat has no part for."""
    parts: list[dict[str, Any]] = []
    for item in items:
        if not isinstance(item, CachePoint):
            parts.append(await _convert_item(item, profile, system, format_text_file))
        elif system in _MARKED_PROVIDERS and parts:
            parts[-1]["cache_control"] = {"type": "ephemeral", **({} if item.ttl == "5m" else {"ttl": item.ttl})}
    return tuple(parts)


async def _convert_item(
    item: UserContent, profile: ModelProfile, system: str, format_text_file: FormatTextFile
) -> dict[str, Any]:
    match item:
        case str() | TextContent():
            return _build_text(item if isinstance(item, str) else item.content)
        case ImageUrl():
            return _build_image(await _load_image_url(item), item.vendor_metadata)
        case AudioUrl():
            return _build_audio((await download_item(item, "base64"))["data"], item.format)
        case DocumentUrl():
            return await _convert_document_url(item, profile, format_text_file)
        case BinaryContent():
            return _convert_binary_content(item, format_text_file)
        case UploadedFile():
            return _convert_uploaded_file(item, system)
        case _:
            raise UserError(
                f"{type(item).__name__} cannot be sent as chat content; send texts, images, audio or documents"
            )


def _convert_uploaded_file(item: UploadedFile, system: str) -> dict[str, Any]:
    if item.provider_name != system or item.media_type.startswith("image/"):
        raise UserError(
            f"UploadedFile {item.file_id!r} ({item.media_type}) of {item.provider_name} cannot be sent to {system}; "
            "send a document that was uploaded to the target's own provider"
        )
    return {"type": "file", "file": {"file_id": item.file_id}}


def _convert_binary_content(item: BinaryContent, format_text_file: FormatTextFile) -> dict[str, Any]:
    if is_text_media_type(item.media_type):
        return _build_text(format_text_file(_decode_text(item), item.media_type, item.identifier))
    if item.is_image:
        return _build_image(item.data_uri, item.vendor_metadata)
    if item.is_audio:
        return _build_audio(item.base64, item.format)
    if item.is_document:
        return _build_file(item.data_uri, item.format)
    raise UserError(
        f"BinaryContent of {item.media_type} cannot be sent as chat content; send texts, images, audio or documents"
    )


async def _convert_document_url(
    item: DocumentUrl, profile: ModelProfile, format_text_file: FormatTextFile
) -> dict[str, Any]:
    takes_urls: Any = dict(profile).get("openai_chat_supports_file_urls", False)
    if takes_urls and not item.force_download:
        return _build_file(item.url, item.format)
    if is_text_media_type(item.media_type):
        text = (await download_item(item, "text"))["data"]
        return _build_text(format_text_file(text, item.media_type, item.identifier))
    return _build_file((await download_item(item, "base64_uri"))["data"], item.format)


async def _load_image_url(item: ImageUrl) -> str:
    return (await download_item(item, "base64_uri"))["data"] if item.force_download else item.url


def _decode_text(item: BinaryContent) -> str:
    try:
        return item.data.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"BinaryContent {item.identifier} of {item.media_type} is not valid UTF-8: {error}") from error


def is_text_media_type(media_type: str) -> bool:
    """Return True if files of this type become a part of the prompt."""
    kind = media_type.partition(";")[0].strip()
    return kind.startswith("text/") or kind.endswith(("+json", "+xml")) or kind in _TEXT_TYPES


def _build_text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _build_image(url: str, metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    detail = {"detail": metadata["detail"]} if metadata and "detail" in metadata else {}
    return {"type": "image_url", "image_url": {"url": url, **detail}}


def _build_audio(data: str, kind: str) -> dict[str, Any]:
    if kind not in _AUDIO_FORMATS:
        raise UserError(f"audio of the format {kind!r} cannot be sent; it must be one of {', '.join(_AUDIO_FORMATS)}")
    return {"type": "input_audio", "input_audio": {"data": data, "format": kind}}


def _build_file(data: str, kind: str) -> dict[str, Any]:
    return {"type": "file", "file": {"file_data": data, "filename": f"filename.{kind}"}}
