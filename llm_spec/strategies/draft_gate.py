"""DraftGate: when a draft may write although that makes the target slower. No clock, no task and no I/O of its own.

A draft on the target's machine, or at its server, takes the target's time, whether or not what it writes is of use. So
the target's stream is timed beside the draft and alone. Until then the draft writes little at a time; where it would
never pause all the same, it is held for some tokens once. A draft that makes the stream later writes where that pays,
and otherwise within what may be lost; an alarm ends it then, since a stream that stands still tells nothing. One in
this process, where the target may be as well, waits until the stream was timed alone, and leaves the first tokens of
each answer alone; it is bounded in the same way until it is known to be harmless.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from llm_spec.contract.draft import DraftProvider, get_draft_capabilities
from llm_spec.drafting.background_draft import BackgroundDraft
from llm_spec.measure.baseline import MIN_BASELINE_TOKENS
from llm_spec.measure.pair_stats import PairStats
from llm_spec.strategies.race.schedule import LossBudget

__all__ = ["DraftGate"]

_MIN_TOKENS: Final = 4  # that are worth a call
_MAX_UNMEASURED: Final = 16  # tokens of a draft at a time, before it is known what that costs the stream
_MIN_SHARE: Final = 0.02  # of a stretch of time, in which a draft has to write to count
_MIN_TOKEN_S: Final = 1e-6  # of the draft, where that was not measured
_MAX_GAP: Final = 3.0  # times its usual step that a token counts at most, unless the draft wrote: more is a hiccup
_MIN_GAP: Final = 0.2  # of its usual step: what comes sooner after a long gap waited with those before


class _Stretch(NamedTuple):
    """Tokens of a stream, and what went on until they came."""

    num_tokens: int
    seconds: float
    drafting_s: float
    has_calls: bool

    def merge_with(self, other: _Stretch) -> _Stretch:
        return _Stretch(
            self.num_tokens + other.num_tokens,
            self.seconds + other.seconds,
            self.drafting_s + other.drafting_s,
            self.has_calls or other.has_calls,
        )


class DraftGate:
    """One answer, and its draft.

    `is_open`: the draft may always write, since it asks no model, or writes its answer once and cannot be restarted.
    `changed` is called when `limit_draft_tokens` is to be called although nothing has come.
    """

    def __init__(
        self,
        draft: DraftProvider,
        pair_stats: PairStats,
        budget: LossBudget,
        background_draft: BackgroundDraft,
        *,
        max_tokens: int | None,
        changed: Callable[[], None],
    ) -> None:
        can = get_draft_capabilities(draft)
        self._background_draft = background_draft
        self.is_open = can.is_free or not can.continues_prefix
        self._is_in_process = can.token_model is not None
        self._pair_stats = pair_stats
        self._load = pair_stats.draft_load
        self._budget = budget
        self._max_tokens = max_tokens
        self._changed = changed
        self._num_streamed = 0  # tokens of this answer, …
        self._was_beside = False  # … the last of them beside the draft
        self._timed_drafting_s = 0.0  # for which the draft wrote in the stretches that were timed
        self._gap: _Stretch | None = None  # a long one, of which it is not known yet how many tokens came after it

    def measure_drafting_s(self) -> float:
        """For how many seconds the draft has been writing."""
        return self._background_draft.measure_drafting_s()

    def is_beside_draft(self, drafting_s: float, seconds: float) -> bool:
        """Whether a draft that asks a model wrote for `drafting_s` of so many seconds, which is not next to nothing."""
        return not self.is_open and drafting_s > _MIN_SHARE * seconds

    def may_disturb(self, drafting_s: float, seconds: float) -> bool:
        """Whether it is known that a stream is later since a draft wrote for `drafting_s` of so many seconds."""
        return self._load.is_harmful and self.is_beside_draft(drafting_s, seconds)

    def add_streamed(self, num_tokens: int, seconds: float, drafting_s: float, *, has_calls: bool = False) -> None:
        """A stream wrote so many tokens while the draft wrote for `drafting_s`. `has_calls`: beside other work, too."""
        if self.is_open or not num_tokens:
            return
        self._num_streamed += num_tokens
        if self._num_streamed == num_tokens:  # the first token's time is that of the prompt, too
            return
        arrived, gap = _Stretch(num_tokens, seconds, drafting_s, has_calls), self._gap
        usual_s = self._estimate_alone_s(num_tokens)
        if gap is not None and usual_s is not None and seconds < _MIN_GAP * usual_s:  # it has waited with those before
            self._gap = gap.merge_with(arrived)
            return
        self._gap = None
        if gap is not None:
            self._add_stretch(gap)
        if usual_s is not None and seconds > _MAX_GAP * usual_s:  # more may have waited with it
            self._gap = arrived
        else:
            self._add_stretch(arrived)

    def _add_stretch(self, stretch: _Stretch) -> None:
        num_tokens, seconds, drafting_s, has_calls = stretch
        self._timed_drafting_s += drafting_s
        load, was_harmful, was_bounded = self._load, self._load.is_harmful, self._is_bounded
        alone_s = self._estimate_alone_s(num_tokens)
        if alone_s is not None:
            seconds = min(seconds, max(_MAX_GAP * alone_s, alone_s + drafting_s))
        is_beside = self.is_beside_draft(drafting_s, seconds)
        began_beside = is_beside or self._was_beside  # the step may have begun when the draft was writing
        if was_bounded and began_beside and alone_s is not None:
            late_s = seconds - alone_s
            self._budget.add_lost_time(min(late_s, load.late_s_per_s * drafting_s) if has_calls else late_s)
        if has_calls:
            load.add_beside_calls()
        elif is_beside:
            load.add_beside(num_tokens, seconds, drafting_s)
        elif not (began_beside and load.is_alone_measured):
            load.add_alone(num_tokens, seconds)
        self._was_beside = is_beside
        if load.is_harmful and not was_harmful and load.alone_token_s is not None:
            self._pair_stats.forget_token_times(load.alone_token_s)

    def limit_draft_tokens(
        self,
        num_tokens: int,
        now_s: float,
        *,
        is_streaming: bool,
        has_calls: bool,
        can_pause: bool,
        is_paying: bool = False,
        gained_s: float = 0.0,
    ) -> int:
        """How many of `num_tokens` may be drafted now; 0: none, and what is drafted is to end.

        `is_streaming`: a stream is open that goes on meanwhile. `has_calls`: the server has other work of ours.
        `can_pause`: little is lost without a draft. `is_paying`: drafting is known to win more time than it costs.
        `gained_s`: that it has won in this answer.
        """
        if self.is_open:
            return num_tokens
        load = self._load
        if can_pause and load.lacks_comparison:
            return 0
        if is_streaming and not load.is_alone_measured:
            num_tokens = min(num_tokens, 0 if self._is_in_process else _MAX_UNMEASURED)
        if is_streaming and self._is_in_process and has_calls and not load.is_measured:
            return 0
        if is_paying or not self._is_bounded:
            return num_tokens
        if is_streaming and self._num_streamed <= MIN_BASELINE_TOKENS:  # nobody can tell how late a first token is
            return 0
        return self._limit_bounded_draft(num_tokens, self._budget.estimate_left_s(now_s, self._max_tokens) + gained_s)

    def _limit_bounded_draft(self, num_tokens: int, allowed_s: float) -> int:
        """How many of `num_tokens` a draft may write that may make the answer so much later."""
        draft, load, drafted_s = self._background_draft, self._load, self.measure_drafting_s()
        # that for which no token was timed is not charged: none has come since, or just the first
        left_s = allowed_s / load.max_late_s_per_s - max(0.0, drafted_s - self._timed_drafting_s)
        writing_s = left_s - self._estimate_s_until_first_piece()
        num_allowed = int(writing_s / max(draft.token_s or load.draft_token_s, _MIN_TOKEN_S))
        if num_allowed < _MIN_TOKENS:
            return 0
        draft.set_alarm(drafted_s + left_s, self._changed)  # it ends then, whatever has come
        return min(num_tokens, num_allowed)

    def record_answer_end(self) -> None:
        """Keep what the answer tells of the next ones."""
        draft, drafted_s = self._background_draft, self.measure_drafting_s()
        if draft.first_piece_s is not None:
            self._load.add_drafting(draft.first_piece_s, draft.token_s)
        elif drafted_s > self._load.first_piece_s:  # it takes longer than that
            self._load.add_drafting(drafted_s, 0.0)
        self._load.record_answer_end(has_drafted=drafted_s > 0.0 or draft.first_piece_s is not None)

    @property
    def _is_bounded(self) -> bool:
        """Whether the draft makes the target slower; one in this process does until it was measured well."""
        return self._load.is_harmful or (self._is_in_process and not self._load.is_harmless)

    def _estimate_alone_s(self, num_tokens: int) -> float | None:
        token_s = self._load.alone_token_s
        return None if token_s is None else token_s * num_tokens

    def _estimate_s_until_first_piece(self) -> float:
        """How long the draft will still be reading its prompt."""
        draft, usual_s = self._background_draft, self._load.first_piece_s
        return 0.0 if draft.first_piece_s is not None else max(0.0, usual_s - draft.measure_drafting_s())
