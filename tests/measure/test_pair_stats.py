"""What was measured of one target with one draft."""

from __future__ import annotations

import asyncio

import pytest

from llm_spec.measure.pair_stats import PairStats

pytestmark = pytest.mark.virtual_clock


async def test_nothing_is_estimated_before_it_was_measured() -> None:
    assert PairStats().estimate_plain_s(10) is None


async def test_the_target_alone_takes_its_first_token_and_the_others() -> None:
    stats = PairStats()
    stats.add_plain_answer(40, 11, first_s=0.5, rest_s=1.0)
    assert stats.estimate_plain_s(1) == pytest.approx(0.5)
    assert stats.estimate_plain_s(21) == pytest.approx(2.5)
    assert stats.num_tokens_per_first_token_wait == pytest.approx(5.0)


async def test_a_stream_is_timed_from_its_opening() -> None:
    """The first token's time is the wait for it; later ones take the time since the last."""
    stats = PairStats()
    timer = stats.start_stream_timer()
    await asyncio.sleep(0.4)
    timer.add_tokens(1)
    await asyncio.sleep(0.6)
    timer.add_tokens(3)
    assert stats.first_token_s.value == pytest.approx(0.4)
    assert stats.token_s.value == pytest.approx(0.2)


async def test_a_stopped_timer_measures_no_consumer() -> None:
    """From `stop` on, pieces come when their consumer takes them."""
    stats = PairStats()
    timer = stats.start_stream_timer()
    timer.add_tokens(1)
    timer.stop_timing()
    await asyncio.sleep(100.0)
    timer.add_tokens(5)
    assert stats.token_s.value is None


def test_a_hiccup_and_what_it_held_up_leave_the_pace_as_it_is() -> None:
    """Tokens that come at once after a late one do not make a stream look fast."""
    pair_stats = PairStats()
    for seconds in [0.02] * 8 + [0.12, 0.0, 0.0, 0.0, 0.0, 0.0] + [0.02] * 2:
        pair_stats.token_s.update(1, seconds)
    assert pair_stats.target_token_s == pytest.approx(0.02, rel=0.02)
