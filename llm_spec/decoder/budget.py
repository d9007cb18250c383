"""Budgets: how much may be spent, what running answers reserve, and what has been spent.

An answer reserves what it is about to use before each call: the input of the call and a slice of
its output. A stream that reaches the end of its slice reserves the next one, and is cut if none is
left. At the end all reservations are released, and the use is counted as spent. So answers that run
at the same time, also in several processes, cannot use the same tokens twice. None has to wait for
the end of another one's longest possible answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from llm_spec.contract.checks import check_number
from llm_spec.contract.errors import BudgetError, ConfigError
from llm_spec.contract.events import Usage
from llm_spec.decoder.pricing import FREE, TOKENS_PER_PRICE_UNIT, Cost, Price
from llm_spec.decoder.shared_objects import SharedByDecoders
from llm_spec.local.forks import reset_in_forked_child

__all__ = [
    "RESERVED_OUTPUT_TOKENS",
    "SPENT_AND_RESERVED_COLUMNS",
    "AnswerReservation",
    "Budget",
    "CallReservation",
    "CostTracker",
]

RESERVED_OUTPUT_TOKENS: Final = 256  # output tokens reserved ahead of what a call has written
_NUM_SLICES: Final = 16  # at most this part of the rest, so that as many other answers find some
_MIN_SLICE_TOKENS: Final = 16  # and at least this many, as long as they are left

_SPENT_TOKENS_COLUMN, _SPENT_COST_COLUMN, _RESERVED_TOKENS_COLUMN, _RESERVED_COST_COLUMN = range(
    4
)  # the columns of a budget's counts
SPENT_AND_RESERVED_COLUMNS: Final = (
    (_SPENT_TOKENS_COLUMN, _RESERVED_TOKENS_COLUMN),
    (_SPENT_COST_COLUMN, _RESERVED_COST_COLUMN),
)


class Budget(SharedByDecoders):
    """A limit on tokens and money, shared by every decoder that receives it. Wasted tokens count.

    A request begins while anything is left, and is cut when nothing is. While it runs, it reserves
    its input and a slice of its output ahead (`reserved_tokens`, `reserved_cost`). So concurrent
    requests exceed a budget only by what came in one piece, and by tokens that only the server can
    count, such as hidden reasoning.
    """

    _config_field = "budget"

    def __init__(self, *, max_tokens: int | None = None, max_cost: float | None = None) -> None:
        check_number(ConfigError, "max_tokens", max_tokens, 0, integer=True)
        check_number(ConfigError, "max_cost", max_cost, 0.0)
        self._max_tokens = max_tokens
        self._max_cost = max_cost
        self._counts = [0, 0.0, 0, 0.0]
        self.reset_after_fork()
        reset_in_forked_child(self)

    def __repr__(self) -> str:
        limits = {"max_tokens": self._max_tokens, "max_cost": self._max_cost}
        shown = [f"{name}={limit}" for name, limit in limits.items() if limit is not None]
        return f"<Budget({', '.join(shown)}): {self.spent_tokens} tokens, cost {self.spent_cost:.6g} spent>"

    def reset_after_fork(self) -> None:
        """Reset the lock and the reservations in a forked child, which counts on by itself."""
        self._lock = threading.Lock()  # decoders may run in several threads
        self._counts[_RESERVED_TOKENS_COLUMN], self._counts[_RESERVED_COST_COLUMN] = 0, 0.0

    @property
    def spent_tokens(self) -> int:
        """Tokens spent so far."""
        return int(self._get_counter_total(_SPENT_TOKENS_COLUMN))

    @property
    def spent_cost(self) -> float:
        """Money spent so far."""
        return self._get_counter_total(_SPENT_COST_COLUMN)

    @property
    def reserved_tokens(self) -> int:
        """Tokens that requests under way have used or may use next."""
        return int(self._get_counter_total(_RESERVED_TOKENS_COLUMN))

    @property
    def reserved_cost(self) -> float:
        """Money that requests under way have used or may use next."""
        return self._get_counter_total(_RESERVED_COST_COLUMN)

    @property
    def is_bounded(self) -> bool:
        """True if it bounds anything."""
        return self._max_tokens is not None or self._max_cost is not None

    def spend(self, num_tokens: int, cost: float) -> None:
        """Count tokens and money as spent."""
        with self._lock:
            self._add_to_counter(_SPENT_TOKENS_COLUMN, num_tokens)
            self._add_to_counter(_SPENT_COST_COLUMN, cost)

    def try_reserve(self, num_tokens: int, cost: float) -> bool:
        """Reserve tokens and money until `release`; return False if too little is left.

        They are reserved first and checked then. If two requests take the last of it at once, both
        may be refused, but never both admitted.
        """
        with self._lock:
            self._add_to_reserved(num_tokens, cost)
            if self._is_overspent():
                self._add_to_reserved(-num_tokens, -cost)
                return False
            return True

    def release(self, num_tokens: int, cost: float) -> None:
        """Release reserved tokens and money."""
        with self._lock:
            self._add_to_reserved(-num_tokens, -cost)

    def max_affordable_tokens(self, num_input: int, price: Price | None, *, held: bool = True) -> int | None:
        """Return how many output tokens a request with this input can afford.

        Returns None if there is no bound, and 0 if the request cannot even begin. With `held`, what
        others have reserved is not available. Raises ConfigError for a bound in money without a
        price.
        """
        bounds: list[int] = []
        if self._max_tokens is not None:
            used = self.spent_tokens + (self.reserved_tokens if held else 0)
            bounds.append(self._max_tokens - used - num_input)
        if self._max_cost is not None:
            if price is None:
                raise ConfigError("max_cost is set, and the target's price is not known; set prices")
            used_cost = self.spent_cost + (self.reserved_cost if held else 0.0)
            left = self._max_cost - used_cost - price.cost_of(Usage(input_tokens=num_input))
            if price.output > 0.0:
                bounds.append(int(left * TOKENS_PER_PRICE_UNIT / price.output))
            elif left < 0.0:
                bounds.append(0)
        return max(0, min(bounds)) if bounds else None

    # --------------------------------------------------------------------------------------- inside

    def _add_to_reserved(self, num_tokens: int, cost: float) -> None:
        self._add_to_counter(_RESERVED_TOKENS_COLUMN, num_tokens)
        self._add_to_counter(_RESERVED_COST_COLUMN, cost)

    def _is_overspent(self) -> bool:
        if self._max_tokens is not None and self.spent_tokens + self.reserved_tokens > self._max_tokens:
            return True
        return self._max_cost is not None and self.spent_cost + self.reserved_cost > self._max_cost

    def _get_counter_total(self, column: int) -> float:
        return self._counts[column]

    def _add_to_counter(self, column: int, value: float) -> None:
        self._counts[column] += value


class CallReservation:
    """One call's reservation: its input, and a slice of output ahead of what it has written."""

    def __init__(
        self, allowance: AnswerReservation, price: Price, num_input: int, num_output: int, max_output: int | None
    ) -> None:
        self._allowance = allowance
        self._price = price
        self._num_tokens = num_input + num_output
        self._cost = price.cost_of(Usage(input_tokens=num_input, output_tokens=num_output))
        self._num_output = num_output
        self._max_output = max_output  # it will not write more

    def reserve_output_up_to(self, num_output: int) -> bool:
        """Return True if the call may continue after `num_output` tokens; reserve the next slice.

        A call that has written exactly what it reserved may continue, because it may be at its end.
        """
        while num_output >= self._num_output and num_output != self._max_output:
            left = (self._max_output or 0) - self._num_output
            num_more = self._allowance.reserve_input_and_output(
                self._price, 0, min(RESERVED_OUTPUT_TOKENS, left) if left > 0 else RESERVED_OUTPUT_TOKENS
            )
            if not num_more:
                return num_output == self._num_output
            self._num_output += num_more
            self._num_tokens += num_more
            self._cost += self._price.cost_of(Usage(output_tokens=num_more))
        return True

    def settle_call(self, usage: Usage) -> None:
        """End the call: reduce its reservation to what it has used."""
        num_tokens, cost = _count_billed_tokens(usage), self._price.cost_of(usage)
        self._allowance.reduce_reserved(self._num_tokens - num_tokens, self._cost - cost)
        self._num_tokens, self._cost = num_tokens, cost


