"""RowScheduler: when a server is asked for which tokens of an answer. No clock, no task and no I/O of its own.

The server's own stream writes the answer. A call of rows asks for the server's own token after each of several
prefixes: the confirmed tokens, and so many drafted ones after them. What the calls confirm can overtake the stream,
which is closed then; where that does not pay any more, a new stream goes on from what is confirmed.

    stream    a b c d                     closed once the rows are clearly ahead
    drafted   a b c d e f g h i
    call 1          . . .                 sent first: what follows c, d and e
    call 2                . . .           sent while call 1 is under way, as if all of the draft were right

A stream shows for nothing how well the draft does: rows are sent once that is known to pay, and the first call of a
server has one row. `RowCallStats` has the arithmetic.

Who may write a position is fixed before anything at or after it is sampled. Greedily there is one text, so whoever is
first writes; of sampled text the rows have all positions from the first one that they were sent for, once the stream
has come to it and agrees with the draft up to there, and the call that was sent first has the position. To take
whichever is first instead would prefer what the draft says, since rows are quick exactly there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from llm_spec.contract.endpoint import SampledToken
from llm_spec.contract.events import Origin
from llm_spec.measure.pair_stats import PairStats
from llm_spec.measure.row_stats import DraftAgreementStats, SingleCall, expect_right_tokens
from llm_spec.strategies.race.schedule import LossBudget
from llm_spec.strategies.rows.drafted_tokens import DraftedTokens
from llm_spec.strategies.rows.lateness_trial import LatenessTrial
from llm_spec.strategies.rows.prompt_trial import PromptTrial

__all__ = ["ConfirmedToken", "RowCall", "RowDecision", "RowScheduler"]

_MIN_USE: Final = 0.03  # a row that is less likely to be of use is not worth its tokens
_MIN_SECONDS: Final = 1e-9
_MIN_WAIT_S: Final = 1e-4
_MAX_AHEAD: Final = 1024  # tokens, of an answer without a limit
_MIN_SPEEDUP: Final = 1.08  # of rows over the stream, in the long run, to begin with them …
_KEPT_SPEEDUP: Final = 1.0  # … and to go on
_MIN_JUDGED: Final = 4  # tokens of the draft that a stream has judged, before a server is asked for its first row
_MIN_JUDGED_OF_PAIR: Final = 24  # tokens of a draft that were judged, before it may be found to be no good
_FAR_SPEEDUP: Final = 1.5  # of rows, which is none of a stream that the draft makes slower
_WATCHED_SPEEDUP: Final = 0.8  # of rows, below which nothing that the draft says is expected to change that soon
_MAX_STAKE: Final = 0.15  # of an answer's time, that may be lost where rows end its stream
_MIN_LEAD: Final = 2  # tokens that rows are ahead of a stream before it is closed
_FIRST_PAUSE: Final = 32  # tokens that a stream writes after rows did not pay, twice as many each time
_DRAFT_PATIENCE: Final = 2.0  # times what drafting for a call usually takes, that the call waits for it
_TRIAL_SHARE: Final = 0.5  # of what may be lost, that rows beside a stream may cost


@dataclass(eq=False, slots=True)
class RowCall:
    """A call under way: rows for the position `base + first` and those after it.

    `assumed_ids`: drafted tokens after the `base` confirmed ones, up to the prefix of the last row. `num_other_rows`:
    under way when it was sent, a stream's included. `num_skipped`: of its positions, those that the stream wrote first.
    """

    base: int
    first: int
    assumed_ids: tuple[int, ...]
    draft_s: tuple[float, ...] = ()  # that each of the drafted tokens after its first row took
    num_other_rows: int = 0
    tokens: list[SampledToken] | None = None  # its answer, one for each row
    verify_s: float = 0.0
    num_accepted: int = 0
    num_emitted: int = 0
    num_skipped: int = 0
    last_at: int = 0  # the position of the last token that it gave

    @property
    def num_rows(self) -> int:
        return len(self.assumed_ids) - self.first + 1

    @property
    def num_drafted(self) -> int:
        """Tokens that are sent to be judged."""
        return self.num_rows - 1

    @property
    def start(self) -> int:
        """The position of its first row."""
        return self.base + self.first

    @property
    def end(self) -> int:
        """The position after its last row."""
        return self.start + self.num_rows

    def get_token(self, position: int) -> SampledToken | None:
        """What it gives for a position; None: it was not answered yet."""
        return None if self.tokens is None else self.tokens[position - self.start]


class ConfirmedToken(NamedTuple):
    """The answer's next token, and how it came about."""

    token: SampledToken
    origin: Origin


