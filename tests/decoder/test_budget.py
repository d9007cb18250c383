"""What answers under way hold of a budget: nobody uses it twice, everybody gets a part, and nothing stays held."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from llm_spec import Budget, BudgetError, ChatRequest, Price, SpeculativeConfig, SpeculativeDecoder, TextDelta, Usage
from llm_spec.contract.events import Finish, Round
from llm_spec.contract.provider import Capabilities
from llm_spec.decoder.budget import RESERVED_OUTPUT_TOKENS, AnswerReservation
from llm_spec.decoder.config import StrategyName
from llm_spec.decoder.pricing import FREE
from llm_spec.decoder.result import SpeculativeResult
from llm_spec.testing import LocalProvider, ScriptedProvider, TableModel
from llm_spec.testing.clock import run_virtual
from llm_spec.testing.simulated import SimulatedDraft, SimulatedTarget

WORDS = " ".join(f"word{i}" for i in range(400))
DEAR = Price(input=2.0, output=8.0)


def held(budget: Budget) -> tuple[int, float]:
    return budget.reserved_tokens, round(budget.reserved_cost, 12)


@pytest.mark.parametrize(
    ("left", "granted"), [(100_000, 256), (3200, 200), (100, 16), (16, 16), (9, 9), (1, 1), (0, 0), (-5, 0)]
)
def test_a_slice_leaves_something_to_others(left: int, granted: int) -> None:
    """256 tokens, a sixteenth of what is left, or 16, and the rest where it is less."""
    budget = Budget(max_tokens=100_000)
    budget.spend(100_000 - left - 7, 0.0)
    assert AnswerReservation([budget]).reserve_input_and_output(FREE, 7, 1000) == granted
    assert budget.reserved_tokens == (granted + 7 if granted else 0)


def test_money_is_held_as_tokens_are() -> None:
    budget = Budget(max_cost=1.0)
    allowance = AnswerReservation([budget])
    reservation = allowance.open_call_reservation(DEAR, 100_000, max_output=256)
    assert held(budget) == (100_256, round(100_000 * 2e-6 + 256 * 8e-6, 12))
    with pytest.raises(BudgetError):
        allowance.open_call_reservation(DEAR, 500_000)
    reservation.settle_call(Usage(input_tokens=100_000, cached_input_tokens=100_000, output_tokens=10))
    assert held(budget) == (100_010, round(100_000 * 2e-6 + 10 * 8e-6, 12))
    allowance.settle_answer(100_010, 0.2)
    assert (held(budget), budget.spent_tokens, budget.spent_cost) == ((0, 0.0), 100_010, 0.2)


def test_a_hold_grows_with_what_is_written() -> None:
    """By slices, up to what the call may write; where there is no more, what was held may be written, no more."""
    budget = Budget(max_tokens=10_000)
    reservation = AnswerReservation([budget]).open_call_reservation(None, 10, max_output=300)
    assert budget.reserved_tokens == 10 + 256
    assert reservation.reserve_output_up_to(255)
    assert budget.reserved_tokens == 10 + 256
    assert reservation.reserve_output_up_to(256)
    assert budget.reserved_tokens == 10 + 300
    assert reservation.reserve_output_up_to(300)
    assert budget.reserved_tokens == 10 + 300
    small = Budget(max_tokens=40)
    reservation = AnswerReservation([small]).open_call_reservation(None, 10)
    assert [reservation.reserve_output_up_to(number) for number in (16, 29, 30, 31)] == [True, True, True, False]
    assert small.reserved_tokens == 40


def test_a_batch_is_held_whole_or_not_at_all() -> None:
    budget = Budget(max_tokens=100)
    allowance = AnswerReservation([budget])
    allowance.open_call_reservation(None, 50, num_output=40)
    with pytest.raises(BudgetError):
        allowance.open_call_reservation(None, 5, num_output=6)
    assert budget.reserved_tokens == 90


def test_what_one_budget_refuses_no_other_keeps() -> None:
    wide, narrow = Budget(max_tokens=1000), Budget(max_tokens=10)
    assert AnswerReservation([wide, narrow]).reserve_input_and_output(FREE, 10, 5) == 0
    assert (wide.reserved_tokens, narrow.reserved_tokens) == (0, 0)


def test_threads_hold_no_token_twice() -> None:
    """Of a budget that many threads take from at once."""
    budget = Budget(max_tokens=10_000)

    def take(_: int) -> int:
        return sum(budget.try_reserve(3, 0.0) for _ in range(1000))

    with ThreadPoolExecutor(8) as threads:
        num_taken = sum(threads.map(take, range(8)))
    assert budget.reserved_tokens == 3 * num_taken <= 10_000
    assert num_taken == 3333


# ------------------------------------------------------------------------------------------ answers


def decoder(target: Any, budget: Budget, draft: Any = None, **config: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder(target=target, draft=draft, config=SpeculativeConfig(budget=budget, **config))


async def decode_all(pair: SpeculativeDecoder, number: int, **options: Any) -> list[SpeculativeResult]:
    return await asyncio.gather(*(pair.decode("one two three", **options) for _ in range(number)))


@pytest.mark.parametrize("options", [{}, {"max_tokens": 300}])
def test_answers_at_once_share_a_budget(options: Mapping[str, Any]) -> None:
    """Each gets a part; the rest finds nothing left, and is not asked."""
    budget, target = Budget(max_tokens=2000), ScriptedProvider(WORDS, delay_first_s=1.0, delay_piece_s=0.01)
    results = run_virtual(decode_all(decoder(target, budget), 100, **options))
    num_asked = len(target.requests)
    assert 16 <= num_asked < 100
    assert sum(bool(result.content) for result in results) == num_asked
    assert {(result.finish_reason, result.stopped_by) for result in results} == {("length", "budget")}
    assert sum(result.plain_reason == "budget" for result in results) == 100 - num_asked
    num_words = sum(len(result.content.split()) for result in results) + 3 * num_asked
    assert budget.spent_tokens == num_words
    assert 1900 <= num_words <= 2000 + num_asked
    assert held(budget) == (0, 0.0)


def test_what_an_answer_does_not_use_is_for_the_next() -> None:
    """Short answers after each other use all of a budget."""
    budget, target = Budget(max_tokens=100), ScriptedProvider("one two")
    pair = decoder(target, budget)

    async def check() -> None:
        for _ in range(20):
            assert (await pair.decode("one two three")).content == "one two"
        assert (await pair.decode("one")).stopped_by == "budget"

    run_virtual(check())
    assert budget.spent_tokens == 100


def test_an_answer_that_is_left_holds_nothing() -> None:
    """Nor one that fails, or was never read."""
    budget = Budget(max_tokens=1000)

    async def check() -> None:
        target = ScriptedProvider(WORDS, delay_first_s=1.0)
        leaving = asyncio.create_task(decoder(target, budget).decode("one two three"))
        await asyncio.sleep(0.5)
        assert budget.reserved_tokens == 3 + 997 // 16
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        assert budget.reserved_tokens == 0
        failing = decoder(ScriptedProvider(WORDS, fail_at={9: ValueError("x")}), budget)
        assert len(await asyncio.gather(failing.decode("one two three"), return_exceptions=True)) == 1

    run_virtual(check())
    assert (budget.reserved_tokens, budget.spent_tokens) == (0, 3 + 3 + 9)


@pytest.mark.parametrize("strategy", ["race", "probe", "regenerate", "judge"])
def test_drafts_and_extra_streams_are_held(strategy: StrategyName) -> None:
    """However an answer is put together, many at once keep to the budget by what came in one piece, each."""
    budget = Budget(max_tokens=4000)
    target = SimulatedTarget(WORDS, first_token_s=0.1, token_s=0.01, by_ids=True)
    draft = SimulatedDraft(WORDS, 0.9, 3)
    pair = decoder(target, budget, draft, strategy=strategy)
    results = run_virtual(decode_all(pair, 60, temperature=0))
    num_answered = sum(bool(result.content) for result in results)
    assert num_answered >= 8
    assert budget.spent_tokens <= 4000 + num_answered * RESERVED_OUTPUT_TOKENS // 4
    assert held(budget) == (0, 0.0)
    for result in results:
        assert WORDS.startswith(result.content)


def test_a_draft_that_no_budget_is_left_for_is_left_out() -> None:
    """The target answers alone."""
    can = Capabilities(continue_prefix=True)
    target, draft = ScriptedProvider("one two", capabilities=can), ScriptedProvider("one two", name="b:d")
    prices = {"script": FREE, "b:d": Price(input=1e9, output=1e9)}
    pair = decoder(target, Budget(max_cost=1.0), draft, strategy="regenerate", prices=prices)
    result = run_virtual(pair.decode("one two three"))
    assert (result.content, len(draft.requests)) == ("one two", 0)
    assert result.fallbacks == ("BudgetError: not enough of the budget is left for this call; it was not sent",)


def test_a_model_in_this_process_is_held_by_its_rounds() -> None:
    """Its text and, where it is paid for, its draft's."""
    budget, model = Budget(max_tokens=120), TableModel(WORDS)
    pair = decoder(LocalProvider(model), budget, LocalProvider(model), strategy="tokens")
    result = run_virtual(pair.decode("go"))
    assert (result.finish_reason, result.stopped_by) == ("length", "budget")
    assert any(isinstance(report, Round) and report.num_draft_tokens for report in result.rounds)
    assert budget.reserved_tokens == 0
    assert 100 <= budget.spent_tokens <= 120 + 2 * 16


