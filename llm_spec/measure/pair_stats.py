"""PairStats: what has been measured of one target with one draft. Kept across requests, on one event loop."""

from __future__ import annotations

from typing import Final

from llm_spec.measure.baseline import TargetSpeedBaseline
from llm_spec.measure.clock import get_loop_clock
from llm_spec.measure.estimates import ExponentialMovingAverage, TokenCostMean
from llm_spec.measure.load_stats import DraftLoadStats, ExtraStreamStats
from llm_spec.measure.row_stats import RowCallStats
from llm_spec.measure.run_stats import DraftRunStats
from llm_spec.measure.shared_vocabulary import SharedVocabularyStats

__all__ = ["PairStats", "StreamTimer"]

_STREAM_HALF_LIFE: Final = 8.0  # half-lives: of first tokens, one a stream;
_TOKEN_HALF_LIFE: Final = 256.0  # of tokens
_PRIOR_TOKEN_S: Final = 0.02
_MAX_FIRST_TOKEN_TOKENS: Final = 1e6  # where tokens come all at once


class PairStats:
    """Running figures, in seconds and tokens; each strategy adds what it sees and decides by what all have seen.

    baseline: the target alone. first_token_s, token_s: of one of the target's streams, be there others beside it.
    rows: calls that ask for several tokens at once. streams: those that are open beside the first one. draft_load: what
    the draft's work costs the target's stream. runs: how often the draft is right. shared_vocabulary: whether its token
    ids are the target's.
    """

    def __init__(self) -> None:
        self.baseline = TargetSpeedBaseline()
        self.first_token_s = ExponentialMovingAverage(half_life=_STREAM_HALF_LIFE)
        self.token_s = TokenCostMean(half_life=_TOKEN_HALF_LIFE)
        self.rows = RowCallStats()
        self.streams = ExtraStreamStats()
        self.draft_load = DraftLoadStats()
        self.runs = DraftRunStats()
        self.shared_vocabulary = SharedVocabularyStats()

    def add_plain_answer(self, num_characters: int, num_tokens: int, first_s: float, rest_s: float) -> None:
        """The target alone answered; the arguments are those of `TargetSpeedBaseline.add_answer`."""
        self.baseline.add_answer(num_characters, num_tokens, first_s, rest_s)
        self.first_token_s.update(first_s)
        if num_tokens > 1:
            self.token_s.update(num_tokens - 1, rest_s)

    def start_stream_timer(self) -> StreamTimer:
        """A stream of the target was opened now."""
        return StreamTimer(self)

    def estimate_plain_s(self, num_tokens: int) -> float | None:
        """How long the target alone takes to write so many tokens; None: not measured yet."""
        if self.token_s.value is None or self.first_token_s.value is None:
            return None
        return self.first_token_s.value + max(0, num_tokens - 1) * self.token_s.value

    def forget_token_times(self, token_s: float) -> None:
        """What was measured so far was measured beside something that makes the target slower; `token_s` was not."""
        self.token_s = TokenCostMean(half_life=_TOKEN_HALF_LIFE)
        self.token_s.update(1, token_s)
        self.baseline.forget_answers_beside_draft()

    @property
    def target_token_s(self) -> float:
        """Seconds between two tokens of a stream; a guess before anything was measured."""
        return self.token_s.value or _PRIOR_TOKEN_S

    @property
    def num_tokens_per_first_token_wait(self) -> float:
        """How many tokens a stream writes while another waits for its first one."""
        return min(_MAX_FIRST_TOKEN_TOKENS, (self.first_token_s.value or 0.0) / self.target_token_s)


class StreamTimer:
    """The times of one stream of the target, by the event loop's clock."""

    def __init__(self, pair_stats: PairStats) -> None:
        self._pair_stats = pair_stats
        self._clock = get_loop_clock()
        self.opened_s = self._clock()
        self.first_s: float | None = None
        self.last_s = self.opened_s
        self._is_timing = True

    def stop_timing(self) -> None:
        """What comes from now on comes when its consumer lets it."""
        self._is_timing = False

    def add_tokens(self, num_tokens: int, arrived_s: float | None = None, *, is_disturbed: bool = False) -> None:
        """Tokens came (0: an end, or a sign of life), now or at `arrived_s` of the clock.

        `is_disturbed`: the server had other work of ours, so that the time says nothing of a stream alone.
        """
        now = self._clock() if arrived_s is None else arrived_s
        if self.first_s is None:
            self.first_s = now
            if self._is_timing and not is_disturbed:
                self._pair_stats.first_token_s.update(now - self.opened_s)
        elif num_tokens and self._is_timing and not is_disturbed:
            self._pair_stats.token_s.update(num_tokens, now - self.last_s)
        self.last_s = now
