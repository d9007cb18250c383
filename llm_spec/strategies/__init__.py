"""Ways for a target to verify a draft, and the choice among them."""

from __future__ import annotations

import importlib
from typing import Final, NamedTuple, get_args

from llm_spec.chat import ChatRequest
from llm_spec.config import SpeculativeConfig, StrategyName
from llm_spec.contract.chat import LlmProvider
from llm_spec.contract.draft import DraftProvider
from llm_spec.contract.endpoint import Feature
from llm_spec.discovery import FeatureDiscovery
from llm_spec.errors import TransientError, UnsupportedError, format_error_line
from llm_spec.planner import StrategyPlanner
from llm_spec.resilience import wait_within
from llm_spec.result import PlainReason
from llm_spec.strategies.base import Strategy, TextGuarantee, find_multi_call_refusal
from llm_spec.strategies.plain import PLAIN
from llm_spec.strategies.tokens import TOKENS

__all__ = ["Strategy", "StrategyChoice", "TextGuarantee", "choose_strategy", "load_strategies"]

# What `auto` may use: exact. `tokens` weighs its costs within a request, the planner those of the others.
_AUTO_STRATEGIES: Final = ("race", "probe", "predict")


class StrategyChoice(NamedTuple):
    """The strategy for a request; where that is plain, why, and more of it for people."""

    strategy: Strategy
    plain_reason: PlainReason | None = None
    plain_detail: str | None = None


async def choose_strategy(
    draft: DraftProvider | None,
    target: LlmProvider,
    request: ChatRequest,
    config: SpeculativeConfig,
    planner: StrategyPlanner,
    *,
    discovery: FeatureDiscovery,
) -> StrategyChoice:
    """The strategy asked for, or for `auto` the exact one that pair and request support and that pays, else plain.

    A request that samples with a seed is answered plain where batches or several streams would need more than one.
    A strategy asked for by name waits until it is known what the target can do, as long as for a first chunk; `auto`
    means plain until then.
    Raises UnsupportedError when the one asked for by name cannot serve them.
    """
    if config.strategy == "auto":
        return await _choose_strategy(draft, target, request, config, planner, discovery=discovery)
    strategy = _get_strategy(config.strategy)
    if strategy is PLAIN:
        return StrategyChoice(PLAIN, "configured")
    silence_s = config.timeouts.first_chunk_s
    try:
        await wait_within(
            _discover_needed_feature(strategy, target, config, discovery), silence_s, f"not known after {silence_s} s"
        )
    except TransientError as error:  # the target may answer all the same, and is tried again with the next request
        return StrategyChoice(PLAIN, "discovery", format_error_line(error))
    refusal = strategy.find_refusal(draft, target, request)
    if refusal is not None:
        raise UnsupportedError(f"strategy {strategy.name!r} cannot be used: {refusal}")
    if strategy.name == "probe" and _is_seeded(request):
        return StrategyChoice(PLAIN, "seed")
    if strategy is TOKENS:
        return StrategyChoice(TOKENS)  # it measures plain steps on its way
    plan = planner.choose_named(strategy.name, config.baseline_every)
    return StrategyChoice(_get_strategy(plan.name), plan.plain_reason)


async def _choose_strategy(
    draft: DraftProvider | None,
    target: LlmProvider,
    request: ChatRequest,
    config: SpeculativeConfig,
    planner: StrategyPlanner,
    *,
    discovery: FeatureDiscovery,
) -> StrategyChoice:
    if draft is None:
        return StrategyChoice(PLAIN, "no_draft")
    if target.capabilities.token_model is not None:
        refusal = TOKENS.find_refusal(draft, target, request)
        return StrategyChoice(TOKENS) if refusal is None else StrategyChoice(PLAIN, "target", refusal)
    if _is_seeded(request):
        return StrategyChoice(PLAIN, "seed")
    if not planner.baseline.is_measured:
        return StrategyChoice(
            PLAIN, "baseline"
        )  # there is nothing to compare with yet, and no need to ask what it can do
    features: set[Feature | None] = {strategy.needed_feature for strategy in map(_get_strategy, _AUTO_STRATEGIES)}
    if not all([await discovery.is_discovered(feature) for feature in features]):
        return StrategyChoice(PLAIN, "discovery")
    return _choose_server_strategy(draft, target, request, config, planner)


def _choose_server_strategy(
    draft: DraftProvider, target: LlmProvider, request: ChatRequest, config: SpeculativeConfig, planner: StrategyPlanner
) -> StrategyChoice:
    refusals = {
        s.name: _find_auto_refusal(s, draft, target, request, config) for s in map(_get_strategy, _AUTO_STRATEGIES)
    }
    usable = [name for name, refusal in refusals.items() if refusal is None]
    if usable:
        plan = planner.choose(usable, config.baseline_every)
        return StrategyChoice(_get_strategy(plan.name), plan.plain_reason)
    in_request = find_multi_call_refusal(request)
    if in_request is not None:
        return StrategyChoice(PLAIN, "request", in_request)
    return StrategyChoice(PLAIN, "target", "; ".join(f"{name}: {refusal}" for name, refusal in refusals.items()))


async def _discover_needed_feature(
    strategy: Strategy, target: LlmProvider, config: SpeculativeConfig, discovery: FeatureDiscovery
) -> None:
    await discovery.wait_for(strategy.needed_feature)
    if strategy.text_guarantee(target, config).guarantee == "exact-text":
        await discovery.wait_for("continue_prefix")


def _is_seeded(request: ChatRequest) -> bool:
    return request.sampling.seed is not None and request.sampling.temperature != 0


def load_strategies() -> None:
    """Load all their modules now, of which each would be loaded with the first request that wants it."""
    for name in get_args(StrategyName):
        if name != "auto":
            _get_strategy(name)


def _get_strategy(name: str) -> Strategy:
    """A strategy; `load_strategies` loads its module earlier."""
    strategy: Strategy = getattr(importlib.import_module(f"llm_spec.strategies.{name}"), name.upper())
    return strategy


def _find_auto_refusal(
    strategy: Strategy, draft: DraftProvider, target: LlmProvider, request: ChatRequest, config: SpeculativeConfig
) -> str | None:
    """Why `auto` may not use a strategy: it wants the target's own tokens besides."""
    refusal = strategy.find_refusal(draft, target, request)
    if refusal is None and strategy.text_guarantee(target, config).guarantee != "exact":
        return f"target {target.name} gives no token ids, so that the text would be exact-text; choose it by name"
    return refusal
