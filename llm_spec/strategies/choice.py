"""Which strategy answers a request."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

from llm_spec._clock import wait_within
from llm_spec.chat import ChatRequest
from llm_spec.config import SpeculativeConfig, Timeouts
from llm_spec.contract.chat import Capabilities, LlmProvider
from llm_spec.contract.endpoint import Discoverable, Feature
from llm_spec.discovery import FeatureDiscovery
from llm_spec.errors import TransientError, UnsupportedError, format_error_line
from llm_spec.planner import StrategyPlanner
from llm_spec.result import PlainReason
from llm_spec.stop_rules import may_token_complete_two
from llm_spec.strategies.base import ReadyStrategy, Refusal, StrategyContext, find_multi_call_refusal
from llm_spec.strategies.message_answer import prepare_with_message_parser
from llm_spec.strategies.registry import AUTO, PLAIN, Prepare, StrategyEntry, find_strategy, get_strategies_by_name
from llm_spec.tools import find_message_parts

__all__ = ["StrategyChoice", "choose_strategy", "has_undiscovered_needs"]


class StrategyChoice(NamedTuple):
    """The strategy for a request: `ready` to speculate, or (None) plain, then why, and more of it for people."""

    strategy: StrategyEntry
    ready: ReadyStrategy | None = None
    plain_reason: PlainReason | None = None
    plain_detail: str | None = None


async def choose_strategy(
    context: StrategyContext, config: SpeculativeConfig, planner: StrategyPlanner, *, discovery: FeatureDiscovery
) -> StrategyChoice:
    """The strategy that the config names, or for `auto` the exact one that serves the context and pays, else plain.

    A request that samples with a seed is answered plainly where batches or several streams would need more than one.
    A strategy that the config names begins while it is found out what the target can do, or waits for that, as long as
    for a first chunk; `auto` means plain until then. Where a server does not have what it may have, it means plain.
    Raises UnsupportedError where the named strategy never serves such a context, and ConfigError as `find_strategy`.
    """
    if config.strategy == AUTO:
        return await _choose_automatically(context, planner, discovery)
    strategy = find_strategy(config.strategy)
    if strategy is PLAIN:
        return _make_plain_choice("configured")
    prepared = await _prepare_named_strategy(strategy, context, config.timeouts, discovery)
    if isinstance(prepared, StrategyChoice):
        return prepared
    plain = _find_sampling_or_stop_reason(strategy, context.request)
    if plain is not None:
        return plain
    if strategy.is_local:
        return StrategyChoice(strategy, prepared)  # it measures plain steps on its way
    plan = planner.choose_named_or_baseline(strategy.name, context.limits.baseline_every)
    return StrategyChoice(strategy, prepared) if plan.plain_reason is None else _make_plain_choice(plan.plain_reason)


def _find_sampling_or_stop_reason(strategy: StrategyEntry, request: ChatRequest) -> StrategyChoice | None:
    """Plain, where a named strategy would write another answer to this request than the target does; else None."""
    if not strategy.takes_seed and _has_sampling_seed(request):
        return _make_plain_choice("seed")
    return _find_stop_reason(request) if strategy.discoverable_features else None


def _find_stop_reason(request: ChatRequest) -> StrategyChoice | None:
    """Plain, where a server may end the answer at another stop string than what reads it here; else None."""
    if not may_token_complete_two(request.stop):
        return None
    return _make_plain_choice("request", "one token may complete two of its stop strings, and servers differ in which")


def _load_prepare_function(strategy: StrategyEntry) -> Prepare:
    """Its function; one that writes by token ids is read by a message parser where an answer is more than text."""
    prepare = strategy.load_prepare_function()
    return partial(prepare_with_message_parser, prepare) if _writes_by_ids(strategy) else prepare


def _writes_by_ids(strategy: StrategyEntry) -> bool:
    return strategy.discoverable_features[:1] in (("token_endpoint",), ("token_scorer",))


def _may_read_message(strategy: StrategyEntry, context: StrategyContext) -> bool:
    """Whether a strategy needs a message parser for a request, and its target may have one."""
    can, request = context.target.capabilities, context.request
    return (
        _writes_by_ids(strategy)
        and (can.message_parser is not None or "message_parser" in can.discoverable)
        and context.draft is not None
        and bool(find_message_parts(request, separates_reasoning=can.separates_reasoning))
        and _may_be_put_together(request, strategy)
    )


def _may_be_put_together(request: ChatRequest, strategy: StrategyEntry) -> bool:
    refusal = find_multi_call_refusal(request, writes_raw_text=True, keeps_constraints=strategy.keeps_constraints)
    return refusal is None


async def _find_missing_message_parser(
    strategy: StrategyEntry, context: StrategyContext, discovery: FeatureDiscovery
) -> StrategyChoice | None:
    """Plain, while it is not known what the target's answers are beside text, or if nobody can tell; None: it is known.

    That is found out of its answers to such requests.
    """
    target, feature = context.target, strategy.discoverable_features[0]
    has_tried_feature = await discovery.has_tried_or_start_trial(feature)
    has_tried_parser = await discovery.has_tried_or_start_trial("message_parser")
    can = target.capabilities
    parts = find_message_parts(context.request, separates_reasoning=can.separates_reasoning)
    if "form_after_reasoning" in parts and not can.separates_reasoning:
        return _make_plain_choice("request", "the server constrains all of the answer, which no reasoning comes before")
    if not _has_feature(can, feature):
        if has_tried_feature:
            return _make_plain_choice("target", f"target {target.name} does not take token ids")
        return _make_plain_choice("discovery")
    if can.message_parser is not None and parts <= can.message_parser.parts:
        return None
    if can.message_parser is None and has_tried_parser:
        return _make_plain_choice("target", f"target {target.name} has no message parser that agrees with its chat")
    return _make_plain_choice("discovery")


def has_undiscovered_needs(strategy: StrategyEntry, target: LlmProvider, discovery: FeatureDiscovery) -> bool:
    """Whether nobody knows yet whether the target has what the strategy needs."""
    features = strategy.discoverable_features
    if not features or not isinstance(target, Discoverable):
        return False
    if any(_has_feature_for_sure(target, feature, discovery) for feature in features):
        return False
    return not all(discovery.has_tried(feature) for feature in features)


def _has_feature_for_sure(target: LlmProvider, feature: Feature, discovery: FeatureDiscovery) -> bool:
    """Whether the target has a feature for sure; that it goes on from a text is a belief until it was tried."""
    is_sure = feature != "continue_prefix" or discovery.has_tried(feature)
    return is_sure and _has_feature(target.capabilities, feature)


async def _prepare_named_strategy(
    strategy: StrategyEntry, context: StrategyContext, timeouts: Timeouts, discovery: FeatureDiscovery
) -> ReadyStrategy | StrategyChoice:
    """The strategy, ready to run, or plain; raises UnsupportedError where it never serves such a context."""
    if _may_read_message(strategy, context):
        plain = await _find_missing_message_parser(strategy, context, discovery)
        if plain is not None:
            return plain
    prepare = _load_prepare_function(strategy)
    untried = await _find_best_untried_feature(strategy, context, discovery)
    if untried:  # a trial takes time, so the answer begins beside it if it can
        prepared = prepare(replace(context, untried=untried))
        if isinstance(prepared, ReadyStrategy):
            return prepared
        silence_s = timeouts.first_chunk_s
        discovering = _discover_needed_features(strategy, context, discovery)
        try:
            await wait_within(discovering, silence_s, f"not known after {silence_s} s")
        except TransientError as error:  # the target may answer all the same, and is tried again with the next request
            return _make_plain_choice("discovery", format_error_line(error))
    prepared = prepare(context)
    if isinstance(prepared, ReadyStrategy):
        return prepared
    can = context.target.capabilities
    is_missing = any(
        feature in can.discoverable and not _has_feature(can, feature) for feature in strategy.discoverable_features
    )
    if is_missing and context.draft is not None and find_multi_call_refusal(context.request) is None:
        return _make_plain_choice("target", prepared.reason)  # a server may lose what it had, and answers all the same
    raise UnsupportedError(f"strategy {strategy.name!r} cannot be used: {prepared.reason}")


async def _find_best_untried_feature(
    strategy: StrategyEntry, context: StrategyContext, discovery: FeatureDiscovery
) -> frozenset[Feature]:
    """The best of what the strategy needs, if it is not known yet whether the target has it; else nothing.

    No trial is begun for the first answer, which the strategy itself begins when it may.
    """
    target = context.target
    for feature in strategy.discoverable_features:
        if _has_feature_for_sure(target, feature, discovery):
            break
        is_new = feature in target.capabilities.discoverable and not discovery.has_tried(feature)
        if is_new or not await discovery.has_tried_or_start_trial(feature):
            return frozenset({feature})
        if _has_feature(target.capabilities, feature):
            break
    return frozenset()


async def _choose_automatically(
    context: StrategyContext, planner: StrategyPlanner, discovery: FeatureDiscovery
) -> StrategyChoice:
    if context.draft is None:
        return _make_plain_choice("no_draft")
    is_local = context.target.capabilities.token_model is not None
    candidates = [s for s in get_strategies_by_name().values() if s.auto and s.is_local == is_local]
    if is_local:
        return _choose_local_strategy(candidates, context)
    plain = await _find_reason_to_wait(candidates, context, planner, discovery)
    if plain is not None:
        return plain
    return _choose_server_strategy(candidates, context, planner)


async def _find_reason_to_wait(
    candidates: list[StrategyEntry], context: StrategyContext, planner: StrategyPlanner, discovery: FeatureDiscovery
) -> StrategyChoice | None:
    """Plain, while a server's strategies cannot be compared; None: they can."""
    if _has_sampling_seed(context.request):
        return _make_plain_choice("seed")
    plain = _find_stop_reason(context.request)
    if plain is not None:
        return plain
    if not planner.baseline.is_measured:
        return _make_plain_choice("baseline")  # there is nothing to compare with yet, and no need to ask what it can do
    features: set[Feature] = {feature for strategy in candidates for feature in strategy.discoverable_features[:1]}
    if not all([await discovery.has_tried_or_start_trial(feature) for feature in features]):
        return _make_plain_choice("discovery")
    reading = next((strategy for strategy in candidates if _may_read_message(strategy, context)), None)
    return None if reading is None else await _find_missing_message_parser(reading, context, discovery)


