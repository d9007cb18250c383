"""The planner: plain first, each strategy tried, the worthiest used, and what does not pay tried later and later."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from support.targets import Fault, Target

from llm_spec import (
    ReferenceDraft,
    SpeculativeConfig,
    SpeculativeDecoder,
    SpeculativeResult,
    SpeculativeStats,
    Timings,
    Usage,
)
from llm_spec.contract.errors import TransientError
from llm_spec.contract.provider import Capabilities
from llm_spec.decoder.choice import StrategyPlanner
from llm_spec.measure.tokens import split_into_pieces
from llm_spec.testing import ScriptedProvider
from llm_spec.testing.clock import run_virtual
from llm_spec.testing.simulated import SimulatedDraft, SimulatedTarget

NAMES = ("race", "probe")
EVERY = 64


def answered(strategy: str, total_s: float, *, num_tokens: int = 100, **fields: Any) -> SpeculativeResult:
    """A speculated answer that took so long; half of its output was thrown away."""
    values: dict[str, Any] = {
        "content": "text",
        "finish_reason": "stop",
        "stopped_by": "eos",
        "strategy": strategy,
        "guarantee": "exact",
        "same_text": False,
        "target": "t",
        "draft": "d",
        "seed": None,
        "stats": SpeculativeStats(),
        "rounds": (),
        "timings": Timings(total_s=total_s, first_text_s=total_s / num_tokens, draft_s=0, verify_s=0),
        "usage": Usage(output_tokens=2 * num_tokens, cancelled_output_tokens=num_tokens),
    }
    return SpeculativeResult(**(values | fields))


def learn(
    planner: StrategyPlanner,
    name: str,
    total_s: float,
    *,
    num_tokens: int = 100,
    first_s: float | None = None,
    **fields: Any,
) -> None:
    """Let the planner learn of an answer that took so long."""
    if name == "plain":
        first_s = total_s / num_tokens if first_s is None else first_s
        planner.pair_stats.add_plain_answer(10, num_tokens, first_s, total_s - first_s)
    else:
        plain_s = planner.baseline.estimate_answer_s(10, num_tokens)
        planner.record_result(answered(name, total_s, num_tokens=num_tokens, **({"plain_s": plain_s} | fields)))


def chosen(
    planner: StrategyPlanner, num_requests: int, seconds: Mapping[str, float], names: Sequence[str] = NAMES
) -> list[str]:
    """What is chosen when a strategy's answers always take so many seconds."""
    choices: list[str] = []
    for _ in range(num_requests):
        choices.append(planner.choose_strategy_that_pays(names, EVERY).name)
        learn(planner, choices[-1], seconds[choices[-1]])
    return choices


def test_the_first_request_is_plain_and_then_each_strategy_is_tried() -> None:
    """Otherwise there is nothing to compare with."""
    choices = chosen(StrategyPlanner(), 10, {"plain": 2.0, "race": 1.5, "probe": 1.0})
    assert choices[0] == "plain"
    assert set(choices[1:6]) >= set(NAMES)


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({"plain": 2.0, "race": 1.5, "probe": 1.0}, "probe"),
        ({"plain": 2.0, "race": 1.0, "probe": 1.5}, "race"),
        ({"plain": 2.0, "race": 2.5, "probe": 3.5}, "plain"),
        ({"plain": 2.0, "race": 1.99, "probe": 2.0}, "plain"),  # a gain within the noise is none
        ({"plain": 2.0, "race": 4.0, "probe": 1.0}, "probe"),
    ],
)
def test_the_worthiest_is_used(seconds: Mapping[str, float], best: str) -> None:
    """After the trials nearly every request goes to it."""
    choices = chosen(StrategyPlanner(), 400, seconds)
    assert Counter(choices[8:])[best] > 0.9 * 392
    assert Counter(choices[100:])[best] > 0.92 * 300


