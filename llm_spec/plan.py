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

from llm_spec._checks import check_number
from llm_spec.chat import ChatRequest, Usage
from llm_spec.config import JudgeConfig, SpeculativeConfig, StrategyName
from llm_spec.decoder import SpeculativeDecoder
from llm_spec.errors import ConfigError
from llm_spec.money import Price
from llm_spec.provider import DraftProvider, LlmProvider
from llm_spec.testing.clock import run_virtual
from llm_spec.testing.hosted import HostedModel
from llm_spec.testing.simulated import SimulatedDraft, SimulatedTarget
from llm_spec.tokens.lookahead import MAX_LOOKAHEAD

__all__ = ["PLANNED", "Estimate", "Situation", "Speed", "break_even", "estimate"]

PLANNED: Final[dict[StrategyName, str]] = {
    "tokens": "the draft proposes the next tokens, the target checks them all in one step",
    "race": "further requests to the target begin where the draft says that its answer will arrive",
    "probe": "one request to the target checks several tokens of the draft",
    "predict": "the draft's answer goes along with the request, as a predicted output",
    "judge": "the target reads the draft's answer and keeps what is right; the text need not be its own",
}
_SEEDS: Final = 6
_WORDS: Final = 10  # of a sentence


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Seconds of a model until its first token, and between two tokens."""

    first_token_s: float
    token_s: float

    def __post_init__(self) -> None:
        check_number(ConfigError, "first_token_s", self.first_token_s, 0.0)
        check_number(ConfigError, "token_s", self.token_s, 0.0)


@dataclass(frozen=True, kw_only=True)
class Situation:
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
    target: Speed
    draft: Speed
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


class Estimate(NamedTuple):
    """The mean of a few answers: seconds, and money of target and draft together (None: a price is not known)."""

    total_s: float
    cost: float | None


@cache
def estimate(strategy: StrategyName, situation: Situation) -> Estimate:
    """What one answer takes by a strategy ("plain" or one of `PLANNED`), in its decoder's first speculative request."""
    if strategy == "tokens":
        return _by_tokens(situation)
    taken = [_answered(strategy, situation, seed) for seed in range(_SEEDS)]
    costs = [cost for _, cost in taken if cost is not None]
    return Estimate(
        total_s=sum(total_s for total_s, _ in taken) / _SEEDS,
        cost=sum(costs) / _SEEDS if len(costs) == _SEEDS else None,
    )


def _by_tokens(situation: Situation) -> Estimate:
    """Rounds of the fastest lookahead: drafted tokens count up to the first wrong one (arXiv 2211.17192)."""
    plain = estimate("plain", situation)
    target, draft, right = situation.target, situation.draft, situation.acceptance
    fastest_s, drafted = target.token_s, 0.0  # for a token of the answer
    for lookahead in range(1, situation.max_lookahead + 1):
        num_emitted = sum(right**n for n in range(lookahead + 1))
        round_s = lookahead * (draft.token_s + situation.verify_token_s) + target.token_s
        if round_s / num_emitted < fastest_s:
            fastest_s, drafted = round_s / num_emitted, lookahead / num_emitted
    first_s = draft.first_token_s if drafted else 0.0
    num_rest = situation.output - 1
    total_s = plain.total_s + first_s - num_rest * (target.token_s - fastest_s)
    price = situation.draft_price
    if plain.cost is None or price is None:
        return Estimate(total_s, None)
    used = Usage(input_tokens=situation.context if drafted else 0, output_tokens=round(num_rest * drafted))
    return Estimate(total_s, plain.cost + price.of(used))


def break_even(strategy: StrategyName, situation: Situation) -> tuple[float | None, float | None]:
    """The lowest acceptance, in twentieths, from which on a strategy is faster, and cheaper, than plain; None: none."""
    plain = estimate("plain", situation)
    faster = cheaper = 21  # the lowest so far, in twentieths
    for twentieths in range(20, -1, -1):
        found = estimate(strategy, replace(situation, acceptance=twentieths / 20))
        if faster == twentieths + 1 and found.total_s < plain.total_s:
            faster = twentieths
        if cheaper == twentieths + 1 and found.cost is not None and plain.cost is not None and found.cost < plain.cost:
            cheaper = twentieths
        if twentieths not in (faster, cheaper):
            break
    return _share(faster), _share(cheaper)


def _share(twentieths: int) -> float | None:
    return None if twentieths > 20 else twentieths / 20


def _answered(strategy: StrategyName, situation: Situation, seed: int) -> tuple[float, float | None]:
    answer = "".join(_sentences(situation.output, random.Random(seed)))  # noqa: S311 - a reproducible text
    prompt = " ".join(["one"] * situation.context)  # also by its bytes, a quarter of a token each
    config = SpeculativeConfig(
        strategy=strategy,
        max_concurrent_streams=situation.max_concurrent_streams,
        judge=JudgeConfig(max_rounds=64),
        prices={
            name: price
            for name, price in (("target", situation.target_price), ("draft", situation.draft_price))
            if price is not None
        },
    )
    target = _target(strategy, situation, answer)
    draft = None if strategy == "plain" else _draft(strategy, situation, answer, seed)
    request = ChatRequest.create(prompt, temperature=0.0)
    result = run_virtual(SpeculativeDecoder(draft, target, config).decode(request))
    return result.timings.total_s, result.cost.total


def _target(strategy: StrategyName, situation: Situation, answer: str) -> LlmProvider:
    speed = situation.target
    if strategy in ("race", "probe"):
        first_token_s = speed.first_token_s + situation.context * situation.read_token_s
        return SimulatedTarget(
            answer,
            first_token_s=speed.token_s if strategy == "probe" else first_token_s,
            token_s=speed.token_s,
            round_trip_s=situation.round_trip_s,
            by_ids=True,
            num_prompt_tokens=situation.context,
        )
    return HostedModel(
        answer,
        first_token_s=speed.first_token_s + situation.round_trip_s,
        token_s=speed.token_s,
        read_token_s=situation.read_token_s,
        predicted_token_s=speed.token_s / situation.predicted_speedup,
    )


def _draft(strategy: StrategyName, situation: Situation, answer: str, seed: int) -> DraftProvider:
    speed, agreement = situation.draft, situation.acceptance
    if strategy == "judge":  # a sentence stands or falls as a whole
        rng = random.Random(seed)  # noqa: S311 - a reproducible draft
        answer = "".join(
            line if rng.random() < agreement else line.replace(" ", " other ", 1) for line in answer.splitlines(True)
        )
        agreement = 1.0
    return SimulatedDraft(answer, agreement, seed, first_token_s=speed.first_token_s, token_s=speed.token_s)


def _sentences(num_tokens: int, rng: random.Random) -> Iterator[str]:
    """Lines of random words, of so many tokens together."""
    while num_tokens > 0:
        num_words = max(1, min(_WORDS, num_tokens - 2))
        words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(num_words)]
        yield " ".join(words) + ".\n"
        num_tokens -= num_words + 2
