"""Prices, costs and budgets: what is not known stays None, what is wasted counts."""

from __future__ import annotations

from typing import Any

import pytest
from support.failing_targets import CONTINUES, Failing

from llm_spec import (
    Budget,
    ConfigError,
    Price,
    ReferenceDraft,
    RetryPolicy,
    SpeculativeConfig,
    SpeculativeDecoder,
    TextDelta,
    TransientError,
    Usage,
)
from llm_spec.contract.draft import DraftProvider
from llm_spec.contract.events import Finish, StreamEvent
from llm_spec.contract.provider import Capabilities
from llm_spec.decoder.budget import CostTracker
from llm_spec.decoder.config import StrategyName
from llm_spec.decoder.pricing import FREE, PRICES, Cost, find_draft_price, find_model_price
from llm_spec.drafting.cascade import CascadeDraft
from llm_spec.drafting.lookup import PromptLookup
from llm_spec.drafting.provider_draft import ProviderDraft
from llm_spec.drafting.suffix import SuffixDraft
from llm_spec.measure.tokens import split_into_pieces
from llm_spec.testing import LocalProvider, ScriptedProvider, TableModel
from llm_spec.testing.clock import run_virtual
from llm_spec.testing.random_draft import RandomDraft
from llm_spec.testing.simulated import SimulatedDraft, SimulatedTarget

WORDS = " ".join(f"word{i}" for i in range(40))
DEAR = Price(input=2.0, output=8.0, cached_input=0.5)
CHEAP = Price(input=0.1, output=0.4)


def test_the_price_of_tokens() -> None:
    """A million of each, cached input at its own price."""
    usage = Usage(input_tokens=3_000_000, cached_input_tokens=1_000_000, output_tokens=2_000_000)
    assert DEAR.cost_of(usage) == pytest.approx(2 * 2.0 + 0.5 + 2 * 8.0)
    assert CHEAP.cost_of(usage) == pytest.approx(3 * 0.1 + 2 * 0.4)
    assert DEAR.cost_of(Usage(input_tokens=10, cached_input_tokens=99)) == pytest.approx(10 * 0.5e-6)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("openai:gpt-4.1", PRICES["gpt-4.1"]),
        ("openai:gpt-4.1-2025-04-14", PRICES["gpt-4.1"]),
        ("anthropic:claude-haiku-5-5-20260901", PRICES["claude-haiku-5-5"]),
        ("gpt-4.1-nano", PRICES["gpt-4.1-nano"]),
        ("openai:gpt-4.1-mini", None),
        ("openai:gpt-4", None),
        ("vllm:tiny", None),
        ("mine:x", CHEAP),
        ("vllm:y", DEAR),
        ("azure:gpt-4.1-nano", DEAR),
    ],
)
def test_whose_price_it_is(name: str, found: Price | None) -> None:
    """By provider and model, or by model; the caller's own come first. A model like another has no price."""
    assert find_model_price(name, {"mine:x": CHEAP, "y": DEAR, "azure:gpt-4.1-nano": DEAR}) == found


def model_draft(name: str) -> DraftProvider:
    return ProviderDraft(ScriptedProvider("x", name=name))


@pytest.mark.parametrize(
    ("draft", "found"),
    [
        (PromptLookup(), FREE),
        (SuffixDraft(), FREE),
        (ReferenceDraft("x"), FREE),
        (RandomDraft(), FREE),
        (CascadeDraft(PromptLookup(), SuffixDraft()), FREE),
        (model_draft("mine:x"), CHEAP),
        (model_draft("mine:y"), None),
        (CascadeDraft(PromptLookup(), model_draft("mine:x")), CHEAP),
        (CascadeDraft(PromptLookup(), model_draft("mine:x"), model_draft("other:x")), CHEAP),
        (CascadeDraft(model_draft("mine:x"), model_draft("mine:y")), None),
        (CascadeDraft(model_draft("mine:x"), model_draft("mine:dear")), None),
        (CascadeDraft(PromptLookup(), model_draft("mine:both")), DEAR),
    ],
)
def test_what_a_draft_costs(draft: DraftProvider, found: Price | None) -> None:
    """A draft that asks no model is free; several together cost what the only model among them costs."""
    prices = {"mine:x": CHEAP, "other:x": CHEAP, "mine:dear": DEAR, "lookup+mine:both": DEAR}
    assert find_draft_price(draft, prices) == found


def test_a_free_draft_can_be_given_a_price() -> None:
    assert find_draft_price(PromptLookup(), {"lookup": CHEAP}) == CHEAP


def spending(target: Price | None, draft: Price | None) -> CostTracker:
    return CostTracker(target=target, draft=draft, budget=None, make_request_budget=Budget)


