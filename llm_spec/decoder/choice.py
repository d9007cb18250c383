"""Which strategy answers a request.

`StrategyPlanner` knows what each strategy has been worth so far. A decoder has one, kept across its requests.

A strategy's worth is its speedup: what the target alone would have taken, divided by what it took; plain is worth 1.
The target alone is measured by answering a request plainly (a baseline request): the first one with `auto`, the second
one with a strategy chosen by name, then now and then. With `auto` every strategy that a request allows is tried, and
from then on the worthiest is used. The others are tried again now and then, since servers and drafts change: later and
later, and so seldom that it costs no more than a hundredth of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from llm_spec.contract.endpoint import Feature
from llm_spec.contract.errors import UnsupportedError
from llm_spec.contract.provider import Capabilities, LlmProvider
from llm_spec.contract.request import ChatRequest
from llm_spec.contract.tools import find_message_parts
from llm_spec.decoder.feature_discovery import FeatureDiscovery
from llm_spec.decoder.result import PlainReason, SpeculativeResult
from llm_spec.decoder.stop_rules import may_token_complete_two
from llm_spec.local.lookahead import LookaheadCostMemory
from llm_spec.measure.estimates import ExponentialMovingAverage
from llm_spec.measure.pair_stats import PairStats
from llm_spec.strategies.base import ReadyStrategy, Refusal, StrategyContext, find_multi_call_refusal
from llm_spec.strategies.message_answer import prepare_with_message_parser
from llm_spec.strategies.registry import AUTO, PLAIN, Prepare, StrategyEntry, find_strategy, get_strategies_by_name

__all__ = [
    "PlannerChoice",
    "StrategyChoice",
    "StrategyPlanner",
    "choose_strategy",
    "discover_needed_features",
]

_REQUEST_HALF_LIFE: Final = 4.0  # half-life of what is known of a strategy
_MAX_TRIALS: Final = 2  # a first request also pays for words and speeds that are not known yet
_MIN_VALUE_RATIO: Final = 1.02  # a gain below this is within the noise of the measurement
_MAX_REGRET: Final = 0.01  # of the time: what trying one again may cost
_FIRST_PAUSE: Final = 16  # requests until a strategy that did not pay is tried again; twice as many each time
_LAST_PAUSE: Final = 512
_BASELINE_RETRY_INTERVAL: Final = 8  # requests after the first baseline, which may have met a cold server
_MIN_TOKENS: Final = 8  # of an answer, for its time to say something


class PlannerChoice(NamedTuple):
    """The strategy to use; `plain_reason` says why it is plain."""

    name: str
    plain_reason: PlainReason | None = None


@dataclass(slots=True)
class _StrategyPerformance:
    """What is known of one strategy."""

    value_ratio: ExponentialMovingAverage = field(
        default_factory=lambda: ExponentialMovingAverage(half_life=_REQUEST_HALF_LIFE)
    )
    num_trials: int = 0
    pause_length: int = _FIRST_PAUSE
    num_requests_to_skip: int = 0  # requests since it was tried


class StrategyPlanner:
    """Chooses among names of strategies, and learns from results."""

    def __init__(self) -> None:
        self.pair_stats = PairStats()
        self.baseline = self.pair_stats.baseline
        self.lookahead_costs = LookaheadCostMemory()
        self._strategy_records: dict[str, _StrategyPerformance] = {}
        self._since_plain = 0

    def choose_strategy_that_pays(self, names: Sequence[str], baseline_every: int) -> PlannerChoice:
        """The strategy to use, out of those that the request allows (at least one); plain where none of them pays.

        After `baseline_every` requests without one the target is measured again; 0: never again.
        """
        plan = self._choose_best_or_trial(names, baseline_every)
        self._since_plain = 0 if plan.name == PLAIN.name else self._since_plain + 1
        return plan

    def find_reason_not_paid(self, name: str) -> PlainReason | None:
        """Why a strategy was not worth more than plain so far; None: it was."""
        if self._get_value_ratio(name) >= _MIN_VALUE_RATIO:
            return None
        record = self._strategy_records.get(name)
        return "not_measured" if record is None or not record.value_ratio.count else "not_worthwhile"

    def choose_named_or_baseline(self, name: str, baseline_every: int) -> PlannerChoice:
        """The same for a strategy that the caller has named: plain for a baseline alone."""
        is_first = not self.baseline.num_answers and self._since_plain > 0
        is_due = baseline_every > 0 and (is_first or self._is_baseline_due(self._get_value_ratio(name), baseline_every))
        self._since_plain = 0 if is_due else self._since_plain + 1
        return PlannerChoice(PLAIN.name, "baseline") if is_due else PlannerChoice(name)

    def _choose_best_or_trial(self, names: Sequence[str], baseline_every: int) -> PlannerChoice:
        if not self.baseline.is_measured:
            return PlannerChoice(PLAIN.name, "baseline")
        records = {name: self._strategy_records.setdefault(name, _StrategyPerformance()) for name in names}
        for name, record in records.items():
            if record.num_trials < _MAX_TRIALS:
                record.num_trials += 1
                return PlannerChoice(name)
        best = PlannerChoice(max(names, key=self._get_value_ratio))
        if self._get_value_ratio(best.name) < _MIN_VALUE_RATIO:
            is_measured = any(record.value_ratio.count for record in records.values())
            best = PlannerChoice(PLAIN.name, "not_worthwhile" if is_measured else "not_measured")
        value_ratio = 1.0 if best.name == PLAIN.name else self._get_value_ratio(best.name)
        if baseline_every and self._is_baseline_due(value_ratio, baseline_every):
            return PlannerChoice(PLAIN.name, "baseline")
        for name, record in records.items():
            if name != best.name:
                record.num_requests_to_skip += 1
                regret = max(0.0, value_ratio / (record.value_ratio.value or 1.0) - 1.0)
                if record.num_requests_to_skip > max(record.pause_length, regret / _MAX_REGRET):
                    record.pause_length = min(2 * record.pause_length, _LAST_PAUSE)
                    record.num_requests_to_skip = 0
                    return PlannerChoice(name)
        return best

    def _get_value_ratio(self, name: str) -> float:
        record = self._strategy_records.get(name)
        return 0.0 if record is None else record.value_ratio.value or 0.0

    def _is_baseline_due(self, value_ratio: float, baseline_every: int) -> bool:
        pause_length = max(baseline_every, (value_ratio - 1.0) / _MAX_REGRET)
        if self.baseline.num_answers < 2:
            pause_length = min(pause_length, _BASELINE_RETRY_INTERVAL)
        return self._since_plain >= pause_length

    def record_failure(self, name: str) -> None:
        """An attempt by this strategy gave nothing, so the target had to be called again."""
        self._strategy_records.setdefault(name, _StrategyPerformance()).value_ratio.update(0.0)

    def record_result(self, result: SpeculativeResult) -> None:
        """Take in an answer that came to its end."""
        self.lookahead_costs.observe(result.lookahead)
        if result.strategy != PLAIN.name and result.plain_reason in ("refused", "retried"):
            self.record_failure(result.strategy)
            return
        if result.strategy == PLAIN.name or result.retries or result.stopped_by == "deadline":
            return
        plain_s, total_s = result.plain_s, result.timings.total_s  # an estimate decides also where none is told
        if plain_s is None or not total_s:
            return
        if result.num_tokens is not None and result.num_tokens >= _MIN_TOKENS:
            self._strategy_records.setdefault(result.strategy, _StrategyPerformance()).value_ratio.update(
                plain_s / total_s
            )


class StrategyChoice(NamedTuple):
    """The strategy for a request: `ready` to speculate, or (None) plain, then why, and more of it for people."""

    strategy: StrategyEntry
    ready: ReadyStrategy | None = None
    plain_reason: PlainReason | None = None
    plain_detail: str | None = None


async def choose_strategy(
    context: StrategyContext, name: str, planner: StrategyPlanner, *, discovery: FeatureDiscovery
) -> StrategyChoice:
    """The strategy of this name, or for `auto` the exact one that serves the context and pays, else plain.

    A request that samples with a seed is answered plainly where batches or several streams would need more than one.
    Until it is known what the target can do the answer is plain, and what the strategy needs is tried beside it. Where
    a server does not have what it may have, the answer is plain as well.
    Raises UnsupportedError where the named strategy never serves such a context, and ConfigError as `find_strategy`.
    """
    if name == AUTO:
        return await _choose_automatically(context, planner, discovery)
    strategy = find_strategy(name)
    if strategy is PLAIN:
        return _make_plain_choice("configured")
    prepared = await _prepare_named_strategy(strategy, context, discovery)
    if isinstance(prepared, StrategyChoice):
        return prepared
    plain = _find_sampling_or_stop_reason(strategy, context.request)
    if plain is not None:
        return plain
    if strategy.is_local:
        return StrategyChoice(strategy, prepared)  # it measures plain steps on its way
    plan = planner.choose_named_or_baseline(strategy.name, context.limits.baseline_every)
    return StrategyChoice(strategy, prepared) if plan.plain_reason is None else _make_plain_choice(plan.plain_reason)


async def discover_needed_features(name: str, target: LlmProvider, discovery: FeatureDiscovery) -> bool:
    """Try what a strategy needs, the best first, until the target has one of it; for `auto` what it compares.

    Raises what the trials raise. False: they were ended by `FeatureDiscovery.aclose`.
    """
    strategies = _list_automatic_strategies(target) if name == AUTO else [find_strategy(name)]
    for strategy in strategies:
        for feature in strategy.discoverable_features[: 1 if name == AUTO else None]:
            if not await discovery.wait_until_tried(feature):
                return False
            if _has_feature(target.capabilities, feature):
                break
    return True


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
    refusal = find_multi_call_refusal(request, writes_raw_text=True, keeps_constraints=strategy.reads_messages)
    return refusal is None


def _find_reason_not_to_read(
    strategy: StrategyEntry, context: StrategyContext, planner: StrategyPlanner | None
) -> StrategyChoice | None:
    """Plain, where an answer that may be more than text cannot be read, or for `auto` has shown no gain; else None."""
    if not strategy.reads_messages:
        return _make_plain_choice("request", f"its answer may be more than text, which {strategy.name} cannot read")
    can = context.target.capabilities
    parts = find_message_parts(context.request, separates_reasoning=can.separates_reasoning)
    if "form_after_reasoning" in parts and not can.separates_reasoning:
        return _make_plain_choice("request", "the server constrains all of the answer, which no reasoning comes before")
    not_paid = None if planner is None else planner.find_reason_not_paid(strategy.name)
    return None if not_paid is None else _make_plain_choice(not_paid)


async def _find_missing_message_parser(
    strategy: StrategyEntry,
    context: StrategyContext,
    discovery: FeatureDiscovery,
    planner: StrategyPlanner | None = None,
) -> StrategyChoice | None:
    """Plain, while it is not known what the target's answers are beside text, or if nobody can tell; None: it is known.

    That is found out of its answers to such requests, for `auto` (with its `planner`) where text was faster before.
    """
    plain = _find_reason_not_to_read(strategy, context, planner)
    if plain is not None:
        return plain
    target, feature = context.target, strategy.discoverable_features[0]
    has_tried_feature = await discovery.has_tried_or_start_trial(feature)
    has_tried_parser = await discovery.has_tried_or_start_trial("message_parser")
    can = target.capabilities
    parts = find_message_parts(context.request, separates_reasoning=can.separates_reasoning)
    if not _has_feature(can, feature):
        if has_tried_feature:
            return _make_plain_choice("target", f"target {target.name} does not take token ids")
        return _make_plain_choice("discovery")
    if can.message_parser is not None and parts <= can.message_parser.parts:
        return None
    if can.message_parser is None and has_tried_parser:
        return _make_plain_choice("target", f"target {target.name} has no message parser that agrees with its chat")
    return _make_plain_choice("discovery")


def _has_feature_for_sure(target: LlmProvider, feature: Feature, discovery: FeatureDiscovery) -> bool:
    """Whether the target has a feature for sure; that it goes on from a text is a belief until it was tried."""
    is_sure = feature != "continue_prefix" or discovery.has_tried(feature)
    return is_sure and _has_feature(target.capabilities, feature)


async def _prepare_named_strategy(
    strategy: StrategyEntry, context: StrategyContext, discovery: FeatureDiscovery
) -> ReadyStrategy | StrategyChoice:
    """The strategy, ready to run, or plain; raises UnsupportedError where it never serves such a context."""
    if _may_read_message(strategy, context):
        plain = await _find_missing_message_parser(strategy, context, discovery)
        if plain is not None:
            return plain
    if context.draft is not None and not await _has_tried_needs_or_start_trial(strategy, context.target, discovery):
        return _make_plain_choice("discovery")
    prepared = _load_prepare_function(strategy)(context)
    if isinstance(prepared, ReadyStrategy):
        return prepared
    can = context.target.capabilities
    is_missing = any(
        feature in can.discoverable and not _has_feature(can, feature) for feature in strategy.discoverable_features
    )
    if is_missing and context.draft is not None and find_multi_call_refusal(context.request) is None:
        return _make_plain_choice("target", prepared.reason)  # a server may lose what it had, and answers all the same
    raise UnsupportedError(f"strategy {strategy.name!r} cannot be used: {prepared.reason}")


async def _has_tried_needs_or_start_trial(
    strategy: StrategyEntry, target: LlmProvider, discovery: FeatureDiscovery
) -> bool:
    """Whether it is known which of what the strategy needs the target has. If not, a trial starts in the background.

    What the target lacked is tried again from time to time, and no answer waits for that.
    """
    for feature in strategy.discoverable_features:
        if not _has_feature_for_sure(target, feature, discovery):
            is_tried_now = await discovery.has_tried_or_start_trial(feature)
            if not (is_tried_now or discovery.has_tried(feature)):
                return False
        if _has_feature(target.capabilities, feature):
            return True
    return True


async def _choose_automatically(
    context: StrategyContext, planner: StrategyPlanner, discovery: FeatureDiscovery
) -> StrategyChoice:
    if context.draft is None:
        return _make_plain_choice("no_draft")
    candidates = _list_automatic_strategies(context.target)
    if context.target.capabilities.token_model is not None:
        return _choose_local_strategy(candidates, context)
    plain = await _find_reason_to_wait(candidates, context, planner, discovery)
    if plain is not None:
        return plain
    return _choose_server_strategy(candidates, context, planner)


def _list_automatic_strategies(target: LlmProvider) -> list[StrategyEntry]:
    """Those that `auto` may use with such a target."""
    is_local = target.capabilities.token_model is not None
    return [
        strategy for strategy in get_strategies_by_name().values() if strategy.auto and strategy.is_local == is_local
    ]


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
    return None if reading is None else await _find_missing_message_parser(reading, context, discovery, planner)


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
    if _may_read_message(strategy, context) and not strategy.reads_messages:
        return Refusal("the answer may be more than text")
    prepared = _load_prepare_function(strategy)(context)
    if isinstance(prepared, ReadyStrategy) and prepared.text_guarantee.guarantee != "exact":
        name = context.target.name
        return Refusal(f"target {name} gives no token ids, so that the text would be exact-text; choose it by name")
    return prepared


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
