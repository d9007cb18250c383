"""Policies refuse bad limits, and CostAware comes close to the best fixed lookahead, plain steps included."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownLambdaType=false
# (pytest.approx and scipy are partly untyped)

import random
from collections.abc import Callable
from functools import cache
from itertools import pairwise

import pytest

from llm_spec.contract.errors import ConfigError
from llm_spec.contract.token_model import PassCosts
from llm_spec.local.calibration import ConfidenceRecord
from llm_spec.local.lookahead import (
    CostAware,
    Ewma,
    Fixed,
    LookaheadController,
    LookaheadCostMemory,
    LookaheadPolicy,
    RoundFeedback,
    Threshold,
)

Token = tuple[float, float | None]  # how likely the next drafted token is accepted, and the draft's confidence in it
Model = Callable[[int, random.Random], Token]


# ------------------------------------------------------------------------------------------------ simulation


def constant(acceptance: float) -> Model:
    return lambda position, rng: (acceptance, None)  # noqa: ARG005 # a Model


def noise_confidence(acceptance: float) -> Model:
    """Confidence says nothing."""
    return lambda position, rng: (acceptance, rng.random())  # noqa: ARG005 # a Model


def true_confidence(acceptance: float) -> Model:
    """Confidence is the probability of acceptance, which varies around its mean."""

    def token(position: int, rng: random.Random) -> Token:  # noqa: ARG001 # a Model
        chance = rng.betavariate(4 * acceptance, 4 * (1 - acceptance))
        return chance, chance

    return token


def regimes(low: float, high: float) -> Model:
    """A hundred tokens that are easy to guess, a hundred that are not."""
    return lambda position, rng: (low if position // 100 % 2 else high, None)  # noqa: ARG005 # a Model


def simulate(
    policy: LookaheadPolicy,
    model: Model,
    draft: float,
    slope: float,
    *,
    num_tokens: int,
    seed: int = 0,
    hiccups: float = 0.0,
    wide: float = 0.0,
    start: float = 0.0,
) -> float:
    """Tokens per plain step's time. The controller gets times up to 10 % off, tenfold in a hiccup.

    `start`: what a draft takes beside its tokens.
    """
    rng = random.Random(seed)  # noqa: S311 # no secret
    controller = policy.start()
    spent, position = 0.0, 0

    def measured(seconds: float) -> float:
        return seconds * (1 + 0.1 * rng.random()) * (10 if hiccups and rng.random() < hiccups else 1)

    while position < num_tokens:
        num_draft, num_right, confidences = draft_round(controller, model, position, rng)
        num_accepted = min(num_right, num_draft)
        verify_s = 1 + slope * num_draft + (wide if num_draft else 0.0)
        draft_s = draft * len(confidences) + (start if confidences else 0.0)
        spent += verify_s + draft_s
        position += num_accepted + 1
        seconds = (measured(draft_s), measured(verify_s))
        controller.update(
            RoundFeedback(num_draft, num_accepted, *seconds, confidences, min(num_right, num_accepted + 1))
        )
    return position / spent


def draft_round(
    controller: LookaheadController, model: Model, position: int, rng: random.Random
) -> tuple[int, int, list[float | None]]:
    """Tokens to verify, how many of the drafted ones are right, and the confidences of these."""
    confidences: list[float | None] = []
    num_right, limit = 0, controller.limit()
    while len(confidences) < limit and (not confidences or controller.wants_more(confidences)):
        chance, confidence = model(position + len(confidences), rng)
        num_right += num_right == len(confidences) and rng.random() < chance
        confidences.append(confidence)
    return controller.choose_num_verified(confidences) if confidences else 0, num_right, confidences


@cache
def tokens_a_round(model: Model, lookahead: int) -> float:
    """Of a fixed lookahead, whatever its tokens cost."""
    return simulate(Fixed(lookahead), model, 0.0, 0.0, num_tokens=6000)


def best_fixed(model: Model, draft: float, slope: float) -> float:
    """The best of the fixed lookaheads, plain steps (1 token a step) included."""
    fixed = [tokens_a_round(model, g) / (1 + g * (draft + slope)) for g in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)]
    return max(1.0, *fixed)


def best_constant(acceptance: float, draft: float, slope: float) -> float:
    """The same for constant acceptance, in closed form."""
    tokens = [(1 - acceptance ** (g + 1)) / (1 - acceptance) for g in range(17)]
    return max(tokens[g] / (1 + g * (draft + slope)) for g in range(17))


COSTS = [(0.05, 0.02), (0.05, 0.3), (0.15, 0.1), (0.3, 0.02), (0.3, 0.3)]  # of a drafted token, of a verified one


@pytest.mark.parametrize(("draft", "slope"), COSTS)
@pytest.mark.parametrize("acceptance", [0.3, 0.5, 0.7, 0.85, 0.95])
def test_cost_aware_comes_within_three_per_cent_of_the_best(acceptance: float, draft: float, slope: float) -> None:
    """At constant acceptance: 0.97 of the best fixed lookahead, hence never below 0.97 of plain."""
    found = simulate(CostAware(), constant(acceptance), draft, slope, num_tokens=12_000)
    assert found >= 0.97 * best_constant(acceptance, draft, slope)


@pytest.mark.parametrize(("draft", "slope"), COSTS)
@pytest.mark.parametrize(
    "model", [noise_confidence(0.7), true_confidence(0.5), true_confidence(0.85), regimes(0.2, 0.9)]
)
def test_cost_aware_uses_confidence_and_follows_regimes(model: Model, draft: float, slope: float) -> None:
    """With confidences, informative or not, and in regimes: 0.97 of the best fixed lookahead or more."""
    assert simulate(CostAware(), model, draft, slope, num_tokens=8_000) >= 0.97 * best_fixed(model, draft, slope)


@pytest.mark.parametrize("acceptance", [0.5, 0.7, 0.85])
def test_what_a_draft_takes_before_its_first_token_is_no_price_of_the_next_one(acceptance: float) -> None:
    """A draft that reads first drafts further than one whose tokens cost as much each."""
    start, draft, slope = 0.2, 0.07, 0.05
    reached = simulate(CostAware(), constant(acceptance), draft, slope, num_tokens=20000, start=start)
    tokens = [(1 - acceptance ** (g + 1)) / (1 - acceptance) for g in range(17)]
    best = max(tokens[g] / (1 + (start if g else 0.0) + g * (draft + slope)) for g in range(17))
    assert reached >= 0.97 * best


def test_what_a_draft_takes_before_its_first_token_is_known_in_later_requests() -> None:
    """Of drafts of one token to eight."""
    memory = LookaheadCostMemory()
    for _ in range(6):
        controller = memory.apply(CostAware()).start()
        for num_drafted in list(range(1, 9)) * 4:
            verify_s = 1.0 + 0.05 * num_drafted
            controller.update(RoundFeedback(num_drafted, num_drafted, 0.2 + 0.07 * num_drafted, verify_s))
            controller.update(RoundFeedback(0, 0, 0.0, 1.0))
        memory.observe(controller.describe())
    policy = memory.apply(CostAware())
    assert isinstance(policy, CostAware)
    assert (policy.prior_draft_start, policy.prior_draft_cost) == pytest.approx((0.2, 0.07), rel=0.2)


def test_a_first_draft_that_took_ten_steps_does_not_end_drafting() -> None:
    """A process is cold when it drafts for the first time: what comes next is what drafting costs."""
    controller = CostAware().start()
    controller.update(RoundFeedback(1, 1, 10.0, 1.0, (0.99,), 1))
    controller.update(RoundFeedback(0, 0, 0.0, 1.0))  # a plain step, to see what it takes
    assert controller.limit() > 0
    controller.update(RoundFeedback(3, 3, 0.1, 1.1, (0.99, 0.99, 0.99), 3))
    assert controller.describe()["draft_token_s"] < 0.1


def test_true_confidence_beats_every_fixed_lookahead() -> None:
    """A draft that knows when it is unsure is worth more than any fixed lookahead."""
    model = true_confidence(0.85)
    found = simulate(CostAware(), model, 0.15, 0.1, num_tokens=12_000)
    assert found >= 1.02 * best_fixed(model, 0.15, 0.1)


@pytest.mark.parametrize("acceptance", [0.3, 0.7, 0.95])
def test_hiccups_do_not_wreck_it(acceptance: float) -> None:
    """Two per cent of times being tenfold costs at most five per cent."""
    found = simulate(CostAware(), constant(acceptance), 0.15, 0.1, num_tokens=12_000, hiccups=0.02)
    assert found >= 0.95 * best_constant(acceptance, 0.15, 0.1)


@pytest.mark.parametrize(("draft", "slope"), COSTS)
@pytest.mark.parametrize("acceptance", [0.3, 0.5, 0.7, 0.85, 0.95])
def test_short_answers_from_a_cold_start(acceptance: float, draft: float, slope: float) -> None:
    """Answers of 96 tokens reach 0.87 of what the best lookahead gives in the long run, had it been known."""
    policy, model = CostAware(), constant(acceptance)
    times = [96 / simulate(policy, model, draft, slope, num_tokens=96, seed=seed) for seed in range(60)]
    assert 96 * len(times) / sum(times) >= 0.87 * best_constant(acceptance, draft, slope)


def remember(draft: float, slope: float) -> LookaheadCostMemory:
    """What a request leaves behind in which a drafted token and a verified one had these costs, in plain steps."""
    memory, controller = LookaheadCostMemory(), CostAware().start()
    for num_draft in (0, 1, 4, 0, 8, 2) * 4:
        controller.update(
            RoundFeedback(num_draft, num_draft // 2, 0.02 * draft * num_draft, 0.02 * (1 + slope * num_draft))
        )
    memory.observe(controller.describe())
    return memory


@pytest.mark.parametrize(("draft", "slope", "expected"), [(0.6, 0.02, 1), (0.01, 0.5, 0)])
def test_costs_of_an_earlier_request_are_known_in_the_first_round(draft: float, slope: float, expected: int) -> None:
    """A dear draft is given one token to show itself, and not five; a cheap one shows itself beside a plain step."""
    rng = random.Random(0)  # noqa: S311 # no secret
    first = draft_round(CostAware().start(), constant(0.0), 0, rng)[0]
    later = draft_round(remember(draft, slope).apply(CostAware()).start(), constant(0.0), 0, rng)[0]
    assert (first > 2, later) == (True, expected)


@pytest.mark.parametrize(("draft", "slope"), COSTS)
@pytest.mark.parametrize("acceptance", [0.2, 0.6, 0.9])
def test_a_request_after_others_is_not_slower_than_the_first(acceptance: float, draft: float, slope: float) -> None:
    """And faster where the draft does not pay, because verifying costs more than is believed at first."""
    model, policies = constant(acceptance), (CostAware(), remember(draft, slope).apply(CostAware()))
    first, later = (
        sum(simulate(policy, model, draft, slope, num_tokens=64, seed=seed) for seed in range(100))
        for policy in policies
    )
    assert later > (1.02 if slope == 0.3 and acceptance == 0.2 else 0.97) * first


@pytest.mark.parametrize("state", [{}, {"plain_step_s": 0.0}, {"plain_step_s": 1.0}, Fixed(3).start().describe()])
def test_a_state_without_costs_leaves_the_policy_as_it_is(state: dict[str, float]) -> None:
    """Of a policy that measures none, also one of another package; and those take in none."""
    memory = LookaheadCostMemory()
    memory.observe(state)
    assert memory.apply(CostAware()) == CostAware()
    assert remember(0.6, 0.5).apply(Fixed(3)) == Fixed(3)


def test_hopeless_draft_is_left_alone_and_tried_again() -> None:
    """Where nothing is accepted it tries ever more rarely, and it resumes when drafts are good again."""
    controller = CostAware().start()
    limits: list[int] = []
    for _ in range(600):
        limits.append(controller.limit())
        controller.update(RoundFeedback(limits[-1], 0, 0.1 * limits[-1], 1.0 + 0.1 * limits[-1]))
    tries = [index for index, limit in enumerate(limits) if limit]
    gaps = [after - before for before, after in pairwise(tries) if after > before + 1]
    assert len(tries) < 25
    assert gaps == sorted(gaps)
    for _ in range(1100):
        limit = controller.limit()
        controller.update(RoundFeedback(limit, limit, 0.1 * limit, 1.0 + 0.1 * limit))
    assert controller.limit() == 16


def test_a_draft_with_nothing_to_say_costs_nothing() -> None:
    """Rounds in which the draft proposed nothing are plain steps, and times of zero are survived."""
    controller = CostAware().start()
    for _ in range(50):
        controller.update(RoundFeedback(0, 0, 0.0, 0.0))
    assert controller.limit() in {0, 16}
    controller.update(RoundFeedback(3, 3, 0.0, 0.0, (0.5, None, 1.0)))
    assert all(value == value for value in controller.describe().values())  # noqa: PLR0124 # not NaN


def test_a_later_request_drafts_on_where_a_draft_was_right_against_its_own_word() -> None:
    memory, controller = LookaheadCostMemory(), CostAware().start()
    for _ in range(20):
        controller.update(RoundFeedback(2, 2, 0.002, 1.1, (0.99, 0.1)))
    memory.observe(controller.describe())
    fresh, later = (policy.start() for policy in (CostAware(), memory.apply(CostAware())))
    assert [it.wants_more([0.99, 0.1]) for it in (fresh, later)] == [False, True]


def test_drafts_are_verified_up_to_the_edge_of_a_step() -> None:
    """Passes of 2 to 4 tokens take half a step more, of 5 to 8 one and a half: three tokens, if they are likely."""
    extra = (0.5, 0.5, 0.5, 1.5, 1.5, 1.5, 1.5)
    line = (0.05, 0.275)
    deviations = tuple(cost - line[0] - line[1] * count for count, cost in enumerate(extra, 1))
    policy = LookaheadCostMemory().apply(CostAware(), PassCosts(*line, deviations))
    confidences = [0.9, 0.8, 0.75, 0.5, 0.4, 0.3, 0.3]
    assert policy.start().choose_num_verified(confidences) == 3
    assert LookaheadCostMemory().apply(CostAware(), PassCosts(*line)).start().choose_num_verified(confidences) != 3


def test_records_are_of_all_ranges_of_confidence() -> None:
    with pytest.raises(ConfigError, match="prior_records has 1 records; it must have one for each of the 8 ranges"):
        CostAware(prior_records=(ConfidenceRecord(3.0, 2.0),))


def test_low_confidence_stops_the_draft() -> None:
    """After an unsure token it drafts no further; after a sure one it does."""
    controller = CostAware().start()
    assert controller.wants_more([0.99])
    assert not controller.wants_more([0.99, 0.01])


# ------------------------------------------------------------------------------- passes of several tokens
# As llama.cpp on a CPU: two tokens take 2.5 times as long as one, and 17 take 6.25 times as long.


def learn_wide_costs(num_right: int = 0, num_tokens: int = 0) -> LookaheadController:
    """A controller that knows them, after so many tokens of a sure draft of which the first ones are right a round."""
    controller = LookaheadCostMemory().apply(CostAware(), PassCosts(1.25, 0.25)).start()
    for _ in range(num_tokens):
        controller.update(RoundFeedback(0, 0, 1e-5, 0.02, (0.95,), num_right))
    return controller


def test_only_a_long_and_sure_draft_is_verified_where_several_tokens_cost_much() -> None:
    """The first token costs more than it can bring, and those after it little: all of them or none."""
    controller = learn_wide_costs(num_right=1, num_tokens=200)
    chosen = [controller.choose_num_verified([0.95] * count) for count in range(17)]
    assert (chosen[:5], chosen[-1]) == ([0] * 5, 16)
    assert set(chosen[5:]) <= {0, *range(5, 17)}
    assert controller.choose_num_verified([0.95, 0.3, *[0.95] * 14]) == 0


def test_a_draft_that_is_not_verified_shows_what_it_is_worth() -> None:
    """It is compared with what plain steps emit: believed after it was right, and not after it was wrong."""
    draft = [0.95] * 16
    assert learn_wide_costs(num_right=1, num_tokens=250).choose_num_verified(draft) == 16
    assert learn_wide_costs(num_right=0, num_tokens=250).choose_num_verified(draft) == 0


def test_an_answer_risks_some_steps_and_what_it_has_won() -> None:
    """Costly drafts that fail are left alone before they have taken a tenth of the time, and those that win are not."""
    lost, won = learn_wide_costs(), learn_wide_costs()
    for _ in range(2):
        lost.update(RoundFeedback(8, 0, 1e-5, 0.02 * 4.25, (0.95,) * 8, 0))
        won.update(RoundFeedback(8, 8, 1e-5, 0.02 * 4.25, (0.95,) * 8, 8))
    for _ in range(40):
        lost.update(RoundFeedback(0, 0, 1e-5, 0.02, (0.95,), 1))
    assert lost.choose_num_verified([1.0] * 16) == 0
    assert won.choose_num_verified([1.0] * 16) == 16


def test_a_sure_draft_may_cost_more_than_an_answer_may_lose() -> None:
    """What counts is how much it is likely to lose: nearly nothing."""
    controller = CostAware(prior_wide_cost=2.25, prior_verify_cost=0.25).start()
    for _ in range(12):
        controller.update(RoundFeedback(0, 0, 1e-5, 0.02, (0.97,), 1))
    assert controller.choose_num_verified([0.97] * 12) == 12  # takes five plain steps longer
    assert controller.choose_num_verified([0.7] * 12) == 0


@pytest.mark.parametrize(("draft_cost", "num_calls"), [(0.02, 10), (0.2, 0)])
def test_a_cheap_draft_is_called_now_and_then_while_it_does_not_pay(draft_cost: float, num_calls: int) -> None:
    """For less than a hundredth of the time, since it may be sure by now; an expensive one waits for its trial."""
    controller = CostAware(prior_draft_cost=draft_cost, prior_wide_cost=3.0).start()
    controller.update(RoundFeedback(0, 0, draft_cost, 1.0, (0.3,), 0))
    limits: list[int] = []
    for _ in range(100):
        limits.append(controller.limit())
        controller.update(RoundFeedback(0, 0, 0.0, 1.0))
    assert sum(limit == 16 for limit in limits) == num_calls
    assert limits.count(0) == 100 - num_calls


def test_after_a_wrong_token_a_draft_is_believed_as_it_was_right_there_before() -> None:
    """Less than within a run, and much less where it was wrong each time that it began."""
    seldom, often = (CostAware(prior_wide_cost=0.5).start() for _ in range(2))
    for _ in range(12):
        seldom.update(RoundFeedback(0, 0, 1e-5, 1.0, (0.9,) * 4, 0))
        often.update(RoundFeedback(0, 0, 1e-5, 1.0, (0.9,) * 4, 1))
        often.update(RoundFeedback(0, 0, 1e-5, 1.0, (0.9,) * 4, 0))
    assert seldom.choose_num_verified([0.99] * 4) < often.choose_num_verified([0.99] * 4)


@pytest.mark.parametrize("acceptance", [0.3, 0.7, 0.95])
def test_cost_aware_comes_close_to_the_best_where_several_tokens_cost_much(acceptance: float) -> None:
    """0.95 of the best of plain steps and fixed lookaheads, with a draft that costs next to nothing."""
    tokens = [(1 - acceptance ** (g + 1)) / (1 - acceptance) for g in range(17)]
    best = max(1.0, *(tokens[g] / (2.25 + 0.25 * g) for g in range(1, 17)))
    found = simulate(CostAware(), constant(acceptance), 1e-4, slope=0.25, num_tokens=6000, wide=1.25)
    assert found >= 0.95 * best


@pytest.mark.parametrize("costs", [PassCosts(-2.5, 1.2), PassCosts(-0.3, -0.1), PassCosts(50.0, 0.0)])
def test_costs_that_were_measured_while_the_machine_was_busy_are_no_error(costs: PassCosts) -> None:
    """Two tokens take no less time than one, whatever was measured."""
    policy = LookaheadCostMemory().apply(CostAware(), costs)
    assert isinstance(policy, CostAware)
    assert policy.prior_wide_cost >= -policy.prior_verify_cost
    assert policy.start().limit() == 16


def test_costs_of_wide_passes_are_those_of_earlier_requests_before_the_targets_own() -> None:
    """What was measured when the target was loaded counts until a request has measured it."""
    memory, measured = LookaheadCostMemory(), PassCosts(1.25, 0.25)
    before = memory.apply(CostAware(), measured)
    memory.observe({"plain_step_s": 0.02, "draft_token_s": 0.001, "verify_token_s": 0.002, "wide_pass_s": 0.01})
    after = memory.apply(CostAware(), measured)
    assert (before, memory.apply(Fixed(3), measured)) == (
        CostAware(prior_wide_cost=1.25, prior_verify_cost=0.25),
        Fixed(3),
    )
    assert after == CostAware(prior_draft_cost=0.05, prior_wide_cost=0.5, prior_verify_cost=0.1)


def test_costs_that_no_request_has_measured_are_not_kept_as_if_it_had() -> None:
    """What a slow moment made dear is forgotten after some requests that verified nothing, and then tried again."""
    memory = LookaheadCostMemory()
    dear = {"plain_step_s": 1.0, "draft_token_s": 0.1, "verify_token_s": 0.1, "wide_pass_s": 6.0, "num_wide_passes": 3}
    memory.observe(dear)
    costs: list[float] = []
    for _ in range(20):
        policy = memory.apply(CostAware())
        assert isinstance(policy, CostAware)
        costs.append(policy.prior_wide_cost)
        memory.observe({**policy.start().describe(), "plain_step_s": 1.0})
    assert costs[:16] == [6.0] * 16
    assert costs[16:] == [0.0] * 4


def test_what_drafting_took_is_lost_whatever_was_verified() -> None:
    """An answer may lose little to drafts, those among them that were not worth verifying."""
    free, dear = (CostAware(prior_wide_cost=2.0).start() for _ in range(2))
    for _ in range(40):
        free.update(RoundFeedback(0, 0, 0.0, 1.0, (0.99,), 1))
        dear.update(RoundFeedback(0, 0, 0.5, 1.0, (0.99,), 1))
    assert free.choose_num_verified([0.99] * 16) > 0
    assert dear.choose_num_verified([0.99] * 16) == 0


# -------------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize("value", [0, 33, -1])
def test_fixed_refuses_lookaheads_outside_1_to_32(value: int) -> None:
    """The message names field, value and range."""
    with pytest.raises(ConfigError) as caught:
        Fixed(value)
    assert str(caught.value) == f"lookahead is {value}; it must be an integer at least 1 and at most 32"


@pytest.mark.parametrize("value", [0, 33, -1])
@pytest.mark.parametrize("policy", [CostAware, Threshold, Ewma])
def test_policies_refuse_limits_outside_1_to_32(policy: Callable[..., LookaheadPolicy], value: int) -> None:
    """The largest lookahead of every policy is 1 to 32."""
    with pytest.raises(ConfigError, match=f"max_lookahead is {value}; it must be an integer at least 1 and at most 32"):
        policy(max_lookahead=value)


@pytest.mark.parametrize("policy", [Threshold, Ewma])
def test_initial_lookahead_is_within_the_limit(policy: Callable[..., LookaheadPolicy]) -> None:
    """A start above the largest lookahead is refused."""
    with pytest.raises(ConfigError, match="initial is 5; it must be an integer at least 1 and at most 4"):
        policy(initial=5, max_lookahead=4)


@pytest.mark.parametrize("policy", [Fixed(3), CostAware(max_lookahead=3), Threshold(initial=3), Ewma(initial=3)])
def test_more_never_passes_the_limit(policy: LookaheadPolicy) -> None:
    """However sure the draft is, the round ends at its limit, and `reset` brings the start back."""
    controller = policy.start()
    before = dict(controller.describe())
    assert controller.wants_more([1.0])
    assert not controller.wants_more([1.0] * controller.limit())
    for _ in range(5):
        controller.update(RoundFeedback(3, 3, 0.01, 1.0, (1.0,) * 3))
    controller.reset()
    assert controller.describe() == before


def test_controllers_share_nothing() -> None:
    """Two requests of one policy learn apart."""
    policy = CostAware()
    first, second = policy.start(), policy.start()
    for _ in range(20):
        first.update(RoundFeedback(4, 0, 1.0, 1.0))
    assert first.describe() != second.describe()
    assert second.describe() == policy.start().describe()


# -------------------------------------------------------------------------------------- the simpler policies


def test_threshold_steps_up_and_down() -> None:
    """One more above 0.8, one less below the minimum, unchanged between, within 1 and the limit."""
    controller = Threshold(initial=4, max_lookahead=5).start()
    found: list[int] = []
    for num_accepted in (4, 5, 3, 0, 0, 0, 0, 0):
        lookahead = controller.limit()
        controller.update(RoundFeedback(lookahead, min(num_accepted, lookahead), 0.0, 0.0))
        found.append(controller.limit())
    assert found == [5, 5, 5, 4, 3, 2, 1, 1]


def test_ewma_follows_the_mean_and_rests_after_a_change() -> None:
    """The lookahead becomes mean accepted + 1, at most once per cooldown."""
    controller = Ewma(initial=4, half_life=1.0, cooldown=2).start()
    found: list[int] = []
    for _ in range(8):
        controller.update(RoundFeedback(controller.limit(), 0, 0.0, 0.0))
        found.append(controller.limit())
    assert found == [4, 4, 1, 1, 1, 1, 1, 1]