def test_what_does_not_pay_is_tried_again_later_and_later() -> None:
    """Pauses grow from one trial to the next, up to a bound: it is never given up for good."""
    choices = chosen(StrategyPlanner(), 3000, {"plain": 1.0, "race": 2.0}, ["race"])
    tried = [index for index, name in enumerate(choices) if name == "race"]
    pauses = [b - a for a, b in pairwise(tried)][2:]
    assert len(pauses) >= 4
    assert all(b >= a for a, b in pairwise(pauses))
    assert pauses[-1] > 4 * pauses[0]
    assert max(pauses) < 1100


@pytest.mark.parametrize("seconds", [1.1, 2.0, 8.0])
def test_trying_again_costs_next_to_nothing(seconds: float) -> None:
    """However bad a strategy is: after the first trials less than 2 % of the time goes into it."""
    planner = StrategyPlanner()
    chosen(planner, 5, {"plain": 1.0, "race": seconds}, ["race"])
    later = chosen(planner, 4000, {"plain": 1.0, "race": seconds}, ["race"])
    assert Counter(later)["race"] * (seconds - 1.0) <= 0.02 * 4000


def test_the_first_pause_comes_right_after_the_trials() -> None:
    """What was tried twice and did not pay rests for 16 requests at least."""
    choices = chosen(StrategyPlanner(), 30, {"plain": 1.0, "race": 2.0}, ["race"])
    assert choices[:3] == ["plain", "race", "race"]
    assert choices[3:19] == ["plain"] * 16


def test_a_strategy_that_becomes_worth_it_is_taken_up() -> None:
    """A draft or a server that got better is found out."""
    planner = StrategyPlanner()
    chosen(planner, 40, {"plain": 1.0, "race": 2.0, "probe": 2.0})
    later = chosen(planner, 300, {"plain": 1.0, "race": 0.4, "probe": 2.0})
    assert Counter(later[150:])["race"] > 90


def test_a_strategy_that_is_no_longer_worth_it_is_left() -> None:
    """Within a few requests."""
    planner = StrategyPlanner()
    chosen(planner, 40, {"plain": 1.0, "race": 0.5}, ["race"])
    later = chosen(planner, 60, {"plain": 1.0, "race": 2.0}, ["race"])
    assert Counter(later[10:])["plain"] > 45


def test_plain_is_measured_again_now_and_then() -> None:
    """A target that became faster alone is noticed, although nothing but the strategy was used."""
    planner = StrategyPlanner()
    choices = chosen(planner, 300, {"plain": 1.0, "race": 0.5}, ["race"])
    plain = [index for index, name in enumerate(choices) if name == "plain"]
    assert len(plain) > 2
    assert plain[:2] == [0, 9]  # the first may have met a cold server
    assert all(b - a >= EVERY for a, b in pairwise(plain[1:]))
    assert (len(plain) - 2) * 0.5 <= 0.0101 * sum(1.0 if name == "plain" else 0.5 for name in choices)  # what it costs
    later = chosen(planner, 1000, {"plain": 0.2, "race": 0.5}, ["race"])
    assert Counter(later[800:])["plain"] > 150


@pytest.mark.parametrize(
    "fields",
    [
        {"num_tokens": 7},
        {"stopped_by": "deadline", "finish_reason": "length"},
        {"usage": None},
        {"plain_s": None},
        {"retries": ("it broke",)},
    ],
)
def test_answers_that_say_nothing_teach_nothing(fields: dict[str, Any]) -> None:
    """Short ones, those that a deadline cut or a failure held up, those that nobody counted."""
    planner = StrategyPlanner()
    chosen(planner, 40, {"plain": 2.0, "race": 1.0, "probe": 3.0})
    for _ in range(20):
        learn(planner, "race", 1000.0, **fields)
    assert Counter(chosen(planner, 20, {"plain": 2.0, "race": 1.0, "probe": 3.0}))["race"] >= 18


