"""What further streams, and a draft's work, cost a target's stream, and when that is tried again."""

from __future__ import annotations

from typing import Final

from llm_spec.measure.estimates import ExponentialMovingAverage, TokenCostMean

__all__ = [
    "DraftLoadStats",
    "ExtraStreamStats",
    "RetrialPause",
]

_FIRST: Final = 16  # answers
_LAST: Final = 64


class RetrialPause:
    """After 16 answers, then 32, then 64 each time: what was measured in a bad moment must not hold for good."""

    def __init__(self) -> None:
        self._pause = _FIRST
        self._num_answers = 0  # in a row without it

    def count_answer(self, *, was_tried: bool) -> bool:
        """An answer has ended; gives whether it is time to forget why it is not tried."""
        self._num_answers = 0 if was_tried else self._num_answers + 1
        if self._num_answers < self._pause:
            return False
        self._num_answers, self._pause = 0, min(_LAST, 2 * self._pause)
        return True


_HALF_LIFE: Final = 16.0  # of streams
_TOKEN_HALF_LIFE: Final = 64.0  # of tokens
_MIN_SLOWDOWN: Final = 0.02  # less cannot be told from noise, …
_MIN_OPENING_COST: Final = 0.25  # … in both
_MIN_GAIN: Final = 1.5  # times what it costs that a stream has to win


class ExtraStreamStats:
    """Figures of a target's later streams. Kept across requests, on one event loop.

    first_s: seconds from the decision to open one to its first token. num_extra: how many were open beside the first
    one and were worth what they cost it; 0: none was tried yet, or the server has no room.
    """

    def __init__(self) -> None:
        self.first_s = ExponentialMovingAverage(half_life=_HALF_LIFE)
        self.num_extra = 0
        self._retrial = RetrialPause()
        self._forget_costs()

    @property
    def is_measured(self) -> bool:
        """Whether one was timed beside the first one."""
        return bool(self._opening_cost.count or self._slowdown.num_tokens)

    @property
    def opening_cost(self) -> float:
        """Tokens that an answer is later by each stream that is opened beside it; 0 before it was measured."""
        cost = self._opening_cost.value or 0.0
        return cost if cost > _MIN_OPENING_COST else 0.0

    @property
    def slowdown(self) -> float:
        """Share of a token that each token is later by each stream beside it; 0 before it was measured."""
        slowdown = self._slowdown.value or 0.0
        return slowdown if slowdown > _MIN_SLOWDOWN else 0.0

    @property
    def are_free(self) -> bool:
        """Whether no stream was seen to slow another one down."""
        return self.opening_cost == 0.0 and self.slowdown == 0.0

    def record_answer_end(self, num_opened: int) -> None:
        """An answer has ended that opened so many streams: where none ever pays, what they cost may have changed."""
        if self._retrial.count_answer(was_tried=num_opened > 0 or self.are_free):
            self.num_extra = 0
            self._forget_costs()

    def _forget_costs(self) -> None:
        self._opening_cost = ExponentialMovingAverage(half_life=_HALF_LIFE)
        self._slowdown = TokenCostMean(half_life=_TOKEN_HALF_LIFE)

    def add_opening(self, num_streams: int, num_late_tokens: float) -> None:
        """So many streams were opened together, and the answer was so many tokens late when all had begun."""
        self._opening_cost.update(max(0.0, num_late_tokens) / num_streams)

    def add_token(self, num_streams: int, num_late_tokens: float) -> None:
        """A token came beside so many streams that had all begun, that much later than usual; earlier, if negative."""
        self._slowdown.update(1, num_late_tokens / num_streams)

    def is_worthwhile(self, num_won: float, num_tokens: int) -> bool:
        """Whether a stream pays that wins so many tokens on average, and is open for `num_tokens` of the answer."""
        return num_won >= _MIN_GAIN * (self.opening_cost + self.slowdown * num_tokens)


_LOAD_HALF_LIFE: Final = 256.0  # tokens

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
        self._alone = TokenCostMean(half_life=_LOAD_HALF_LIFE)
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
