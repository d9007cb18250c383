"""`llm-spec plan`: estimate the time and cost of each strategy before paying for it.

It runs the strategies themselves, by a virtual clock, against simulated models that have the
scenario's latencies and know one random answer. Prices turn the tokens of these models into money.
`tokens` runs in one process and waits for nothing, so its figures are computed directly.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import cache
from typing import Final, NamedTuple, TextIO

from llm_spec.cli.bench.advice import WORTHWHILE_GAIN
from llm_spec.contract.checks import check_number
from llm_spec.contract.draft import DraftProvider
from llm_spec.contract.errors import ConfigError, TargetError
from llm_spec.contract.events import Usage
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
from llm_spec.local.lookahead import MAX_LOOKAHEAD
from llm_spec.measure.tokens import split_into_pieces
from llm_spec.strategies.limits import JudgeConfig
from llm_spec.strategies.registry import (
    PLAIN,
    REGENERATE,
    TOKENS,
    Simulation,
    StrategyEntry,
    find_strategy,
    get_strategies_by_name,
)
from llm_spec.testing.clock import run_virtual
from llm_spec.testing.hosted_model import SimulatedHostedModel
from llm_spec.testing.simulated import SimulatedDraft, SimulatedTarget

__all__ = [
    "AnswerEstimate",
    "ModelSpeed",
    "PlanScenario",
    "describe_plan_advice",
    "estimate_answer",
    "find_break_even_acceptances",
    "list_possible_strategies",
    "list_simulated_strategies",
    "print_plan_table",
    "read_plan_scenario",
]

_NUM_SEEDS: Final = 6
_LESS: Final = 1 - 1e-9  # a smaller factor is less by more than rounding
_WORDS_PER_LINE: Final = 10


@dataclass(frozen=True, kw_only=True)
class ModelSpeed:
    """Seconds until a model's first token, and between two tokens."""

    first_token_s: float
    token_s: float

    def __post_init__(self) -> None:
        check_number(ConfigError, "first_token_s", self.first_token_s, 0.0)
        check_number(ConfigError, "token_s", self.token_s, 0.0)


@dataclass(frozen=True, kw_only=True)
class PlanScenario:
    """A pair and a request.

    - `context`, `output`: tokens of the prompt and of the answer.
    - `acceptance`: the probability that the target would have written a drafted token (for `judge`:
      a drafted sentence).
    - `round_trip_s`: seconds of the network for each call; the other figures do not include it.
    - `read_token_s`: seconds to read a prompt token that is not cached.
    - `predicted_speedup`: how many times as fast as other tokens the predicted ones come.
    - `verify_token_s`: seconds that each further token adds to a step of the target that verifies
      several (for `tokens`).
    - `max_lookahead`: the most tokens that the draft proposes at a time (for `tokens`).
    """

    context: int
    output: int
    acceptance: float
    target: ModelSpeed
    draft: ModelSpeed
    target_price: Price | None = None
    draft_price: Price | None = None
    round_trip_s: float = 0.05
    read_token_s: float = 0.0002
    predicted_speedup: float = 4.0
    verify_token_s: float = 0.0
    max_lookahead: int = MAX_LOOKAHEAD
    max_concurrent_streams: int = 4

    def __post_init__(self) -> None:
        check_number(ConfigError, "context", self.context, 1, integer=True)
        check_number(ConfigError, "output", self.output, 1, integer=True)
        check_number(ConfigError, "acceptance", self.acceptance, 0.0, 1.0)
        check_number(ConfigError, "round_trip_s", self.round_trip_s, 0.0)
        check_number(ConfigError, "read_token_s", self.read_token_s, 0.0)
        check_number(ConfigError, "verify_token_s", self.verify_token_s, 0.0)
        check_number(ConfigError, "max_lookahead", self.max_lookahead, 1, MAX_LOOKAHEAD, integer=True)
        check_number(ConfigError, "predicted_speedup", self.predicted_speedup, 1.0)
        check_number(ConfigError, "max_concurrent_streams", self.max_concurrent_streams, 1, integer=True)


class AnswerEstimate(NamedTuple):
    """The mean over a few answers: seconds, and the cost of target and draft together.

    The cost is None if a price is not known.
    """

    total_s: float
    cost: float | None


def list_simulated_strategies() -> tuple[StrategyEntry, ...]:
    """Return the strategies that can be simulated."""
    return tuple(entry for entry in get_strategies_by_name().values() if entry.simulation is not None)