def test_thrown_away_tokens_are_no_answer() -> None:
    """Seven tokens of an answer stay seven, however many were generated beside them."""
    planner = StrategyPlanner()
    learn(planner, "plain", 1.0)
    usage = Usage(output_tokens=500, cancelled_output_tokens=493)
    for _ in range(10):
        learn(planner, "race", 0.01, usage=usage)
        learn(planner, "probe", 2.0)
    assert planner.choose_strategy_that_pays(["race"], EVERY).name == "race"  # not tried yet
    learn(planner, "race", 2.0)
    learn(planner, "race", 2.0)
    assert Counter(chosen(planner, 20, {"plain": 1.0, "race": 2.0}, ["race"]))["plain"] >= 17


def test_what_a_request_does_not_allow_is_never_chosen() -> None:
    """The names differ from request to request."""
    planner, seconds = StrategyPlanner(), {"plain": 2.0, "race": 1.0, "probe": 0.5}
    for index in range(400):
        names = [("race",), ("probe",), NAMES][index * 7 % 3]
        name = planner.choose_strategy_that_pays(names, EVERY).name
        assert name == "plain" or name in names
        learn(planner, name, seconds[name])
    assert Counter(chosen(planner, 20, seconds, ["race"]))["race"] >= 18  # probe, which is better, is not allowed


def test_the_first_token_weighs_as_it_does_in_a_short_answer() -> None:
    """Worth compares like with like: plain is expected to take its first token and then so much for each other."""
    planner = StrategyPlanner()
    for _ in range(3):
        learn(planner, "plain", 2.0, first_s=1.01, num_tokens=100)  # 10 ms a token
    for _ in range(3):
        learn(planner, "race", 1.05, num_tokens=10)  # plain: 1.10
    assert Counter(chosen(planner, 10, {"plain": 2.0, "race": 1.05}, ["race"]))["race"] > 8


def test_a_strategy_that_always_meets_the_deadline_is_given_up() -> None:
    """Plain answers come in time, those of a strategy never: it may not be chosen for every request from then on."""
    planner = StrategyPlanner()
    choices: list[str] = []
    for _ in range(40):
        choices.append(planner.choose_strategy_that_pays(["race"], EVERY).name)
        learn(planner, choices[-1], 1.0, stopped_by="deadline")
    assert Counter(choices)["plain"] > 20


# ------------------------------------------------------------------------------------------ a whole decoder

TEXT = " ".join(f"word{i}" for i in range(200))


@pytest.mark.parametrize("consumer_s", [0.0, 0.003, 1.0])
@pytest.mark.parametrize("wait_s", [None, 50.0])
def test_the_baseline_is_the_targets_own_time(consumer_s: float, wait_s: float | None) -> None:
    """Neither what a consumer takes for each event nor the wait before another attempt counts as the target's time."""

    async def run() -> SpeculativeResult:
        busy = Fault("stream", count=1, how=TransientError("busy", retry_after_s=wait_s))
        target = Target(TEXT, faults=[] if wait_s is None else [busy], first_token_s=0.4, token_s=0.02)
        decoder = SpeculativeDecoder(target=target, draft=SimulatedDraft(TEXT, 0.9, 1))
        for _ in range(2):
            async with decoder.stream("tell") as events:
                async for _ in events:
                    await asyncio.sleep(consumer_s)
        target.capabilities = replace(target.capabilities, prediction=True)
        return await decoder.with_config(SpeculativeConfig(strategy="predict")).decode("tell")

    result = run_virtual(run())
    assert result.plain_s == pytest.approx(0.4 + (len(split_into_pieces(TEXT)) - 1) * 0.02, rel=0.01)


