"""Results and statistics: measured, added up, serialisable, and readable by people."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_spec import Cost, Round, SpeculativeResult, SpeculativeStats, Timings, ToolCall, Usage
from llm_spec.measure.estimates import ExponentialMovingAverage


def report(drafted: int, accepted: int, *, draft_s: float = 0.0, verify_s: float = 0.0) -> Round:
    return Round(
        index=0,
        num_draft_tokens=drafted,
        num_accepted_tokens=accepted,
        num_emitted_tokens=accepted + 1,
        draft_s=draft_s,
        verify_s=verify_s,
    )


def stats_of(*reports: Round) -> SpeculativeStats:
    return SpeculativeStats.from_rounds(reports)


def plain_steps(count: int) -> list[Round]:
    return [report(0, 0, verify_s=1.0)] * count


def result_of(
    stats: SpeculativeStats,
    *,
    total_s: float = 2.0,
    plain_s: float | None = None,
    plain_range_s: tuple[float, float] | None = None,
) -> SpeculativeResult:
    return SpeculativeResult(
        content="héllo",
        finish_reason="stop",
        stopped_by="eos",
        strategy="tokens",
        guarantee="exact",
        same_text=True,
        target="t",
        draft="d",
        seed=1,
        stats=stats,
        rounds=(report(2, 1),),
        timings=Timings(total_s=total_s, first_text_s=0.1, draft_s=stats.draft_s, verify_s=stats.verify_s),
        usage=Usage(input_tokens=1, output_tokens=2),
        plain_s=plain_s,
        plain_range_s=plain_range_s,
        speedup_basis=None if plain_s is None else "measured on 8 of its own tokens",
    )


def test_counts_of_hand_made_rounds() -> None:
    """Rounds, steps, drafted, accepted, emitted and wasted are counted as the glossary defines them."""
    stats = stats_of(report(4, 4), report(4, 1), report(0, 0), report(2, 0))
    assert (stats.num_rounds, stats.num_spec_steps, stats.num_plain_steps) == (4, 3, 1)
    assert (stats.num_draft_tokens, stats.num_accepted_draft_tokens) == (10, 5)
    assert stats.num_emitted_tokens == 5 + 2 + 1 + 1
    assert stats.num_wasted_draft_tokens == 5
    assert stats.draft_acceptance_rate == 0.5
    assert stats.mean_acceptance_length == pytest.approx(1 + 5 / 3)
    assert stats.mean_lookahead == pytest.approx(10 / 3)
    assert stats.acceptance_histogram == (1, 1, 0, 0, 1)


def test_the_correction_is_not_counted_as_accepted() -> None:
    """A round that rejects its first token has accepted nothing, though it emits one."""
    stats = stats_of(report(3, 0))
    assert (stats.num_accepted_draft_tokens, stats.num_emitted_tokens, stats.draft_acceptance_rate) == (0, 1, 0.0)


def test_nothing_measured_is_none_not_zero() -> None:
    """Rates of nothing are None."""
    stats = SpeculativeStats()
    assert stats.draft_acceptance_rate is None
    assert stats.mean_acceptance_length is None
    assert stats.mean_lookahead is None
    result = result_of(stats)
    assert result.speedup is None
    assert result.time_saved_s is None


def test_speedup_is_a_ratio_of_whole_times() -> None:
    """The target's time alone over the time taken; what was lost is negative."""
    gained = result_of(stats_of(report(3, 3)), total_s=2.0, plain_s=3.0, plain_range_s=(2.5, 4.0))
    assert (gained.speedup, gained.time_saved_s) == (pytest.approx(1.5), pytest.approx(1.0))
    assert gained.speedup_range == pytest.approx((1.25, 2.0))
    lost = result_of(stats_of(report(3, 0)), total_s=4.0, plain_s=3.0, plain_range_s=(3.0, 3.0))
    assert (lost.speedup, lost.time_saved_s) == (pytest.approx(0.75), pytest.approx(-1.0))


ROUNDS = st.lists(st.integers(0, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), max_size=12)


