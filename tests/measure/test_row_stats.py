"""What rows are worth: the arithmetic, and the budget of lost time."""

from __future__ import annotations

import pytest

from llm_spec.measure.row_stats import DraftAgreementStats, RowCallStats

STEP_S = 0.025


def measured(*, call_s: float = 0.045, draft_start_s: float = 0.005, draft_token_s: float = 0.0033) -> RowCallStats:
    stats = RowCallStats()
    for num_rows in (1, 4, 8, 16, 32):
        stats.add_call_time(num_rows, call_s)
    stats.draft_start_s.update(draft_start_s)
    stats.add_drafted_tokens_time(10, 10 * draft_token_s)
    return stats


def agreeing(rate: float, *, num_tokens: int = 400) -> DraftAgreementStats:
    agreement = DraftAgreementStats()
    for index in range(num_tokens):
        agreement.add_next_token(has_agreed=int(index * rate) != int((index + 1) * rate))
    return agreement


@pytest.mark.parametrize(("rate", "speedup"), [(0.0, 0.55), (0.5, 0.92), (0.8, 1.8), (0.9, 2.95)])
def test_a_cycle_is_a_call_and_the_draft_of_what_was_right(rate: float, speedup: float) -> None:
    """5 tokens in 5 + 4 x 3.3 + 45 ms and half a pause between calls, against steps of 25 ms; and so on."""
    assert measured().estimate_speedup(agreeing(rate), STEP_S, 4) == pytest.approx(speedup, rel=0.05)


def test_a_row_that_costs_as_much_as_a_step_pays_for_nobody() -> None:
    """A prompt that is read again with each row, however good the draft."""
    stats = RowCallStats()
    for num_rows in (1, 2, 4, 8) * 5:
        stats.add_call_time(num_rows, num_rows * STEP_S)
    assert stats.estimate_speedup(agreeing(0.95), STEP_S, 4) < 1.08  # no rows are begun below that


def test_what_a_row_takes_is_told_from_what_those_under_way_take() -> None:
    """Calls of a row or two that overlap take 3 ms longer for each row under way, their own or another's."""
    stats = RowCallStats()
    for index in range(60):
        num_rows, num_others = 1 + index % 2, index % 7
        stats.add_call_time(num_rows, 0.045 + 0.003 * (num_rows - 1 + num_others), num_other_rows=num_others)
    assert stats.call_s.per_token_s == pytest.approx(0.003, rel=0.05)
    assert stats.estimate_call_s() == pytest.approx(0.045, rel=0.05)


def test_rows_beside_which_a_stream_was_late_twice_take_what_it_was_late() -> None:
    """Calls beside a stream have a row or two, and hardly show what one more takes. One late trial may be a hiccup."""
    stats = measured()
    for _ in range(2):
        assert stats.row_s < 0.1 * STEP_S
        assert not stats.is_room_doubtful
        stats.add_row_trial(2, 1.6 * STEP_S, STEP_S)
    assert stats.row_s == pytest.approx(0.8 * STEP_S)
    assert stats.is_room_doubtful
    assert stats.estimate_speedup(agreeing(0.95), STEP_S, 4) < 1.08


def test_a_server_without_room_is_tried_again_after_more_answers_each_time() -> None:
    """A trial beside which the stream is in time shows room again, and rows take what their calls show."""
    stats, pauses = measured(), list[int]()
    for _ in range(10):
        stats.add_row_trial(1, STEP_S, STEP_S)
        pauses.append(0)
        while stats.row_s > 0.5 * STEP_S:
            stats.add_answer_time(1.0)
            pauses[-1] += 1
    assert pauses == [0, 2, 4, 8, 16, 32, 64, 64, 64, 64]
    stats.add_row_trial(1, STEP_S, STEP_S)
    stats.add_row_trial(1, 0.1 * STEP_S, STEP_S)
    assert not stats.is_room_doubtful
    assert stats.row_s < 0.1 * STEP_S