class AnswerReservation:
    """The reservations of one answer in its budgets, for all calls together."""

    def __init__(self, budgets: Sequence[Budget]) -> None:
        self._budgets = budgets
        self._num_tokens = 0
        self._cost = 0.0

    def open_call_reservation(
        self,
        price: Price | None,
        num_input: int,
        *,
        num_output: int = 0,
        max_output: int | None = None,
    ) -> CallReservation:
        """Reserve the input of a call, and `num_output` tokens or a slice of its output.

        If `num_output` is 0, a slice of `max_output`, or of unbounded output, is reserved. Without
        a price it costs no money. Raises BudgetError if too little is left.
        """
        price = price or FREE
        wanted = num_output or min(RESERVED_OUTPUT_TOKENS, max_output or RESERVED_OUTPUT_TOKENS)
        granted = self.reserve_input_and_output(price, num_input, wanted, is_whole=num_output > 0)
        if not granted:
            raise BudgetError("not enough of the budget is left for this call; it was not sent")
        return CallReservation(self, price, num_input, granted, num_output or max_output)

    def reserve_input_and_output(self, price: Price, num_input: int, num_output: int, *, is_whole: bool = False) -> int:
        """Reserve input and at most `num_output` tokens; return how many.

        Returns 0 if nothing is reserved.
        """
        left = [budget.max_affordable_tokens(num_input, price) for budget in self._budgets]
        room = min((number for number in left if number is not None), default=num_output)
        granted = (
            num_output
            if is_whole
            else min(num_output, RESERVED_OUTPUT_TOKENS, room, max(_MIN_SLICE_TOKENS, room // _NUM_SLICES))
        )
        while granted > 0:
            cost = price.cost_of(Usage(input_tokens=num_input, output_tokens=granted))
            if self._try_reserve_in_all_budgets(num_input + granted, cost):
                return granted
            granted = 0 if is_whole else granted // 2  # others took some of it meanwhile
        return 0

    def reduce_reserved(self, num_tokens: int, cost: float) -> None:
        """Reduce the reservation; negative values add to it what was used already."""
        for budget in self._budgets:
            budget.release(num_tokens, cost)
        self._num_tokens -= num_tokens
        self._cost -= cost

    def settle_answer(self, num_tokens: int, cost: float) -> None:
        """End the answer: count its tokens and cost as spent, and release its reservations."""
        for budget in self._budgets:
            budget.spend(num_tokens, cost)
        self.reduce_reserved(self._num_tokens, self._cost)

    def _try_reserve_in_all_budgets(self, num_tokens: int, cost: float) -> bool:
        for index, budget in enumerate(self._budgets):
            if not budget.try_reserve(num_tokens, cost):
                for other in self._budgets[:index]:
                    other.release(num_tokens, cost)
                return False
        self._num_tokens += num_tokens
        self._cost += cost
        return True


class CostTracker:
    """Counts the costs of one decoder's answers, and checks them against its budgets.

    Raises ConfigError for a bound in money if the target's price is not known.
    """

    def __init__(
        self,
        *,
        target: Price | None,
        draft: Price | None,
        budget: Budget | None,
        make_request_budget: Callable[[], Budget],
        tiers: Mapping[str, Price] = MappingProxyType({}),
    ) -> None:
        self.target_price = target
        self._tier_prices = tiers
        self.draft_price = draft
        self._budget = budget
        self._make_request_budget = make_request_budget
        # whether there is any budget
        self.is_bounded = budget is not None or make_request_budget().is_bounded
        self.max_affordable_tokens(0)

    def max_affordable_tokens(self, num_input: int) -> int | None:
        """Return how many tokens an answer to this input may have, if no other answer takes any.

        Returns None if there is no bound.
        """
        bounds = [
            budget.max_affordable_tokens(num_input, self.target_price, held=False)
            for budget in self._make_answer_budgets()
        ]
        return min((bound for bound in bounds if bound is not None), default=None)

    def open_answer_reservation(self) -> AnswerReservation | None:
        """Open an answer's reservation, or return None if there is no budget."""
        return AnswerReservation(self._make_answer_budgets()) if self.is_bounded else None

    def settle_answer(
        self,
        allowance: AnswerReservation | None,
        usage: Usage,
        draft_usage: Usage | None,
        *,
        tier: str | None = None,
    ) -> None:
        """Count what an answer used.

        Without a price it costs no money. A tier without a price costs as much as the model.
        """
        if allowance is None:
            return
        target_price = self._get_tier_price(tier) or self.target_price
        cost = 0.0 if target_price is None else target_price.cost_of(usage)
        num_tokens = _count_billed_tokens(usage)
        if draft_usage is not None:
            cost += 0.0 if self.draft_price is None else self.draft_price.cost_of(draft_usage)
            num_tokens += _count_billed_tokens(draft_usage)
        allowance.settle_answer(num_tokens, cost)

    def compute_cost(
        self, usage: Usage | None, draft_usage: Usage | None, *, has_drafted: bool, tier: str | None = None
    ) -> Cost:
        """Compute an answer's cost from its usage and the target's tier.

        A draft that was not called costs nothing.
        """
        target_price = self._get_tier_price(tier)
        draft = None if self.draft_price is None or draft_usage is None else self.draft_price.cost_of(draft_usage)
        if not has_drafted or self.draft_price == FREE:
            draft = 0.0
        if usage is None or target_price is None:
            return Cost(target=None, draft=draft, plain=None)
        return Cost(
            target=target_price.cost_of(usage),
            draft=draft,
            plain=target_price.cost_of(_estimate_plain_usage(usage)),
        )

    def _get_tier_price(self, tier: str | None) -> Price | None:
        return self.target_price if tier is None else self._tier_prices.get(tier)

    def _make_answer_budgets(self) -> list[Budget]:
        return [self._make_request_budget()] if self._budget is None else [self._make_request_budget(), self._budget]


def _estimate_plain_usage(usage: Usage) -> Usage:
    """Estimate the tokens that the target alone would have read and written."""
    return Usage(
        input_tokens=usage.input_tokens - usage.extra_input_tokens,
        output_tokens=usage.answer_tokens,
        # it reads the prompt once
        cached_input_tokens=max(0, usage.cached_input_tokens - usage.extra_input_tokens),
    )


def _count_billed_tokens(usage: Usage) -> int:
    """Return the tokens that a model read or wrote."""
    return usage.input_tokens + usage.output_tokens - usage.free_output_tokens
