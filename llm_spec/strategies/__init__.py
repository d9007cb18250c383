"""Ways for a target to verify a draft, and the choice among them."""

from __future__ import annotations

import importlib
from typing import Final, NamedTuple, get_args

from llm_spec.chat import ChatRequest
from llm_spec.config import SpeculativeConfig, StrategyName
from llm_spec.discovery import Discovery
from llm_spec.errors import TransientError, UnsupportedError, one_line
from llm_spec.planner import Planner
from llm_spec.provider import DraftProvider, Feature, LlmProvider
from llm_spec.resilience import within
from llm_spec.result import PlainReason
from llm_spec.strategies.base import Promise, Strategy, refuse_request
from llm_spec.strategies.plain import PLAIN
from llm_spec.strategies.tokens import TOKENS

__all__ = ["Choice", "Promise", "Strategy", "choose_strategy", "load_strategies"]

# What `auto` may use: exact. `tokens` weighs its costs within a request, the planner those of the others.
_AUTO: Final = ("race", "probe", "predict")


class Choice(NamedTuple):
    """The strategy for a request; where that is plain, why, and more of it for people."""

    strategy: Strategy
    plain_reason: PlainReason | None = None
    plain_detail: str | None = None


async def choose_strategy(
    draft: DraftProvider | None,
    target: LlmProvider,
    request: ChatRequest,
    config: SpeculativeConfig,
    planner: Planner,
    *,
    discovery: Discovery,
) -> Choice:
    """The strategy asked for, or for `auto` the exact one that pair and request support and that pays, else plain.

    A request that samples with a seed is answered plain where batches or several streams would need more than one.
    A strategy asked for by name waits until it is known what the target can do, as long as for a first chunk; `auto`
    means plain until then.
    Raises UnsupportedError when the one asked for by name cannot serve them.
    """
    if config.strategy == "auto":
        return await _choose(draft, target, request, config, planner, discovery=discovery)
    strategy = _named(config.strategy)
    if strategy is PLAIN:
        return Choice(PLAIN, "configured")
    silence_s = config.timeouts.first_chunk_s
    try:
        await within(_find_out(strategy, target, config, discovery), silence_s, f"not known after {silence_s} s")
    except TransientError as error:  # the target may answer all the same, and is tried again with the next request
        return Choice(PLAIN, "discovery", one_line(error))
    refusal = strategy.supports(draft, target, request)
    if refusal is not None:
        raise UnsupportedError(f"strategy {strategy.name!r} cannot be used: {refusal}")
    if strategy.name == "probe" and _is_seeded(request):
        return Choice(PLAIN, "seed")
    if strategy is TOKENS:
        return Choice(TOKENS)  # it measures plain steps on its way
    plan = planner.choose_named(strategy.name, config.baseline_every)
    return Choice(_named(plan.name), plan.plain_reason)


async def _choose(
    draft: DraftProvider | None,
    target: LlmProvider,
    request: ChatRequest,
    config: SpeculativeConfig,
    planner: Planner,
    *,
    discovery: Discovery,
) -> Choice:
    if draft is None:
        return Choice(PLAIN, "no_draft")
    if target.capabilities.token_model is not None:
        refusal = TOKENS.supports(draft, target, request)
        return Choice(TOKENS) if refusal is None else Choice(PLAIN, "target", refusal)
    if _is_seeded(request):
        return Choice(PLAIN, "seed")
    if not planner.baseline.can_tell:
        return Choice(PLAIN, "baseline")  # there is nothing to compare with yet, and no need to ask what it can do
    features: set[Feature | None] = {strategy.needs for strategy in map(_named, _AUTO)}
    if not all([await discovery.is_done(feature) for feature in features]):
        return Choice(PLAIN, "discovery")
    return _choose_remote(draft, target, request, config, planner)


def _choose_remote(
    draft: DraftProvider, target: LlmProvider, request: ChatRequest, config: SpeculativeConfig, planner: Planner
) -> Choice:
    refusals = {s.name: _refusal_by_auto(s, draft, target, request, config) for s in map(_named, _AUTO)}
    usable = [name for name, refusal in refusals.items() if refusal is None]
    if usable:
        plan = planner.choose(usable, config.baseline_every)
        return Choice(_named(plan.name), plan.plain_reason)
    in_request = refuse_request(request)
    if in_request is not None:
        return Choice(PLAIN, "request", in_request)
    return Choice(PLAIN, "target", "; ".join(f"{name}: {refusal}" for name, refusal in refusals.items()))


async def _find_out(strategy: Strategy, target: LlmProvider, config: SpeculativeConfig, discovery: Discovery) -> None:
    await discovery.wait_for(strategy.needs)
    if strategy.promise(target, config).guarantee == "exact-text":
        await discovery.wait_for("continue_prefix")


def _is_seeded(request: ChatRequest) -> bool:
    return request.sampling.seed is not None and request.sampling.temperature != 0


def load_strategies() -> None:
    """Load all their modules now, of which each would be loaded with the first request that wants it."""
    for name in get_args(StrategyName):
        if name != "auto":
            _named(name)


def _named(name: str) -> Strategy:
    """A strategy; `load_strategies` loads its module earlier."""
    strategy: Strategy = getattr(importlib.import_module(f"llm_spec.strategies.{name}"), name.upper())
    return strategy


def _refusal_by_auto(
    strategy: Strategy, draft: DraftProvider, target: LlmProvider, request: ChatRequest, config: SpeculativeConfig
) -> str | None:
    """Why `auto` may not use a strategy: it wants the target's own tokens besides."""
    refusal = strategy.supports(draft, target, request)
    if refusal is None and strategy.promise(target, config).guarantee != "exact":
        return f"target {target.name} gives no token ids, so that the text would be exact-text; choose it by name"
    return refusal
