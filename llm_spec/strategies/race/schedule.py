"""StreamScheduler: when a race asks its draft, and where it begins streams. No clock, no task and no I/O of its own.

After a token that the draft did not have, the draft restarts at once, and streams begin at once where the first one
will be when they write their first token, and from there on a segment each, all that there is room for. Segments are
short where the draft is likely to be right still, and longer further on: what a wrong token costs is the wait for the
stream whose segment it is in.

    first token of a stream: 27 tokens of another         draft  a b c d ...
    stream 0 |------------------------------>|------>
    stream 1                                 |------>|          all have written their segment at once,
    stream 2                                         |-------->  and the answer is at the end of the last one

Streams beside the first one may slow it down, while they are opened (their prompt is read) and afterwards. The draft is
judged against the first stream, for nothing; where it is promising, one stream is opened beside it, and a few tokens
later several more. `ExtraStreamStats` measures what they cost. A stream is opened where it is likely to win more than
that, and segments are as long as that takes. Where the answer is later than it may be the streams end, and what was
lost is charged to the budget of `RowCallStats`, out of which later trials are paid.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from llm_spec.measure.pair_stats import PairStats
from llm_spec.measure.tokens import split_into_pieces
from llm_spec.strategies.race.chain import RaceStream, StreamChain, find_stream_boundary
from llm_spec.strategies.rows.prompt_trial import PromptTrial

__all__ = [
    "MAX_DRAFT_REACH",
    "DraftRequest",
    "LossBudget",
    "PromptTokenCosts",
    "StreamScheduler",
]

_MAX_SHARE: Final = 0.1  # of one answer's time, whatever all answers together may lose
_MAX_GAP: Final = 1.5  # times a stream's usual step, beyond which it waits because of other work


class LossBudget:
    """One answer's part of what all answers of a pair may lose. Times are seconds of any clock."""

    def __init__(self, pair_stats: PairStats, began_s: float) -> None:
        self._pair_stats = pair_stats
        self._began_s = began_s
        self._lost_s = 0.0

    def add_lost_time(self, seconds: float) -> None:
        """The answer is later than the target's own by so much; earlier, if negative."""
        self._lost_s += seconds
        self._pair_stats.rows.add_lost_time(seconds)

    def add_late_tokens(self, num_tokens: int, seconds: float) -> bool:
        """So many tokens of the stream came beside other work, so long after the last; gives whether it is late."""
        step_s = num_tokens * self._pair_stats.target_token_s
        is_late = seconds > _MAX_GAP * step_s
        if is_late:
            self.add_lost_time(seconds - step_s)  # a hiccup counts as well: nobody can tell
        return is_late

    def estimate_left_s(self, now_s: float, max_tokens: int | None) -> float:
        """How much may still be lost now, in an answer of at most `max_tokens`."""
        rows, step_s = self._pair_stats.rows, self._pair_stats.target_token_s
        elapsed_s = now_s - self._began_s
        answer_s = max(elapsed_s, rows.estimate_answer_s(step_s, max_tokens))
        return min(
            rows.estimate_allowed_loss_s(elapsed_s, step_s, max_tokens), _MAX_SHARE * answer_s - max(0.0, self._lost_s)
        )


_MIN_SEGMENT: Final = 2  # tokens
_MAX_SEGMENT: Final = 64
MAX_DRAFT_REACH: Final = 1024  # tokens that are drafted at once at most
_SEGMENT_SHARE: Final = 1.5  # of the tokens that the draft is right, one stream's part of them
_SEGMENT_GROWTH: Final = 0.3  # of a segment, where the draft is less likely by a factor of e to be right
_MIN_SURVIVAL: Final = 0.02  # a stream that is less likely to be of use is not worth its tokens
_CHARACTERS_PER_TOKEN: Final = 4  # of a token, roughly
_MAX_REST_TOKENS: Final = 64  # tokens without a draft, after several that were wrong at once
_MIN_USEFUL_RUN: Final = 4  # tokens that a draft is right, for it not to be tired of
_MIN_JUDGED: Final = 4  # tokens of the draft that a stream has judged, before a second one is opened
_TRIAL_TOKENS: Final = 4  # that are written beside more streams than before, to see whether those slow them down
_TRIAL_FACTOR: Final = 4  # so many times as many streams are tried next
_MAX_TRIAL_LOSS: Final = 1.0  # tokens that a trial may be late, for the server to have room
_MAX_LATE: Final = 2.0  # tokens that an answer may be late beside streams whatever the budget is: hiccups happen
_LATE_TOLERANCE: Final = 0.05  # of a time, that measuring may be off

