"""What each strategy would take in a given situation: time and money against plain, before anything is paid for.

The strategies themselves are run, by virtual clock, against models that have the situation's latencies and know one
random answer; prices turn their tokens into money. Of `tokens`, whose rounds take no waiting, it is the arithmetic.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Final, NamedTuple

from llm_spec.contract.checks import check_number
from llm_spec.contract.draft import DraftProvider
from llm_spec.contract.errors import ConfigError
from llm_spec.contract.events import Usage
from llm_spec.contract.provider import LlmProvider
from llm_spec.contract.request import ChatRequest
from llm_spec.decoder.config import SpeculativeConfig
from llm_spec.decoder.decoder import SpeculativeDecoder
from llm_spec.decoder.pricing import Price
from llm_spec.local.lookahead import MAX_LOOKAHEAD
from llm_spec.strategies.limits import JudgeConfig
from llm_spec.strategies.registry import PLAIN, Simulation, StrategyEntry, find_strategy, get_strategies_by_name
from llm_spec.testing.clock import run_virtual
from llm_spec.testing.hosted_model import SimulatedHostedModel
from llm_spec.testing.simulated import SimulatedDraft, SimulatedTarget

__all__ = [
    "AnswerEstimate",
    "ModelSpeed",
    "PlanScenario",
    "estimate_answer",
    "find_break_even_acceptances",
    "list_simulated_strategies",
]

_NUM_SEEDS: Final = 6
_WORDS_PER_LINE: Final = 10  # of a sentence


@dataclass(frozen=True, kw_only=True)
class ModelSpeed:
    """Seconds of a model until its first token, and between two tokens."""

    first_token_s: float
    token_s: float

    def __post_init__(self) -> None:
        check_number(ConfigError, "first_token_s", self.first_token_s, 0.0)
        check_number(ConfigError, "token_s", self.token_s, 0.0)


@dataclass(frozen=True, kw_only=True)
class PlanScenario:
    """A pair and a request.

    context, output: tokens of the prompt and of the answer. acceptance: how likely the target would have written a
    drafted token (`judge`: a drafted sentence). read_token_s: seconds for a token of a prompt that is not cached.
    predicted_speedup: how much faster than others predicted tokens come. round_trip_s is part of no other figure.
    verify_token_s: what each further token makes a step of the target take longer that checks several,
    max_lookahead: how many the draft proposes at most (both: `tokens`).
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
    """The mean of a few answers: seconds, and money of target and draft together (None: a price is not known)."""

    total_s: float
    cost: float | None


def list_simulated_strategies() -> tuple[StrategyEntry, ...]:
    """The strategies that can be simulated."""
    return tuple(entry for entry in get_strategies_by_name().values() if entry.simulation is not None)


@cache
def estimate_answer(name: str, scenario: PlanScenario) -> AnswerEstimate:
    """What one answer takes by `plain` or a simulated strategy, in its decoder's first speculative request."""
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
    """Rounds of the fastest lookahead: drafted tokens count up to the first wrong one (arXiv 2211.17192)."""
    plain = estimate_answer(PLAIN.name, scenario)
    target, draft, right = scenario.target, scenario.draft, scenario.acceptance
    fastest_s, drafted = target.token_s, 0.0  # for a token of the answer
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
    """The lowest acceptance, in twentieths, from which on a strategy is faster, and cheaper, than plain; None: none."""
    plain = estimate_answer(PLAIN.name, scenario)
    faster = cheaper = 21  # the lowest so far, in twentieths
    for num_twentieths in range(20, -1, -1):
        found = estimate_answer(strategy, replace(scenario, acceptance=num_twentieths / 20))
        if faster == num_twentieths + 1 and found.total_s < plain.total_s:
            faster = num_twentieths
        if (
            cheaper == num_twentieths + 1
            and found.cost is not None
            and plain.cost is not None
            and found.cost < plain.cost
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
    prompt = " ".join(["one"] * scenario.context)  # also by its bytes, a quarter of a token each
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
    result = run_virtual(SpeculativeDecoder(draft, target, config).decode(request))
    return result.timings.total_s, result.cost.total


def _make_simulated_target(kind: Simulation | None, scenario: PlanScenario, answer: str) -> LlmProvider:
    speed = scenario.target
    if kind in ("streams", "batches"):
        first_token_s = speed.first_token_s + scenario.context * scenario.read_token_s
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
    """Lines of random words, of so many tokens together."""
    while num_tokens > 0:
        num_words = max(1, min(_WORDS_PER_LINE, num_tokens - 2))
        words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(num_words)]
        yield " ".join(words) + ".\n"
        num_tokens -= num_words + 2