def test_the_cost_of_an_answer() -> None:
    """Target, draft, what plain would have cost, what was wasted and what was saved."""
    usage = Usage(input_tokens=1500, extra_input_tokens=500, output_tokens=900, cancelled_output_tokens=100)
    cost = spending(DEAR, CHEAP).compute_cost(usage, Usage(input_tokens=1000, output_tokens=1000), has_drafted=True)
    of_draft, of_waste = 1000 * 0.1e-6 + 1000 * 0.4e-6, 500 * 2e-6 + 100 * 8e-6
    assert cost.target == pytest.approx(1500 * 2e-6 + 900 * 8e-6)
    assert cost.draft == pytest.approx(of_draft)
    assert cost.plain == pytest.approx(1000 * 2e-6 + 800 * 8e-6)
    assert cost.total == pytest.approx(1500 * 2e-6 + 900 * 8e-6 + of_draft)
    assert cost.wasted == pytest.approx(of_waste + of_draft)
    assert cost.saving == pytest.approx(-of_waste - of_draft)
    predicted = spending(DEAR, None).compute_cost(
        Usage(
            output_tokens=120,
            accepted_prediction_tokens=80,
            rejected_prediction_tokens=20,
            cancelled_output_tokens=20,
        ),
        None,
        has_drafted=False,
    )
    assert (predicted.target, predicted.draft) == (pytest.approx(120 * 8e-6), 0.0)
    assert predicted.plain == pytest.approx(100 * 8e-6)


@pytest.mark.parametrize(
    ("target", "draft", "usage", "draft_usage"),
    [
        (None, CHEAP, Usage(), Usage()),
        (DEAR, None, Usage(), Usage()),
        (DEAR, CHEAP, None, Usage()),
        (DEAR, CHEAP, Usage(), None),
    ],
)
def test_what_is_not_known_is_none(
    target: Price | None, draft: Price | None, usage: Usage | None, draft_usage: Usage | None
) -> None:
    """Never 0."""
    cost = spending(target, draft).compute_cost(usage, draft_usage, has_drafted=True)
    assert (cost.total, cost.saving, cost.wasted) == (None, None, None)


def test_a_result_tells_its_cost() -> None:
    """In its fields, as JSON and in words; negative savings included."""
    target, draft = ScriptedProvider(WORDS, name="a:t"), ScriptedProvider(WORDS, name="b:d")
    config = SpeculativeConfig(strategy="regenerate", prices={"t": DEAR, "b:d": CHEAP})
    result = run_virtual(SpeculativeDecoder(target=target, draft=draft, config=config).decode("one two three"))
    assert result.usage is not None
    assert result.draft_usage is not None
    assert result.cost.target == pytest.approx(DEAR.cost_of(result.usage))
    assert result.cost.draft == pytest.approx(CHEAP.cost_of(result.draft_usage)) != 0.0
    assert result.cost.saving == pytest.approx(-CHEAP.cost_of(result.draft_usage))
    assert result.to_dict()["cost"]["saving"] == result.cost.saving
    assert "more than plain" in result.summary()
    unknown = run_virtual(SpeculativeDecoder(target=target, draft=None).decode("q"))
    assert unknown.cost == Cost(target=None, draft=0.0, plain=None)
    assert "cost" not in unknown.summary()


# ------------------------------------------------------------------------------------------ budgets


def plain(target: Any, **config: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder(target=target, draft=None, config=SpeculativeConfig(**config))


@pytest.mark.parametrize(
    ("config", "num_tokens"),
    [
        ({"max_request_tokens": 13}, 10),  # three are the request's own
        ({"max_request_tokens": 13, "max_total_tokens": 20}, 10),
        ({"budget": Budget(max_tokens=8)}, 5),
        ({"max_request_cost": 3 * 2e-6 + 4.5 * 8e-6, "prices": {"t": DEAR}}, 4),
        ({"budget": Budget(max_cost=3 * 2e-6 + 2.5 * 8e-6), "prices": {"t": DEAR}}, 2),
    ],
)
def test_an_answer_is_cut_where_the_budget_ends(config: dict[str, Any], num_tokens: int) -> None:
    target = ScriptedProvider(WORDS, name="a:t")
    result = run_virtual(plain(target, **config).decode("one two three"))
    assert (len(result.content.split()), result.stopped_by, result.finish_reason) == (num_tokens, "budget", "length")
    assert target.requests[0].max_tokens == num_tokens


@pytest.mark.parametrize(
    ("options", "config", "stopped_by"),
    [
        ({"max_tokens": 4}, {"max_request_tokens": 30}, "max_tokens"),
        ({}, {"max_request_tokens": 30, "max_total_tokens": 6}, "max_total_tokens"),
        ({}, {"max_request_tokens": 100}, None),
    ],
)
def test_another_limit_may_come_first(options: dict[str, Any], config: dict[str, Any], stopped_by: str | None) -> None:
    result = run_virtual(plain(ScriptedProvider(WORDS), **config).decode("one two three", **options))
    assert result.stopped_by == stopped_by


LIMITS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"max_tokens": 2}, {}, "max_tokens"),
    ({}, {"max_total_tokens": 2}, "max_total_tokens"),
    ({}, {"max_request_tokens": 3}, "budget"),
]


