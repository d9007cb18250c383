"""The scheduler of rows, fed with events alone: no loop, no clock and no server."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from llm_spec.contract.endpoint import SampledToken
from llm_spec.measure.pair_stats import PairStats
from llm_spec.strategies.race.schedule import LossBudget
from llm_spec.strategies.rows.prompt_trial import choose_prompt_stretch
from llm_spec.strategies.rows.schedule import RowCall, RowDecision, RowScheduler

STEP_S = 0.025


def paced(*, calls: bool = True, agreement: float = 0.9) -> PairStats:
    """Figures of a server whose stream and, with `calls`, rows were measured."""
    stats = PairStats()
    stats.first_token_s.update(0.045)
    stats.token_s.update(100, 100 * STEP_S)
    if calls:
        for num_rows in (1, 2, 4, 8, 16):
            stats.rows.add_call_time(num_rows, 0.045)
    for index in range(100):
        stats.rows.agreement.add_next_token(has_agreed=index % 100 < 100 * agreement)
    return stats


@dataclass
class Run:
    """An answer of the tokens 100, 101, …; its draft says `drafted` ones that are right, then nothing but zeros."""

    stats: PairStats
    is_greedy: bool = True
    max_open: int = 4
    num_right: int = 1000
    num_drafted: int = 24
    is_cache_shared: bool = False
    now_s: float = 0.0
    calls: list[RowCall] = field(default_factory=list["RowCall"])
    num_closed: int = 0
    num_opened: int = 0

    def __post_init__(self) -> None:
        self.scheduler = RowScheduler(
            self.stats,
            is_greedy=self.is_greedy,
            max_open=self.max_open,
            max_calls=self.max_open,
            max_rows=32,
            max_tokens=400,
            now_s=0.0,
            is_cache_shared=self.is_cache_shared,
        )
        self.scheduler.can_send = True

    def drafted(self) -> list[int]:
        at = len(self.scheduler.ids)
        return [100 + n if n < self.num_right else 0 for n in range(at, at + self.num_drafted)]

    def decide(self) -> RowDecision:
        ids = self.drafted()
        self.scheduler.draft.update(ids, [0.003] * len(ids), self.now_s, is_idle=True, is_exhausted=False)
        decision = self.scheduler.decide_next_actions(self.now_s)
        self.calls += decision.calls
        self.num_closed += decision.closes_stream
        self.num_opened += decision.opens_stream
        if decision.opens_stream:
            self.scheduler.record_stream_opened(self.now_s)
        return decision

    def stream(self, num_tokens: int = 1) -> None:
        """The stream goes on, a token each step."""
        for _ in range(num_tokens):
            self.now_s += STEP_S
            at = self.scheduler.stream_at
            if at is not None:
                self.scheduler.confirm_streamed_tokens([100 + at], self.now_s)

    def answer(self, call: RowCall, *, seconds: float = 0.045) -> None:
        tokens = [SampledToken(100 + n, f" {n}") for n in range(call.start, call.end)]
        self.scheduler.record_call_answer(call, tokens, seconds)
        self.take_rows()

    def take_rows(self) -> None:
        while self.scheduler.take_confirmed(self.now_s) is not None:
            pass


def test_the_first_call_of_a_server_has_one_row() -> None:
    """What a call costs is not known yet: one row is asked for, and no other before it is answered."""
    run = Run(paced(calls=False))
    run.stream(6)
    run.decide()
    assert [call.num_rows for call in run.calls] == [1]
    run.stream()
    assert run.decide().calls == []


def test_calls_become_at_most_twice_as_wide_as_any_before() -> None:
    """The cost of a wider call is extrapolated before it is sent."""
    run = Run(paced(calls=False))
    run.stream(6)
    for _ in range(6):
        run.decide()
        widest = run.stats.rows.max_rows
        assert all(call.num_rows <= max(1, 2 * widest) for call in run.scheduler.calls if call.tokens is None)
        for call in [call for call in run.scheduler.calls if call.tokens is None]:
            run.answer(call)


def test_a_draft_that_is_wrong_never_costs_a_row() -> None:
    """The stream shows for nothing that it is wrong."""
    run = Run(paced(calls=False, agreement=0.1), num_right=0)
    for _ in range(100):
        run.stream()
        assert run.decide().calls == []
    assert (run.num_closed, run.num_opened) == (0, 0)


def prompted(*, late_s: float) -> Run:
    """An answer to a long prompt, some tokens of which were read, so that the stream was late."""
    run = Run(paced(calls=False))
    run.scheduler.num_prompt_tokens = 150
    run.stream(6)
    decision = run.decide()
    assert (decision.num_trial_tokens, decision.calls) == (4, [])
    run.stream()
    assert run.decide() == RowDecision()  # it is under way
    run.scheduler.prompt_trial.note_answer()
    run.now_s += late_s
    run.stream()
    return run


def test_some_tokens_of_a_prompt_are_read_before_a_row_reads_all_of_it() -> None:
    """Four tokens that cost nothing say little of 150: some more are read in between."""
    run = prompted(late_s=0.0)
    decision = run.decide()
    assert (decision.num_trial_tokens, decision.calls) == (40, [])
    run.scheduler.prompt_trial.note_answer()
    run.stream()
    decision = run.decide()
    assert decision.num_trial_tokens is None
    assert [call.num_rows for call in decision.calls] == [1]


def test_a_prompt_that_takes_too_long_to_read_is_not_read_again() -> None:
    """A row would hold up the stream by five seconds. Once more may be lost, some more tokens are read first."""
    run = prompted(late_s=0.12)
    for _ in range(50):
        assert run.decide() == RowDecision()
        run.stream()
    run.stats.rows.add_answer_time(1000.0)
    decision = run.decide()
    assert (decision.num_trial_tokens, decision.calls) == (14, [])


@pytest.mark.parametrize(("late_s", "is_read"), [(0.06, True), (0.07, False)])
def test_a_prompt_is_read_that_is_expected_to_cost_half_of_what_may_be_lost(late_s: float, *, is_read: bool) -> None:
    """Half of 128 ms, since the estimate may be too low."""
    run = Run(paced(calls=False))
    run.scheduler.num_prompt_tokens = 150
    run.stats.rows.reading.add(156, late_s)
    run.stream(6)
    assert [call.num_rows for call in run.decide().calls] == ([1] if is_read else [])


def test_a_longer_trial_costs_what_may_be_lost() -> None:
    """It is lengthened from what is known, before all of the prompt is read."""
    run = prompted(late_s=0.02)
    assert run.decide().num_trial_tokens == 10  # 4 tokens took 20 ms; half of the 108 ms that are left


def test_a_cache_that_calls_share_makes_trials_needless() -> None:
    """A row reads the end of the prompt alone: it is itself the trial."""
    run = Run(paced(calls=False), is_cache_shared=True)
    run.scheduler.num_prompt_tokens = 150
    run.stream(6)
    decision = run.decide()
    assert (decision.num_trial_tokens, [call.num_rows for call in decision.calls]) == (None, [1])


def after_first_row(*, late_s: float) -> Run:
    """An answer whose first row was answered, and made its stream late."""
    run = Run(paced(calls=False), is_cache_shared=True)
    run.stream(6)
    run.decide()
    run.stream()
    run.now_s += late_s
    run.answer(run.calls[0])
    run.stream()
    return run


def test_rows_are_sent_beside_a_stream_as_far_as_it_may_be_late() -> None:
    """15 ms a row: three of them are expected to cost less than half of the 113 ms that are left."""
    run = after_first_row(late_s=0.015)
    run.stats.rows.lateness.add(2, 0.03)
    run.decide()
    assert sum(call.num_rows for call in run.calls[1:]) == 3


def test_two_rows_may_follow_one_before_the_stream_shows_what_it_cost() -> None:
    """Its answer may come before the stream's next token."""
    run = Run(paced(calls=False), is_cache_shared=True)
    run.stream(6)
    run.decide()
    run.answer(run.calls[0])
    run.decide()
    assert [call.num_rows for call in run.calls] == [1, 2]


