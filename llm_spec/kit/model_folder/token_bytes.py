"""Converts the names that a tokenizer file gives its tokens to bytes of UTF-8."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

__all__ = ["TokenByteTable"]

_BYTE_NAME: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenByteTable:
    """The bytes of one tokenizer's tokens.

    Byte-level tokenizers (GPT-2's, Llama 3's) represent each byte by a character. Others
    (SentencePiece's) write a mark for the space, and a number for a byte that is not a character.
    """

    def __init__(self, tokenizer: RustTokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items()}
        decoder: Mapping[str, Any] = json.loads(tokenizer.to_str()).get("decoder") or {}
        steps: list[Mapping[str, Any]] = [decoder, *decoder.get("decoders", ())]
        types = {step.get("type") for step in steps}
        self._byte_characters = dict(_list_byte_characters()) if "ByteLevel" in types else None
        self._has_byte_names = "ByteFallback" in types
        self._space = next((step["replacement"] for step in steps if step.get("type") == "Metaspace"), None)
        replaced = (step for step in steps if step.get("type") == "Replace" and step.get("content") == " ")
        self._space = self._space or next((step["pattern"].get("String") for step in replaced), None)

    def get_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes; empty for an id that is not a token."""
        if token_id in self._added:
            return self._added[token_id].encode()
        name = self._tokenizer.id_to_token(token_id)
        if not name:
            return b""
        if self._byte_characters is not None:
            values = [self._byte_characters.get(character) for character in name]
            return name.encode() if None in values else bytes(value for value in values if value is not None)
        byte_name = _BYTE_NAME.fullmatch(name) if self._has_byte_names else None
        if byte_name is not None:
            return bytes([int(byte_name[1], 16)])
        return (name.replace(self._space, " ") if self._space else name).encode()


def _list_byte_characters() -> Iterator[tuple[str, int]]:
    """Yield each byte's character: itself if visible, else one from 256 on (GPT-2's table)."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    num_others = 0
    for value in range(256):
        yield chr(value if value in visible else 256 + num_others), value
        num_others += value not in visible
