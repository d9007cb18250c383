"""Token ids for pieces of text and for the marks between messages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from llm_spec.contract.errors import InvalidRequestError
from llm_spec.measure.tokens import split_into_pieces

__all__ = ["ASSISTANT", "EOS_ID", "GrowingVocabulary"]

ASSISTANT: Final = "<|assistant|>"
EOS_ID: Final = 0
_MARK: Final = re.compile(r"(<\|\w+\|>)")


class GrowingVocabulary:
    """Assigns ids to pieces in the order in which they are seen.

    The end mark has EOS_ID and no text.
    """

    def __init__(self) -> None:
        self._pieces = [""]
        self._ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        parts = _MARK.split(text)  # every second one is a mark
        return self.get_ids(p for i, part in enumerate(parts) for p in ([part] if i % 2 else split_into_pieces(part)))

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(self.get_pieces(token_ids))

    def get_ids(self, pieces: Iterable[str]) -> list[int]:
        return [self._get_id(piece) for piece in pieces]

    def get_pieces(self, token_ids: Sequence[int]) -> list[str]:
        if any(not 0 <= token_id < len(self._pieces) for token_id in token_ids):
            raise InvalidRequestError(f"token ids are out of range; this server has given out {len(self._pieces)}")
        return [self._pieces[token_id] for token_id in token_ids]

    def _get_id(self, piece: str) -> int:
        if piece not in self._ids:
            self._ids[piece] = len(self._pieces)
            self._pieces.append(piece)
        return self._ids[piece]