@cache
def estimate_answer(name: str, scenario: PlanScenario) -> AnswerEstimate:
    """Estimate one answer by a strategy: a decoder's first speculative request."""
    strategy = find_strategy(name)
    if strategy.simulation == "steps":
        return _estimate_local_answer(scenario)
    taken = [_simulate_answer_time_and_cost(strategy, scenario, seed) for seed in range(_NUM_SEEDS)]
    costs = [cost for _, cost in taken if cost is not None]
    return AnswerEstimate(
        total_s=sum(total_s for total_s, _ in taken) / _NUM_SEEDS,
        cost=sum(costs) / _NUM_SEEDS if len(costs) == _NUM_SEEDS else None,
    )


def _estimate_local_answer(scenario: PlanScenario) -> AnswerEstimate:
    """Estimate an answer of the fastest lookahead.

    Drafted tokens count up to the first wrong one (arXiv 2211.17192).
    """
    plain = estimate_answer(PLAIN.name, scenario)
    target, draft, right = scenario.target, scenario.draft, scenario.acceptance
    fastest_s, drafted = target.token_s, 0.0  # per token of the answer
    for lookahead in range(1, scenario.max_lookahead + 1):
        num_emitted = sum(right**n for n in range(lookahead + 1))
        round_s = lookahead * (draft.token_s + scenario.verify_token_s) + target.token_s
        if round_s / num_emitted < fastest_s:
            fastest_s, drafted = round_s / num_emitted, lookahead / num_emitted
    first_s = draft.first_token_s if drafted else 0.0
    num_rest = scenario.output - 1
    total_s = plain.total_s + first_s - num_rest * (target.token_s - fastest_s)
    price = scenario.draft_price
    if plain.cost is None or price is None:
        return AnswerEstimate(total_s, None)
    used = Usage(input_tokens=scenario.context if drafted else 0, output_tokens=round(num_rest * drafted))
    return AnswerEstimate(total_s, plain.cost + price.cost_of(used))


def find_break_even_acceptances(strategy: str, scenario: PlanScenario) -> tuple[float | None, float | None]:
    """Return the lowest acceptances at which a strategy is faster, and cheaper, than plain.

    Both are in steps of 5 %, or None if there is no such acceptance.
    """
    plain = estimate_answer(PLAIN.name, scenario)
    faster = cheaper = 21  # the lowest so far, in twentieths
    for num_twentieths in range(20, -1, -1):
        found = estimate_answer(strategy, replace(scenario, acceptance=num_twentieths / 20))
        if faster == num_twentieths + 1 and found.total_s < _LESS * plain.total_s:
            faster = num_twentieths
        if (
            cheaper == num_twentieths + 1
            and found.cost is not None
            and plain.cost is not None
            and found.cost < _LESS * plain.cost
        ):
            cheaper = num_twentieths
        if num_twentieths not in (faster, cheaper):
            break
    return _convert_twentieths_to_rate(faster), _convert_twentieths_to_rate(cheaper)


def _convert_twentieths_to_rate(num_twentieths: int) -> float | None:
    return None if num_twentieths > 20 else num_twentieths / 20


def _simulate_answer_time_and_cost(
    strategy: StrategyEntry, scenario: PlanScenario, seed: int
) -> tuple[float, float | None]:
    answer = "".join(_generate_random_lines(scenario.output, random.Random(seed)))  # noqa: S311 - a reproducible text
    # 4 bytes per token, as estimates from bytes assume
    prompt = " ".join(["one"] * scenario.context)
    config = SpeculativeConfig(
        strategy=strategy.name,
        max_concurrent_streams=scenario.max_concurrent_streams,
        judge=JudgeConfig(max_rounds=64),
        prices={
            name: price
            for name, price in (("target", scenario.target_price), ("draft", scenario.draft_price))
            if price is not None
        },
    )
    target = _make_simulated_target(strategy.simulation, scenario, answer)
    draft = None if strategy is PLAIN else _make_simulated_draft(strategy.simulation, scenario, answer, seed)
    request = ChatRequest.create(prompt, temperature=0.0)
    result = run_virtual(SpeculativeDecoder(target=target, draft=draft, config=config).decode(request))
    total_s = result.timings.total_s
    # the simulated target has read the prompt: the first call pays for that
    if strategy.simulation == "batches":
        total_s += _compute_first_token_s(scenario) - scenario.target.token_s
    return total_s, result.cost.total