def test_rows_that_cost_the_stream_nothing_are_followed_by_twice_as_many() -> None:
    """What one costs may not show, and what six cost may be a tenth of an answer."""
    run = after_first_row(late_s=0.0)
    run.decide()
    assert [call.num_rows for call in run.calls[1:]] == [2]
    run.answer(run.calls[1])
    run.stream(2)
    run.num_drafted += 8
    run.decide()
    assert sum(call.num_rows for call in run.calls[2:]) == 4


def test_a_row_is_sent_that_takes_more_than_half_of_what_may_be_lost() -> None:
    """Its second figure is averaged with the first one, which may have been a hiccup."""
    run = after_first_row(late_s=0.06)
    run.decide()
    assert [call.num_rows for call in run.calls[1:]] == [1]
    assert run.stats.rows.lateness.late_s == pytest.approx(0.06)
    run.stats.rows.lateness.add(1, 0.0)
    assert run.stats.rows.lateness.late_s == pytest.approx(0.03)


def test_rows_that_make_the_stream_late_twice_are_the_last_ones_of_the_answer() -> None:
    """Each row makes it late by a step, so none can pay, though much more could still be lost."""
    run = after_first_row(late_s=STEP_S)
    for _ in range(20):  # answers
        run.stats.rows.add_answer_time(10.0)
    run.decide()
    assert [call.num_rows for call in run.calls] == [1, 2]
    run.stream()
    run.now_s += 2 * STEP_S
    run.answer(run.calls[1])
    run.stream()
    for _ in range(20):
        assert run.decide().calls == []
        run.stream()