@pytest.mark.parametrize("usage", [Usage(input_tokens=1, output_tokens=2), None])
@pytest.mark.parametrize(("options", "config", "reached"), LIMITS)
def test_only_a_limit_that_was_reached_is_named(
    options: dict[str, Any], config: dict[str, Any], reached: str, usage: Usage | None
) -> None:
    """A server may end an answer by a limit of its own: then nothing is named, unless its window is full."""
    script: list[StreamEvent] = [TextDelta("one"), TextDelta(" two"), Finish("length", usage, "max_tokens")]
    wide = dict.fromkeys(options, 1000), dict.fromkeys(config, 1000)
    cases: list[tuple[int | None, tuple[dict[str, Any], dict[str, Any]], str | None]] = [
        (None, (options, config), reached),
        (None, wide, None if usage else reached),  # without a count, the server's word is all there is
        (3, wide, "context_length" if usage else reached),
        (None, ({}, {}), None),
    ]
    for length, (given, caps), stopped_by in cases:
        target = ScriptedProvider(script, capabilities=Capabilities(context_length=length))
        result = run_virtual(plain(target, **caps).decode("hi", **given))
        assert (result.finish_reason, result.stopped_by) == ("length", stopped_by)


def test_a_budget_is_used_up() -> None:
    """By all decoders that share it; then nothing is asked any more, and the answer says why it is empty."""
    budget, target = Budget(max_tokens=100), ScriptedProvider(WORDS)

    async def check() -> None:
        one, two = plain(target, budget=budget), plain(target, budget=budget)
        contents = [await decoder.decode("one two three") for decoder in (one, two, one, two)]
        assert [len(result.content.split()) for result in contents] == [40, 40, 11, 0]
        assert [result.stopped_by for result in contents] == [None, None, "budget", "budget"]
        assert contents[-1].usage == Usage()

    run_virtual(check())
    assert budget.spent_tokens == 100
    assert len(target.requests) == 3


def test_wasted_tokens_count() -> None:
    """Those of the draft, and those that the target wrote or read for nothing."""
    budget = Budget(max_tokens=10_000)
    target = SimulatedTarget(WORDS, first_token_s=0.1, token_s=0.01, by_ids=True)
    config = SpeculativeConfig(strategy="race", budget=budget)
    result = run_virtual(
        SpeculativeDecoder(target=target, draft=SimulatedDraft(WORDS, 0.8, 3), config=config).decode("one two three")
    )
    usage, draft_usage = result.usage, result.draft_usage
    assert usage is not None
    assert draft_usage is not None
    assert usage.cancelled_output_tokens + usage.extra_input_tokens > 0
    assert draft_usage.output_tokens > 0
    spent = usage.input_tokens + usage.output_tokens + draft_usage.input_tokens + draft_usage.output_tokens
    assert budget.spent_tokens == spent > len(WORDS.split()) + 3


@pytest.mark.parametrize("by_lookup", [True, False])
def test_of_joined_drafts_only_the_model_is_paid(by_lookup: bool) -> None:
    """What was copied costs neither money nor tokens of a budget."""
    budget, prompt = Budget(max_tokens=10_000), f"{WORDS}. word0 word1" if by_lookup else "one two three"
    target = ScriptedProvider(WORDS, name="a:t")
    draft = CascadeDraft(PromptLookup(), model_draft("b:d"))
    config = SpeculativeConfig(strategy="regenerate", budget=budget, prices={"a:t": DEAR, "b:d": CHEAP})
    result = run_virtual(SpeculativeDecoder(target=target, draft=draft, config=config).decode(prompt))
    usage, drafted = result.usage, result.draft_usage
    assert usage is not None
    assert drafted is not None
    assert drafted.output_tokens > 0
    assert (drafted.free_output_tokens > 0, result.cost.draft == 0.0) == (by_lookup, by_lookup)
    paid = 0 if by_lookup else drafted.input_tokens + drafted.output_tokens
    assert budget.spent_tokens == usage.input_tokens + usage.output_tokens + paid


@pytest.mark.parametrize("draft", [SuffixDraft(), CascadeDraft(PromptLookup(), SuffixDraft())])
def test_a_free_draft_has_a_cost(draft: DraftProvider) -> None:
    """None, not an unknown one."""
    target = LocalProvider(TableModel("abc " * 10))
    result = run_virtual(
        SpeculativeDecoder(target=target, draft=draft, config=SpeculativeConfig(prices={"table:model": DEAR})).decode(
            "abc abc "
        )
    )
    assert result.strategy == "tokens"
    assert (result.cost.draft, result.cost.total) == (0.0, result.cost.target)


