"""DraftLoadStats: what the draft's work costs the target's stream. They may share a machine, or a server."""

from __future__ import annotations

from typing import Final

from llm_spec.measure.estimates import ExponentialMovingAverage, TokenCostMean
from llm_spec.measure.retrial_pause import RetrialPause

__all__ = ["DraftLoadStats"]

_HALF_LIFE: Final = 256.0  # tokens
_ANSWER_HALF_LIFE: Final = 4.0  # answers
_KEPT: Final = 0.98  # of what is known of a stream beside the draft, with each stretch that is added
_MIN_ALONE: Final = 4  # tokens of a stream alone, …
_MIN_BESIDE: Final = 2  # … and stretches beside the draft, before anything is known
_MAX_BESIDE: Final = 16  # stretches without a stream alone: by then a draft that pays has shown it
_MAX_HARMLESS: Final = 0.1  # seconds that a stream is later by a second of drafting, which may be noise, …
_NOISE: Final = 1.0  # … and by so much more, divided by the number of stretches


class DraftLoadStats:
    """How much later the target's stream is for each second that the draft writes beside it."""

    def __init__(self) -> None:
        self._alone = TokenCostMean(half_life=_HALF_LIFE)
        self._first_piece_s = ExponentialMovingAverage(half_life=_ANSWER_HALF_LIFE)
        self._draft_token_s = ExponentialMovingAverage(half_life=_ANSWER_HALF_LIFE)
        self._retrial = RetrialPause()
        self._num_alone = self._num_stretches = self._num_beside_calls = 0
        self._tokens = self._seconds = self._drafting_s = 0.0  # beside the draft

    @property
    def first_piece_s(self) -> float:
        """Seconds that the draft takes for the first piece of an answer, its prompt included; 0 before any."""
        return self._first_piece_s.value or 0.0

    @property
    def draft_token_s(self) -> float:
        """Seconds between two of its tokens; 0 before it was measured."""
        return self._draft_token_s.value or 0.0

    def add_drafting(self, first_piece_s: float, token_s: float) -> None:
        """An answer's first piece of the draft took so long, and then each token; 0: it wrote none."""
        self._first_piece_s.update(first_piece_s)
        if token_s:
            self._draft_token_s.update(token_s)

    def record_answer_end(self, *, has_drafted: bool) -> None:
        """An answer has ended. Where the first piece always takes too long, it may have been a bad moment."""
        if self._retrial.count_answer(was_tried=has_drafted or not self.first_piece_s):
            self._first_piece_s.reset()

    def add_alone(self, num_tokens: int, seconds: float) -> None:
        """A stream wrote so many tokens while the draft wrote nothing."""
        self._num_alone += num_tokens
        self._alone.update(num_tokens, seconds)

    def add_beside(self, num_tokens: int, seconds: float, drafting_s: float) -> None:
        """A stream wrote so many tokens, and the draft wrote for `drafting_s` of that time."""
        self._num_stretches += 1
        self._tokens = _KEPT * self._tokens + num_tokens
        self._seconds = _KEPT * self._seconds + seconds
        self._drafting_s = _KEPT * self._drafting_s + drafting_s

    def add_beside_calls(self) -> None:
        """A stretch beside the draft and other work, which tells nothing of the draft."""
        self._num_beside_calls += 1

    @property
    def alone_token_s(self) -> float | None:
        """Seconds for a token of a stream alone; None: not measured yet."""
        return self._alone.value

    @property
    def is_alone_measured(self) -> bool:
        """Whether a stream was timed alone."""
        return self._num_alone >= _MIN_ALONE

    @property
    def lacks_comparison(self) -> bool:
        """Whether a stream was timed beside the draft, and not alone."""
        num_beside = self._num_stretches + self._num_beside_calls
        return num_beside >= _MAX_BESIDE and not self.is_alone_measured

    @property
    def is_measured(self) -> bool:
        return self._num_stretches >= _MIN_BESIDE and self.is_alone_measured

    @property
    def late_s_per_s(self) -> float:
        """Seconds that a stream is later for a second of drafting; 0 before that is measured."""
        if not self.is_measured or self._alone.value is None:
            return 0.0
        return max(0.0, (self._seconds - self._tokens * self._alone.value) / self._drafting_s)

    @property
    def max_late_s_per_s(self) -> float:
        """What `late_s_per_s` may be at most, by what was measured so far."""
        return self.late_s_per_s + _NOISE / max(1, self._num_stretches) + _NOISE / max(1, self._num_alone)

    @property
    def is_harmless(self) -> bool:
        """Whether the draft is known to make the target hardly slower."""
        return self.is_measured and not self.is_harmful and self.max_late_s_per_s <= 2.0 * _MAX_HARMLESS

    @property
    def is_harmful(self) -> bool:
        """Whether the draft is known to make the target slower."""
        return self.late_s_per_s > _MAX_HARMLESS + _NOISE / max(1, self._num_stretches)
