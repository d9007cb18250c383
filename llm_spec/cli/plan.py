"""`llm-spec plan`: what each strategy would take in time and money, before anything is paid for."""

from __future__ import annotations

import argparse
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Final, TextIO

from llm_spec.cli.plan_estimates import (
    AnswerEstimate,
    ModelSpeed,
    PlanScenario,
    estimate_answer,
    find_break_even_acceptances,
    list_simulated_strategies,
)
from llm_spec.contract.draft import DraftProvider
from llm_spec.contract.errors import ConfigError, TargetError
from llm_spec.contract.provider import LlmProvider
from llm_spec.contract.request import ChatRequest
from llm_spec.decoder.config import SpeculativeConfig
from llm_spec.decoder.decoder import SpeculativeDecoder
from llm_spec.decoder.entry_points import (
    find_target_features,
    list_model_specs_of_draft,
    open_draft,
    open_provider,
    strip_credentials,
)
from llm_spec.decoder.pricing import FREE, PRICES_AS_OF, Price, find_model_price, parse_price
from llm_spec.measure.text_pieces import split_into_pieces
from llm_spec.strategies.registry import PLAIN, REGENERATE, TOKENS, StrategyEntry

__all__ = ["list_possible_strategies", "print_plan_table", "read_plan_scenario"]

_ACCEPTANCES: Final = (0.5, 0.8, 0.95)
_MEASURED_TOKENS: Final = 96
_COPIED_TOKENS: Final = 16  # of a draft that copies, at a time
_TARGET_SPEED: Final = ModelSpeed(first_token_s=0.5, token_s=1 / 60)
_DRAFT_SPEED: Final = ModelSpeed(first_token_s=0.3, token_s=1 / 200)
_COPYING_SPEED: Final = ModelSpeed(first_token_s=0.0, token_s=0.0)  # of a draft that asks no model


async def read_plan_scenario(arguments: argparse.Namespace) -> tuple[PlanScenario, tuple[float, ...]]:
    """The situation that the arguments describe, measured where they say so, and the acceptance rates to show."""
    scenario = PlanScenario(
        context=arguments.context,
        output=arguments.output,
        acceptance=_ACCEPTANCES[0] if arguments.acceptance is None else arguments.acceptance,
        target=_parse_model_speed(
            arguments.target_first_token_s, arguments.target_tokens_per_s, "--target-tokens-per-s", _TARGET_SPEED
        ),
        draft=_parse_model_speed(
            arguments.draft_first_token_s,
            arguments.draft_tokens_per_s,
            "--draft-tokens-per-s",
            _DRAFT_SPEED if list_model_specs_of_draft(arguments.draft) else _COPYING_SPEED,
        ),
        target_price=_find_given_or_listed_price(arguments.target_price, arguments.target),
        draft_price=_find_given_or_listed_price(arguments.draft_price, *list_model_specs_of_draft(arguments.draft)),
        max_concurrent_streams=arguments.streams,
    )
    if any(strategy.is_local for strategy in list_possible_strategies(arguments.target, arguments.draft)):
        scenario = replace(scenario, round_trip_s=0.0)
    if arguments.measure is not None:
        scenario = await _measure_pair_by_short_answers(scenario, arguments.target, arguments.draft, arguments.measure)
        return scenario, (scenario.acceptance,)
    return scenario, _ACCEPTANCES if arguments.acceptance is None else (scenario.acceptance,)


def list_possible_strategies(target: str, draft: str) -> tuple[StrategyEntry, ...]:
    """Those of `list_simulated_strategies` by which this target can verify this draft, as far as their names tell."""
    has = find_target_features(target)
    drafters = map(find_target_features, list_model_specs_of_draft(draft))
    is_local = "token_model" in (has or ()) and all("token_model" in (found or ()) for found in drafters)
    possible = [s for s in list_simulated_strategies() if s.is_local == is_local]
    return tuple(s for s in possible if has is None or not s.needs or not set(s.needs).isdisjoint(has))