def test_a_piece_larger_than_a_slice_is_passed_on() -> None:
    """It was written, and is counted; then the answer ends."""
    budget = Budget(max_tokens=100)
    target = ScriptedProvider([TextDelta(WORDS), TextDelta(" more"), Finish("stop")])
    result = run_virtual(decoder(target, budget).decode("one two three"))
    assert result.stopped_by == "budget"
    assert budget.spent_tokens >= 97


def test_a_request_that_is_refused_was_not_sent() -> None:
    """What is asked for as the target's own chunks fails, as there is no result that could say so."""
    budget = Budget(max_tokens=10)
    budget.try_reserve(10, 0.0)

    async def check() -> None:
        target = ScriptedProvider("one two")
        result = await decoder(target, budget).decode("one two three")
        assert (result.plain_reason, result.usage, target.requests) == ("budget", Usage(), [])

    run_virtual(check())


def test_an_allowance_keeps_a_request_of_its_own_bounds() -> None:
    """`max_request_tokens` bounds drafts and extra streams of one request, beside the budget of all."""
    target = SimulatedTarget(WORDS, first_token_s=0.1, token_s=0.01, by_ids=True)
    pair = SpeculativeDecoder(
        target=target,
        draft=SimulatedDraft(WORDS, 0.9, 3),
        config=SpeculativeConfig(strategy="race", max_request_tokens=200),
    )
    result = run_virtual(pair.decode(ChatRequest.create("one two three", temperature=0)))
    assert result.stopped_by == "budget"
    assert result.usage is not None
    assert result.draft_usage is not None
    both = result.usage + result.draft_usage
    assert both.input_tokens + both.output_tokens <= 200 + 2 * 16