def test_calls_that_were_given_up_show_nothing_of_the_server() -> None:
    """The draft was wrong. The stream is 4 % slower than on average, and no rows are under way any more."""
    run = Run(paced(), num_right=9)
    run.stream(6)
    run.decide()
    assert run.calls
    run.stream(4)
    assert run.scheduler.calls == []
    for _ in range(40):
        run.now_s += 0.04 * STEP_S
        run.stream()
    run.num_right, run.calls = 1000, []
    run.decide()
    run.stream()
    run.answer(run.calls[0])
    run.stream()
    assert run.stats.rows.lateness.amount == sum(call.num_rows for call in run.calls)
    assert run.stats.rows.lateness.late_s < 0.01 * STEP_S


def test_a_call_that_the_stream_overtakes_shows_how_late_it_makes_the_stream() -> None:
    """Both wait for each other: the call is given up without an answer, and was expensive all the same."""
    run = Run(paced(calls=False), is_cache_shared=True)
    run.stream(6)
    run.decide()
    while run.scheduler.calls:
        run.now_s += STEP_S
        run.stream()
    run.stream()
    assert run.stats.rows.lateness.amount == 1
    assert run.stats.rows.lateness.late_s >= STEP_S


def test_a_server_that_had_no_room_is_tried_again_with_one_row() -> None:
    """What two rows cost was measured, and little is lost so far: without a late trial, four would be sent."""
    for num_late, num_rows in ((0, 4), (2, 1)):
        run = Run(paced())
        run.stats.rows.lateness.add(2, 0.5 * STEP_S)
        for _ in range(num_late):
            run.stats.rows.add_row_trial(1, 0.5 * STEP_S, STEP_S)
        for _ in range(200):  # answers
            run.stats.rows.add_answer_time(10.0)
        run.stream(6)
        run.decide()
        assert sum(call.num_rows for call in run.calls) == num_rows


def test_rows_that_take_as_long_as_what_they_save_are_not_begun() -> None:
    """Ten drafted tokens are right nearly always, and each row takes 0.9 steps: the call is over after the stream."""
    for row_s, num_calls in ((0.02 * STEP_S, 1), (0.9 * STEP_S, 0), (1.5 * STEP_S, 0), (3.0 * STEP_S, 0)):
        stats = paced(calls=False, agreement=0.98)
        for _ in range(20):
            for num_rows in (1, 2, 4, 8):
                stats.rows.add_call_time(num_rows, 0.06 + row_s * (num_rows - 1))
        run = Run(stats, num_drafted=10)
        run.stream(6)
        run.decide()
        assert min(1, len(run.calls)) == num_calls


def test_no_row_is_sent_where_one_takes_more_than_may_be_lost() -> None:
    """Not in this answer; a later one may lose more."""
    run = after_first_row(late_s=0.1)
    for _ in range(20):
        assert run.decide().calls == []
        run.stream()