@given(ROUNDS, ROUNDS)
def test_adding_requests_up_is_counting_their_rounds_together(
    first: list[tuple[int, int]], second: list[tuple[int, int]]
) -> None:
    """Statistics of two requests add up to those of all their rounds; an empty one changes nothing."""
    one, two = stats_of(*(report(*r) for r in first)), stats_of(*(report(*r) for r in second))
    assert one + two == two + one == stats_of(*(report(*r) for r in first + second))
    assert one + SpeculativeStats() == one
    assert sum(one.acceptance_histogram) == one.num_spec_steps
    assert sum(n * count for n, count in enumerate(one.acceptance_histogram)) == one.num_accepted_draft_tokens


def test_the_metrics_have_the_names_of_the_field() -> None:
    """The serialised metrics use the glossary's names, and are JSON."""
    metrics = json.loads(json.dumps(stats_of(report(4, 2), report(0, 0, verify_s=1.0)).to_dict()))
    assert metrics["num_spec_steps"] == 1
    assert metrics["num_draft_tokens"] == 4
    assert metrics["num_accepted_draft_tokens"] == 2
    assert metrics["mean_acceptance_length"] == 3.0
    assert "mean_lookahead" in metrics
    assert metrics["draft_acceptance_rate"] == 0.5
    assert metrics["acceptance_histogram"] == [0, 0, 1]


def test_stats_summary_is_for_people() -> None:
    """The summary is one line with the counts in it."""
    text = stats_of(report(4, 2), report(4, 4)).summary()
    assert "\n" not in text
    assert "6 of 8" in text
    assert "75%" in text
    assert "plain" in stats_of(report(0, 0)).summary()
    assert SpeculativeStats().summary()


# ------------------------------------------------------------------------------------------- results


def test_a_result_is_json() -> None:
    """One object with everything the issue lists, that survives JSON."""
    out = json.loads(json.dumps(result_of(stats_of(report(4, 2))).to_dict()))
    keys = ["content", "strategy", "guarantee", "finish_reason", "stopped_by", "draft_tokens", "accepted_tokens"]
    keys += ["acceptance_rate", "speedup", "speedup_range", "speedup_basis", "rounds", "metrics", "usage", "timings"]
    assert [key for key in keys if key not in out] == []
    assert out["content"] == "héllo"
    assert set(out["usage"]) == {"target", "draft", "wasted"}
    assert out["usage"]["wasted"] == 2
    assert out["usage"]["draft"] is None


def test_figures_are_the_result_without_the_answer() -> None:
    """What servers and adapters tell has the names that the whole result has, and is JSON."""
    result = result_of(stats_of(report(4, 2)))
    told, whole = result.to_report(), result.to_dict()
    assert json.loads(json.dumps(told)) == told
    assert {name: whole[name] for name in told} == told
    rest = {"content", "finish_reason", "stopped_by", "stop_string", "rounds", "usage", "tool_calls", "reasoning"}
    assert set(whole) - set(told) == rest


@pytest.mark.parametrize("plain_s", [None, 3.0])
def test_no_figure_is_told_where_the_evidence_carries_no_range(plain_s: float | None) -> None:
    """An estimate by itself is none that anybody is told: neither in JSON nor in words."""
    result = result_of(stats_of(report(4, 2, verify_s=1.0)), plain_s=plain_s)
    out = result.to_dict()
    assert [out[name] for name in ("speedup", "speedup_range", "speedup_basis", "time_saved_s")] == [None] * 4
    assert out["timings"]["plain_s"] is None
    assert "speed not measured" in result.summary()
    assert "llm-spec run --compare" in result.summary()
    assert "as fast as" not in result.summary()


def test_result_summary_is_for_people() -> None:
    """Strategy, guarantee and the range of the speedup are in it; one figure where the clock gave it."""
    text = result_of(stats_of(report(4, 2)), plain_s=3.0, plain_range_s=(2.5, 4.0)).summary()
    assert "tokens (exact)" in text
    assert "1.25x to 2.00x as fast as the target alone (measured on 8 of its own tokens)" in text
    text = result_of(stats_of(report(4, 2)), plain_s=3.0, plain_range_s=(3.0, 3.0)).summary()
    assert "\n1.50x as fast as the target alone" in text


