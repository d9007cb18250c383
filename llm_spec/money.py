"""Money: what tokens cost, what an answer cost against plain, and budgets.

Prices are those of vendors' lists in US dollars, as of the date in `PRICES_AS_OF`; they change, so set your own
(`SpeculativeConfig.prices`). A price that is not known is None, never 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from llm_spec._checks import check_number
from llm_spec.chat import Usage
from llm_spec.errors import ConfigError
from llm_spec.provider import DraftProvider, is_free

__all__ = [
    "FREE",
    "PRICES",
    "PRICES_AS_OF",
    "Budget",
    "Cost",
    "Price",
    "Spending",
    "find_draft_price",
    "find_price",
    "read_price",
]

_PER: Final = 1e6
_DATE: Final = re.compile(r"-\d{4}-?\d{2}-?\d{2}\Z")


@dataclass(frozen=True, kw_only=True)
class Price:
    """Money for a million tokens, in any one currency; `cached_input`: of what a cache held (None: as `input`)."""

    input: float
    output: float
    cached_input: float | None = None

    def __post_init__(self) -> None:
        for name in ("input", "output", "cached_input"):
            check_number(ConfigError, name, getattr(self, name), 0.0)

    def of(self, usage: Usage) -> float:
        """What these tokens cost. Reasoning and rejected predictions are part of the output, as vendors bill them."""
        cached_price = self.input if self.cached_input is None else self.cached_input
        cached = min(usage.cached_input_tokens, usage.input_tokens)
        fresh = usage.input_tokens - cached
        output = usage.output_tokens - usage.free_output_tokens
        return (fresh * self.input + cached * cached_price + output * self.output) / _PER


PRICES_AS_OF: Final = "2026-11"
PRICES: Final[Mapping[str, Price]] = MappingProxyType(
    {
        "gpt-4.1": Price(input=2.0, output=8.0, cached_input=0.5),
        "gpt-4.1-nano": Price(input=0.1, output=0.4, cached_input=0.025),
        "gpt-5.6-terra": Price(input=2.0, output=12.0, cached_input=0.2),
        "claude-opus-5-5": Price(input=4.0, output=20.0, cached_input=0.2),
        "claude-haiku-5-5": Price(input=0.1, output=0.5, cached_input=0.01),
        "deepseek-v4-pro": Price(input=1.32, output=3.96, cached_input=0.044),
    }
)


FREE: Final = Price(input=0.0, output=0.0)  # of what no model writes


def find_price(provider_name: str, prices: Mapping[str, Price]) -> Price | None:
    """The price of a provider such as `openai:gpt-4.1`: the caller's by name or model, else the list's by model.

    A model's dated version has the price of the model.
    """
    model = provider_name.partition(":")[2] or provider_name
    names = (provider_name, model, _DATE.sub("", model))
    return next((table[name] for table in (prices, PRICES) for name in names if name in table), None)


def find_draft_price(draft: DraftProvider, prices: Mapping[str, Price]) -> Price | None:
    """The price of what a draft's model reads and writes; a draft that asks no model costs nothing (`is_free`).

    Of several drafts joined (`parts`) it is that of those that ask one; None where these have different prices.
    """
    parts: Sequence[DraftProvider] = getattr(draft, "parts", ())
    if draft.name in prices or not parts:
        price = find_price(draft.name, prices)
        return FREE if price is None and is_free(draft) else price
    found = {find_draft_price(part, prices) for part in parts if not is_free(part)}
    return found.pop() if len(found) == 1 else None if found else FREE


def read_price(text: str) -> Price:
    """A price written as IN:OUT or IN:OUT:CACHED; raises ConfigError for anything else."""
    try:
        values = [float(part) for part in text.split(":")]
    except ValueError:
        values = []
    if len(values) not in (2, 3):
        raise ConfigError(f"the price is {text!r}; it must be IN:OUT or IN:OUT:CACHED, as 2:8:0.5")
    return Price(input=values[0], output=values[1], cached_input=values[2] if len(values) == 3 else None)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one answer cost, in the currency of the prices.

    plain: what the target alone would have cost, by the same tokens. wasted: the part of target and draft together that
    plain would not have cost. None: a price or a token count is not known.
    """

    target: float | None = None
    draft: float | None = None
    plain: float | None = None

    @property
    def total(self) -> float | None:
        """Target and draft."""
        return None if self.target is None or self.draft is None else self.target + self.draft

    @property
    def wasted(self) -> float | None:
        """What plain would not have cost, never negative."""
        return None if self.total is None or self.plain is None else max(0.0, self.total - self.plain)

    @property
    def saving(self) -> float | None:
        """Against plain; negative when speculation cost more."""
        return None if self.total is None or self.plain is None else self.plain - self.total