def test_a_server_that_had_room_for_many_rows_may_have_none_for_a_few_later() -> None:
    """What sixteen rows showed once is no figure of the four that make the stream late now."""
    stats = measured()
    stats.lateness.add(16, 0.0)
    stats.add_row_trial(16, 0.0, STEP_S)
    for _ in range(2):
        stats.lateness.add(4, 2 * STEP_S)
        stats.add_row_trial(4, 2 * STEP_S, STEP_S)
    assert stats.row_s == pytest.approx(0.5 * STEP_S)


def test_many_rows_that_make_a_stream_a_little_late_have_room() -> None:
    """Sixteen rows take a third of a step, which is 16 tokens for 1.3 steps."""
    stats = measured()
    for _ in range(3):
        stats.add_row_trial(16, 0.3 * STEP_S, STEP_S)
    assert not stats.is_room_doubtful
    for _ in range(2):
        stats.add_row_trial(4, 0.3 * STEP_S, STEP_S)
    assert stats.is_room_doubtful


def test_one_delay_of_many_answers_is_no_long_pause() -> None:
    """Seven answers beside each other were late at once: the first two trials end rows, and the others tell no more."""
    stats = measured()
    for _ in range(7):
        stats.add_row_trial(1, STEP_S, STEP_S)
    for _ in range(2):
        assert stats.row_s == pytest.approx(STEP_S)
        stats.add_answer_time(1.0)
    assert stats.row_s < 0.1 * STEP_S


def test_a_cycle_is_longer_for_the_rows_that_are_under_way_in_it() -> None:
    """Tokens that are drafted every 5 ms, rows of 3 ms: while a call of 44 ms is longer by a row every 5 ms, 22 others
    are sent, and the last right token's call waits for those before it."""
    stats = RowCallStats()
    for num_rows in (1, 4, 8, 16, 32) * 8:
        stats.add_call_time(num_rows, 0.044 + 0.003 * (num_rows - 1))
    stats.add_drafted_tokens_time(10, 0.05)
    for rate in (0.5, 0.8, 0.9):
        run, wait_s = rate / (1 - rate), 0.044 / 8
        rows_s = 0.003 * sum(rate**n for n in range(1, 23))
        cycle = stats.estimate_cycle(rate, 4)
        assert cycle.tokens == pytest.approx(run + 1, rel=1e-3)
        assert cycle.seconds == pytest.approx(0.044 + rate * wait_s + 0.005 * run + rows_s, rel=0.02)


def test_tokens_without_a_draft_count_against_what_is_covered_alone() -> None:
    """A draft that is silent at every other token, and else right."""
    agreement = DraftAgreementStats()
    for _ in range(200):
        agreement.add_next_token(has_agreed=True)
        agreement.add_next_token(has_agreed=None)
    assert agreement.estimate_acceptance_rate() > 0.95
    assert agreement.estimate_coverage_rate() == pytest.approx(0.5, abs=0.03)


def test_an_answer_knows_what_earlier_ones_showed() -> None:
    """A new answer begins with the pair's agreement, and soon goes by its own."""
    earlier = agreeing(0.9)
    local = DraftAgreementStats(earlier)
    assert local.estimate_acceptance_rate() == pytest.approx(0.9, abs=0.02)
    for _ in range(20):
        local.add_next_token(has_agreed=False)
    assert local.estimate_acceptance_rate() < 0.3


def test_bunches_of_drafted_tokens_are_averaged() -> None:
    """Ten tokens at once and then a pause are the same pace as one at a time."""
    stats = RowCallStats()
    for _ in range(20):
        stats.add_drafted_tokens_time(10, 0.0)
        stats.add_drafted_tokens_time(1, 0.033)
    assert stats.draft_token_s == pytest.approx(0.003, rel=0.02)


def test_lost_time_is_charged_and_earned_again() -> None:
    """Two hundredths of the target's time; before there is any, of the answer that is expected."""
    stats = RowCallStats()
    assert stats.estimate_allowed_loss_s(0.0, STEP_S, 100) == pytest.approx(0.02 * 100 * STEP_S)
    stats.add_lost_time(0.2)
    assert stats.estimate_allowed_loss_s(0.0, STEP_S, 100) < 0.0
    stats.add_answer_time(10.0)
    assert stats.estimate_allowed_loss_s(0.0, STEP_S, 100) == pytest.approx(0.02 * 12.5 - 0.2)