def test_one_answer_does_not_lose_what_all_may() -> None:
    """A pair with a thousand seconds of answers may lose twenty, but not in an answer of two seconds and a half."""
    stats = paced()
    for _ in range(400):
        stats.rows.add_answer_time(2.5)
    budget = LossBudget(stats, 0.0)
    assert budget.estimate_left_s(1.0, 400) == pytest.approx(0.25)
    budget.add_lost_time(0.15)
    assert budget.estimate_left_s(1.0, 400) == pytest.approx(0.1)
    budget.add_late_tokens(2, 2 * STEP_S + 0.04)
    assert budget.estimate_left_s(1.0, 400) == pytest.approx(0.06)
    budget.add_late_tokens(2, 3 * STEP_S)  # too short to distinguish from noise
    assert budget.estimate_left_s(1.0, 400) == pytest.approx(0.06)
    assert LossBudget(stats, 0.0).estimate_left_s(1.0, 400) == pytest.approx(0.25)  # the next answer's own
    assert stats.rows.estimate_allowed_loss_s(1.0, STEP_S, 400) == pytest.approx(0.02 * (1000 + 6.4) - 0.19)


def test_tokens_of_a_trial_are_in_no_cache() -> None:
    """They are the prompt's, but not its beginning, and not the same ones each time."""
    token_ids = list(range(1000))
    starts = set[int]()
    for _ in range(20):
        stretch = choose_prompt_stretch(token_ids, 6)
        starts.add(stretch[0])
        assert stretch == token_ids[stretch[0] : stretch[0] + 6]
    assert len(starts) > 1
    assert 0 not in starts
    assert choose_prompt_stretch([1, 2], 6) == [1, 2]


def test_nothing_is_read_where_nothing_may_be_lost() -> None:
    """Not even what cost nothing the last time."""
    run = prompted(late_s=0.0)
    run.stats.rows.add_lost_time(100.0)
    assert run.decide() == RowDecision()


def test_what_a_closed_stream_would_have_written_is_asked_for() -> None:
    """Rows begin behind what the stream was to write until they are answered; without it somebody else has to."""
    run = Run(paced())
    run.stream(2)
    run.decide()
    assert run.calls[0].start > len(run.scheduler.ids)
    run.scheduler.record_stream_ended(run.now_s)
    run.decide()
    assert run.calls[-1].start <= len(run.scheduler.ids) < run.calls[-1].end


def test_a_stream_is_opened_beside_rows_that_fall_behind() -> None:
    """In time to be no later than the one that was closed, but for what an answer may lose; the rows stay."""
    run = Run(paced())
    run.stream(2)
    while not run.num_closed:
        run.decide()
        for call in [call for call in run.scheduler.calls if call.tokens is None]:
            run.answer(call)
        run.stream()
    closed_s, lead = run.now_s, len(run.scheduler.ids)
    run.decide()
    while not run.num_opened:
        run.now_s += 0.001
        run.decide()
    assert len(run.scheduler.ids) == lead
    assert run.scheduler.calls
    assert run.scheduler.stream_at == lead
    assert 0.045 < run.now_s - closed_s < 0.15 * 256 * STEP_S + lead * STEP_S


def test_sampled_text_is_not_staked_where_a_new_stream_is_dear() -> None:
    """Rows end its stream, and a first token of five seconds is more than an answer may lose."""
    stats = paced()
    stats.first_token_s.update(50.0)
    run = Run(stats, is_greedy=False)
    for _ in range(50):
        run.stream()
        assert run.decide().calls == []


def test_greedily_a_stream_is_closed_once_rows_are_ahead() -> None:
    """Until then both may write, and nothing is written twice."""
    run = Run(paced())
    run.stream(2)
    run.decide()
    assert run.calls
    assert run.scheduler.stream_at == 2
    run.answer(run.calls[0])
    assert len(run.scheduler.ids) == 2  # rows begin where the stream would be by then
    run.decide()
    assert run.num_closed == 0
    run.stream(2)
    run.take_rows()
    num_confirmed = len(run.scheduler.ids)
    assert num_confirmed >= 6
    assert run.scheduler.ids == [100 + n for n in range(num_confirmed)]
    run.decide()
    assert run.num_closed == 1
    assert run.scheduler.stream_at is None


