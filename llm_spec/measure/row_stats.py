"""RowCallStats: what is known of rows, calls in which a server gives its own token after each of several prefixes.

Whether they pay is arithmetic. A draft that is right with probability `a` a token is right for `a / (1 - a)` tokens on
average before it is wrong, and calls overlap, so a cycle from one wrong token to the next takes

    round trip + time of the draft's first token + right tokens * time of a drafted token
    + rows under way before the last right one * time of a row

and gives one token more than were right (Leviathan et al. 2023, with calls that overlap). The server's own stream gives
a token each step. All times are seconds.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from llm_spec.measure.estimates import ExponentialMovingAverage, ForwardCostLine

__all__ = [
    "DraftAgreementStats",
    "LatenessStats",
    "RowCallStats",
    "RowCycle",
    "SingleCall",
    "expect_right_tokens",
]

_HALF_LIFE: Final = 512.0  # half-life, in tokens, of how well a draft agrees
_CALL_HALF_LIFE: Final = 64.0  # of calls
_START_HALF_LIFE: Final = 16.0  # of a draft's starts
_PRIOR_AGREEMENT: Final = 0.5  # of a draft of which nothing is known; as much as …
_PRIOR_TOKENS: Final = 2.0  # … so many tokens
_LOCAL_PRIOR_TOKENS: Final = 6.0  # what earlier answers say counts as so many tokens of this one
_MIN_SECONDS: Final = 1e-9
_MAX_RUN: Final = 128.0  # tokens in a row that a draft may be expected to be right
_ASSUMED_ROW_SHARE: Final = 1 / 16  # of a call's time, that a row more is assumed to take before that was measured
_MIN_LATE_STEPS: Final = 0.25  # of a stream, that work beside it is taken to cost at least
_MIN_LATE_ROW_STEPS: Final = 0.05  # and so much for each row, where there is no room for it
_LATE_TRIALS: Final = 2  # in a row, after which a server is taken to have no room; one may be a hiccup
_MAX_ANSWERS_WITHOUT_ROOM: Final = 64
_NEW_SHARE: Final = 0.5  # of the newest figure among those of as much work
_MAX_LOSS: Final = 0.02  # of the target's own time: what finding out that rows do not pay may cost …
_EXPECTED_TOKENS: Final = 256  # … and as much of an answer of so many tokens, or of its limit, before there is one


class RowCycle(NamedTuple):
    """From one token that the draft did not have to the next: tokens of the answer, and seconds."""

    tokens: float
    seconds: float


class SingleCall(NamedTuple):
    """A call with no other beside it: its rows, the tokens that it gives on average, and seconds until the next one.

    `drafting_s`: what a draft that begins anew takes for it.
    """

    num_rows: int
    tokens: float
    seconds: float
    drafting_s: float


def expect_right_tokens(rate: float, num_tokens: float) -> float:
    """How many of the next drafted tokens are right before one is wrong, where each is with probability `rate`."""
    return num_tokens if rate >= 1.0 else rate * (1.0 - rate**num_tokens) / (1.0 - rate)


class DraftAgreementStats:
    """How often a draft had the target's own next token, another one, or none. `earlier`: of the answers before."""

    def __init__(self, earlier: DraftAgreementStats | None = None) -> None:
        self._earlier = earlier
        self._keep = 0.5 ** (1.0 / _HALF_LIFE)
        self.num_agreed = self.num_different = self.num_missing = 0.0

    @property
    def num_judged(self) -> float:
        """Tokens that the draft had said something of."""
        return self.num_agreed + self.num_different

    def add_next_token(self, *, has_agreed: bool | None) -> None:
        """The target's next token is known; None: the draft had none."""
        self.num_agreed = self._keep * self.num_agreed + (has_agreed is True)
        self.num_different = self._keep * self.num_different + (has_agreed is False)
        self.num_missing = self._keep * self.num_missing + (has_agreed is None)
        if self._earlier is not None:
            self._earlier.add_next_token(has_agreed=has_agreed)

    def estimate_acceptance_rate(self) -> float:
        """The probability that a drafted token is the target's own."""
        return self._estimate_agreement_rate(0.0)

    def estimate_coverage_rate(self) -> float:
        """The probability that the next token is drafted, and is the target's own."""
        return self._estimate_agreement_rate(1.0)

    def _estimate_agreement_rate(self, weight_of_missing: float) -> float:
        num_tokens = self.num_judged + weight_of_missing * self.num_missing
        earlier = self._earlier
        prior, weight = (
            (_PRIOR_AGREEMENT, _PRIOR_TOKENS)
            if earlier is None
            else (earlier._estimate_agreement_rate(weight_of_missing), _LOCAL_PRIOR_TOKENS)  # noqa: SLF001 - one of us
        )
        return (self.num_agreed + weight * prior) / (num_tokens + weight)


