"""`benchmarks/race_costs.py`: what a race loses where its streams cost time, and that it gains where they are cheap."""

from __future__ import annotations

import pytest
from race_costs import StreamCosts, run_decoder, summarize

from llm_spec.measure.load_stats import ExtraStreamStats

SEEDS = range(3)


def test_streams_that_cost_nothing_are_used() -> None:
    report = summarize(StreamCosts(0.0, 0.0), [run_decoder(StreamCosts(0.0, 0.0), seed) for seed in SEEDS])
    assert report.by_kind["copy"] > 1.5
    assert report.worst > 0.95


@pytest.mark.parametrize("costs", [StreamCosts(1.5, 0.05), StreamCosts(3.0, 0.1)], ids=str)
def test_a_server_without_room_loses_little(costs: StreamCosts) -> None:
    """A decoder without experience, its first ten requests together, and each by itself."""
    report = summarize(costs, [run_decoder(costs, seed) for seed in SEEDS])
    assert report.first_ten >= 0.95
    assert report.worst >= 0.85
    assert report.says == pytest.approx(1.0, abs=0.05)


def test_a_race_that_took_streams_for_free_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bounds above are sharp."""
    monkeypatch.setattr(ExtraStreamStats, "opening_cost", 0.0)
    monkeypatch.setattr(ExtraStreamStats, "slowdown", 0.0)
    costs = StreamCosts(3.0, 0.1)
    report = summarize(costs, [run_decoder(costs, seed) for seed in SEEDS])
    assert report.worst < 0.85
