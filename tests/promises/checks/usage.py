"""Tokens are counted: none is negative, and an answer's own are among them, also those that a budget is charged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from itertools import pairwise
from typing import Any, Final

from llm_spec import Finish, SpeculativeResult, TargetError, Usage
from promises.checks.base import is_cut, num_shown, num_tokens
from promises.draw import Case
from promises.run import PRICES, Outcome, Shown

__all__ = ["find_wrong_spending", "find_wrong_usage"]


_WORDS_ARE_COUNTED: Final = ("right", "wrong", "own ids", "trickling", "short", "from the start")
_FREE: Final = ("none", "lookup", "suffix", "given")
_ESTIMATED: Final = 0.8  # of what was shown: words are not tokens


def find_wrong_usage(outcome: Outcome, shown: Shown) -> Iterator[str]:
    """A result's usage is of numbers, not less than the answer, and not more than the target generated."""
    result = shown.result
    if result is None:
        return
    yield from _wrong_cost(outcome.case, result)
    yield from _wrong_drafting(outcome, shown, result)
    wrong = [*_not_counts("usage", result.usage), *_not_counts("draft_usage", result.draft_usage)]
    yield from wrong
    if result.usage is None or outcome.case.is_local or wrong:
        return
    yield from _too_few(outcome, shown, result, result.usage)
    yield from _too_many(outcome, shown, result, result.usage)
    yield from _not_as_billed(outcome, shown, result.usage)
    finish = shown.events[-1][1] if shown.events else None
    if isinstance(finish, Finish) and finish.usage != result.usage:
        yield f"the last event's usage is {finish.usage}, the result's {result.usage}"


def _wrong_cost(case: Case, result: SpeculativeResult) -> Iterator[str]:
    """Money is that of the tokens, by the prices that are set."""
    cost, price = result.cost, PRICES[result.target]
    expected = None if result.usage is None else price.cost_of(result.usage)
    if cost.target != expected:
        yield f"the target's cost is {cost.target}; its tokens cost {expected}: {result.usage}"
    if (
        cost.draft is not None
        and not case.is_local
        and case.draft in ("lookup", "suffix", "given")
        and cost.draft != 0.0
    ):
        yield f"the draft's cost is {cost.draft}; it asks no model"
    parts = [cost.target, cost.draft, cost.plain]
    if any(part is not None and part < 0.0 for part in parts):
        yield f"a cost is negative: {cost}"


def _wrong_drafting(outcome: Outcome, shown: Shown, result: SpeculativeResult) -> Iterator[str]:
    """What a draft wrote is in `draft_usage`, also where it was left."""
    num_words, usage = outcome.draft.num_words[shown.tag], result.draft_usage
    if (
        outcome.case.draft in _WORDS_ARE_COUNTED
        and usage is not None
        and usage.output_tokens < int(_ESTIMATED * num_words)
    ):
        yield f"draft_usage counts {usage.output_tokens} output tokens; the draft wrote {num_words} words"
    if num_words and usage is None and result.strategy != "plain":
        yield f"draft_usage is None; the draft wrote {num_words} words"


def _not_counts(name: str, usage: Any) -> Iterator[str]:
    if usage is None:
        return
    if not isinstance(usage, Usage):
        yield f"{name} is {usage!r}"
        return
    values = [getattr(usage, f.name) for f in fields(Usage)]
    if any(type(value) is not int or value < 0 for value in values):
        yield f"{name} is {usage}"


def _is_estimated(outcome: Outcome, shown: Shown, result: SpeculativeResult) -> bool:
    """Whether some call was cut off, or its provider does not count: then what came of it is all that is known."""
    is_cut_off = is_cut(shown) or bool(result.retries) or bool(shown.ask.stop) or result.strategy in ("race", "judge")
    return is_cut_off or not outcome.case.counts


