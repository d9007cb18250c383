"""Session affinity: all calls of a conversation carry one id in a header.

A balancer can so keep them together. `session_headers` carries the id from here to the calls.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, TypeVar, cast

from llm_spec.contract.errors import ConfigError
from llm_spec.contract.request import ChatRequest
from llm_spec.contract.system_texts import strip_billing_header

__all__ = [
    "check_session_header_name",
    "derive_session_id",
    "hash_texts",
    "make_session_key",
]

T = TypeVar("T")

_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_RESERVED_HEADERS: Final = frozenset(
    {
        "accept",
        "authorization",
        "connection",
        "content-length",
        "content-type",
        "cookie",
        "host",
        "transfer-encoding",
        "x-api-key",
    }
)
_ID_BYTES: Final = 16
_KEY_BYTES: Final = 32
_NUM_HASHED_CHARS: Final = 4096  # at either end of a text, so that long prompts are fast


def check_session_header_name(name: str | None) -> None:
    """Raise ConfigError if a header cannot have this name, or if calls need it otherwise."""
    if name is None:
        return
    if _HEADER_NAME.fullmatch(name) is None:
        raise ConfigError(f"session_header is {name!r}; it must be the name of a header, such as 'x-session-id'")
    if name.lower() in _RESERVED_HEADERS:
        raise ConfigError(f"session_header is {name!r}, which calls need for something else; use 'x-session-id'")


def make_session_key() -> bytes:
    """A secret from which ids of conversations are derived. Another key gives other ids."""
    return os.urandom(_KEY_BYTES)


def derive_session_id(request: ChatRequest, key: bytes) -> str:
    """Derive a conversation's id: a keyed hash of its messages up to the user's first one.

    It stays the same over the turns of a conversation, also if a client begins each turn with a
    billing header of its own. Without the key the id reveals nothing of the messages.
    """
    texts: list[str] = []
    for index, message in enumerate(request.messages):
        content = _iterate_content_texts(message.content)
        is_first_system_text = index == 0 and message.role in ("system", "developer")
        texts += (message.role, *(map(strip_billing_header, content) if is_first_system_text else content))
        if message.role == "user":
            break
    return hash_texts(texts, key)


def hash_texts(texts: Iterable[str], key: bytes) -> str:
    """Hash some texts to an id; for long texts only beginning and end count."""
    digest = hashlib.blake2b(key=key, digest_size=_ID_BYTES)
    for text in texts:
        part = text if len(text) <= 2 * _NUM_HASHED_CHARS else text[:_NUM_HASHED_CHARS] + text[-_NUM_HASHED_CHARS:]
        value = part.encode(errors="surrogatepass")
        digest.update(len(value).to_bytes(8, "big") + value)
    return digest.hexdigest()


def _iterate_content_texts(content: object) -> Iterator[str]:
    """Yield the texts in a message's content, addresses and data of images included."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, Mapping):
        for value in cast("Mapping[str, object]", content).values():
            yield from _iterate_content_texts(value)
    elif isinstance(content, list | tuple):
        for item in cast("list[object]", content):
            yield from _iterate_content_texts(item)