def _choose_local_strategy(candidates: list[StrategyEntry], context: StrategyContext) -> StrategyChoice:
    """The first that can serve: each weighs its costs within a request."""
    refusals: list[str] = []
    for strategy in candidates:
        prepared = strategy.load_prepare_function()(context)
        if isinstance(prepared, ReadyStrategy):
            return StrategyChoice(strategy, prepared)
        refusals.append(prepared.reason)
    return _make_plain_choice("target", "; ".join(refusals))


def _choose_server_strategy(
    candidates: list[StrategyEntry], context: StrategyContext, planner: StrategyPlanner
) -> StrategyChoice:
    prepared = {strategy.name: _prepare_if_exact(strategy, context) for strategy in candidates}
    usable = {name: ready for name, ready in prepared.items() if isinstance(ready, ReadyStrategy)}
    if usable:
        plan = planner.choose_strategy_that_pays(list(usable), context.limits.baseline_every)
        if plan.plain_reason is not None:
            return _make_plain_choice(plan.plain_reason)
        return StrategyChoice(find_strategy(plan.name), usable[plan.name])
    in_request = find_multi_call_refusal(context.request)
    if in_request is not None:
        return _make_plain_choice("request", in_request)
    refusals = [f"{name}: {refusal.reason}" for name, refusal in prepared.items() if isinstance(refusal, Refusal)]
    return _make_plain_choice("target", "; ".join(refusals))


