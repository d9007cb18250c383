"""The baseline: what the target takes alone, and the speedup that a result tells against it."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from llm_spec import (
    ChatRequest,
    DecoderStats,
    Finish,
    Fixed,
    ReferenceDraft,
    Round,
    SpeculativeConfig,
    SpeculativeDecoder,
    SpeculativeFinish,
    SpeculativeResult,
    TextDelta,
    Usage,
)
from llm_spec.contract.events import LocalTimings
from llm_spec.decoder.budget import Budget, CostTracker
from llm_spec.decoder.choice import StrategyChoice
from llm_spec.decoder.config import StrategyName
from llm_spec.decoder.record import AnswerRecorder
from llm_spec.measure.baseline import TargetSpeedBaseline
from llm_spec.measure.pair_stats import PairStats
from llm_spec.strategies.registry import TOKENS
from llm_spec.testing import LocalProvider, TableModel
from llm_spec.testing.clock import run_virtual
from llm_spec.testing.simulated import SimulatedDraft, SimulatedTarget

TEXT = " ".join(f"word{i}" for i in range(120))


def test_an_answers_time_is_its_first_token_and_so_much_for_each_other() -> None:
    """By the prompts that were measured: the first token of a longer one takes longer, once that was seen."""
    baseline = TargetSpeedBaseline()
    assert baseline.estimate_answer_s(100, 1) is None
    baseline.add_answer(1000, 1, 0.5, 0.0)
    assert baseline.estimate_answer_s(4000, 1) == pytest.approx(0.5)
    assert baseline.estimate_answer_s(1000, 2) is None
    baseline.add_answer(1000, 51, 0.5, 1.0)
    assert baseline.estimate_answer_s(1000, 101) == pytest.approx(0.5 + 2.0)
    for _ in range(20):
        for num_characters in (1000, 3000, 5000, 9000):
            baseline.add_answer(num_characters, 51, 0.4 + num_characters / 10_000, 1.0)
    assert baseline.estimate_answer_s(7000, 1) == pytest.approx(0.4 + 0.7, rel=0.02)


def test_answers_beside_a_draft_are_forgotten_where_it_makes_the_target_slower() -> None:
    """The others stay; until then all of them count."""
    baseline = TargetSpeedBaseline()
    baseline.add_answer(100, 51, 0.5, 1.0)
    for _ in range(20):
        baseline.add_answer(100, 51, 0.5, 3.0, is_beside_draft=True)
    assert baseline.estimate_answer_s(100, 51) == pytest.approx(3.5, rel=0.1)
    baseline.forget_answers_beside_draft()
    assert (baseline.num_answers, baseline.estimate_answer_s(100, 51)) == (1, pytest.approx(1.5))
    baseline.add_answer(100, 51, 0.5, 3.0, is_beside_draft=True)
    baseline.forget_answers_beside_draft()
    assert (baseline.num_answers, baseline.estimate_answer_s(100, 51)) == (1, pytest.approx(1.5))


def test_a_few_plain_steps_tell_nothing_yet() -> None:
    """The first ones are slow; five tell something. A round with a draft is not a plain step."""
    baseline = TargetSpeedBaseline()
    plain = Round(index=0, num_draft_tokens=0, num_accepted_tokens=0, num_emitted_tokens=1, verify_s=0.01)
    drafted = Round(index=0, num_draft_tokens=4, num_accepted_tokens=4, num_emitted_tokens=5, verify_s=0.5)
    baseline.add_plain_steps(10, [plain, drafted] * 4)
    assert baseline.estimate_plain_steps_s(10, 100) is None
    assert baseline.count_plain_steps_wanted() == 4
    baseline.add_plain_steps(10, [drafted, plain])
    assert baseline.estimate_plain_steps_s(10, 100) == pytest.approx(1.0)


@pytest.mark.parametrize("at", range(8))
def test_one_hiccup_does_not_tell_the_time_of_plain_steps(at: int) -> None:
    """Wherever it is among the few that an answer has."""
    baseline = TargetSpeedBaseline()
    plain = Round(index=0, num_draft_tokens=0, num_accepted_tokens=0, num_emitted_tokens=1, verify_s=0.01)
    steps = [replace(plain, verify_s=0.05) if index == at else plain for index in range(8)]
    baseline.add_plain_steps(10, steps)
    assert baseline.estimate_plain_steps_s(10, 100) == pytest.approx(1.0, rel=0.1)


def rounds_of(*seconds: float, num_drafted: int = 0) -> list[Round]:
    return [
        Round(
            index=index,
            num_draft_tokens=num_drafted,
            num_accepted_tokens=num_drafted,
            num_emitted_tokens=1 + num_drafted,
            draft_s=value / 4 if num_drafted else 0.0,
            verify_s=value * 3 / 4 if num_drafted else value,
        )
        for index, value in enumerate(seconds)
    ]


STEADY = [*rounds_of(*[0.01, 0.011] * 4), *rounds_of(*[0.02] * 6, num_drafted=4), *rounds_of(0.03, num_drafted=8)]
HICCUPS: dict[str, tuple[list[Round], bool]] = {
    "steady": (STEADY, True),
    "few plain steps": (STEADY[4:], False),
    "one slow first step": ([*rounds_of(0.02), *STEADY], True),
    "hiccups in plain steps": ([*rounds_of(*[0.06] * 3), *STEADY], False),
    "hiccups in rounds with a draft": ([*STEADY, *rounds_of(0.1, 0.08, num_drafted=4)], False),
    "plain steps quiet, then all busy": ([*STEADY, *rounds_of(*[0.08] * 12, num_drafted=4)], False),
    "plain steps of two levels": ([*STEADY, *rounds_of(*[0.03] * 8)], False),
    "a draft that drafts as it goes": ([*STEADY, *rounds_of(0.012, 0.014, 0.016, num_drafted=1)], True),
}


@pytest.mark.parametrize("name", HICCUPS)
def test_a_range_is_told_where_rounds_are_steady(name: str) -> None:
    """What is told has the true time within its bounds; hiccups on one side alone compare with nothing."""
    rounds, is_told = HICCUPS[name]
    baseline = TargetSpeedBaseline()
    baseline.add_plain_steps(10, rounds)
    found = baseline.find_plain_steps_range_s(10, 100)
    assert (found is not None) == is_told
    if found is not None:
        assert found[0] < 1.0
        assert 1.1 < found[1] < 2.6 * found[0]


RECORDED: dict[str, list[tuple[int, int, int, int, int]]] = json.loads(
    (Path(__file__).parents[1] / "support" / "recorded_rounds.json").read_text(encoding="utf-8")
)


@pytest.mark.parametrize(
    ("name", "is_told"), [("a quiet machine", True), ("drafting stops after noisy first passes", False)]
)
def test_recorded_rounds_of_the_included_pair(name: str, is_told: bool) -> None:
    """Of each: tokens drafted, accepted and emitted, and microseconds of the draft and of the verification."""
    rounds = [
        Round(
            index=index,
            num_draft_tokens=num_drafted,
            num_accepted_tokens=num_accepted,
            num_emitted_tokens=num_emitted,
            draft_s=draft_us / 1e6,
            verify_s=verify_us / 1e6,
        )
        for index, (num_drafted, num_accepted, num_emitted, draft_us, verify_us) in enumerate(RECORDED[name])
    ]
    baseline = TargetSpeedBaseline()
    baseline.add_plain_steps(8, rounds)
    assert (baseline.find_plain_steps_range_s(8, 59) is not None) == is_told


ANSWERS: dict[str, tuple[list[tuple[int, float, float, int | None]], tuple[float, float] | None]] = {
    "one whole answer": ([(101, 0.5, 1.0, None)], (1.3, 1.73)),
    "a few tokens of one": ([(5, 0.5, 0.04, None)], None),
    "a few tokens of one, as many streams wrote them": ([(5, 0.5, 0.04, 80)], (1.3, 1.73)),
    "one that was cut short, and a whole one": ([(5, 0.5, 0.4, None), (101, 0.5, 1.0, None)], (1.3, 1.73)),
    "some like each other": ([(101, 0.5, 1.0, None), (101, 0.7, 1.2, None)], (1.3, 2.2)),
    "far apart": ([(101, 0.5, 1.0, None), (101, 1.5, 2.0, None)], None),
    "the first token alone": ([(1, 0.5, 0.0, None)], None),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_range_is_told_where_a_servers_answers_agree(name: str) -> None:
    """Of an answer of 101 tokens, by those that were measured for long enough."""
    answers, expected = ANSWERS[name]
    baseline = TargetSpeedBaseline()
    for num_tokens, first_s, rest_s, num_measured in answers:
        baseline.add_answer(100, num_tokens, first_s, rest_s, num_measured=num_measured)
    found = baseline.find_answer_range_s(100, 101)
    assert found == (None if expected is None else pytest.approx(expected, rel=0.05))


def test_plain_steps_beside_other_answers_are_measured_apart() -> None:
    """They wait for each other: what a step takes alone tells nothing of four at a time, and neither does a median."""
    baseline = TargetSpeedBaseline()
    plain = Round(index=0, num_draft_tokens=0, num_accepted_tokens=0, num_emitted_tokens=1, verify_s=0.01)
    baseline.add_plain_steps(10, [plain] * 20)
    assert baseline.estimate_plain_steps_s(10, 100, num_concurrent=3.6) is None
    assert baseline.count_plain_steps_wanted(3.6) == 8
    steps = [replace(plain, verify_s=0.1 if index % 4 == 0 else 0.02) for index in range(400)]
    baseline.add_plain_steps(10, steps, num_concurrent=4.3)
    assert baseline.count_plain_steps_wanted(3.6) == 0
    assert baseline.estimate_plain_steps_s(10, 100, num_concurrent=3.6) == pytest.approx(4.0, rel=0.05)
    assert baseline.estimate_plain_steps_s(10, 100) == pytest.approx(1.0)
    assert baseline.num_steps == 420


def test_plain_steps_take_longer_behind_a_long_context() -> None:
    """The time of a step is a line over the tokens before it."""
    baseline = TargetSpeedBaseline()
    for start in (0, 1000, 3000, 6000) * 20:
        seconds = 0.01 + start * 1e-6
        baseline.add_plain_steps(
            start, [Round(index=0, num_draft_tokens=0, num_accepted_tokens=0, num_emitted_tokens=1, verify_s=seconds)]
        )
    assert baseline.estimate_plain_steps_s(3950, 100) == pytest.approx(100 * 0.014, rel=0.02)


def recorded(open_draft_s: float, round_s: float, consumer_s: float = 0.0) -> SpeculativeResult:
    """An answer of 100 tokens in 10 rounds by a model of 10 ms a plain step, its prompt read in 2 s."""

    async def run() -> SpeculativeResult:
        pair_stats = PairStats()
        plain = Round(index=0, num_draft_tokens=0, num_accepted_tokens=0, num_emitted_tokens=1, verify_s=0.01)
        pair_stats.baseline.add_plain_steps(50, [plain] * 20)
        recorder = AnswerRecorder(ChatRequest.create("tell"))
        await asyncio.sleep(2.0 + open_draft_s + 10 * round_s)
        for index in range(10):
            recorder.add_event(TextDelta("word " * 10, token_ids=tuple(range(10))))
            recorder.add_event(
                Round(index=index, num_draft_tokens=9, num_accepted_tokens=9, num_emitted_tokens=10, verify_s=round_s)
            )
        await asyncio.sleep(consumer_s)
        recorder.consumer_wait_s = consumer_s
        finish = Finish("stop", Usage(input_tokens=50, output_tokens=100), "eos")
        for event in (LocalTimings(2.0, open_draft_s, {"lookahead": 9}), finish):
            recorder.add_event(event)
        return recorder.build_result(
            finish,
            strategy_choice=StrategyChoice(TOKENS),
            target="t",
            draft="d",
            cost_tracker=CostTracker(target=None, draft=None, budget=None, make_request_budget=Budget),
            pair_stats=pair_stats,
        )

    return run_virtual(run())


def test_opening_a_draft_is_part_of_the_time_taken() -> None:
    """Plain: 2 s of prompt and 1 s of steps. A draft that takes 1.5 s to open loses time, and the result says so."""
    quick, slow = recorded(0.0, 0.02), recorded(1.5, 0.02)
    assert quick.speedup == pytest.approx(3.0 / 2.2)
    assert slow.speedup == pytest.approx(3.0 / 3.7)
    assert slow.time_saved_s == pytest.approx(-0.7)
    assert slow.lookahead == {"lookahead": 9}


def test_a_slow_consumer_is_waited_for_with_and_without_speculation() -> None:
    """What is bound by its consumer is not made faster, and is not reported to be."""
    assert recorded(0.0, 0.02, consumer_s=1000.0).speedup == pytest.approx(1.0, abs=0.01)


def test_a_decoder_measures_how_long_its_consumer_takes() -> None:
    """A race that waits for its consumer at each piece is no faster than the target, which would wait as well."""

    async def race() -> list[SpeculativeResult]:
        target = SimulatedTarget(TEXT, first_token_s=0.1, token_s=0.05)
        decoder = SpeculativeDecoder(
            target=target, draft=SimulatedDraft(TEXT, 1.0, 1), config=SpeculativeConfig(strategy="race")
        )
        results: list[SpeculativeResult] = []
        for _ in range(6):
            async with decoder.stream("q", temperature=0.0) as events:
                async for event in events:
                    results += [event.result] if isinstance(event, SpeculativeFinish) and event.result else []
                    await asyncio.sleep(2.0 if isinstance(event, TextDelta) else 0.0)
        return results

    raced = [result for result in run_virtual(race()) if result.strategy == "race"]
    speedups = [result.speedup for result in raced if result.speedup is not None]
    assert speedups == [pytest.approx(1.0, abs=0.05)] * len(speedups)
    assert speedups


def test_an_answer_in_this_process_has_plain_steps_to_compare_with() -> None:
    """The first request takes eight, every other round; later ones one in `baseline_every` rounds."""
    text = "".join(random.Random(1).choices("abcdefgh", k=300))  # noqa: S311 - a text, no secret
    target = LocalProvider(TableModel(text, order=12))

    async def run(every: int) -> list[SpeculativeResult]:
        decoder = SpeculativeDecoder(
            target=target,
            draft=ReferenceDraft(text),
            config=SpeculativeConfig(lookahead=Fixed(3), baseline_every=every),
        )
        return [await decoder.decode("x", max_tokens=200) for _ in range(2)]

    first, second = asyncio.run(run(20))
    assert [bool(r.num_draft_tokens) for r in first.rounds[:16]] == [True, False] * 8
    assert first.plain_s is not None
    assert 2 <= second.stats.num_plain_steps <= 4
    assert second.content == first.content
    for result in asyncio.run(run(0)):
        assert (result.plain_s, result.speedup) == (None, None)
        assert result.stats.num_plain_steps <= 1  # the last token may have no room for a draft


@pytest.mark.parametrize("strategy", ["race", "probe", "predict", "judge", "regenerate", "auto"])
def test_the_speedup_is_that_of_an_outside_clock(strategy: str) -> None:
    """Within 5 % of the target's time alone over the time taken, both measured from outside."""

    async def run() -> None:
        latency: dict[str, Any] = {"first_token_s": 0.3, "token_s": 0.02, "round_trip_s": 0.01}
        target = SimulatedTarget(TEXT, by_ids=True, **latency)
        target.capabilities = replace(target.capabilities, prediction=True)
        clock = asyncio.get_running_loop().time
        started = clock()
        await SpeculativeDecoder(target=target, draft=None).decode("tell")
        plain_s = clock() - started
        draft = SimulatedDraft(TEXT, 0.97, 1, first_token_s=0.2, token_s=0.001)
        decoder = SpeculativeDecoder(
            target=target, draft=draft, config=SpeculativeConfig(strategy=cast("StrategyName", strategy))
        )
        for index in range(30):
            started = clock()
            result = await decoder.decode("tell")
            taken_s = clock() - started
            if index == 0:
                assert result.speedup in (None, pytest.approx(1.0))
            elif result.num_tokens is not None and strategy != "judge":
                assert result.speedup == pytest.approx(plain_s / taken_s, rel=0.05)
            else:
                assert result.speedup is not None

    run_virtual(run())


async def test_statistics_run_over_requests() -> None:
    """They add up results, can be written as JSON, and begin anew."""
    decoder = SpeculativeDecoder(target=LocalProvider(TableModel(TEXT, order=9)), draft=ReferenceDraft(TEXT))
    results = [await decoder.decode("x", max_tokens=60) for _ in range(3)]
    stats = decoder.stats
    assert stats.num_requests == 3
    assert stats.strategies == {"tokens": 3}
    assert stats.rounds.num_draft_tokens == sum(r.stats.num_draft_tokens for r in results)
    assert stats.usage.output_tokens == sum(r.usage.output_tokens for r in results if r.usage)
    assert stats.total_s == pytest.approx(sum(r.timings.total_s for r in results))
    assert stats.to_dict()["num_requests"] == 3
    assert decoder.with_config(SpeculativeConfig(strategy="plain")).stats is stats
    await decoder.with_config(SpeculativeConfig(strategy="plain")).decode("x", max_tokens=5)
    assert stats.plain_reasons["configured"] == 1  # a busy machine may find that drafts do not pay, too
    assert "4 requests" in repr(stats)
    stats.reset()
    assert stats.to_dict() == DecoderStats().to_dict()