def test_sampled_tokens_of_a_stream_are_not_taken_where_rows_own_the_position() -> None:
    """It ends where it comes to the first row, however early that is answered."""
    run = Run(paced(), is_greedy=False)
    run.stream(2)
    run.decide()
    first = run.calls[0].start
    run.answer(run.calls[0])
    assert len(run.scheduler.ids) == 2  # the stream has yet to come there
    taken = run.scheduler.confirm_streamed_tokens([100 + n for n in range(2, first + 3)], run.now_s)
    assert taken == range(first - 2)
    assert run.scheduler.stream_at is None
    confirmed = run.scheduler.take_confirmed(run.now_s)
    assert confirmed is not None
    assert confirmed.token.token_id == 100 + first


def test_sampled_rows_are_dropped_where_the_stream_leaves_the_draft() -> None:
    """They were asked for after another token; the stream goes on."""
    run = Run(paced(), is_greedy=False)
    run.stream(2)
    run.decide()
    assert run.calls
    run.scheduler.confirm_streamed_tokens([7], run.now_s)
    assert run.scheduler.calls == []
    assert run.scheduler.take_dropped_calls() == run.calls
    assert run.scheduler.take_confirmed(run.now_s) is None
    assert run.scheduler.stream_at == 3


def test_of_two_calls_for_a_position_the_one_that_was_sent_first_has_it() -> None:
    """Also where the other is answered sooner."""
    run = Run(paced())
    run.scheduler.record_stream_ended(0.0)
    run.decide()
    early, late = RowCall(0, 0, ()), RowCall(0, 0, ())
    run.scheduler.calls[:] = [early, late]
    run.scheduler.record_call_answer(late, [SampledToken(5, "late")], 0.01)
    assert run.scheduler.take_confirmed(0.0) is None
    run.scheduler.record_call_answer(early, [SampledToken(6, "early")], 0.02)
    confirmed = run.scheduler.take_confirmed(0.0)
    assert confirmed is not None
    assert confirmed.token.text == "early"


def test_a_call_knows_the_rows_that_were_under_way_when_it_was_sent() -> None:
    """Its time says nothing of its own rows otherwise: a stream counts as one, and calls as many as they have."""
    run = Run(paced())
    run.stream(2)
    run.decide()
    run.num_drafted += 8
    run.now_s += STEP_S / 2
    run.decide()
    first, second = run.calls
    assert (first.num_other_rows, second.num_other_rows) == (1, 1 + first.num_rows)


def test_rows_that_are_under_way_are_not_taken_for_the_cost_of_a_calls_own() -> None:
    """Each row under way makes a call 3 ms longer, whoever sent it: that is what a row is found to take."""
    run = Run(paced(calls=False), num_drafted=60)
    run.stream(6)
    for number in range(80):
        run.decide()
        waiting = [call for call in run.scheduler.calls if call.tokens is None]
        call = waiting[0] if waiting else None
        if call is not None and (len(waiting) >= 3 or number % 3 == 2):
            run.answer(call, seconds=0.045 + 0.003 * (call.num_rows - 1 + call.num_other_rows))
        run.stream()
    assert any(call.num_other_rows > 4 for call in run.calls)
    assert run.stats.rows.call_s.per_token_s == pytest.approx(0.003, rel=0.1)


def test_a_stream_that_is_behind_writes_first_what_is_known() -> None:
    """Rows are sent from where it will be when they are answered, and it has to come to what is confirmed before."""
    run, level = Run(paced()), Run(paced())
    for each in (run, level):
        each.stream(4)
    call = RowCall(4, 0, ())
    run.scheduler.calls.append(call)
    run.answer(call)
    assert (run.scheduler.stream_at, len(run.scheduler.ids)) == (4, 5)
    run.decide()
    level.decide()
    assert [each.calls[0].start for each in (run, level)] == [6, 6]
    assert run.num_closed == 0


def test_no_more_is_open_than_may_be() -> None:
    """A stream counts, and so does what is being closed."""
    run = Run(paced(), max_open=3)
    run.scheduler.num_closing = 1
    run.stream(2)
    run.decide()
    assert len(run.scheduler.calls) <= 1
    alone = Run(paced(), max_open=1)
    alone.stream(2)
    decision = alone.decide()
    assert (decision.closes_stream, decision.calls) == (True, [])  # it is closed before a call is sent
    alone.scheduler.num_closing = 1
    assert alone.decide().calls == []
    alone.scheduler.num_closing = 0
    assert len(alone.decide().calls) == 1
    assert alone.decide().calls == []