def print_plan_table(
    scenario: PlanScenario,
    acceptances: tuple[float, ...],
    *,
    names: tuple[str, str],
    strategies: tuple[StrategyEntry, ...],
    out: TextIO,
) -> None:
    """Print the table; not to be called on a running event loop, for the strategies are run by a clock of their own."""
    target, draft = scenario.target, scenario.draft
    target_name, draft_name = map(strip_credentials, names)
    is_priced = scenario.target_price is not None and scenario.draft_price is not None
    print(
        f"{target_name}, drafted by {draft_name}:\n"
        f"an answer of {scenario.output} tokens to a prompt of {scenario.context}\n\n"
        f"  target  {_format_model_speed(target)}; {_format_price(scenario.target_price)}\n"
        f"  draft   {_format_model_speed(draft)}; {_format_price(scenario.draft_price)}\n"
        f"  Speeds are assumed unless given or measured (--measure). Listed prices are of {PRICES_AS_OF}.\n",
        file=out,
    )
    plain = estimate_answer(PLAIN.name, scenario)
    columns = f"{'draft is right':>16}{'time':>11}{'speedup':>10}" + (f"{'cost':>12}{'saved':>12}" if is_priced else "")
    print(columns, file=out)
    print(f"{'target alone':>16}{_format_estimate_row(plain, plain)}", file=out)
    for strategy in strategies:
        print(f"\n{strategy.name}: {strategy.summary}", file=out)
        for acceptance in acceptances:
            found = estimate_answer(strategy.name, replace(scenario, acceptance=acceptance))
            print(f"{acceptance:>16.0%}{_format_estimate_row(found, plain)}", file=out)
        faster, cheaper = find_break_even_acceptances(strategy.name, scenario)
        print(
            f"  {_format_break_even_acceptance('faster', faster)}"
            + (f"; {_format_break_even_acceptance('cheaper', cheaper)}" if is_priced else ""),
            file=out,
        )
    missing = [strategy.name for strategy in list_simulated_strategies() if strategy not in strategies]
    if missing:
        print(f"\nNot with {target_name} and {draft_name}: {', '.join(missing)}.", file=out)


def _format_estimate_row(estimate: AnswerEstimate, plain: AnswerEstimate) -> str:
    cells = f"{estimate.total_s:>9.2f} s{plain.total_s / estimate.total_s:>9.2f}x"
    if estimate.cost is None or plain.cost is None:
        return cells
    return cells + f"{estimate.cost:>12.5f}" + ("" if estimate is plain else f"{plain.cost - estimate.cost:>+12.5f}")


def _format_break_even_acceptance(what: str, acceptance: float | None) -> str:
    if acceptance is None:
        return f"never {what}"
    share = {0.0: "any", 1.0: "all"}.get(acceptance, f"at least {acceptance:.0%}")
    return f"{what} where {share} of the draft is right"


def _format_model_speed(speed: ModelSpeed) -> str:
    if speed == _COPYING_SPEED:
        return "its text is there at once"
    return f"first token after {speed.first_token_s:.2f} s, then {_format_tokens_per_s(speed)} tokens/s"


def _format_tokens_per_s(speed: ModelSpeed) -> str:
    return f"{1.0 / speed.token_s:.0f}" if speed.token_s else "any number of"


def _format_price(price: Price | None) -> str:
    if price is None:
        return "price not known"
    if price == FREE:
        return "free"
    cached = "" if price.cached_input is None else f", {price.cached_input:g} cached"
    return f"{price.input:g} in, {price.output:g} out{cached} per million tokens"


def _parse_model_speed(
    first_token_s: float | None, tokens_per_s: float | None, option: str, assumed: ModelSpeed
) -> ModelSpeed:
    if tokens_per_s is not None and not tokens_per_s > 0.0:
        raise ConfigError(f"{option} is {tokens_per_s!r}; it must be a number greater than 0")
    return ModelSpeed(
        first_token_s=assumed.first_token_s if first_token_s is None else first_token_s,
        token_s=assumed.token_s if tokens_per_s is None else 1.0 / tokens_per_s,
    )