def _too_few(outcome: Outcome, shown: Shown, result: SpeculativeResult, usage: Usage) -> Iterator[str]:
    least, _ = num_tokens(outcome, shown, result.content)
    if _is_estimated(outcome, shown, result):
        least = int(_ESTIMATED * num_shown(outcome, shown, result.content))
    if result.strategy == "judge":
        return  # it counts words of what it approves
    if result.strategy != "score" and usage.output_tokens < least:  # its answers are approved
        yield f"usage counts {usage.output_tokens} output tokens; the answer has {least}"
    alone = usage.output_tokens - usage.cancelled_output_tokens
    if alone + usage.approved_output_tokens < least:
        yield f"{alone} output tokens are not wasted ones; the answer has {least}: {usage}"


def _too_many(outcome: Outcome, shown: Shown, result: SpeculativeResult, usage: Usage) -> Iterator[str]:
    ledger = outcome.ledger
    most = ledger.generated[shown.tag] + ledger.num_calls[shown.tag, "any"]  # each may have been one token further
    is_estimated = _is_estimated(outcome, shown, result) or outcome.case.takes_prediction
    if not is_estimated and usage.output_tokens > most:
        yield f"usage counts {usage.output_tokens} output tokens; the target generated at most {most}"
    if usage.extra_input_tokens > usage.input_tokens or usage.cancelled_output_tokens > usage.output_tokens:
        yield f"more is wasted than there is: {usage}"


def _not_as_billed(outcome: Outcome, shown: Shown, usage: Usage) -> Iterator[str]:
    """All that the calls of the request read and wrote, those that were cut off and tried again among them."""
    bills = outcome.ledger.bills[shown.tag]
    num_output = sum(bill.output_tokens for bill in bills)
    if usage.output_tokens != num_output:
        yield f"usage counts {usage.output_tokens} output tokens; its {len(bills)} calls wrote {num_output}"
    inputs = [bill.input_tokens for bill in bills]
    num_input = sum(number for number in inputs if number is not None)
    if usage.input_tokens < num_input or (None not in inputs and usage.input_tokens != num_input):
        yield f"usage counts {usage.input_tokens} input tokens; its {len(bills)} calls read {num_input}"


# ------------------------------------------------------------------------------------------ budgets


def find_wrong_spending(outcome: Outcome) -> Iterator[str]:
    """What is spent never decreases, and is never less than what answers took."""
    budget, case = outcome.budget, outcome.case
    if budget is None:
        return
    spent = [number for shown in outcome.shown for number in shown.spent]
    if not case.together and any(before > after for before, after in pairwise(spent)):
        yield f"the budget's spent tokens decreased: {spent}"
    results = [shown.result for shown in outcome.shown if shown.result is not None and shown.result.usage is not None]
    if len(results) == len(outcome.shown):
        usages = [usage for result in results for usage in (result.usage, result.draft_usage) if usage is not None]
        expected = sum(usage.input_tokens + usage.output_tokens - usage.free_output_tokens for usage in usages)
        if budget.spent_tokens != expected:
            yield f"the budget was charged {budget.spent_tokens} tokens; the results count {expected}"
    if not case.is_local and case.draft in _FREE:  # whatever became of the answers
        bills = [bill for shown in outcome.shown for bill in outcome.ledger.bills[shown.tag]]
        inputs = [bill.input_tokens for bill in bills]
        billed = sum(bill.output_tokens for bill in bills) + sum(number or 0 for number in inputs)
        if budget.spent_tokens < billed or (None not in inputs and budget.spent_tokens != billed):
            yield f"the budget was charged {budget.spent_tokens} tokens; the calls read and wrote {billed}"
    least = 0 if case.is_local else sum(_least_charge(outcome, shown) for shown in outcome.shown)
    if budget.spent_tokens < least:
        yield f"the budget was charged {budget.spent_tokens} tokens for answers of {least}"


def _least_charge(outcome: Outcome, shown: Shown) -> int:
    result = shown.result
    if result is not None and isinstance(result.usage, Usage):
        return result.usage.input_tokens + result.usage.output_tokens
    if result is not None and result.strategy == "judge":
        return 0
    text = shown.error.partial_text if isinstance(shown.error, TargetError) else shown.text
    return int(_ESTIMATED * num_shown(outcome, shown, text))
