"""`llm-spec plan`: what each strategy would take in time and money, before anything is paid for."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Final, TextIO

from llm_spec.chat import ChatRequest
from llm_spec.config import SpeculativeConfig
from llm_spec.decoder import SpeculativeDecoder
from llm_spec.errors import ConfigError, TargetError
from llm_spec.money import FREE, PRICES_AS_OF, Price, find_price, read_price
from llm_spec.plan import PLANNED, Estimate, Situation, Speed, break_even, estimate
from llm_spec.provider import LlmProvider
from llm_spec.registry import model_parts, open_provider

__all__ = ["add_plan", "print_plan", "read_situation"]

_ACCEPTANCES: Final = (0.5, 0.8, 0.95)
_MEASURED_TOKENS: Final = 96


def add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]
    """Add the command to a parser."""
    plan = commands.add_parser(
        "plan",
        help="what each strategy would take, in time and money",
        description="Runs the strategies against models of the given speeds and prices, without asking anybody. "
        "Speeds are guesses unless they are given or, with --measure, taken from the models themselves.",
    )
    plan.add_argument("--target", required=True, help="the model whose answer counts, such as openai:gpt-4.1")
    plan.add_argument("--draft", required=True, help="who drafts, such as openai:gpt-4.1-nano")
    plan.add_argument("--context", type=int, default=2000, metavar="N", help="tokens of the prompt (%(default)s)")
    plan.add_argument("--output", type=int, default=600, metavar="N", help="tokens of the answer (%(default)s)")
    plan.add_argument("--acceptance", type=float, metavar="A", help="how likely a drafted token is right, 0 to 1")
    plan.add_argument(
        "--measure", metavar="PROMPT", help="ask both models this, and take speeds and acceptance from it"
    )
    for name, first_s, rate in (("target", 0.5, 60.0), ("draft", 0.3, 200.0)):
        plan.add_argument(f"--{name}-first-token-s", type=float, default=first_s, metavar="S", help="(%(default)s)")
        plan.add_argument(f"--{name}-tokens-per-s", type=float, default=rate, metavar="N", help="(%(default)s)")
        plan.add_argument(f"--{name}-price", metavar="IN:OUT[:CACHED]", help="for a million tokens")
    plan.add_argument("--streams", type=int, default=4, metavar="N", help="most requests at once (%(default)s)")


async def read_situation(arguments: argparse.Namespace) -> tuple[Situation, tuple[float, ...]]:
    """The situation that the arguments describe, measured where they say so, and the acceptance rates to show."""
    situation = Situation(
        context=arguments.context,
        output=arguments.output,
        acceptance=_ACCEPTANCES[0] if arguments.acceptance is None else arguments.acceptance,
        target=_speed(arguments.target_first_token_s, arguments.target_tokens_per_s, "--target-tokens-per-s"),
        draft=_speed(arguments.draft_first_token_s, arguments.draft_tokens_per_s, "--draft-tokens-per-s"),
        target_price=_listed(arguments.target_price, arguments.target),
        draft_price=_listed(arguments.draft_price, *model_parts(arguments.draft)),
        max_concurrent_streams=arguments.streams,
    )
    if arguments.measure is not None:
        situation = await _measured(situation, arguments.target, arguments.draft, arguments.measure)
        return situation, (situation.acceptance,)
    return situation, _ACCEPTANCES if arguments.acceptance is None else (situation.acceptance,)


def print_plan(situation: Situation, acceptances: tuple[float, ...], *, names: tuple[str, str], out: TextIO) -> None:
    """Print the table; not to be called on a running event loop, for the strategies are run by a clock of their own."""
    target, draft = situation.target, situation.draft
    print(
        f"{names[0]} with {names[1]}: a prompt of {situation.context} tokens, an answer of {situation.output}\n"
        f"first token {target.first_token_s:.2f} s, then {_rate(target)} tokens/s; draft {draft.first_token_s:.2f} s, "
        f"{_rate(draft)} tokens/s; {situation.max_concurrent_streams} requests at once\n"
        f"prices for a million tokens (list of {PRICES_AS_OF} unless given): target {_told(situation.target_price)}; "
        f"draft {_told(situation.draft_price)}\n",
        file=out,
    )
    plain = estimate("plain", situation)
    print(f"{'':<9}{'accepted':>8}{'time':>10}{'':>8}{'money':>12}{'saved':>12}  faster, cheaper from", file=out)
    print(_row("plain", "", plain, plain), file=out)
    for strategy, needs in PLANNED.items():
        faster, cheaper = break_even(strategy, situation)
        for acceptance in acceptances:
            found = estimate(strategy, replace(situation, acceptance=acceptance))
            cells = _row(strategy, f"{acceptance:.2f}", found, plain)
            print(f"{cells}  {_from(faster)}, {_from(cheaper)}; the target {needs}", file=out)


def _row(name: str, acceptance: str, found: Estimate, plain: Estimate) -> str:
    money = saved = "unknown"
    if found.cost is not None and plain.cost is not None:
        money, saved = f"{found.cost:.5f}", f"{plain.cost - found.cost:+.5f}"
    speedup = f"{plain.total_s / found.total_s:.2f}x"
    return f"{name:<9}{acceptance:>8}{found.total_s:>8.2f} s{speedup:>8}{money:>12}{saved:>12}"


def _from(acceptance: float | None) -> str:
    return "never" if acceptance is None else f"{acceptance:.2f}"


def _rate(speed: Speed) -> str:
    return f"{1.0 / speed.token_s:.0f}" if speed.token_s else "any number of"


def _told(price: Price | None) -> str:
    if price is None:
        return "unknown"
    return f"{price.input:g} in, {price.output:g} out" + (
        "" if price.cached_input is None else f", {price.cached_input:g} cached"
    )


def _speed(first_token_s: float, tokens_per_s: float, option: str) -> Speed:
    if not tokens_per_s > 0.0:
        raise ConfigError(f"{option} is {tokens_per_s!r}; it must be a number greater than 0")
    return Speed(first_token_s=first_token_s, token_s=1.0 / tokens_per_s)


def _listed(argument: str | None, *names: str) -> Price | None:
    """The price given, else that of the models of these names, if it is one."""
    if argument is not None:
        return read_price(argument)
    found = {find_price(name, {}) for name in names}
    return found.pop() if len(found) == 1 else None if found else FREE


async def _measured(situation: Situation, target_name: str, draft_name: str, prompt: str) -> Situation:
    """Both models' speeds, and how often the draft says what the target says, by three short answers."""
    target = open_provider(target_name)
    try:
        draft = open_provider(draft_name)
        try:
            target_speed = await _measured_speed(target, prompt)
            draft_speed = await _measured_speed(draft, prompt)
            decoder = SpeculativeDecoder(draft, target, SpeculativeConfig(strategy="regenerate"))
            compared = await decoder.decode(prompt, max_tokens=_MEASURED_TOKENS)
        finally:
            await draft.aclose()
    finally:
        await target.aclose()
    rate = compared.stats.draft_acceptance_rate
    return replace(situation, target=target_speed, draft=draft_speed, acceptance=rate or 0.0)


async def _measured_speed(provider: LlmProvider, prompt: str) -> Speed:
    request = ChatRequest.create(prompt, max_tokens=_MEASURED_TOKENS)
    result = await SpeculativeDecoder(None, provider).decode(request)
    first_s, num_tokens = result.timings.first_text_s, 0 if result.usage is None else result.usage.output_tokens
    if first_s is None or num_tokens < 8:
        raise TargetError(f"{provider.name} wrote too little to measure it by; give another prompt")
    return Speed(first_token_s=first_s, token_s=(result.timings.total_s - first_s) / (num_tokens - 1))