def test_with_one_place_the_first_call_of_a_server_has_one_row() -> None:
    """The stream ends for it where the draft is good, and comes back where a call takes much longer than assumed."""
    run = Run(paced(calls=False), max_open=1)
    run.stream(6)
    while not run.calls:
        run.decide()
    assert (run.num_closed, [call.num_rows for call in run.calls]) == (1, [1])
    run.now_s += 1.0
    run.answer(run.calls[0], seconds=1.0)
    run.decide()
    assert run.num_opened == 1
    for _ in range(100):
        run.stream()
        run.decide()
    assert run.num_closed == 1  # once was enough


def test_with_one_place_a_draft_of_little_use_never_ends_the_stream() -> None:
    """Calls one after another take nearly two steps each, and a token of three is right."""
    run = Run(paced(agreement=0.33), max_open=1)
    run.drafted = lambda: [0 if n % 3 else 100 + n for n in range(len(run.scheduler.ids), 200)]  # type: ignore[method-assign]
    for _ in range(100):
        run.stream()
        run.decide()
    assert (run.num_closed, run.calls) == (0, [])


def test_with_one_place_a_call_waits_for_the_rows_that_pay_most() -> None:
    """Not for ever: a draft that writes nothing more has shown all that the call is sent with."""
    run = Run(paced(agreement=0.9), max_open=1)
    run.stats.rows.draft_start_s.update(0.01)
    run.stats.rows.add_drafted_tokens_time(10, 0.03)
    run.scheduler.record_stream_ended(0.0)
    scheduler = run.scheduler

    def decide(num_drafted: int) -> RowDecision:
        scheduler.draft.update(
            run.drafted()[:num_drafted], [0.003] * num_drafted, run.now_s, is_idle=False, is_exhausted=False
        )
        return scheduler.decide_next_actions(run.now_s)

    for num_drafted in (0, 1, 2):
        decision = decide(num_drafted)
        assert decision.calls == []
        assert decision.wait_s is not None
    assert [call.num_rows > 4 for call in decide(12).calls] == [True]
    run.answer(scheduler.calls[0])
    assert decide(1).calls == []
    run.now_s += 0.1
    assert [call.num_rows for call in decide(1).calls] == [2]


def test_a_stream_beside_rows_takes_the_place_of_one() -> None:
    """All places are taken by calls when the stream is due: the last one is given up."""
    run = Run(paced(), max_open=2, num_drafted=0)
    run.stream(2)
    run.scheduler.record_stream_ended(run.now_s)
    calls: list[RowCall] = []
    for num_ms in range(10_000):
        run.now_s, run.num_drafted = run.now_s + 0.001, num_ms
        calls = run.scheduler.calls[:]
        run.decide()
        assert len(run.scheduler.calls) + (run.scheduler.stream_at is not None) <= 2
        if run.num_opened:
            break
    assert len(calls) == 2
    assert run.scheduler.calls == calls[:1]
    assert run.scheduler.take_dropped_calls() == calls[1:]


def test_rows_that_do_not_pay_are_left_for_a_stream() -> None:
    """Calls take far longer than was measured before: what that costs is charged to later trials."""
    run = Run(paced())
    run.stream(2)
    run.decide()
    run.answer(run.calls[0])
    run.stream(2)
    run.take_rows()
    run.decide()
    assert run.num_closed == 1
    before = run.stats.rows.estimate_allowed_loss_s(run.now_s, STEP_S, 400)
    run.now_s += 3.0
    assert run.decide().opens_stream
    assert run.stats.rows.estimate_allowed_loss_s(run.now_s, STEP_S, 400) < before - 1.0


def test_a_stream_that_waits_because_of_rows_ends_them() -> None:
    """A server without room to spare: its stream stands still while a call is under way."""
    run = Run(paced(calls=False))
    run.stream(6)
    run.decide()
    assert run.calls
    run.now_s += 2.0
    run.stream()
    assert run.scheduler.calls == []
    run.stream(3)
    assert run.decide().calls == []
