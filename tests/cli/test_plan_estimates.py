"""`llm-spec plan`: estimates by the strategies themselves, and the table that shows them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llm_spec import ConfigError, Price
from llm_spec.cli.plan import (
    ModelSpeed,
    PlanScenario,
    describe_plan_advice,
    estimate_answer,
    find_break_even_acceptances,
    list_simulated_strategies,
)
from llm_spec.strategies.registry import find_strategy

SITUATION = PlanScenario(
    context=2000,
    output=600,
    acceptance=0.8,
    target=ModelSpeed(first_token_s=0.5, token_s=1 / 60),
    draft=ModelSpeed(first_token_s=0.3, token_s=1 / 200),
    target_price=Price(input=2.0, output=8.0, cached_input=0.5),
    draft_price=Price(input=0.1, output=0.4),
)


def test_plain_is_what_the_figures_say() -> None:
    """Reading, the round trip, the first token, and the others; the prompt and the answer in money."""
    plain = estimate_answer("plain", SITUATION)
    assert plain.total_s == pytest.approx(0.05 + 0.5 + 2000 * 0.0002 + 599 / 60, abs=0.05)
    assert plain.cost == pytest.approx(2000 * 2e-6 + 600 * 8e-6)


def test_a_prediction_saves_time_and_costs_what_is_rejected() -> None:
    """At every acceptance it costs more than plain; the more is right, the less."""
    plain = estimate_answer("plain", SITUATION)
    found = [estimate_answer("predict", replace(SITUATION, acceptance=a)) for a in (0.0, 0.5, 1.0)]
    assert found[0].total_s > plain.total_s > found[2].total_s
    costs = [estimated.cost for estimated in found if estimated.cost is not None]
    assert plain.cost is not None
    assert costs == sorted(costs, reverse=True)
    assert costs[2] == pytest.approx(plain.cost + 2000 * 0.1e-6 + 600 * 0.4e-6, rel=1e-3)
    assert costs[0] == pytest.approx(costs[2] + 600 * 8e-6, rel=0.05)


def test_a_judge_saves_money_where_the_draft_is_right_and_loses_it_where_not() -> None:
    plain = estimate_answer("plain", SITUATION)
    right, wrong = (estimate_answer("judge", replace(SITUATION, acceptance=a)) for a in (1.0, 0.0))
    assert right.cost is not None
    assert wrong.cost is not None
    assert plain.cost is not None
    assert right.cost < plain.cost < wrong.cost
    assert right.total_s < plain.total_s < wrong.total_s


def test_rounds_of_tokens() -> None:
    """Expected tokens a round over its time, by the lookahead that is the fastest; what never pays is not used."""
    here = replace(SITUATION, round_trip_s=0.0, acceptance=0.5, draft=ModelSpeed(first_token_s=0.3, token_s=0.0))
    plain = estimate_answer("plain", here)
    one = estimate_answer("tokens", replace(here, max_lookahead=1))
    assert one.total_s == pytest.approx(plain.total_s + 0.3 - 599 / 60 * (1 - 1 / 1.5))
    many = estimate_answer("tokens", here)
    assert many.total_s == pytest.approx(plain.total_s + 0.3 - 599 / 60 / 2, rel=1e-3)
    dear = replace(here, verify_token_s=1 / 60)
    assert estimate_answer("tokens", dear) == plain
    assert find_break_even_acceptances("tokens", replace(dear, verify_token_s=1 / 120))[0] == 0.55


def test_break_even() -> None:
    """From there on a strategy is faster, or cheaper; below it is not."""
    faster, cheaper = find_break_even_acceptances("predict", SITUATION)
    assert cheaper is None
    assert faster is not None
    assert 0.0 < faster < 1.0
    plain = estimate_answer("plain", SITUATION)
    assert estimate_answer("predict", replace(SITUATION, acceptance=faster)).total_s < plain.total_s
    assert estimate_answer("predict", replace(SITUATION, acceptance=faster - 0.05)).total_s >= plain.total_s
    _, cheaper = find_break_even_acceptances("judge", SITUATION)
    assert cheaper == 1.0


@pytest.mark.parametrize(("strategy", "output"), [("race", 600), ("probe", 200)])
def test_a_servers_strategy_gains_by_a_right_draft_alone(strategy: str, output: int) -> None:
    """With a wrong one it takes as long as the target, which reads the prompt and writes its first token, too."""
    copied = replace(SITUATION, output=output, draft=ModelSpeed(first_token_s=0.0, token_s=0.0))
    plain = estimate_answer("plain", copied)
    wrong, right = (estimate_answer(strategy, replace(copied, acceptance=a)) for a in (0.0, 1.0))
    assert wrong.total_s == pytest.approx(plain.total_s, rel=0.03)
    assert right.total_s < 0.9 * plain.total_s


LOCAL = replace(SITUATION, round_trip_s=0.0, draft=ModelSpeed(first_token_s=0.0, token_s=0.0), target_price=None)
ADVICE: dict[str, tuple[PlanScenario, tuple[float, ...], list[str], str]] = {
    "one acceptance": (LOCAL, (0.5,), ["tokens"], "use: --strategy tokens if 50% of the draft is right (1.85x)"),
    "several": (
        LOCAL,
        (0.0, 0.01, 0.5),
        ["tokens"],
        "use: plain if 0% or 1% of the draft is right; --strategy tokens if 50% of the draft is right (1.85x)",
    ),
    "none is faster": (
        LOCAL,
        (0.0, 0.01, 0.02),
        ["tokens"],
        "plain: no strategy that keeps the target's text is much faster if 0%, 1% or 2% of the draft is right",
    ),
    "only one that may change the text is faster": (
        SITUATION,
        (1.0,),
        ["judge"],
        "plain: no strategy that keeps the target's text is much faster if 100% of the draft is right",
    ),
    "faster, for more money": (
        SITUATION,
        (0.8,),
        ["predict", "judge"],
        "use: --strategy predict if 80% of the draft is right (1.30x for +16% cost)",
    ),
    "no strategy at all": (
        SITUATION,
        (0.8,),
        [],
        "plain: no strategy that keeps the target's text is much faster if 80% of the draft is right",
    ),
}


@pytest.mark.parametrize("name", ADVICE)
def test_the_advice(name: str) -> None:
    """The fastest of those that keep the text, where the gain is worthwhile."""
    scenario, acceptances, strategies, line = ADVICE[name]
    assert describe_plan_advice(scenario, acceptances, [find_strategy(name) for name in strategies]) == line


@pytest.mark.parametrize("strategy", [entry.name for entry in list_simulated_strategies()])
def test_without_prices_there_is_no_money(strategy: str) -> None:
    """None, not 0; times are the same."""
    free = replace(SITUATION, output=60, target_price=None)
    assert estimate_answer(strategy, free).cost is None
    paid = estimate_answer(strategy, replace(SITUATION, output=60))
    assert paid.cost is not None
    assert estimate_answer(strategy, free).total_s == pytest.approx(paid.total_s)


@pytest.mark.parametrize(
    ("changes", "name"),
    [({"context": 0}, "context"), ({"output": 0}, "output"), ({"acceptance": 1.1}, "acceptance")],
)
def test_values_out_of_range(changes: dict[str, float], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        replace(SITUATION, **changes)  # type: ignore[arg-type]
