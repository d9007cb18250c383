"""TargetSpeedBaseline: how long the target takes alone, measured.

A server is timed by answers of its own (`stream_timing.py`), a model in this process by its plain steps: rounds without
a draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from llm_spec.chat import ChatRequest, Round
from llm_spec.tokens.statistics import ForwardCostLine, RobustTokenCostAverage

__all__ = ["TargetSpeedBaseline", "count_prompt_characters"]

_ANSWER_HALF_LIFE: Final = 4.0  # half-lives: of answers …
_STEP_HALF_LIFE: Final = 128.0  # … and of plain steps
_MIN_STEPS: Final = 8  # the first few are slow: buffers are new and caches cold
_CHARACTERS: Final = 100  # of a prompt; the first token's time is a line over its length …
_POSITIONS: Final = 100  # … and a plain step's over the tokens before it


class TargetSpeedBaseline:
    """The target's own speed, in seconds. One per decoder, on one event loop."""

    def __init__(self) -> None:
        self.num_answers = 0
        self.num_steps = 0
        self.is_counted = True  # whether the target counts its tokens; if not, those of answers are pieces of text
        # without evidence for a slope there is none
        self._first_s = ForwardCostLine(half_life=_ANSWER_HALF_LIFE, prior_ratio=1.0)
        self._token_s = RobustTokenCostAverage(half_life=_ANSWER_HALF_LIFE)
        self._piece_tokens = RobustTokenCostAverage(half_life=_ANSWER_HALF_LIFE)
        # a hiccup of this machine counts, but one among the few steps of an answer must not tell the whole figure
        self._step_s = ForwardCostLine(half_life=_STEP_HALF_LIFE, prior_ratio=1.0, max_outlier=1.25)

    @property
    def num_plain_steps_needed(self) -> int:
        """Plain steps that have to be measured before they tell something."""
        return max(0, _MIN_STEPS - self.num_steps)

    @property
    def tokens_per_piece(self) -> float:
        """Tokens of a piece of the target's text (`drafting/text_pieces.py`); 1 before it was measured."""
        return self._piece_tokens.value or 1.0

    @property
    def is_measured(self) -> bool:
        """Whether a whole answer of the target's own was measured, first token and others."""
        return self._token_s.value is not None

    def add_answer(self, num_characters: int, num_tokens: int, first_s: float, rest_s: float) -> None:
        """Add an answer of the target alone.

        first_s: from the request, of `num_characters`, to the first piece. rest_s: from there to the last piece.
        """
        self.num_answers += 1
        self._first_s.update(1 + num_characters // _CHARACTERS, first_s)
        if num_tokens > 1:
            self._token_s.update(num_tokens - 1, rest_s)

    def add_plain_steps(self, num_prompt_tokens: int, rounds: Sequence[Round]) -> None:
        """Add the plain steps among an answer's rounds."""
        position = num_prompt_tokens
        for report in rounds:
            if not report.num_draft_tokens:  # what a draft took that had nothing to say is not the target's
                self.num_steps += 1
                self._step_s.update(1 + position // _POSITIONS, report.verify_s)
            position += report.num_emitted_tokens

    def add_tokens_per_piece(self, num_pieces: int, num_tokens: int) -> None:
        """So many pieces of text had so many tokens."""
        if num_pieces:
            self._piece_tokens.update(num_pieces, num_tokens)

    def estimate_answer_s(self, num_characters: int, num_tokens: int) -> float | None:
        """How long the target's own stream takes for so many tokens; None: not measured yet."""
        token_s = self._token_s.value or 0.0
        if not self.num_answers or (num_tokens > 1 and self._token_s.value is None):
            return None
        first_s = self._first_s.base_s + self._first_s.per_token_s * (num_characters // _CHARACTERS)
        return first_s + max(0, num_tokens - 1) * token_s

    def estimate_plain_steps_s(self, num_prompt_tokens: int, num_tokens: int) -> float | None:
        """How long so many plain steps take after a prompt; None: not measured yet."""
        if self.num_plain_steps_needed:
            return None
        middle = (num_prompt_tokens + num_tokens / 2.0) / _POSITIONS
        return num_tokens * (self._step_s.base_s + self._step_s.per_token_s * middle)


def count_prompt_characters(request: ChatRequest) -> int:
    """Characters of a request's text: how long its prompt is, roughly, at no cost."""
    return sum(len(message.text) for message in request.messages) + len(request.prefix)
