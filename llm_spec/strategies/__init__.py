"""Ways for a target to verify a draft, and the choice among them."""

from __future__ import annotations

from typing import Final

from llm_spec.chat import ChatRequest
from llm_spec.config import SpeculativeConfig
from llm_spec.errors import UnsupportedError
from llm_spec.planner import Planner
from llm_spec.provider import Discoverable, DraftProvider, LlmProvider
from llm_spec.strategies.base import Promise, Strategy
from llm_spec.strategies.judge import JUDGE
from llm_spec.strategies.plain import PLAIN
from llm_spec.strategies.predict import PREDICT
from llm_spec.strategies.probe import PROBE
from llm_spec.strategies.race import RACE
from llm_spec.strategies.regenerate import REGENERATE
from llm_spec.strategies.score import SCORE
from llm_spec.strategies.tokens import TOKENS

__all__ = ["Promise", "Strategy", "choose_strategy"]

_ALL: Final[tuple[Strategy, ...]] = (PLAIN, TOKENS, PROBE, SCORE, RACE, PREDICT, JUDGE, REGENERATE)
_BY_NAME: Final = {strategy.name: strategy for strategy in _ALL}
# What `auto` may use: exact. `tokens` weighs its costs within a request, the planner those of the others.
_AUTO: Final[tuple[Strategy, ...]] = (RACE, PROBE, PREDICT)


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
        usable = [s for s in _AUTO if await _refusal(s, draft, target, request) is None]
        return _BY_NAME[planner.choose([s.name for s in usable if s.promise(target, config).guarantee == "exact"])]
    strategy = _BY_NAME[config.strategy]
    refusal = await _refusal(strategy, draft, target, request)
    if refusal is not None:
        raise UnsupportedError(f"strategy {strategy.name!r} cannot be used: {refusal}")
    return PLAIN if strategy is PROBE and is_seeded else strategy


async def _refusal(
    strategy: Strategy, draft: DraftProvider | None, target: LlmProvider, request: ChatRequest
) -> str | None:
    if strategy.needs is not None and isinstance(target, Discoverable):
        await target.discover(strategy.needs)
    return strategy.supports(draft, target, request)
