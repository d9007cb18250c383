"""The one text that the model knows, and drafts that know it less well."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from llm_spec.contract.checks import check_number
from llm_spec.measure.tokens import split_into_pieces

__all__ = ["AnswerScript", "make_disagreeing_draft"]

_NUM_COMPARED_PIECES: Final = 16  # the last pieces of a prefix that are compared


class AnswerScript:
    """A text, and its continuation after any prefix."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._pieces = split_into_pieces(text)
        self._index_at = {at: i for i, at in enumerate(accumulate(map(len, self._pieces), initial=0))}
        self._ends: dict[str, list[int]] = {}  # by piece: the numbers of pieces up to its ends
        for index, piece in enumerate(self._pieces):
            self._ends.setdefault(piece, []).append(index + 1)

    def find_rest_after_prefix(self, prefix: str) -> list[str]:
        """Return the pieces that follow `prefix`.

        If the text does not begin with `prefix`, the place that its end resembles most is used.
        There the most of its last pieces equal the script's. Of several such places, the one
        nearest to the prefix's length is chosen. Without any equal piece the script begins again.
        """
        if not self.text.startswith(prefix):
            return self._pieces[self._find_most_similar_place(split_into_pieces(prefix)) :]
        index = self._index_at.get(len(prefix))
        return split_into_pieces(self.text[len(prefix) :]) if index is None else self._pieces[index:]

    def _find_most_similar_place(self, pieces: Sequence[str]) -> int:
        """Return the number of pieces before the place that the end of `pieces` resembles most."""
        recent = pieces[: -_NUM_COMPARED_PIECES - 1 : -1]  # the last one first
        alike = {end + back for back, piece in enumerate(recent) for end in self._ends.get(piece, ())}

        def measure_similarity(end: int) -> tuple[int, int]:
            there = self._pieces[max(0, end - len(recent)) : end][::-1]
            return sum(a == b for a, b in zip(there, recent, strict=False)), -abs(end - len(pieces))

        return max((end for end in alike if end <= len(self._pieces)), key=measure_similarity, default=0)


def make_disagreeing_draft(text: str, agreement: float, seed: int) -> str:
    """Return a draft of `text` with each piece replaced with probability 1 - agreement.

    A word is replaced by another word, a sign by another sign. The pieces around a replaced one
    stay as they are, so the draft agrees again right after it.
    """
    check_number(ValueError, "agreement", agreement, 0, 1)
    rng = random.Random(seed)  # noqa: S311 - a reproducible draft, no secret
    return "".join(piece if rng.random() < agreement else _replace_piece(piece) for piece in split_into_pieces(text))


def _replace_piece(piece: str) -> str:
    word = piece.removeprefix(" ")
    if word[:1].isalnum() or word[:1] == "_":
        return piece.removesuffix(word) + ("else" if word == "other" else "other")
    return "^" if piece == "~" else "~"
