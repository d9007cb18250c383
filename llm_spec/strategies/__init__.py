"""Ways for a target to verify a draft, and the choice among them."""

from __future__ import annotations

from typing import Final

from llm_spec.chat import ChatRequest
from llm_spec.config import SpeculativeConfig
from llm_spec.errors import UnsupportedError
from llm_spec.provider import Discoverable, DraftProvider, LlmProvider
from llm_spec.strategies.base import Promise, Strategy
from llm_spec.strategies.plain import PLAIN
from llm_spec.strategies.probe import PROBE
from llm_spec.strategies.race import RACE
from llm_spec.strategies.regenerate import REGENERATE
from llm_spec.strategies.tokens import TOKENS

__all__ = ["Promise", "Strategy", "choose_strategy"]

_BY_NAME: Final[dict[str, Strategy]] = {s.name: s for s in (PLAIN, TOKENS, PROBE, RACE, REGENERATE)}
_AUTO: Final[tuple[Strategy, ...]] = (TOKENS,)  # exact ones that can be faster, the strongest first


async def choose_strategy(
    draft: DraftProvider | None, target: LlmProvider, request: ChatRequest, config: SpeculativeConfig
) -> Strategy:
    """The strategy asked for, or for `auto` the strongest exact one that pair and request support, else plain.

    Raises UnsupportedError when the one asked for by name cannot serve them.
    """
    if config.strategy == "auto":
        return next((s for s in _AUTO if s.supports(draft, target, request) is None), PLAIN)
    strategy = _BY_NAME[config.strategy]
    if strategy.needs is not None and isinstance(target, Discoverable):
        await target.discover(strategy.needs)
    refusal = strategy.supports(draft, target, request)
    if refusal is not None:
        raise UnsupportedError(f"strategy {strategy.name!r} cannot be used: {refusal}")
    return strategy
