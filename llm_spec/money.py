"""Money: what tokens cost, what an answer cost against plain, and budgets.

Prices are those of vendors' lists in US dollars, as of the date in `PRICES_AS_OF`; they change, so set your own
(`SpeculativeConfig.prices`). A price that is not known is None, never 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from llm_spec._checks import check_number
from llm_spec.chat import Usage
from llm_spec.errors import ConfigError

__all__ = ["PRICES", "PRICES_AS_OF", "Budget", "Cost", "Price", "cost_of_answer", "find_price"]

_PER: Final = 1e6
_DATE: Final = re.compile(r"-\d{4}-?\d{2}-?\d{2}\Z")


@dataclass(frozen=True, kw_only=True)
class Price:
    """Money for a million tokens, in any one currency; `cached_input` is what a provider's cache held (None: `input`)."""

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
        return (fresh * self.input + cached * cached_price + usage.output_tokens * self.output) / _PER


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


def find_price(provider_name: str, prices: Mapping[str, Price]) -> Price | None:
    """The price of a provider such as `openai:gpt-4.1`: the caller's by name or model, else the list's by model.

    A model's dated version has the price of the model.
    """
    model = provider_name.partition(":")[2] or provider_name
    names = (provider_name, model, _DATE.sub("", model))
    return next((table[name] for table in (prices, PRICES) for name in names if name in table), None)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one answer cost, in the currency of the prices.

    plain: what the target alone would have cost, by the same tokens. wasted: the part of target and draft together that
    plain would not have cost. None: a price or a token count is not known.
    """

    target: float | None
    draft: float | None
    plain: float | None

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


def cost_of_answer(
    usage: Usage | None, draft_usage: Usage | None, *, target: Price | None, draft: Price | None, drafted: bool
) -> Cost:
    """The cost of an answer by its usage; `drafted`: whether a draft was asked at all (else it cost nothing)."""
    of_draft = 0.0 if not drafted else None if draft is None or draft_usage is None else draft.of(draft_usage)
    if usage is None or target is None:
        return Cost(target=None, draft=of_draft, plain=None)
    return Cost(target=target.of(usage), draft=of_draft, plain=target.of(_plain_usage(usage)))


def _plain_usage(usage: Usage) -> Usage:
    """The part of a target's tokens that it would have read and written alone."""
    wasted = usage.cancelled_output_tokens + usage.rejected_prediction_tokens
    return Usage(
        input_tokens=usage.input_tokens - usage.extra_input_tokens,
        output_tokens=usage.output_tokens - wasted,
        cached_input_tokens=min(usage.cached_input_tokens, usage.input_tokens - usage.extra_input_tokens),
    )


class Budget:
    """What may be spent, in tokens and in money, by all requests of the decoders that are given it; wasted ones count.

    A request begins while anything is left, and is cut where its own answer would use up the rest; what others spend
    meanwhile can take it over by that much. `spent_tokens` and `spent_cost` are what has been spent so far.
    """

    def __init__(self, *, max_tokens: int | None = None, max_cost: float | None = None) -> None:
        check_number(ConfigError, "max_tokens", max_tokens, 0, integer=True)
        check_number(ConfigError, "max_cost", max_cost, 0.0)
        self._max_tokens = max_tokens
        self._max_cost = max_cost
        self.spent_tokens = 0
        self.spent_cost = 0.0

    def spend(self, num_tokens: int, cost: float) -> None:
        """Count what a request has used."""
        self.spent_tokens += num_tokens
        self.spent_cost += cost

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
