"""Running estimates converge, forget, and are not wrecked by a hiccup."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownLambdaType=false
# (pytest.approx and scipy are partly untyped)

import pytest

from llm_spec.contract.errors import ConfigError
from llm_spec.measure.estimates import (
    AcceptanceEstimate,
    ExponentialMovingAverage,
    ForwardCostLine,
    PassCostEstimate,
    RobustTokenCostAverage,
)


def test_moving_average_starts_at_the_first_value_and_halves_by_half_life() -> None:
    """The first value counts in full, and after a half-life of others it counts half."""
    average = ExponentialMovingAverage(half_life=4)
    assert average.value is None
    assert average.update(1.0) == 1.0
    for _ in range(4):
        average.update(0.0)
    assert average.value == pytest.approx(0.5)
    assert average.count == 5
    average.reset()
    assert (average.value, average.count) == (None, 0)


def test_moving_average_by_alpha() -> None:
    """Alpha is the weight of the newest value."""
    average = ExponentialMovingAverage(alpha=0.25)
    average.update(0.0)
    assert average.update(1.0) == pytest.approx(0.25)


def test_moving_average_takes_exactly_one_way_to_forget() -> None:
    """Neither or both of alpha and half-life, or one out of range, is a configuration error."""
    for options in ({}, {"alpha": 0.5, "half_life": 3.0}, {"alpha": 0.0}, {"alpha": 1.5}, {"half_life": -1.0}):
        with pytest.raises(ConfigError):
            ExponentialMovingAverage(**options)


def test_acceptance_does_not_count_tokens_behind_a_rejection() -> None:
    """Accepted / (accepted + first rejections): 3 of 4 judged, however long the draft was."""
    estimate = AcceptanceEstimate(half_life=1e9, prior=0.5, prior_weight=0.0)
    estimate.update(3, rejected=True)
    assert estimate.rate == pytest.approx(0.75)
    estimate.update(2, rejected=False)
    assert estimate.rate == pytest.approx(5 / 6)


def test_acceptance_forgets_towards_its_prior() -> None:
    """The evidence halves in a half-life, the prior stays."""
    estimate = AcceptanceEstimate(half_life=10, prior=0.5, prior_weight=1.0)
    estimate.update(0, rejected=True)
    estimate.decay(10)
    assert estimate.rejected == pytest.approx(0.5)
    estimate.decay(1000)
    assert estimate.rate == pytest.approx(0.5)


def test_line_finds_base_and_slope() -> None:
    """Widths 1 to 9 determine the line, whatever the unit."""
    line = ForwardCostLine(half_life=64)
    for index in range(300):
        width = 1 + index % 9
        line.update(width, 2e-3 * (1.0 + 0.2 * (width - 1)))
    assert line.base_s == pytest.approx(2e-3, rel=0.02)
    assert line.per_token_s == pytest.approx(4e-4, rel=0.02)


def test_line_of_one_width_is_the_prior_to_scale() -> None:
    """Where every forward was equally wide, nine positions cost 1.5 of one."""
    line = ForwardCostLine(half_life=64)
    for _ in range(10):
        line.update(5, 0.010)
    assert line.base_s + 4 * line.per_token_s == pytest.approx(0.010)
    assert line.base_s + 8 * line.per_token_s == pytest.approx(1.5 * line.base_s)


def test_line_keeps_what_a_long_stretch_of_plain_steps_does_not_show() -> None:
    """Two thousand plain steps do not wipe out the slope."""
    line = ForwardCostLine(half_life=64)
    for _ in range(20):
        line.update(1, 1.0)
        line.update(5, 2.2)
    for _ in range(2000):
        line.update(1, 1.0)
    assert line.per_token_s == pytest.approx(0.3, rel=0.05)


def test_line_survives_hiccups() -> None:
    """Single times ten times too long, the very first included, move the line little and not for long."""
    line = ForwardCostLine(half_life=64)
    line.update(5, 20.0)
    for index in range(60):
        line.update(1 + 4 * (index % 2), (10.0 if index == 40 else 1.0) * (1.0 + 0.1 * 4 * (index % 2)))
    assert line.base_s == pytest.approx(1.0, rel=0.15)
    assert line.per_token_s == pytest.approx(0.1, abs=0.05)


def test_line_follows_a_lasting_change() -> None:
    """A cost that has risen tenfold and stays there is followed within a few half-lives."""
    line = ForwardCostLine(half_life=8)
    for factor, rounds in ((1.0, 30), (10.0, 60)):
        for index in range(rounds):
            line.update(1 + 4 * (index % 2), factor * (1.0 + 0.4 * (index % 2)))
    assert line.base_s == pytest.approx(10.0, rel=0.1)


def test_line_and_average_stand_times_of_zero() -> None:
    """A virtual clock that does not move divides nothing by zero."""
    line, average = ForwardCostLine(half_life=8), RobustTokenCostAverage(half_life=8)
    for width in (1, 5, 1):
        line.update(width, 0.0)
        average.update(width, 0.0)
    assert (line.base_s, line.per_token_s, average.value) == (0.0, 0.0, 0.0)


def test_a_time_of_nothing_does_not_bound_the_next_ones() -> None:
    """The first reading of a prompt may be cached; as an outlier's measure 0 would hold for ever."""
    average, line = RobustTokenCostAverage(half_life=4), ForwardCostLine(half_life=4)
    for seconds in (0.0, 0.01, 0.01, 0.01):
        average.update(1, seconds)
        line.update(1, seconds)
    assert average.value is not None
    assert average.value > 0.005
    assert line.base_s > 0.005