class LatenessStats:
    """How late a stream is beside other work: `late_s` for an `amount` of it (tokens, rows), the most so far.

    Less than a part of a step does not show: four tokens that cost nothing visible say little of a thousand.
    """

    def __init__(self) -> None:
        self.amount = 0
        self.late_s = 0.0

    def add(self, amount: int, late_s: float) -> None:
        """So much was done beside a stream."""
        if amount > self.amount:
            self.amount, self.late_s = amount, late_s
        elif amount == self.amount:
            self.late_s += _NEW_SHARE * (late_s - self.late_s)

    def estimate_late_s(self, amount: int, step_s: float) -> float | None:
        """How late a stream of a token each `step_s` is by so much of it; None: nothing was measured yet."""
        return max(self.late_s, _MIN_LATE_STEPS * step_s) * amount / self.amount if self.amount else None


class RowCallStats:
    """Figures of a target's rows and of the draft for them. Kept across requests, on one event loop."""

    def __init__(self) -> None:
        self.call_s = ForwardCostLine(half_life=_CALL_HALF_LIFE)  # of a call, by its rows and those under way
        self.max_rows = 0  # of a call that was measured
        self.draft_start_s = ExponentialMovingAverage(half_life=_START_HALF_LIFE)  # until its first token is encoded
        self._drafted = [0.0, 0.0]  # tokens of the draft after its first ones, and the seconds that they took
        self.agreement = DraftAgreementStats()
        self.reading = LatenessStats()  # of tokens of a prompt …
        self.lateness = LatenessStats()  # … and of rows
        self._num_late_trials = 0  # of rows beside a stream, in a row
        self._late_row_s = 0.0  # for each row, in the last of them
        self._room_expected_at = 0  # answers that have ended when rows are tried again as if there were room
        self._plain_s = 0.0  # of answers that have ended, …
        self._num_answers = 0  # … so many
        self._lost_s = 0.0

    @property
    def is_measured(self) -> bool:
        """Whether a call was."""
        return self.max_rows > 0

    def add_call_time(self, num_rows: int, seconds: float, *, num_other_rows: int = 0) -> None:
        """A call was answered that was sent while so many other rows were under way; a stream counts as one."""
        self.call_s.update(num_rows + num_other_rows, seconds)
        self.max_rows = max(self.max_rows, num_rows)

    def estimate_call_s(self) -> float:
        """How long a call of one row takes beside no others."""
        return self.call_s.base_s

    @property
    def row_s(self) -> float:
        """Seconds that a row more takes: as calls show it, or as a stream beside them does where there is no room."""
        if self._num_answers >= self._room_expected_at:
            return self.call_s.per_token_s
        return max(self.call_s.per_token_s, self._late_row_s)

    def add_row_trial(self, num_rows: int, late_s: float, step_s: float) -> None:
        """A stream of a token each `step_s` was so late beside so many rows: after two such trials there is no room.

        That is taken to hold for 2, 4, 8 … answers, `_MAX_ANSWERS_WITHOUT_ROOM` at most, and then tried with one row.
        """
        is_late = late_s > step_s * max(_MIN_LATE_STEPS, num_rows * _MIN_LATE_ROW_STEPS)
        if is_late and self._num_answers < self._room_expected_at:
            return  # it was begun before this was known, in this answer or beside it
        self._num_late_trials = self._num_late_trials + 1 if is_late else 0
        self._late_row_s = late_s / num_rows
        self._room_expected_at = 0
        if self.is_room_doubtful:
            num_answers = min(_MAX_ANSWERS_WITHOUT_ROOM, 2 ** (self._num_late_trials - _LATE_TRIALS + 1))
            self._room_expected_at = self._num_answers + num_answers

    @property
    def is_room_doubtful(self) -> bool:
        """Whether the last rows beside a stream made it late, so that the next ones are a trial."""
        return self._num_late_trials >= _LATE_TRIALS

    def estimate_cycle(self, covered: float, max_calls: int) -> RowCycle:
        """A cycle where `max_calls` may overlap, and a token is drafted rightly with probability `covered`."""
        run = expect_right_tokens(covered, _MAX_RUN)
        call_s, row_s = self.estimate_call_s(), self.row_s
        wait_s = call_s / (2 * max_calls)  # of a drafted token for the next call
        start_s = (self.draft_start_s.value or 0.0) + wait_s
        pace_s = max(self.draft_token_s, row_s)
        # those that are sent while a call is under way, which is the longer for it
        num_under_way = min(_MAX_RUN, call_s / max(pace_s - row_s, _MIN_SECONDS))
        rows_s = row_s * expect_right_tokens(covered, num_under_way)
        return RowCycle(run + 1.0, call_s + covered * start_s + run * pace_s + rows_s)

    def estimate_speedup(self, agreement: DraftAgreementStats, step_s: float, max_calls: int) -> float:
        """How many times as fast as a stream of `step_s` a token rows are in the long run.

        `max_calls` may overlap, with each other or with a stream.
        """
        tokens, seconds = self.estimate_cycle(agreement.estimate_coverage_rate(), max_calls)
        return tokens * step_s / max(seconds, _MIN_SECONDS)

    def find_best_single_call(self, agreement: DraftAgreementStats, max_rows: int, assumed_call_s: float) -> SingleCall:
        """The best calls of at most `max_rows`, one after another; `assumed_call_s`: of a row that was not measured."""
        call_s, row_s = self.call_s.base_s, self.row_s
        if not self.is_measured:
            call_s, row_s = assumed_call_s, assumed_call_s * _ASSUMED_ROW_SHARE
        covered = agreement.estimate_coverage_rate()
        calls = [self._estimate_single_call(covered, n, call_s + (n - 1) * row_s) for n in range(1, max_rows + 1)]
        return max(calls, key=lambda call: call.tokens / max(call.seconds, _MIN_SECONDS))

    def _estimate_single_call(self, covered: float, num_rows: int, call_s: float) -> SingleCall:
        tokens = sum(covered**n for n in range(num_rows))
        all_right = covered ** (num_rows - 1)
        drafting_s = (num_rows - 1) * self.draft_token_s
        from_start_s = drafting_s + (self.draft_start_s.value or 0.0) * (num_rows > 1)
        # what follows a call that was right was drafted while it was under way
        wait_s = all_right * max(0.0, drafting_s - call_s) + (1.0 - all_right) * from_start_s
        return SingleCall(num_rows, tokens, call_s + wait_s, from_start_s)

    @property
    def draft_token_s(self) -> float:
        """Between two tokens of the draft; 0 before it was measured."""
        num_tokens, seconds = self._drafted
        return seconds / num_tokens if num_tokens else 0.0

    def add_drafted_tokens_time(self, num_tokens: int, seconds: float) -> None:
        """So many tokens more were drafted and encoded, so long after the ones before; often several come at once."""
        keep = 0.5 ** (num_tokens / _HALF_LIFE)
        self._drafted = [keep * self._drafted[0] + num_tokens, keep * self._drafted[1] + seconds]

    # ---------------------------------------------------------------------------------------- lost time

    def add_answer_time(self, plain_s: float) -> None:
        """An answer has ended, for which the target alone takes so long."""
        self._plain_s += plain_s
        self._num_answers += 1

    def estimate_answer_s(self, step_s: float, max_tokens: int | None) -> float:
        """How long the target alone takes for an answer of at most `max_tokens`: as for those before, on average."""
        mean_s = self._plain_s / self._num_answers if self._num_answers else _EXPECTED_TOKENS * step_s
        return mean_s if max_tokens is None else min(mean_s, max_tokens * step_s)

    def add_lost_time(self, seconds: float) -> None:
        """An answer is later than the target's own by so much, since rows were tried; earlier, if negative."""
        self._lost_s += seconds

    def estimate_allowed_loss_s(self, elapsed_s: float, step_s: float, max_tokens: int | None) -> float:
        """How much may be lost now, in an answer of at most `max_tokens` that began `elapsed_s` ago."""
        expected_s = step_s * min(_EXPECTED_TOKENS, max_tokens or _EXPECTED_TOKENS)
        return _MAX_LOSS * (self._plain_s + max(elapsed_s, expected_s)) - self._lost_s