def test_a_result_is_shown_in_one_line() -> None:
    stats = stats_of(report(4, 3), report(4, 1))
    result = dataclasses.replace(result_of(stats), content="word " * 500, rounds=(report(4, 3), report(4, 1)))
    assert repr(result).startswith("<SpeculativeResult 'word word")
    assert repr(result).endswith(f", tokens (exact): {stats.summary()}, 2.000 s>")
    assert len(repr(result)) < 300
    calls = (ToolCall("1", "weather", "{}"),)
    assert repr(dataclasses.replace(result, content="", tool_calls=calls)).startswith(
        "<SpeculativeResult ('weather',), "
    )


def test_a_notebook_shows_the_answer_and_a_table() -> None:
    result = result_of(stats_of(report(4, 3)), plain_s=4.0, plain_range_s=(4.0, 4.0))
    cost = Cost(target=0.5, draft=0.25, plain=1.0)
    shown = dataclasses.replace(result, rounds=(report(4, 3),), cost=cost, speedup_basis="a | b")._repr_markdown_()
    assert shown.splitlines() == [
        "héllo",
        "",
        "| | |",
        "| --- | --- |",
        "| strategy | tokens (exact) |",
        f"| tokens | {result.stats.summary()} |",
        "| time | 2.000 s |",
        "| speed | 2.00x as fast as the target alone (a &#124; b) |",
        "| cost | 0.750000, 0.250000 less than plain |",
    ]
    calls = (ToolCall("1", "weather", '{"city": "Rome"}'),)
    assert '\n`weather({"city": "Rome"})`\n\n| | |\n' in dataclasses.replace(result, tool_calls=calls)._repr_markdown_()


def test_the_summary_says_why_nothing_was_speculated() -> None:
    """Instead of a speedup, in words for people."""
    plain = dataclasses.replace(result_of(stats_of(report(0, 0))), strategy="plain", plain_reason="no_draft")
    assert plain.plain_explanation
    assert f"no speculation: {plain.plain_explanation}" in plain.summary()
    assert "no speculation" not in result_of(stats_of(report(4, 2))).summary()


def test_a_remote_plain_run_has_the_targets_count() -> None:
    """Where there are no rounds, the summary tells the tokens that the target counted."""
    assert "2 tokens" in dataclasses.replace(result_of(stats_of()), rounds=()).summary()
    assert "not counted" in dataclasses.replace(result_of(stats_of()), rounds=(), usage=None).summary()


def test_the_message_can_go_back_into_a_conversation() -> None:
    """The answer is an assistant message."""
    message = result_of(SpeculativeStats()).message
    assert message.to_openai() == {"role": "assistant", "content": "héllo"}


def test_times_outside_rounds_are_never_negative() -> None:
    """A draft that ran beside the target can make the parts exceed the whole; the rest is 0 then."""
    assert Timings(total_s=1.0, first_text_s=None, draft_s=0.7, verify_s=0.6).other_s == 0.0
    assert Timings(total_s=2.0, first_text_s=None, draft_s=0.7, verify_s=0.6).other_s == pytest.approx(0.7)


# ------------------------------------------------------------------------------------- moving average


def test_moving_average_by_hand() -> None:
    """The first value counts in full, each later one by alpha; reset forgets all."""
    average = ExponentialMovingAverage(alpha=0.25)
    assert average.value is None
    assert average.update(1.0) == 1.0
    assert average.update(0.0) == pytest.approx(0.75)
    assert average.count == 2
    average.reset()
    assert (average.value, average.count) == (None, 0)


def test_half_life_means_what_it_says() -> None:
    """After `half_life` further values the first has half its weight."""
    average = ExponentialMovingAverage(half_life=4)
    average.update(1.0)
    for _ in range(4):
        average.update(0.0)
    assert average.value == pytest.approx(0.5)
