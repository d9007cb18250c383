"""What further streams cost the first one, and when one pays."""

from __future__ import annotations

from llm_spec.measure.load_stats import ExtraStreamStats


def test_what_was_not_measured_costs_nothing() -> None:
    stats = ExtraStreamStats()
    assert stats.are_free
    assert stats.is_worthwhile(0.1, 1000)


def test_openings_cost_what_they_made_the_answer_late() -> None:
    """Shared by those that were opened together; an answer that was early says that they are free."""
    stats = ExtraStreamStats()
    stats.add_opening(3, 6.0)
    assert stats.opening_cost == 2.0
    assert not stats.is_worthwhile(2.9, 1)
    assert stats.is_worthwhile(3.1, 1)
    early = ExtraStreamStats()
    early.add_opening(1, -2.0)
    assert early.are_free


def test_a_stream_costs_its_part_of_every_step() -> None:
    stats = ExtraStreamStats()
    for _ in range(50):
        stats.add_token(3, 0.3)
    assert not stats.are_free
    assert stats.slowdown > 0.09
    assert stats.is_worthwhile(4.0, 20)
    assert not stats.is_worthwhile(4.0, 40)


def test_noise_is_no_cost() -> None:
    """Tokens come now early, now late: on average not late."""
    stats = ExtraStreamStats()
    for sign in (1, -1) * 50:
        stats.add_token(3, sign * 0.3)
    stats.add_opening(2, 0.4)
    assert stats.are_free


def test_what_streams_cost_is_measured_anew_where_none_is_opened_any_more() -> None:
    """After 16, 32 … answers, 64 at most; the first stream may have been opened in a bad moment."""
    stats, pauses = ExtraStreamStats(), list[int]()
    for _ in range(5):
        stats.num_extra = 3
        stats.add_opening(1, 8.0)
        pauses.append(0)
        while not stats.are_free:
            assert stats.num_extra == 3
            stats.record_answer_end(0)
            pauses[-1] += 1
        assert stats.num_extra == 0
    assert pauses == [16, 32, 64, 64, 64]


def test_what_streams_cost_is_kept_where_they_are_opened() -> None:
    stats = ExtraStreamStats()
    stats.add_opening(1, 2.0)
    for number in range(100):
        stats.record_answer_end(number % 5)
    assert stats.opening_cost == 2.0