def _plain_usage(usage: Usage) -> Usage:
    """The tokens that a target would have read and written alone."""
    return Usage(
        input_tokens=usage.input_tokens - usage.extra_input_tokens,
        output_tokens=usage.answer_tokens,
        cached_input_tokens=max(0, usage.cached_input_tokens - usage.extra_input_tokens),  # it reads the prompt once
    )


def _num_paid_tokens(usage: Usage) -> int:
    """Tokens that a model read or wrote."""
    return usage.input_tokens + usage.output_tokens - usage.free_output_tokens


class Budget:
    """What may be spent, in tokens and in money, by all requests of the decoders that are given it; wasted ones count.

    A request begins while anything is left, and is cut where the target's answer would use up the rest; what drafts,
    cancelled streams and other requests use meanwhile can exceed it by that much.
    """

    def __init__(self, *, max_tokens: int | None = None, max_cost: float | None = None) -> None:
        check_number(ConfigError, "max_tokens", max_tokens, 0, integer=True)
        check_number(ConfigError, "max_cost", max_cost, 0.0)
        self._max_tokens = max_tokens
        self._max_cost = max_cost
        self._spent_tokens = 0
        self._spent_cost = 0.0

    @property
    def spent_tokens(self) -> int:
        """Tokens spent so far."""
        return self._spent_tokens

    @property
    def spent_cost(self) -> float:
        """Money spent so far."""
        return self._spent_cost

    @property
    def is_bounded(self) -> bool:
        """Whether it bounds anything."""
        return self._max_tokens is not None or self._max_cost is not None

    def spend(self, num_tokens: int, cost: float) -> None:
        """Count what a request has used."""
        self._spent_tokens += num_tokens
        self._spent_cost += cost

    def affordable(self, num_input: int, price: Price | None) -> int | None:
        """How many output tokens a request with so much input can afford: None: no bound, 0: not even to begin.

        Raises ConfigError for a bound in money without a price.
        """
        bounds: list[int] = []
        if self._max_tokens is not None:
            bounds.append(self._max_tokens - self.spent_tokens - num_input)
        if self._max_cost is not None:
            if price is None:
                raise ConfigError("max_cost is set, and the target's price is not known; set prices")
            left = self._max_cost - self.spent_cost - price.of(Usage(input_tokens=num_input))
            if price.output > 0.0:
                bounds.append(int(left * _PER / price.output))
            elif left < 0.0:
                bounds.append(0)
        return max(0, min(bounds)) if bounds else None


class Spending:
    """What one decoder's answers cost, and what they may.

    Raises ConfigError for a bound in money where the target's price is not known.
    """

    def __init__(
        self, *, target: Price | None, draft: Price | None, budget: Budget | None, for_each: Callable[[], Budget]
    ) -> None:
        self._target = target
        self._draft = draft
        self._budget = budget
        self._for_each = for_each
        self.is_bounded = budget is not None or for_each().is_bounded  # whether there is any budget
        self.affordable(0)

    def affordable(self, num_input: int) -> int | None:
        """How many tokens an answer to so much input may have; None: as many as it likes."""
        budgets = [self._for_each()] if self._budget is None else [self._for_each(), self._budget]
        bounds = [budget.affordable(num_input, self._target) for budget in budgets]
        return min((bound for bound in bounds if bound is not None), default=None)

    def charge(self, usage: Usage, draft_usage: Usage | None) -> None:
        """Count what an answer took; what has no price costs no money."""
        if self._budget is None:
            return
        cost = 0.0 if self._target is None else self._target.of(usage)
        num_tokens = _num_paid_tokens(usage)
        if draft_usage is not None:
            cost += 0.0 if self._draft is None else self._draft.of(draft_usage)
            num_tokens += _num_paid_tokens(draft_usage)
        self._budget.spend(num_tokens, cost)

    def cost(self, usage: Usage | None, draft_usage: Usage | None, *, has_drafted: bool) -> Cost:
        """The cost of an answer by its usage; a draft that was not asked cost nothing."""
        draft = None if self._draft is None or draft_usage is None else self._draft.of(draft_usage)
        if not has_drafted or self._draft == FREE:
            draft = 0.0
        if usage is None or self._target is None:
            return Cost(target=None, draft=draft, plain=None)
        return Cost(target=self._target.of(usage), draft=draft, plain=self._target.of(_plain_usage(usage)))
