"""The one text that the model knows, and drafts that know it less well."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate, takewhile

from llm_spec._checks import check_number
from llm_spec.drafting.pieces import split_pieces

__all__ = ["Script", "disagreeing"]


class Script:
    """A text, and how it goes on behind any prefix."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._pieces = split_pieces(text)
        self._index_at = {at: i for i, at in enumerate(accumulate(map(len, self._pieces), initial=0))}
        self._ends: dict[str, list[int]] = {}  # by piece: the numbers of pieces up to and with it
        for index, piece in enumerate(self._pieces):
            self._ends.setdefault(piece, []).append(index + 1)

    def behind(self, prefix: str) -> list[str]:
        """The pieces that follow `prefix`; where it is no beginning, those that follow the longest match of its end.

        Of equally long matches the one nearest to the prefix's length counts; without any the script begins again.
        """
        if not self.text.startswith(prefix):
            return self._pieces[self._matched(split_pieces(prefix)) :]
        index = self._index_at.get(len(prefix))
        return split_pieces(self.text[len(prefix) :]) if index is None else self._pieces[index:]

    def _matched(self, asked: Sequence[str]) -> int:
        """How many pieces of the script lie before the end of the best match."""

        def fit(end: int) -> tuple[int, int]:
            return _num_shared(self._pieces[:end], asked), -abs(end - len(asked))

        return max(self._ends.get(asked[-1], ()), key=fit, default=0)


def _num_shared(pieces: Sequence[str], asked: Sequence[str]) -> int:
    """How many pieces two texts share at their ends."""
    pairs = zip(reversed(pieces), reversed(asked), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def disagreeing(text: str, agreement: float, seed: int) -> str:
    """A draft of `text` in which each piece is, with probability 1 - agreement, another word (a sign: another sign).

    The pieces around a replaced one stay as they are, so the draft agrees again right behind it.
    """
    check_number(ValueError, "agreement", agreement, 0, 1)
    rng = random.Random(seed)  # noqa: S311 - a reproducible draft, no secret
    return "".join(piece if rng.random() < agreement else _another(piece) for piece in split_pieces(text))


def _another(piece: str) -> str:
    word = piece.removeprefix(" ")
    if word[:1].isalnum() or word[:1] == "_":
        return piece.removesuffix(word) + ("else" if word == "other" else "other")
    return "^" if piece == "~" else "~"