def _find_given_or_listed_price(argument: str | None, *names: str) -> Price | None:
    """The price given, else that of the models of these names, if it is one."""
    if argument is not None:
        return parse_price(argument)
    found = {find_model_price(name, {}) for name in names}
    return found.pop() if len(found) == 1 else None if found else FREE


async def _measure_pair_by_short_answers(
    scenario: PlanScenario, target_name: str, draft_name: str, prompt: str
) -> PlanScenario:
    """Both models' speeds, and how often the draft says what the target says, by a few short answers."""
    async with AsyncExitStack() as stack:
        target = open_provider(target_name)
        stack.push_async_callback(target.aclose)
        draft = open_draft(draft_name)
        stack.push_async_callback(draft.aclose)
        target_speed = await _measure_model_speed(target, prompt)
        if target.capabilities.token_model is not None:
            return await _measure_local_draft(replace(scenario, target=target_speed), target, draft, prompt)
        models = list_model_specs_of_draft(draft_name)
        if not models:
            share = await _measure_copied_share(target, draft, prompt)
            return replace(scenario, target=target_speed, acceptance=share)
        draft_provider = open_provider(models[0])
        stack.push_async_callback(draft_provider.aclose)
        draft_speed = await _measure_model_speed(draft_provider, prompt)
        decoder = SpeculativeDecoder(draft, target, SpeculativeConfig(strategy=REGENERATE.name))
        compared = await decoder.decode(prompt, max_tokens=_MEASURED_TOKENS)
    rate = compared.stats.draft_acceptance_rate
    return replace(scenario, target=target_speed, draft=draft_speed, acceptance=rate or 0.0)


async def _measure_copied_share(target: LlmProvider, draft: DraftProvider, prompt: str) -> float:
    """How often a draft that copies has the next word right, all along the target's own answer."""
    request = ChatRequest.create(prompt, max_tokens=_MEASURED_TOKENS)
    pieces = split_into_pieces((await SpeculativeDecoder(None, target).decode(request)).content)
    num_pieces = num_right = num_missed = 0
    while num_pieces < len(pieces):
        text = ""
        async with draft.draft(replace(request, prefix="".join(pieces[:num_pieces])), _COPIED_TOKENS) as drafted:
            async for piece in drafted:
                text += piece.text
        pairs = list(zip(split_into_pieces(text), pieces[num_pieces:], strict=False))
        found = next((index for index, (ours, theirs) in enumerate(pairs) if ours != theirs), len(pairs))
        num_right += found
        num_pieces += found
        if num_pieces < len(pieces) and found < _COPIED_TOKENS:  # the next one is the target's
            num_missed += 1
            num_pieces += 1
    return num_right / max(1, num_right + num_missed)


async def _measure_local_draft(
    scenario: PlanScenario, target: LlmProvider, draft: DraftProvider, prompt: str
) -> PlanScenario:
    """What an answer by `tokens` tells of the draft."""
    decoder = SpeculativeDecoder(draft, target, SpeculativeConfig(strategy=TOKENS.name))
    result = await decoder.decode(prompt, max_tokens=_MEASURED_TOKENS)
    stats = result.stats
    return replace(
        scenario,
        acceptance=stats.draft_acceptance_rate or 0.0,
        draft=ModelSpeed(first_token_s=0.0, token_s=stats.draft_s / max(1, stats.num_draft_tokens)),
        verify_token_s=result.lookahead["verify_token_s"],
        max_lookahead=max(1, round(stats.num_draft_tokens / max(1, stats.num_rounds))),
    )


async def _measure_model_speed(provider: LlmProvider, prompt: str) -> ModelSpeed:
    request = ChatRequest.create(prompt, max_tokens=_MEASURED_TOKENS)
    result = await SpeculativeDecoder(None, provider).decode(request)
    first_s, num_tokens = result.timings.first_text_s, 0 if result.usage is None else result.usage.output_tokens
    if first_s is None or num_tokens < 8:
        raise TargetError(f"{provider.name} wrote too little to be measured; give another prompt")
    return ModelSpeed(first_token_s=first_s, token_s=(result.timings.total_s - first_s) / (num_tokens - 1))