@dataclass(slots=True)
class RowDecision:
    """What to do now; `wait_s`: when to decide again, unless something happens before (None: only then).

    `num_trial_tokens`: a call is to read so many tokens of the prompt, after which `prompt_trial` is told.
    """

    closes_stream: bool = False
    opens_stream: bool = False
    num_trial_tokens: int | None = None
    calls: list[RowCall] = field(default_factory=list["RowCall"])
    wait_s: float | None = None


class RowScheduler:
    """One answer. Times are seconds of any clock that never goes back.

    `max_open`: calls and streams that may be open at once; with one, a stream ends where rows begin. `max_calls`: of
    those, calls. `max_rows`: of a call. `max_tokens`: of the answer. `is_cache_shared`: as of `PromptTrial`.
    Whoever drives it tells what has happened, calls `take_confirmed` and `take_dropped_calls`, and does what
    `decide_next_actions` says.
    """

    def __init__(
        self,
        pair_stats: PairStats,
        *,
        is_greedy: bool,
        max_open: int,
        max_calls: int,
        max_rows: int,
        max_tokens: int | None,
        now_s: float,
        is_cache_shared: bool = False,
    ) -> None:
        self.ids: list[int] = []  # confirmed
        self.calls: list[RowCall] = []  # that may still tell something, in the order in which they were sent
        self.stream_at: int | None = 0  # the position that the stream writes next; None: there is none
        self.can_send = False  # whether the prompt is known, …
        self.num_prompt_tokens = 0  # … which has so many tokens
        self.draft = DraftedTokens(pair_stats.rows, now_s)
        self.prompt_trial = PromptTrial(pair_stats.rows.reading, is_cache_shared=is_cache_shared)
        self.can_leave = True  # whether a stream can go on from what is confirmed
        self.num_closing = 0  # calls and streams that are not needed, and still open
        self.max_tokens = max_tokens
        self._dropped_calls: list[RowCall] = []  # that tell nothing more, and were not taken yet
        self._pair_stats = pair_stats
        self._rows = pair_stats.rows
        self._agreement = DraftAgreementStats(self._rows.agreement)
        self._is_greedy = is_greedy
        self._max_open = max_open
        self._max_calls = min(max_calls, max_open)
        self._max_rows = max_rows
        self._is_off = False  # no more rows
        self.budget = LossBudget(pair_stats, now_s)
        self._row_trial: LatenessTrial | None = None
        self._stream_opened_s: float | None = now_s  # None: its first token has come
        self._stream_last_s = now_s
        self._seen_s = now_s  # of the last event, or decision
        self._rows_from: int | None = None  # the first position of sampled text that the stream may not write
        self._send_at_s = now_s  # when the next call is due
        self._held_since_s: float | None = None  # since when one waits for more to be drafted, with no other beside it
        self._phase_s, self._phase_at = now_s, 0  # when rows were left alone, and how many tokens there were, …
        self._closed_at = 0  # … and those that the stream had come to
        self._late_s = 0.0  # that the answer is by rows that were alone
        self._pause_tokens = _FIRST_PAUSE
        self._resume_at = 0  # tokens that the answer has when rows may be tried again

    # ------------------------------------------------------------------------------------------ events

    def add_late_token_counts(self, num_agreed: int, num_different: int) -> None:
        """Tokens of the draft that were late for what was confirmed, and agreed with it or not."""
        for has_agreed, number in ((True, num_agreed), (False, num_different)):
            for _ in range(number):
                self._agreement.add_next_token(has_agreed=has_agreed)

    def record_stream_opened(self, now_s: float) -> None:
        """A stream was opened that goes on from what is confirmed."""
        self.stream_at, self._stream_opened_s, self._rows_from = len(self.ids), now_s, None
        self._stream_last_s = now_s

    def record_stream_ended(self, now_s: float) -> None:
        """The stream writes no more, or nobody reads it: rows are alone."""
        self._phase_s, self._phase_at = now_s, len(self.ids)
        self._closed_at = len(self.ids) if self.stream_at is None else self.stream_at
        self.stream_at = self._row_trial = None
        self.prompt_trial.stop()

    def confirm_streamed_tokens(self, token_ids: Sequence[int], now_s: float) -> range:
        """Tokens of the stream, confirmed where it may write them; gives which of them were.

        The stream ends here where it goes on from something else than what is confirmed, or comes to what is the rows'.
        """
        self._seen_s = now_s
        self._charge_slow_stream(len(token_ids), now_s)
        taken = range(0)
        for index, token_id in enumerate(token_ids):
            if self.stream_at is None:
                break
            if self.stream_at < len(self.ids):
                if self.ids[self.stream_at] != token_id:
                    self.record_stream_ended(now_s)
                    break
            elif self.is_stream_at_rows:
                self.record_stream_ended(now_s)
                break
            else:
                self._confirm_token(token_id)
                taken = range(taken.start if taken else index, index + 1)
            self.stream_at += 1
        return taken

    @property
    def is_stream_at_rows(self) -> bool:
        """Whether what the stream writes next is the rows' to write: it does not count."""
        return self.stream_at is not None and self._rows_from is not None and self.stream_at >= self._rows_from

    def stop_rows(self) -> list[RowCall]:
        """No more rows in this answer; gives the calls that are not needed any more."""
        self._is_off = True
        calls, self.calls, self._rows_from = self.calls, [], None
        return calls

    def record_call_answer(self, call: RowCall, tokens: list[SampledToken], seconds: float) -> None:
        """A call was answered."""
        call.tokens, call.verify_s = tokens, seconds
        if self._row_trial is not None:
            self._row_trial.is_answered = True
        self._rows.add_call_time(call.num_rows, seconds, num_other_rows=call.num_other_rows)

    def take_confirmed(self, now_s: float) -> ConfirmedToken | None:
        """The next token that rows confirm; None: there is none yet. Of sampled text, a stream ends with the first."""
        self._seen_s = now_s
        at = len(self.ids)
        is_streamed = self.stream_at is not None and not self._is_greedy
        if is_streamed and (self._rows_from is None or at < self._rows_from):
            return None
        call = next((call for call in self.calls if call.start <= at < call.end), None)
        token = None if call is None else call.get_token(at)
        if call is None or token is None:
            return None
        if is_streamed:
            self.record_stream_ended(now_s)
        drafted_id = call.assumed_ids[at - call.base] if at - call.base < len(call.assumed_ids) else None
        is_accepted = token.token_id == drafted_id
        call.num_emitted, call.last_at = call.num_emitted + 1, at
        call.num_accepted += is_accepted
        self._confirm_token(token.token_id, call)
        return ConfirmedToken(token, _find_token_origin(call, drafted_id, is_accepted=is_accepted))

    def take_dropped_calls(self) -> list[RowCall]:
        """The calls that tell nothing more, since this was last called."""
        dropped, self._dropped_calls = self._dropped_calls, []
        return dropped

    def confirm_single_token(self, token_id: int) -> None:
        """A token that was asked for by itself."""
        self._confirm_token(token_id)

    def forget_last_tokens(self, num_tokens: int) -> None:
        """Forget the last tokens, which no text came of."""
        del self.ids[len(self.ids) - num_tokens :]

    def record_answer_end(self) -> None:
        """The answer has ended, or nobody reads on: what it took is charged to later trials."""
        if self.stream_at is None:
            self._charge_phase_of_rows(self._seen_s)
        if self.ids:
            self._rows.add_answer_time(self._pair_stats.estimate_plain_s(len(self.ids)) or 0.0)

    def _confirm_token(self, token_id: int, source: RowCall | None = None) -> None:
        at = len(self.ids)
        self.ids.append(token_id)
        drafted_id = self.draft.confirm_token(token_id)
        if drafted_id is not None or self.draft.is_idle:  # a draft that has just begun is not silent
            self._agreement.add_next_token(has_agreed=None if drafted_id is None else drafted_id == token_id)
        for call in list(self.calls):
            if call is not source and call.start <= at < call.end:
                call.num_skipped += 1
            index = at - call.base
            is_wrong = 0 <= index < len(call.assumed_ids) and call.assumed_ids[index] != token_id
            if is_wrong or call.end <= len(self.ids):
                self.calls.remove(call)
                self._dropped_calls.append(call)
                if self._row_trial is not None and not is_wrong:
                    self._row_trial.is_answered = True  # by now, and too late
        if drafted_id != token_id or not self.calls:
            self._send_at_s = -math.inf  # the draft begins anew, and its first tokens are waited for
        if not self.calls and self.stream_at is not None:
            self._rows_from = None

    # --------------------------------------------------------------------------------------- decisions

    def decide_next_actions(self, now_s: float) -> RowDecision:
        """What is to be done now; calls that are to be sent count as sent."""
        self._seen_s = now_s
        decision = RowDecision()
        if self._should_close_stream(now_s):
            decision.closes_stream = True
            self.record_stream_ended(now_s)
            self.num_closing += 1
        if self.stream_at is None:
            if self._is_off or self._should_leave_rows(now_s):
                self._leave_rows(now_s)
                decision.opens_stream = True
                return decision
            self._secure_lead(now_s, decision)
            self._send_calls(self._count_positions_with_rows(), now_s, decision)
        elif self.can_send and not self._is_off:
            first = self._count_positions_with_rows() if self.calls else self._estimate_stream_lead_tokens(now_s)
            is_trial = bool(self.calls) and not self._is_greedy and self._rows_from is None
            is_paused = is_trial or len(self.ids) < self._resume_at
            if not is_paused and (self.calls or self._should_begin_rows(first, now_s)):
                if self._max_open == 1:
                    decision.closes_stream = True
                    self.record_stream_ended(now_s)
                else:
                    self._send_calls(first, now_s, decision)
            elif not self._rows.is_measured and self._is_first_row_promising() and self._max_open > 1:
                num_tokens, allowance_s = self.num_prompt_tokens + len(self.ids), self._estimate_allowance(now_s)
                decision.num_trial_tokens = self.prompt_trial.begin(
                    num_tokens, allowance_s, self._stream_last_s, self._pair_stats.target_token_s
                )
        return decision

    def _send_calls(self, first: int, now_s: float, decision: RowDecision) -> None:
        """Send a call for the positions from `first` after the confirmed ones, when it is due."""
        num_drafted = len(self.draft.ids)
        room = self._count_answer_tokens_left() - first
        has_stream = self.stream_at is not None or decision.opens_stream
        max_open = self._max_open - self.num_closing - has_stream
        max_calls = min(self._max_calls if self._rows.is_measured else 1, max_open)
        if first > num_drafted or room < 1 or len(self.calls) >= max_calls:
            return
        limit = self._limit_rows(first)
        num_rows = min(
            num_drafted - first + 1, room, limit if self.calls else max(1, limit), self._limit_rows_beside_stream(now_s)
        )
        if num_rows < 1:
            return
        if num_rows == num_drafted - first + 1 < room and not self.draft.is_idle:  # more is to be drafted
            wait_s = self._send_at_s - now_s if self._max_open > 1 else self._wait_for_single_call(num_rows, now_s)
            if wait_s > 0.0:
                decision.wait_s = min(wait_s, math.inf if decision.wait_s is None else decision.wait_s)
                return
        self._held_since_s = None
        last = first + num_rows - 1
        call = RowCall(
            len(self.ids),
            first,
            tuple(self.draft.ids[:last]),
            tuple(self.draft.seconds[first:last]),
            self._count_rows_under_way() + has_stream,
        )
        self._send_at_s = now_s + self._rows.estimate_call_s() / self._max_calls
        if self.stream_at is not None and self._rows_from is None and self._rows.is_measured and not self._is_greedy:
            self._rows_from = call.start
        if self.stream_at is not None and self._stream_opened_s is None:
            self._add_to_row_trial(call.num_rows)
        self.calls.append(call)
        decision.calls.append(call)
        self._send_calls(first + num_rows, now_s, decision)

    def _add_to_row_trial(self, num_rows: int) -> None:
        """So many rows are sent beside the stream, with those under way; what was given up unanswered shows nothing."""
        trial = self._row_trial
        if trial is None or not (trial.is_answered or self._count_rows_under_way()):
            trial = self._row_trial = LatenessTrial(self._rows.lateness, 0, self._stream_last_s)
        trial.amount += num_rows

    def _wait_for_single_call(self, num_rows: int, now_s: float) -> float:
        """How long a call with no other beside it may wait for more than these rows."""
        best = self._find_best_single_call()
        if num_rows >= min(best.num_rows, 2 * self._rows.max_rows):
            return 0.0
        if self._held_since_s is None:
            self._held_since_s = now_s
        return self._held_since_s + _DRAFT_PATIENCE * best.drafting_s - now_s

    def _count_positions_with_rows(self) -> int:
        """How many positions after the confirmed ones will be written; a stream writes those before the first row."""
        if self.stream_at is not None:
            return max((call.end for call in self.calls), default=len(self.ids)) - len(self.ids)
        end = len(self.ids)
        for call in self.calls:  # the stream may have ended before it came to the first of them
            end = max(end, call.end) if call.start <= end else end
        return end - len(self.ids)

    def _count_answer_tokens_left(self) -> int:
        """How many tokens the answer may still have."""
        return _MAX_AHEAD if self.max_tokens is None else self.max_tokens - len(self.ids)

    def _limit_rows(self, first: int) -> int:
        """Rows that a call may have: at most twice as many as any before, and none that is hardly ever of use."""
        num_rows = min(self._max_rows, max(1, 2 * self._rows.max_rows))
        if not self._rows.is_measured:
            return num_rows
        return min(num_rows, self._find_last_useful_position() - first + 1)

    def _find_last_useful_position(self) -> int:
        """The last position after the confirmed ones at which a row saves more time than it takes."""
        accepted = self._agreement.estimate_acceptance_rate()
        least = max(_MIN_USE, self._rows.row_s / max(self._pair_stats.target_token_s, _MIN_SECONDS))
        return int(math.log(min(1.0, least)) / math.log(accepted)) if 0.0 < accepted < 1.0 else _MAX_AHEAD

    def _limit_rows_beside_stream(self, now_s: float) -> int:
        """Rows that may be sent besides those under way.

        They are at most twice as many as showed what they cost (while none has, twice the most that were answered; one
        where there was no room), and are expected to cost half of what may be lost at most; a single one may cost all.
        """
        if self.stream_at is None:
            return _MAX_AHEAD
        known = self._rows.lateness
        num_rows = 1 if self._rows.is_room_doubtful else max(1, 2 * (known.amount or self._rows.max_rows))
        if row_late_s := known.estimate_late_s(1, self._pair_stats.target_token_s):
            allowance_s = self._estimate_allowance(now_s)
            least = 1 if row_late_s <= allowance_s else 0
            num_rows = min(num_rows, max(least, int(_TRIAL_SHARE * allowance_s / row_late_s)))
        return num_rows - self._count_rows_under_way()

    def _count_rows_under_way(self) -> int:
        return sum(call.num_rows for call in self.calls if call.tokens is None)

    def _estimate_stream_lead_tokens(self, now_s: float) -> int:
        """How many tokens the stream writes until a call that is sent now is answered."""
        step_s, call_s = self._pair_stats.target_token_s, self._estimate_call_s()
        if self._max_open == 1:
            return 0
        if self._stream_opened_s is not None:
            call_s -= max(0.0, self._stream_opened_s + self._get_first_token_s() - now_s)
        num_tokens = math.ceil(min(call_s / step_s, _MAX_AHEAD)) if call_s > 0.0 < step_s else 0
        num_behind = 0 if self.stream_at is None else len(self.ids) - self.stream_at
        return max(0, num_tokens - num_behind)

    def _should_begin_rows(self, first: int, now_s: float) -> bool:
        """Whether rows are likely to overtake the stream, and may be tried."""
        num_drafted = len(self.draft.ids)
        is_known = self._pair_stats.token_s.value is not None and self._pair_stats.first_token_s.value is not None
        if not (is_known and num_drafted):
            return False
        if self._max_open == 1:  # nothing may run beside the stream: neither a trial nor rows that gain once
            return self._estimate_speedup_of_rows() >= _MIN_SPEEDUP and self._can_stake(now_s)
        if not self._rows.is_measured:
            return self._should_try_first_row(now_s)
        if first > num_drafted or not self._can_stake(now_s):
            return False
        least_s = 0.0 if self._is_greedy else self._get_first_token_s()
        return self._estimate_speedup_of_rows() >= _MIN_SPEEDUP or self._estimate_gain_s(first) > least_s

    def _can_stake(self, now_s: float) -> bool:
        """Whether what is lost where rows are of no use is little: of sampled text they end the stream, at a price."""
        first_s = self._get_first_token_s()
        is_affordable = first_s <= self._estimate_allowance(now_s)
        return self._is_insured() or (is_affordable and first_s + self._estimate_call_s() <= self._limit_stake())

    def _limit_stake(self) -> float:
        return _MAX_STAKE * self._rows.estimate_answer_s(self._pair_stats.target_token_s, self.max_tokens)

    def _tolerate_late(self, now_s: float) -> float:
        """How late an answer may be where its stream is closed: a wrong token of the draft is no reason to open it.

        Not at all where too much was lost already.
        """
        allowance_s = self._estimate_allowance(now_s)
        if allowance_s <= 0.0:
            return 0.0
        usual_s = max(2.0 * self._rows.estimate_call_s(), allowance_s)
        return min(usual_s + self._get_first_token_s(), self._limit_stake() - self._late_s)

    def _should_try_first_row(self, now_s: float) -> bool:
        """Whether a row may be asked for although nobody knows what it costs: a prompt that is read again, at worst."""
        num_tokens = self.num_prompt_tokens + len(self.ids)
        is_trial_due = self._is_first_row_promising() and not self.prompt_trial.is_running
        return is_trial_due and self.prompt_trial.may_read(
            num_tokens, self._estimate_allowance(now_s), self._pair_stats.target_token_s
        )

    def _is_first_row_promising(self) -> bool:
        """Whether the draft has been right of more than every other token."""
        if self._stream_opened_s is not None or self._rows.agreement.num_judged < _MIN_JUDGED:
            return False
        covered = self._agreement.estimate_coverage_rate()
        return covered / max(1e-9, 1.0 - covered) >= 1.0

    def _estimate_allowance(self, now_s: float) -> float:
        """How much may be lost now."""
        return self.budget.estimate_left_s(now_s, self.max_tokens)

    def is_draft_promising(self) -> bool:
        """Whether the draft is worth being asked at once where it was wrong, and not only now and then."""
        if self.stream_at is None or self._rows.agreement.num_judged < _MIN_JUDGED_OF_PAIR:
            return True
        covered = self._agreement.estimate_coverage_rate()
        return covered >= 0.5 and (not self._rows.is_measured or self._estimate_speedup_of_rows() >= _WATCHED_SPEEDUP)

    def can_pause_draft(self) -> bool:
        """Whether little is lost without a draft for some tokens: a stream is open, and rows are not far faster."""
        is_far_faster = self._rows.is_measured and self._estimate_speedup_of_rows() >= _FAR_SPEEDUP
        return self.stream_at is not None and not is_far_faster

    def is_draft_paying(self) -> bool:
        """Whether drafting is known to win time: rows are alone, or faster than the stream."""
        is_faster = self._rows.is_measured and self._estimate_speedup_of_rows() >= _MIN_SPEEDUP
        return not self._is_off and (self.stream_at is None or is_faster)

    def are_rows_faster_than_stream(self) -> bool:
        """Whether rows are known to be the faster way, and may write again what a stream has written, unseen."""
        is_known = self._is_greedy and self.can_send and not self._is_off and self._rows.is_measured
        return is_known and self._estimate_speedup_of_rows() >= _MIN_SPEEDUP

    def _should_close_stream(self, now_s: float) -> bool:
        if self.stream_at is None or self._is_off:
            return False
        if not self._is_greedy:
            return bool(self.calls) and self.stream_at == self._rows_from
        lead, step_s = len(self.ids) - self.stream_at, self._pair_stats.target_token_s
        if lead < _MIN_LEAD or not self.can_leave:
            return False
        needed_s = self._get_first_token_s() + self._rows.estimate_call_s()
        if self._estimate_speedup_of_rows() >= _MIN_SPEEDUP:
            needed_s -= self._tolerate_late(now_s)
        return (lead - _MIN_LEAD) * step_s >= needed_s

    def _is_insured(self) -> bool:
        """Whether a stream can be opened beside rows: greedily both write one text."""
        return self._is_greedy and self._max_open > 1

    def _secure_lead(self, now_s: float, decision: RowDecision) -> None:
        """Open a stream beside the rows while it can still come in time to what the closed one would have written."""
        if not (self._is_insured() and self.can_leave):
            return
        lead_s = (len(self.ids) - self._closed_at) * self._pair_stats.target_token_s - (now_s - self._phase_s)
        left_s = lead_s - self._get_first_token_s() + self._tolerate_late(now_s)
        if left_s <= _MIN_WAIT_S:
            self._charge_phase_of_rows(now_s, self._get_first_token_s())
            decision.opens_stream = True
            if self.calls and len(self.calls) + self.num_closing >= self._max_open:
                self._dropped_calls.append(self.calls.pop())  # the stream takes its place
        else:
            decision.wait_s = left_s

    def _should_leave_rows(self, now_s: float) -> bool:
        """Whether the target's own stream is the better way to go on."""
        if not self.can_leave:
            return False
        step_s = self._pair_stats.target_token_s
        lost_s = (now_s - self._phase_s) - (len(self.ids) - self._phase_at) * step_s
        allowance_s = min(self._estimate_allowance(now_s), self._limit_stake()) - self._get_first_token_s()
        # with one place a call is under way nearly always, and shows what it gives only at its end
        usual_s = (2.0 if self._max_open > 1 else 3.0) * self._rows.estimate_call_s()
        if not self._is_insured() and lost_s > max(usual_s, allowance_s):
            self._pause_rows()
            return True
        if self.calls or not (self.draft.ids or self.draft.is_idle):
            return False
        if not self.draft.ids and self.draft.is_exhausted:
            return True
        gain_s = (self._estimate_run_of_right_tokens(len(self.draft.ids)) + 1.0) * step_s - self._rows.estimate_call_s()
        return self._estimate_speedup_of_rows() < _KEPT_SPEEDUP and gain_s < 0.0

    def _leave_rows(self, now_s: float) -> None:
        self._charge_phase_of_rows(now_s, self._get_first_token_s())
        self._dropped_calls += self.calls
        self.calls.clear()

    def _pause_rows(self) -> None:
        """Rows took longer than the stream would have: they are tried later, and later each time."""
        self._resume_at = len(self.ids) + self._pause_tokens
        self._pause_tokens *= 2

    # --------------------------------------------------------------------------------------- estimates

    def _get_first_token_s(self) -> float:
        return self._pair_stats.first_token_s.value or 0.0

    def _estimate_call_s(self) -> float:
        """How long a call of one row takes; before that was measured, as long as a stream's first token."""
        return self._rows.estimate_call_s() if self._rows.is_measured else self._get_first_token_s()

    def _estimate_speedup_of_rows(self) -> float:
        step_s = self._pair_stats.target_token_s
        if self._max_open > 1:
            return self._rows.estimate_speedup(self._agreement, step_s, self._max_calls)
        call = self._find_best_single_call()
        return call.tokens * step_s / max(call.seconds, _MIN_SECONDS)

    def _find_best_single_call(self) -> SingleCall:
        return self._rows.find_best_single_call(self._agreement, self._max_rows, self._get_first_token_s())

    def _estimate_run_of_right_tokens(self, num_drafted: int) -> float:
        """How many of the next drafted tokens are right, on average, before one is wrong."""
        return expect_right_tokens(self._agreement.estimate_acceptance_rate(), num_drafted)

    def _estimate_gain_s(self, first: int) -> float:
        """How much earlier the answer is by rows from position `first` on, once, for the present draft."""
        last = max(first, min(len(self.draft.ids), self._find_last_useful_position()))
        num_ahead = self._estimate_run_of_right_tokens(last) + 1.0 - first - _MIN_LEAD
        return num_ahead * self._pair_stats.target_token_s - (last - first) * self._rows.row_s

    def _charge_phase_of_rows(self, now_s: float, first_s: float = 0.0) -> None:
        """Rows were alone until now: what was lost by it, with the first token of the stream that follows."""
        gained_s = (len(self.ids) - self._closed_at) * self._pair_stats.target_token_s
        late_s = now_s - self._phase_s - gained_s + first_s
        self.budget.add_lost_time(late_s)
        self._late_s += max(0.0, late_s)

    def _charge_slow_stream(self, num_tokens: int, now_s: float) -> None:
        """A stream that waits while rows are under way waits because of them: its server has no room."""
        token_s = self._pair_stats.target_token_s
        gap_s = now_s - self._stream_last_s
        self.budget.add_lost_time(self.prompt_trial.add_streamed(num_tokens, now_s, token_s))
        trial = self._row_trial
        late_s = None if trial is None else trial.add_streamed(num_tokens, now_s, token_s)
        if trial is not None and late_s is not None:
            self._row_trial = None
            self._rows.add_row_trial(trial.amount, late_s, token_s)
        is_first, self._stream_opened_s = self._stream_opened_s is not None, None
        self._stream_last_s = now_s
        if is_first or not self.calls or not self.budget.add_late_tokens(num_tokens, gap_s):
            return
        if self._estimate_allowance(now_s) < 0:
            self._pause_rows()
            self._dropped_calls += self.calls
            self.calls.clear()
            self._rows_from = None


def _find_token_origin(call: RowCall, drafted_id: int | None, *, is_accepted: bool) -> Origin:
    if is_accepted:
        return "accepted"
    if drafted_id is not None:
        return "correction"
    return "bonus" if call.num_rows > 1 else "plain"