def _compute_first_token_s(scenario: PlanScenario) -> float:
    return scenario.target.first_token_s + scenario.context * scenario.read_token_s


def _make_simulated_target(kind: Simulation | None, scenario: PlanScenario, answer: str) -> LlmProvider:
    speed = scenario.target
    if kind in ("streams", "batches"):
        first_token_s = _compute_first_token_s(scenario)
        return SimulatedTarget(
            answer,
            first_token_s=speed.token_s if kind == "batches" else first_token_s,
            token_s=speed.token_s,
            round_trip_s=scenario.round_trip_s,
            by_ids=True,
            num_prompt_tokens=scenario.context,
        )
    return SimulatedHostedModel(
        answer,
        first_token_s=speed.first_token_s + scenario.round_trip_s,
        token_s=speed.token_s,
        read_token_s=scenario.read_token_s,
        predicted_token_s=speed.token_s / scenario.predicted_speedup,
    )


def _make_simulated_draft(kind: Simulation | None, scenario: PlanScenario, answer: str, seed: int) -> DraftProvider:
    speed, agreement = scenario.draft, scenario.acceptance
    if kind == "sentences":  # a sentence stands or falls as a whole
        rng = random.Random(seed)  # noqa: S311 - a reproducible draft
        answer = "".join(
            line if rng.random() < agreement else line.replace(" ", " other ", 1) for line in answer.splitlines(True)
        )
        agreement = 1.0
    return SimulatedDraft(answer, agreement, seed, first_token_s=speed.first_token_s, token_s=speed.token_s)


def _generate_random_lines(num_tokens: int, rng: random.Random) -> Iterator[str]:
    """Yield lines of random words that have `num_tokens` tokens together."""
    while num_tokens > 0:
        num_words = max(1, min(_WORDS_PER_LINE, num_tokens - 2))
        words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(num_words)]
        yield " ".join(words) + ".\n"
        num_tokens -= num_words + 2


_ACCEPTANCES: Final = (0.5, 0.8, 0.95)
_MEASURED_TOKENS: Final = 96
_COPIED_TOKENS: Final = 16  # tokens that a copying draft is asked for at a time
_TARGET_SPEED: Final = ModelSpeed(first_token_s=0.5, token_s=1 / 60)
_DRAFT_SPEED: Final = ModelSpeed(first_token_s=0.3, token_s=1 / 200)
_COPYING_SPEED: Final = ModelSpeed(first_token_s=0.0, token_s=0.0)  # of a draft that calls no model


