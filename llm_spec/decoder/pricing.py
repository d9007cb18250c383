"""Money: prices of tokens, and what an answer cost compared with no speculation.

Prices are from vendors' lists in US dollars, as of the date in `PRICES_AS_OF`. They change, so set
your own (`SpeculativeConfig.prices`). An unknown price is None, never 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from llm_spec.contract.checks import check_number
from llm_spec.contract.draft import DraftProvider, get_draft_capabilities
from llm_spec.contract.errors import ConfigError
from llm_spec.contract.events import Usage
from llm_spec.contract.short_repr import format_short_repr

__all__ = [
    "FREE",
    "PRICES",
    "PRICES_AS_OF",
    "TOKENS_PER_PRICE_UNIT",
    "Cost",
    "Price",
    "find_draft_price",
    "find_model_price",
    "find_tier_prices",
    "get_billed_tier",
    "parse_price",
]

TOKENS_PER_PRICE_UNIT: Final = 1e6  # tokens that a price is for
# of OpenAI and Anthropic
_PRICED_TIERS: Final = frozenset({"batch", "fast", "flex", "priority", "scale"})
_DATE: Final = re.compile(r"-\d{4}-?\d{2}-?\d{2}\Z")


@dataclass(frozen=True, kw_only=True)
class Price:
    """Money for a million tokens, in any one currency.

    `cached_input` is for tokens that a cache held; with None they cost as much as `input`.
    """

    input: float
    output: float
    cached_input: float | None = None

    __repr__ = format_short_repr

    def __post_init__(self) -> None:
        for name in ("input", "output", "cached_input"):
            check_number(ConfigError, name, getattr(self, name), 0.0)

    def cost_of(self, usage: Usage) -> float:
        """Return what these tokens cost.

        Reasoning and rejected predictions are part of the output, as vendors bill them.
        """
        cached_price = self.input if self.cached_input is None else self.cached_input
        cached = min(usage.cached_input_tokens, usage.input_tokens)
        fresh = usage.input_tokens - cached
        output = usage.output_tokens - usage.free_output_tokens
        return (fresh * self.input + cached * cached_price + output * self.output) / TOKENS_PER_PRICE_UNIT


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


FREE: Final = Price(input=0.0, output=0.0)  # for output without a model


def find_model_price(provider_name: str, prices: Mapping[str, Price]) -> Price | None:
    """Find the price of a provider such as `openai:gpt-4.1`.

    The caller's prices by name or model come first, then the list's by model. A model's dated
    version has the price of the model. Returns None if no price is known.
    """
    names = _list_price_names(provider_name)
    return next((table[name] for table in (prices, PRICES) for name in names if name in table), None)


def _list_price_names(provider_name: str) -> tuple[str, ...]:
    """Return the names that a price may be listed under, the most exact first."""
    model = provider_name.partition(":")[2] or provider_name
    return (provider_name, model, _DATE.sub("", model))


def find_tier_prices(provider_name: str, prices: Mapping[str, Price]) -> Mapping[str, Price]:
    """Return the caller's prices of a provider's service tiers, by tier.

    Their keys are `openai:gpt-4.1#priority` or `gpt-4.1#priority`.
    """
    found: dict[str, Price] = {}
    for name in reversed(_list_price_names(provider_name)):
        found |= {key.removeprefix(f"{name}#"): price for key, price in prices.items() if key.startswith(f"{name}#")}
    return found


def get_billed_tier(service_tier: str | None, speed: str | None) -> str | None:
    """Return the served tier if it has a price of its own, else None."""
    return next((served for served in (speed, service_tier) if served in _PRICED_TIERS), None)


def find_draft_price(draft: DraftProvider, prices: Mapping[str, Price]) -> Price | None:
    """Return the price of what a draft's model reads and writes.

    A draft that calls no model costs nothing (`is_free`). Joined drafts have the price of those
    that call a model, or None if these have different prices.
    """
    can = get_draft_capabilities(draft)
    if draft.name in prices or not can.drafts:
        price = find_model_price(draft.name, prices)
        return FREE if price is None and can.is_free else price
    found = {find_draft_price(part, prices) for part in can.drafts if not get_draft_capabilities(part).is_free}
    return found.pop() if len(found) == 1 else None if found else FREE


def parse_price(text: str) -> Price:
    """Parse a price written as IN:OUT or IN:OUT:CACHED; raises ConfigError for anything else."""
    try:
        values = [float(part) for part in text.split(":")]
    except ValueError:
        values = []
    if len(values) not in (2, 3):
        raise ConfigError(f"the price is {text!r}; it must be IN:OUT or IN:OUT:CACHED, for example 2:8:0.5")
    return Price(input=values[0], output=values[1], cached_input=values[2] if len(values) == 3 else None)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The costs of one answer, in the currency of the prices.

    plain: what the target alone would have cost, by the same tokens.
    wasted: the part of target and draft together that plain would not have cost.

    A value is None if a price or a token count is not known.
    """

    target: float | None = None
    draft: float | None = None
    plain: float | None = None

    __repr__ = format_short_repr

    @property
    def total(self) -> float | None:
        """The cost of target and draft."""
        return None if self.target is None or self.draft is None else self.target + self.draft

    @property
    def wasted(self) -> float | None:
        """The part that plain would not have cost, never negative."""
        return None if self.total is None or self.plain is None else max(0.0, self.total - self.plain)

    @property
    def saving(self) -> float | None:
        """The saving against plain; negative when speculation cost more."""
        return None if self.total is None or self.plain is None else self.plain - self.total
