"""Answers that a benchmark has measured, kept in a file, so that a program that was stopped goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

__all__ = ["Answer", "AnswerLog"]


class Answer(NamedTuple):
    """What a contender said, and how fast. Its first piece has `num_first` tokens, and came after `first_s`."""

    num_tokens: int
    seconds: float
    text: str
    num_first: int = 0
    first_s: float = 0.0

    @property
    def seconds_per_token(self) -> float:
        """An answer without tokens counts as one of one."""
        return self.seconds / max(1, self.num_tokens)

    @property
    def later_seconds_per_token(self) -> float:
        """The same of what followed the first piece, so that reading the prompt is no part of it."""
        return (self.seconds - self.first_s) / max(1, self.num_tokens - self.num_first)


class AnswerLog:
    """All contenders' answers to a request, by a name for it; one JSON object a line. Without a file nothing is kept.

    What a draft or decoder learned from answers that are read from the file is lost.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._answers: dict[str, dict[str, Answer]] = {}
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                self._answers[entry["request"]] = {name: Answer(*answer) for name, answer in entry["answers"].items()}

    def get(self, request: str) -> dict[str, Answer] | None:
        """None: it has to be measured."""
        return self._answers.get(request)

    def add(self, request: str, answers: Mapping[str, Answer]) -> None:
        self._answers[request] = dict(answers)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"request": request, "answers": answers}) + "\n")
