"""Whether contenders say what plain says, and where they begin to differ. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from llm_spec.cli.bench.records import AnswerRecord
from llm_spec.measure.text_pieces import split_into_pieces

__all__ = ["TextComparisonFigures", "TextDifference", "compare_answer_texts", "find_first_difference"]

_EXCERPT: Final = 24  # characters of each text after the difference, and before it


@dataclass(frozen=True, kw_only=True)
class TextDifference:
    """Where an answer leaves plain's: the first character and word that differ, counted from 1, and what is there.

    before: the end of what both say. plain, other: how each goes on; empty where it ends.
    """

    id: str
    run: int
    turn: int
    character: int
    word: int
    before: str
    plain: str
    other: str


@dataclass(frozen=True, kw_only=True)
class TextComparisonFigures:
    """How many answers were compared with plain's, how many are equal, and the differences of the others."""

    num_compared: int
    num_same: int
    differences: tuple[TextDifference, ...]


def compare_answer_texts(
    pairs: Sequence[tuple[AnswerRecord, AnswerRecord]], ids: Sequence[str]
) -> TextComparisonFigures:
    """Pairs of plain's answer and another to the same request; `ids` are the prompts'."""
    found: list[TextDifference] = []
    for plain, other in pairs:
        difference = find_first_difference(plain, other, ids[plain.key.prompt])
        if difference is not None:
            found.append(difference)
    return TextComparisonFigures(num_compared=len(pairs), num_same=len(pairs) - len(found), differences=tuple(found))


def find_first_difference(plain: AnswerRecord, other: AnswerRecord, prompt_id: str) -> TextDifference | None:
    """The first difference of two answers, reasoning included; None where they say the same."""
    ours, theirs = plain.reasoning + plain.text, other.reasoning + other.text
    if ours == theirs:
        return None
    pairs = enumerate(zip(ours, theirs, strict=False))
    at = next((index for index, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
    return TextDifference(
        id=prompt_id,
        run=plain.key.run,
        turn=plain.key.turn,
        character=at + 1,
        word=max(1, len(split_into_pieces(ours[: at + 1]))),
        before=ours[max(0, at - _EXCERPT) : at],
        plain=ours[at : at + _EXCERPT],
        other=theirs[at : at + _EXCERPT],
    )