async def read_plan_scenario(arguments: argparse.Namespace) -> tuple[PlanScenario, tuple[float, ...]]:
    """Return the scenario that the arguments describe, and the acceptance rates to show.

    With `--measure`, the models are called and their speeds measured.
    """
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
    """Return the simulated strategies that can verify this draft, judged by the models' names."""
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
    """Print the table.

    Not to be called on a running event loop: the simulations run a loop of their own.
    """
    target, draft = scenario.target, scenario.draft
    target_name, draft_name = map(strip_credentials, names)
    is_priced = scenario.target_price is not None and scenario.draft_price is not None
    print(
        f"{target_name}, drafted by {draft_name}:\n"
        f"an answer of {scenario.output} tokens to a prompt of {scenario.context}\n\n"
        f"  target  {_format_model_speed(target)}; {_format_price(scenario.target_price)}\n"
        f"  draft   {_format_model_speed(draft)}; {_format_price(scenario.draft_price)}\n"
        f"  Speeds that were not given or measured (--measure) are assumed. Listed prices are of {PRICES_AS_OF}.\n",
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
    print(f"\n{describe_plan_advice(scenario, acceptances, strategies)}", file=out)


def describe_plan_advice(
    scenario: PlanScenario, acceptances: Sequence[float], strategies: Sequence[StrategyEntry]
) -> str:
    """Return one line with the fastest strategy at each acceptance, or plain.

    Only strategies that keep the target's own text are considered. It is plain if none is much
    faster.
    """
    plain = estimate_answer(PLAIN.name, scenario)
    exact = [strategy.name for strategy in strategies if strategy.guarantee == "exact"]
    choices: dict[str, list[tuple[float, AnswerEstimate]]] = {}
    for acceptance in acceptances:
        found = {name: estimate_answer(name, replace(scenario, acceptance=acceptance)) for name in exact}
        best = min(found, key=lambda name: found[name].total_s, default=PLAIN.name)
        if best == PLAIN.name or plain.total_s < (1 + WORTHWHILE_GAIN) * found[best].total_s:
            choices.setdefault(PLAIN.name, []).append((acceptance, plain))
        else:
            choices.setdefault(f"--strategy {best}", []).append((acceptance, found[best]))
    if [*choices] == [PLAIN.name]:
        shares = _join_shares(acceptances)
        return f"plain: no strategy that keeps the target's text is much faster if {shares} of the draft is right"
    parts = [_describe_plan_choice(choice, estimates, plain) for choice, estimates in choices.items()]
    return f"use: {'; '.join(parts)}"


def _describe_plan_choice(choice: str, estimates: Sequence[tuple[float, AnswerEstimate]], plain: AnswerEstimate) -> str:
    where = f"if {_join_shares([acceptance for acceptance, _ in estimates])} of the draft is right"
    if choice == PLAIN.name:
        return f"{choice} {where}"
    gains = [f"{plain.total_s / found.total_s:.2f}x{_describe_cost_change(found, plain)}" for _, found in estimates]
    return f"{choice} {where} ({', '.join(gains)})"


def _describe_cost_change(found: AnswerEstimate, plain: AnswerEstimate) -> str:
    return f" for {found.cost / plain.cost - 1:+.0%} cost" if found.cost is not None and plain.cost else ""


def _join_shares(acceptances: Sequence[float]) -> str:
    *others, last = (f"{acceptance:.0%}" for acceptance in acceptances)
    return f"{', '.join(others)} or {last}" if others else last


def _format_estimate_row(estimate: AnswerEstimate, plain: AnswerEstimate) -> str:
    cells = f"{estimate.total_s:>9.2f} s{plain.total_s / estimate.total_s:>9.2f}x"
    if estimate.cost is None or plain.cost is None:
        return cells
    return cells + f"{estimate.cost:>12.5f}" + ("" if estimate is plain else f"{plain.cost - estimate.cost:>+12.5f}")


def _format_break_even_acceptance(what: str, acceptance: float | None) -> str:
    if acceptance is None:
        return f"never {what}"
    share = {0.0: "any", 1.0: "all"}.get(acceptance, f"at least {acceptance:.0%}")
    return f"{what} if {share} of the draft is right"


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
    """Return the given price, or the listed one if all models of these names have the same."""
    if argument is not None:
        return parse_price(argument)
    found = {find_model_price(name, {}) for name in names}
    return found.pop() if len(found) == 1 else None if found else FREE


async def _measure_pair_by_short_answers(
    scenario: PlanScenario, target_name: str, draft_name: str, prompt: str
) -> PlanScenario:
    """Measure both models' speeds and the draft's acceptance rate by a few short answers."""
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
        decoder = SpeculativeDecoder(target=target, draft=draft, config=SpeculativeConfig(strategy=REGENERATE.name))
        compared = await decoder.decode(prompt, max_tokens=_MEASURED_TOKENS)
    rate = compared.stats.draft_acceptance_rate
    return replace(scenario, target=target_speed, draft=draft_speed, acceptance=rate or 0.0)


async def _measure_copied_share(target: LlmProvider, draft: DraftProvider, prompt: str) -> float:
    """Return the share of words of the target's own answer that a copying draft has right."""
    request = ChatRequest.create(prompt, max_tokens=_MEASURED_TOKENS)
    pieces = split_into_pieces((await SpeculativeDecoder(target=target, draft=None).decode(request)).content)
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
    """Measure the draft's acceptance rate and speed by an answer with `tokens`."""
    decoder = SpeculativeDecoder(target=target, draft=draft, config=SpeculativeConfig(strategy=TOKENS.name))
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
    result = await SpeculativeDecoder(target=provider, draft=None).decode(request)
    first_s, num_tokens = result.timings.first_text_s, 0 if result.usage is None else result.usage.output_tokens
    if first_s is None or num_tokens < 8:
        raise TargetError(f"{provider.name} wrote too little to be measured; give another prompt")
    return ModelSpeed(first_token_s=first_s, token_s=(result.timings.total_s - first_s) / (num_tokens - 1))
