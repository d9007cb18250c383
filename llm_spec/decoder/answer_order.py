"""In which order the parts of an answer came, where that is not reasoning, then text, then calls. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from llm_spec.contract.events import TextDelta

__all__ = ["AnswerOrder", "AnswerPart", "PartKind"]

PartKind: TypeAlias = Literal["reasoning", "text", "call"]
AnswerPart: TypeAlias = tuple[PartKind, int]  # how many characters of it, or which of the calls
_RANKS: dict[PartKind, int] = {"reasoning": 0, "text": 1, "call": 2}


class AnswerOrder:
    """Notes calls and reasoning as they come, with the number of texts before them: texts themselves cost nothing."""

    def __init__(self) -> None:
        self._num_first_characters = 0  # of the reasoning before all else
        self._notes: list[tuple[int, PartKind, int]] = []

    def note_reasoning(self, num_texts: int, num_characters: int) -> None:
        if self._notes or num_texts:
            self._notes.append((num_texts, "reasoning", num_characters))
        else:
            self._num_first_characters += num_characters

    def note_call(self, num_texts: int, index: int) -> None:
        """A call has begun."""
        self._notes.append((num_texts, "call", index))

    def clear(self) -> None:
        self._num_first_characters = 0
        self._notes.clear()

    def list_parts(self, texts: Sequence[TextDelta], call_indexes: Sequence[int]) -> tuple[AnswerPart, ...]:
        """The parts; none where they came in the usual order. A call's number is its place in `call_indexes`."""
        parts: list[AnswerPart] = [("reasoning", self._num_first_characters)]
        position = 0
        for num_texts, kind, number in (*self._notes, (len(texts), "text", 0)):
            _add_part(parts, "text", sum(len(text.text) for text in texts[position:num_texts]))
            position = num_texts
            if kind == "call":
                parts.append((kind, call_indexes.index(number)))
            elif kind == "reasoning":
                _add_part(parts, kind, number)
        found = tuple(part for part in parts if part[0] == "call" or part[1])
        ranks = [(_RANKS[kind], number if kind == "call" else 0) for kind, number in found]
        return () if ranks == sorted(set(ranks)) else found


def _add_part(parts: list[AnswerPart], kind: PartKind, num_characters: int) -> None:
    """Add characters to the last part if it is of that kind."""
    if not num_characters:
        return
    if parts and parts[-1][0] == kind:
        num_characters += parts.pop()[1]
    parts.append((kind, num_characters))