_MAX_STREAM_GAP: Final = 3.0  # times its usual step that a token counts at most: more is a hiccup, …

_MAX_OPENING_COST: Final = 8.0  # … and tokens that the answer may be late by each stream that is being opened
_FIRST_PAUSE: Final = 32  # tokens without further streams after they did not pay, twice as many each time


@dataclass(slots=True)
class PromptTokenCosts:
    """Tokens of the request's prompt, and those that further streams have read.

    `is_at_end`: a stream would have begun where no token may follow, or within what the server constrains.
    """

    num_prompt_tokens: int
    num_extra_tokens: int = 0
    is_at_end: bool = False


class DraftRequest(NamedTuple):
    """A request to the draft: so many tokens of what follows a text."""

    answer: str
    num_tokens: int


class StreamScheduler:
    """One answer. Times are seconds of the clock by which streams are timed.

    `max_streams` may be open at once, `max_extra_cost` as of the config, `is_cache_shared` as of
    `PromptTrial`. Whoever drives it tells when tokens of the answer came (`record_progress`), asks the draft what
    `choose_draft_request` says, and opens what `choose_stream_to_open` gives.
    """

    def __init__(
        self,
        chain: StreamChain,
        pair_stats: PairStats,
        costs: PromptTokenCosts,
        *,
        make_stream: Callable[[str], RaceStream],
        max_streams: int,
        max_extra_cost: float | None,
        max_tokens: int | None,
        now_s: float,
        is_cache_shared: bool = False,
    ) -> None:
        self.can_begin = False  # whether it is known how further streams are begun
        self.is_off = False  # nothing more is begun
        self.num_opened = 0  # streams beside the first one, in all
        self.gained_s = 0.0  # by taking over what they had written
        self.can_read_prompt_part = False  # whether a part of the prompt can be read by itself
        self.prompt_trial = PromptTrial(pair_stats.rows.reading, is_cache_shared=is_cache_shared)
        self._chain = chain
        self._pair_stats = pair_stats
        self._stats = pair_stats.streams
        self._costs = costs
        self._make_stream = make_stream
        self._max_streams = max_streams
        self._max_extra_cost = max_extra_cost
        self._max_tokens = max_tokens
        self.budget = LossBudget(pair_stats, now_s)
        self._num_rest_tokens = 0  # tokens to wait before the draft begins anew …
        self._resting: RaceStream | None = None  # … while this one is the last …
        self._rest_until = 0  # … until it has written so many
        self._num_seen_takeovers = 0
        self._num_seen_agreed = 0
        self._num_extra = 0  # streams that are open beside the first one …
        self._num_tokens_since_change = 0  # … and tokens of the answer since there are so many
        self._late_s = 0.0  # that the answer is later than without them; earlier, if negative
        self._opening: list[RaceStream] = []  # streams that were opened and had not all begun …
        self._opening_late_s = 0.0  # … when the answer was that late by them
        self._first_stream = chain.streams[0]  # whose token came last, …
        self._has_come_alone = True  # … and after another one of its own
        self._num_tokens = 0
        self._last_s: float | None = None  # when the answer's last token came
        self._pause_tokens = _FIRST_PAUSE
        self._resume_at = 0  # tokens that the answer has when streams may be opened again

    # ------------------------------------------------------------------------------------------- draft

    @property
    def num_tokens_between_streams(self) -> int:
        """Tokens between the first two streams."""
        return self._find_segment_length(0)

    @property
    def max_useful_draft_tokens(self) -> int:
        """Tokens that are worth drafting at once: as far as all streams together can reach."""
        num_likely = self._pair_stats.runs.count_likely_tokens(self._chain.run_length, _MIN_SURVIVAL, MAX_DRAFT_REACH)
        num_reached = math.ceil(self._estimate_lead_tokens())
        num_reached += 2 * (self._max_streams + 1) * self.num_tokens_between_streams
        return min(num_reached, max(num_likely, _MIN_USEFUL_RUN, self.num_tokens_between_streams), MAX_DRAFT_REACH)

    def choose_draft_request(self, max_tokens: int, *, has_ended: bool, is_cut: bool) -> DraftRequest | None:
        """The next request to the draft, for at most `max_tokens`; None: none now.

        `is_cut`: it has ended, and would have gone on.
        """
        chain, tail = self._chain, self._chain.last_stream
        if self.is_off or not (chain.is_draft_wrong or (has_ended and not self._costs.is_at_end)):
            return None
        num_tokens = min(self.max_useful_draft_tokens, max_tokens)
        if not chain.is_draft_wrong and is_cut:
            if len(tail.expected) - len(tail.text) >= _CHARACTERS_PER_TOKEN * num_tokens:
                return None
            return DraftRequest(tail.prefix + tail.expected, num_tokens)
        if not chain.is_draft_wrong and len(tail.text) < len(tail.expected):
            return None
        if self._resting is not tail:
            self._choose_pause_before_new_draft(tail)
        if tail.num_tokens < self._rest_until:
            return None
        self._resting = None
        self._costs.is_at_end = False
        chain.reset_expected_text()
        return DraftRequest(tail.assumed_answer, num_tokens)

    def _choose_pause_before_new_draft(self, tail: RaceStream) -> None:
        """A draft that was of no use since the last time restarts later and later."""
        num_agreed = self._chain.num_agreed
        is_useful = (
            self._chain.num_takeovers > self._num_seen_takeovers
            or num_agreed - self._num_seen_agreed >= _MIN_USEFUL_RUN
        )
        self._num_rest_tokens = (
            0 if is_useful and self._is_draft_promising() else min(max(1, 2 * self._num_rest_tokens), _MAX_REST_TOKENS)
        )
        self._resting, self._num_seen_takeovers, self._num_seen_agreed = tail, self._chain.num_takeovers, num_agreed
        self._rest_until = tail.num_tokens + self._num_rest_tokens

    def _is_draft_promising(self) -> bool:
        """Whether it is likely enough to be right where a stream could begin."""
        num_tokens = math.ceil(self._estimate_lead_tokens()) + _MIN_SEGMENT
        return self._estimate_survival(num_tokens) >= _MIN_SURVIVAL

    # ----------------------------------------------------------------------------------------- streams

    def choose_stream_to_open(self, num_open: int, now_s: float, *, is_draft_whole: bool) -> RaceStream | None:
        """One more stream that is to be opened now; None: none. `num_open` are, with those that are being closed.

        `is_draft_whole`: the draft has said how the answer ends.
        """
        chain, tail = self._chain, self._chain.last_stream
        if self.is_off or self._costs.is_at_end or tail.finish is not None or chain.is_draft_wrong:
            return None
        if num_open >= self._choose_max_open_streams(now_s):
            return None
        # what the last stream will have written when a new one writes its first token
        lead = self._estimate_lead_tokens()
        if tail.timer.first_s is None:
            lead = min(lead or math.inf, (now_s - tail.timer.opened_s) / self._pair_stats.target_token_s)
        num_before = self._count_unverified_tokens(tail) + math.ceil(lead)
        segment = self._find_segment_length(num_before)
        if is_draft_whole:  # the streams divide what is left
            num_left = len(split_into_pieces(tail.expected[len(tail.text) :])) - math.ceil(lead)
            segment = min(segment, max(num_left // (self._max_streams - num_open + 1), _MIN_SEGMENT))
        worthwhile = self._find_worthwhile_segment(segment, num_before)
        if worthwhile is None or not self._may_be_late_by_opening(now_s):
            return None
        end = find_stream_boundary(tail.expected, len(tail.text), math.ceil(lead) + worthwhile)
        if end is None or not self._can_afford_stream(end):
            return None
        child = self._make_stream(tail.prefix + tail.expected[:end])
        chain.append_stream(child, end)
        self._opening.append(child)
        self._num_tokens_since_change = 0
        self.num_opened += 1
        return child

    def choose_prompt_trial(self, now_s: float) -> int | None:
        """How many tokens of the prompt are to be read now, before a second stream reads all of them; None: none."""
        is_of_use = self.can_read_prompt_part and not self.is_off and self._may_try_stream(now_s)
        if self._max_streams == 1 or self._stats.num_extra or not is_of_use or self._last_s is None:
            return None
        allowance_s, step_s = self._estimate_allowance(now_s), self._pair_stats.target_token_s
        return self.prompt_trial.begin(self._costs.num_prompt_tokens, allowance_s, self._last_s, step_s)

    def _choose_max_open_streams(self, now_s: float) -> int:
        """How many streams may be open now."""
        if not self.can_begin or self._num_tokens < self._resume_at:
            return 1
        num_known = self._stats.num_extra
        if self._last_s is None and not (num_known and self._stats.are_free):
            return 1  # nobody could tell how late the first token is by it
        if not num_known and not (self._may_try_stream(now_s) and self._may_read_prompt(now_s)):
            return 1
        return min(self._max_streams, 1 + max(1, _TRIAL_FACTOR * num_known))

    def _may_try_stream(self, now_s: float) -> bool:
        """Whether a second stream may be opened to see whether the server has room."""
        step_s = self._pair_stats.token_s.value
        if step_s is None or self._pair_stats.runs.num_judged < _MIN_JUDGED:
            return False
        return self._num_tokens >= self._resume_at and _TRIAL_TOKENS * step_s <= self._estimate_allowance(now_s)

    def _may_read_prompt(self, now_s: float) -> bool:
        if not self.can_read_prompt_part:
            return True
        if self.prompt_trial.is_running:
            return False
        allowance_s, step_s = self._estimate_allowance(now_s), self._pair_stats.target_token_s
        return self.prompt_trial.may_read(self._costs.num_prompt_tokens, allowance_s, step_s)

    def _estimate_allowance(self, now_s: float) -> float:
        """How much may be lost now."""
        return self.budget.estimate_left_s(now_s, self._max_tokens)

    def _estimate_survival(self, num_tokens: int) -> float:
        """The probability that the draft's next tokens are all right."""
        return self._pair_stats.runs.estimate_survival(self._chain.run_length, num_tokens)

    def _estimate_lead_tokens(self) -> float:
        """How many tokens a stream writes while another waits for its first one."""
        first_s = self._stats.first_s.value
        if first_s is None:
            return self._pair_stats.num_tokens_per_first_token_wait
        return min(first_s / self._pair_stats.target_token_s, float(MAX_DRAFT_REACH))

    def _count_unverified_tokens(self, tail: RaceStream) -> int:
        """How many tokens the draft has to be right for what the last stream has written to be the answer."""
        frontier = next(stream for stream in self._chain.streams if not stream.complete)
        num_tokens = tail.num_prefix_tokens + tail.num_tokens - frontier.num_prefix_tokens - frontier.num_tokens
        return 0 if frontier is tail else max(0, num_tokens)

    def _find_segment_length(self, num_before: float) -> int:
        """Tokens from one stream to the next, where the draft has to be right for so many before."""
        wrong = max(1.0 - self._pair_stats.runs.estimate_rate(self._chain.run_length + round(num_before)), 1e-3)
        growth = math.exp(min(_SEGMENT_GROWTH * wrong * num_before, 5.0))
        return min(max(round(_SEGMENT_SHARE / wrong / self._max_streams * growth), _MIN_SEGMENT), _MAX_SEGMENT)

    def _find_worthwhile_segment(self, segment: int, num_before: int) -> int | None:
        """The shortest segment from `segment` on that pays for its stream; None: there is none."""
        survival = self._estimate_survival(num_before + segment)
        for length in range(segment, max(segment, _MAX_SEGMENT) + 1):
            if survival < _MIN_SURVIVAL:
                return None
            if self._stats.is_worthwhile(survival * length, num_before + length):
                return length
            survival *= self._pair_stats.runs.estimate_rate(self._chain.run_length + num_before + length)
        return None

    def _may_be_late_by_opening(self, now_s: float) -> bool:
        """Whether one more stream may be opened now, as late as the answer will be by it."""
        cost_s = self._stats.opening_cost * self._pair_stats.target_token_s
        return not cost_s or self._late_s + (len(self._opening) + 1) * cost_s <= self._estimate_allowance(now_s)

    def _can_afford_stream(self, end: int) -> bool:
        """Whether one more stream stays within `max_extra_cost`."""
        bound, chain = self._max_extra_cost, self._chain
        if bound is None:
            return True
        num_input = self._costs.num_prompt_tokens + len(
            split_into_pieces(chain.last_stream.prefix + chain.last_stream.expected[:end])
        )
        extra = self._costs.num_extra_tokens + num_input + chain.num_cancelled_tokens
        return extra <= bound * (self._costs.num_prompt_tokens + chain.num_answer_tokens)

    # --------------------------------------------------------------------------------------- lost time

    def record_progress(self, num_open: int, arrived_s: float) -> None:
        """Something came while so many streams were open: where they make the answer late, all but the first end."""
        num_new = self._chain.num_answer_tokens - self._num_tokens
        self._num_tokens += num_new
        if num_open - 1 != self._num_extra:
            self._num_extra, self._num_tokens_since_change = num_open - 1, 0
        if num_new < 1:
            return
        last_s, self._last_s = self._last_s, arrived_s
        step_s = self._pair_stats.target_token_s
        self.budget.add_lost_time(self.prompt_trial.add_streamed(num_new, arrived_s, step_s))
        if last_s is None or num_open < 2 or self._pair_stats.token_s.value is None:
            self._opening.clear()
            self._charge_lost_time()
            return
        max_gap = _MAX_STREAM_GAP * num_new + _MAX_OPENING_COST * len(self._opening)
        gap_s = min(arrived_s - last_s, max_gap * step_s)
        if self._chain.streams[0] is not self._first_stream:  # the tokens of another stream were won
            self._first_stream, self._has_come_alone = self._chain.streams[0], False
            self._opening.clear()
            self._late_s += gap_s - step_s * num_new
            self.gained_s += max(0.0, step_s * num_new - gap_s)
        elif not self._has_come_alone:  # since what it wrote before, and that came all at once
            self._has_come_alone = True
        else:
            self._measure_costs(num_new, gap_s - step_s * num_new)
            late_s = gap_s * (1.0 - _LATE_TOLERANCE) - step_s * num_new
            self._late_s = max(min(0.0, self._late_s), self._late_s + late_s)
        self._num_tokens_since_change += num_new
        self._judge_server_room(arrived_s)

    def _measure_costs(self, num_new: int, late_s: float) -> None:
        """What the streams beside the first one cost it: while they are opened, and afterwards."""
        step_s = self._pair_stats.target_token_s
        if not self._opening:
            self._opening_late_s = 0.0
            self._stats.add_token(self._num_extra, late_s / step_s / num_new)
            return
        self._opening_late_s += late_s
        if any(stream.timer.first_s is None and stream in self._chain.streams for stream in self._opening):
            return
        num_begun = sum(stream.timer.first_s is not None for stream in self._opening)
        num_late = self._opening_late_s / step_s
        if num_begun or num_late > len(self._opening):  # else they ended before the server had begun with them
            self._stats.add_opening(max(1, num_begun), num_late)
        self._opening.clear()

    def _judge_server_room(self, now_s: float) -> None:
        step_s = self._pair_stats.target_token_s
        is_trial = self._num_extra > self._stats.num_extra and self._num_tokens_since_change >= _TRIAL_TOKENS
        has_room = self._late_s <= _MAX_TRIAL_LOSS * step_s
        if (
            is_trial and not has_room and not self._opening
        ):  # it may be late by what opening streams costs, and that pays
            lead = math.ceil(self._estimate_lead_tokens())
            has_room = self._find_worthwhile_segment(_MIN_SEGMENT, lead) is not None
        if is_trial and has_room:
            self._stats.num_extra = self._num_extra
        is_refuted = is_trial and not has_room and not self._opening
        if is_refuted or self._late_s > max(self._estimate_allowance(now_s), _MAX_LATE * step_s):
            self._stats.num_extra = 0
            self._resume_at = self._num_tokens + self._pause_tokens
            self._pause_tokens *= 2
            self._chain.drop_all_but_first_stream()
            self._charge_lost_time()

    def _charge_lost_time(self) -> None:
        if self._late_s > 0.0:
            self.budget.add_lost_time(self._late_s)
            self._late_s = 0.0

    def record_answer_end(self) -> None:
        """The answer has ended: what it took is added to what later trials may cost."""
        self._charge_lost_time()
        num_tokens = self._chain.num_answer_tokens
        if num_tokens:
            self._pair_stats.rows.add_answer_time(self._pair_stats.estimate_plain_s(num_tokens) or 0.0)
            self._stats.record_answer_end(self.num_opened)