def _make_plain_choice(reason: PlainReason, detail: str | None = None) -> StrategyChoice:
    return StrategyChoice(PLAIN, plain_reason=reason, plain_detail=detail)


def _prepare_if_exact(strategy: StrategyEntry, context: StrategyContext) -> ReadyStrategy | Refusal:
    """The same for `auto`, which wants the target's own tokens besides."""
    prepared = _load_prepare_function(strategy)(context)
    if isinstance(prepared, ReadyStrategy) and prepared.text_guarantee.guarantee != "exact":
        name = context.target.name
        return Refusal(f"target {name} gives no token ids, so that the text would be exact-text; choose it by name")
    return prepared


async def _discover_needed_features(
    strategy: StrategyEntry, context: StrategyContext, discovery: FeatureDiscovery
) -> None:
    """Ask for what the strategy needs, the best first, until the target has one of it."""
    for feature in strategy.discoverable_features:
        await discovery.wait_until_tried(feature)
        if _has_feature(context.target.capabilities, feature):
            return


def _has_feature(can: Capabilities, feature: Feature) -> bool:
    has = {
        "token_endpoint": can.token_endpoint is not None,
        "token_scorer": can.token_scorer is not None,
        "continue_prefix": can.continue_prefix,
        "message_parser": can.message_parser is not None,
    }
    return has[feature]


def _has_sampling_seed(request: ChatRequest) -> bool:
    return request.sampling.seed is not None and request.sampling.temperature != 0