def test_what_a_cancelled_answer_took_counts() -> None:
    """As far as it can be told."""
    budget = Budget(max_tokens=1000)

    async def check() -> None:
        target = ScriptedProvider(WORDS, delay_piece_s=0.01)
        async with plain(target, budget=budget).stream("one two three") as events:
            seen = 0
            async for event in events:
                seen += isinstance(event, TextDelta)
                if seen == 7:
                    break

    run_virtual(check())
    assert budget.spent_tokens == 3 + 7


@pytest.mark.parametrize("at", [0, 1, 30, 39, 40])
def test_all_parts_of_a_broken_answer_count(at: int) -> None:
    """The prompt was read twice where the first call had begun to answer; the usage is the sum of both."""
    budget = Budget(max_tokens=10_000)
    failure = (at, TransientError("the connection broke"))
    target = Failing(failure, script=WORDS, name="a:t", capabilities=CONTINUES)
    result = run_virtual(plain(target, budget=budget, prices={"t": DEAR}).decode("one two three"))
    assert result.content == WORDS
    usage = result.usage
    assert usage is not None
    num_extra = 3 if at else 0
    assert (usage.input_tokens, usage.extra_input_tokens) == (3 + num_extra, num_extra)
    assert (usage.output_tokens, usage.cancelled_output_tokens) == (40, 0)
    assert budget.spent_tokens == 3 + num_extra + 40
    assert result.cost.plain == pytest.approx(3 * 2e-6 + 40 * 8e-6)


def test_what_failed_for_good_counts() -> None:
    """As far as it came; an attempt that the server did not take counts nothing."""
    for at, spent in ((7, 3 + 7), (0, 0)):
        budget = Budget(max_tokens=10_000)
        target = ScriptedProvider(WORDS, fail_at={at: TransientError("no", status=None if at else 503)})
        with pytest.raises(TransientError):
            run_virtual(plain(target, budget=budget, retry=RetryPolicy(max_attempts=1)).decode("one two three"))
        assert budget.spent_tokens == spent


@pytest.mark.parametrize("strategy", ["race", "regenerate"])
def test_an_answer_that_is_left_is_charged_as_one_that_is_read(strategy: StrategyName) -> None:
    """All its streams and drafts; only what was under way when it was left is missing."""
    spent: list[int] = []
    num_calls: list[int] = []

    async def check(*, is_left: bool) -> None:
        can, budget = Capabilities(continue_prefix=True), Budget(max_tokens=10**6)
        target = ScriptedProvider(WORDS, capabilities=can, delay_piece_s=0.02, delay_first_s=0.1)
        draft = ScriptedProvider(WORDS, name="b:d", capabilities=can, delay_piece_s=0.002)
        config = SpeculativeConfig(strategy=strategy, budget=budget)
        text = ""
        async with SpeculativeDecoder(target=target, draft=draft, config=config).stream(
            "p " * 500, temperature=0
        ) as events:
            async for event in events:
                text += event.text if isinstance(event, TextDelta) else ""
                if is_left and len(text) >= len(WORDS) - 3:
                    break
        assert text
        spent.append(budget.spent_tokens)
        num_calls.append(len(draft.requests))

    run_virtual(check(is_left=False))
    run_virtual(check(is_left=True))
    num_missing = num_calls[0] - num_calls[1]  # of the draft, that was about to begin when the answer was left
    assert num_missing <= 1
    # the script counts no prefix in its usage, which a stream that was left does not tell
    assert spent[1] == pytest.approx(spent[0] - num_missing * 500, abs=len(split_into_pieces(WORDS)))
    assert spent[0] > 1000


def test_a_bound_in_money_needs_a_price() -> None:
    for config in ({"max_request_cost": 1.0}, {"budget": Budget(max_cost=1.0)}):
        with pytest.raises(ConfigError, match="price is not known"):
            plain(ScriptedProvider(WORDS), **config)


def test_what_is_free_is_not_bounded_by_money() -> None:
    free = {"script": Price(input=0.0, output=0.0)}
    result = run_virtual(plain(ScriptedProvider(WORDS), max_request_cost=0.0, prices=free).decode("q"))
    assert (result.content, result.cost.total) == (WORDS, 0.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Price(input=-1.0, output=1.0),
        lambda: Price(input=1.0, output=1.0, cached_input=float("nan")),
        lambda: Budget(max_tokens=-1),
        lambda: Budget(max_cost=-0.1),
        lambda: SpeculativeConfig(max_request_tokens=0),
        lambda: SpeculativeConfig(max_request_cost=-1.0),
    ],
)
def test_values_out_of_range(make: Any) -> None:
    with pytest.raises(ConfigError):
        make()