def estimate_pass_s(costs: PassCostEstimate, width: int) -> float:
    return costs.plain_s + costs.estimate_extra_s(width - 1)


def make_pass_costs(wide: float = 0.0, token: float = 0.0625) -> PassCostEstimate:
    return PassCostEstimate(half_life=64, prior_wide_cost=wide, prior_token_cost=token)


def test_passes_of_several_tokens_have_a_line_of_their_own() -> None:
    """Two tokens may cost 2.5 times as much as one, and each further one a quarter; in any unit."""
    costs = make_pass_costs()
    for index in range(100):
        width = 1 + index % 9
        costs.update(width, 2e-3 * (1.0 if width == 1 else 2.25 + 0.25 * (width - 1)))
    assert costs.plain_s == pytest.approx(2e-3, rel=0.15)
    assert estimate_pass_s(costs, 2) == pytest.approx(5e-3, rel=0.05)
    assert estimate_pass_s(costs, 16) == pytest.approx(12e-3, rel=0.05)


def test_costs_that_go_up_in_steps_are_the_line_and_what_deviates_from_it() -> None:
    """Also where they cost twice as much as was believed; beyond the widest known pass the last step holds."""
    extra = [0.5, 0.5, 1.5, 1.5]  # of passes of 2 to 5 tokens, in plain steps
    deviations = (0.0, -0.4, 0.2, -0.2)
    costs = PassCostEstimate(half_life=64, prior_wide_cost=0.1, prior_token_cost=0.4, deviations=deviations)
    assert [costs.estimate_extra_s(count) for count in range(1, 5)] == pytest.approx(extra)
    assert costs.estimate_extra_s(7) == pytest.approx(0.1 + 7 * 0.4 - 0.2)
    for index in range(200):
        count = index % 5
        costs.update(count + 1, 1e-3 * (1.0 + (2 * extra[count - 1] if count else 0.0)))
    found = [costs.estimate_extra_s(count) / 1e-3 for count in range(1, 5)]
    assert found == pytest.approx([2 * each for each in extra], rel=0.3)


def test_the_next_token_costs_what_it_costs_on_the_way_to_the_cheapest_step() -> None:
    """From two tokens after the first the third one opens a step, which the fourth has for nothing."""
    deviations = (0.0, -0.4, 0.2, -0.2)
    costs = PassCostEstimate(half_life=64, prior_wide_cost=0.1, prior_token_cost=0.4, deviations=deviations)
    assert [costs.estimate_token_s(count) for count in (1, 2, 3, 4)] == pytest.approx([0.0, 0.5, 0.0, 0.4])


def test_what_is_believed_of_wide_passes_holds_until_they_are_measured() -> None:
    """To the scale of plain steps, however many these are; and the other way round."""
    costs = make_pass_costs(1.25, 0.25)
    for _ in range(1000):
        costs.update(1, 0.02)
    assert estimate_pass_s(costs, 5) == pytest.approx(0.02 * 3.25)
    costs = make_pass_costs(1.25, 0.25)
    for _ in range(10):
        costs.update(5, 0.02 * 3.25)
    assert costs.plain_s == pytest.approx(0.02)


def test_two_tokens_never_take_less_time_than_one() -> None:
    """Where a pass of one is padded to two, it costs as much, and the estimate says so."""
    costs = make_pass_costs()
    for index in range(60):
        costs.update(1 + index % 2, 0.02)
    assert estimate_pass_s(costs, 2) == pytest.approx(costs.plain_s, rel=0.02)
    costs.update(2, 0.001)
    assert estimate_pass_s(costs, 2) >= costs.plain_s > 0.0
    for width in (1, 2, 9):
        costs.update(width, 0.0)
    assert costs.plain_s >= 0.0


def test_cost_average_is_per_token_and_survives_hiccups() -> None:
    """Seconds per token, weighted by tokens; a hiccup counts three times at most, and a low time refutes it."""
    average = RobustTokenCostAverage(half_life=64)
    average.update(4, 4.0)
    for _ in range(20):
        average.update(4, 0.4)
    average.update(4, 4.0)
    for _ in range(20):
        average.update(4, 0.4)
    assert average.value == pytest.approx(0.1, rel=0.1)