@pytest.mark.parametrize("consumer_s", [0.0, 0.1])
def test_a_race_measures_streams_as_they_arrive(consumer_s: float) -> None:
    """A consumer that takes ten times as long as a token does not make the target look slow, nor its bursts fast."""

    async def run() -> SpeculativeResult:
        target = SimulatedTarget(TEXT, by_ids=True, first_token_s=0.4, token_s=0.01)
        config = SpeculativeConfig(strategy="race", baseline_every=0)
        decoder = SpeculativeDecoder(target=target, draft=SimulatedDraft(TEXT, 0.9, 1), config=config)
        async with decoder.stream("tell") as events:
            async for _ in events:
                await asyncio.sleep(consumer_s)
        target.capabilities = replace(target.capabilities, prediction=True)
        return await decoder.with_config(SpeculativeConfig(strategy="predict")).decode("tell")

    result = run_virtual(run())
    assert result.plain_s == pytest.approx(0.4 + (len(split_into_pieces(TEXT)) - 1) * 0.01, rel=0.05)


@pytest.mark.slow
def test_a_named_strategy_is_compared_with_a_plain_answer_now_and_then() -> None:
    """Its own first stream measures the target; then one answer in so many is plain, with `baseline_every=0` none."""

    async def run(every: int, num_requests: int) -> list[tuple[str, str | None, bool]]:
        decoder = SpeculativeDecoder(
            target=SimulatedTarget(TEXT, by_ids=True, first_token_s=0.4, token_s=0.02),
            draft=SimulatedDraft(TEXT, 0.9, 1),
            config=SpeculativeConfig(strategy="race", baseline_every=every),
        )
        results = [await decoder.decode("tell") for _ in range(num_requests)]
        return [(result.strategy, result.plain_reason, result.speedup is None) for result in results]

    measured = run_virtual(run(20, 60))
    plain = [index for index, (name, *_) in enumerate(measured) if name == "plain"]
    assert plain[0] == 8
    assert all(later - earlier >= 20 for earlier, later in pairwise(plain))
    assert len(plain) >= 3
    assert [(name, reason) for name, reason, _ in run_virtual(run(0, 30))] == [("race", None)] * 30


@pytest.mark.parametrize(
    ("latency", "agreement", "draft_token_s", "best"),
    [
        # nothing the draft says is right
        ({"first_token_s": 0.02, "token_s": 0.02}, 0.0, 0.002, "plain"),
        # a call costs as much as 20 tokens, and the draft is instantaneous and mostly right
        ({"first_token_s": 0.4, "token_s": 0.02}, 0.95, 0.0, "race"),
        # a call costs little more than a token
        ({"first_token_s": 0.005, "round_trip_s": 0.02, "token_s": 0.05}, 0.8, 0.006, "probe"),
    ],
)
def test_auto_settles_on_what_is_best(
    latency: dict[str, Any], agreement: float, draft_token_s: float, best: str
) -> None:
    """Out of plain, race and probe, for a target and a draft of known speeds; the text is always the target's."""

    async def run() -> tuple[list[str], dict[str, list[float]]]:
        target = SimulatedTarget(TEXT, by_ids=True, **latency)
        draft = SimulatedDraft(TEXT, agreement, 1, token_s=draft_token_s)
        decoder = SpeculativeDecoder(target=target, draft=draft, config=SpeculativeConfig(strategy="auto"))
        names: list[str] = []
        seconds: dict[str, list[float]] = {}
        for _ in range(30):
            result = await decoder.decode("tell")
            assert result.content == TEXT
            names.append(result.strategy)
            seconds.setdefault(result.strategy, []).append(result.timings.total_s)
        assert target.num_open == 0
        return names, seconds

    names, seconds = run_virtual(run())
    assert names[0] == "plain"
    assert Counter(names[12:])[best] >= 15
    mean = {name: sum(times) / len(times) for name, times in seconds.items()}
    assert mean[best] <= 1.02 * min(mean.values())


def test_an_answer_that_takes_no_time() -> None:
    """It is an answer like any other."""

    async def run() -> list[str]:
        target = ScriptedProvider(TEXT, capabilities=Capabilities(prediction=True))
        decoder = SpeculativeDecoder(target=target, draft=ReferenceDraft(TEXT))
        return [(await decoder.decode("tell")).content for _ in range(3)]

    assert run_virtual(run()) == [TEXT] * 3
