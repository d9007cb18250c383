"""Ways for a target to verify a draft, and the choice among them."""

from __future__ import annotations

import importlib
from typing import Final

from llm_spec.chat import ChatRequest
from llm_spec.config import SpeculativeConfig
from llm_spec.errors import UnsupportedError
from llm_spec.planner import Planner
from llm_spec.provider import Discoverable, DraftProvider, LlmProvider
from llm_spec.strategies.base import Promise, Strategy
from llm_spec.strategies.plain import PLAIN
from llm_spec.strategies.tokens import TOKENS

__all__ = ["Promise", "Strategy", "choose_strategy"]

# What `auto` may use: exact. `tokens` weighs its costs within a request, the planner those of the others.
_AUTO: Final = ("race", "probe", "predict")


async def choose_strategy(
    draft: DraftProvider | None,
    target: LlmProvider,
    request: ChatRequest,
    config: SpeculativeConfig,
    planner: Planner,
) -> Strategy:
    """The strategy asked for, or for `auto` the exact one that pair and request support and that pays, else plain.

    A request that samples with a seed is answered plain where batches or several streams would need more than one.
    Raises UnsupportedError when the one asked for by name cannot serve them.
    """
    is_seeded = request.sampling.seed is not None and request.sampling.temperature != 0
    if config.strategy == "auto":
        if draft is not None and TOKENS.supports(draft, target, request) is None:
            return TOKENS
        if draft is None or is_seeded or not planner.has_plain_figures:
            return PLAIN  # there is nothing to compare with yet, and no need to ask what the server can do
        usable = [s for s in map(_named, _AUTO) if await _refusal(s, draft, target, request) is None]
        return _named(planner.choose([s.name for s in usable if s.promise(target, config).guarantee == "exact"]))
    strategy = _named(config.strategy)
    refusal = await _refusal(strategy, draft, target, request)
    if refusal is not None:
        raise UnsupportedError(f"strategy {strategy.name!r} cannot be used: {refusal}")
    return PLAIN if strategy.name == "probe" and is_seeded else strategy


def _named(name: str) -> Strategy:
    """A strategy, whose module is loaded with the first request that wants it."""
    strategy: Strategy = getattr(importlib.import_module(f"llm_spec.strategies.{name}"), name.upper())
    return strategy


async def _refusal(
    strategy: Strategy, draft: DraftProvider | None, target: LlmProvider, request: ChatRequest
) -> str | None:
    if strategy.needs is not None and isinstance(target, Discoverable):
        await target.discover(strategy.needs)
    return strategy.supports(draft, target, request)
