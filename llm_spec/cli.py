"""`llm-spec`: run a prompt, plan, serve, list providers."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, TextIO, get_args

import llm_spec
from llm_spec.chat import ChatRequest, Origin, TextDelta
from llm_spec.config import SpeculativeConfig, StrategyName
from llm_spec.decoder import SpeculativeDecoder
from llm_spec.errors import ConfigError, InvalidRequestError, LlmSpecError, TargetError
from llm_spec.money import read_price
from llm_spec.registry import open_draft, open_provider, registered_providers
from llm_spec.result import SpeculativeFinish, SpeculativeResult
from llm_spec.tokens.lookahead import CostAware, Fixed, LookaheadPolicy

__all__ = ["main"]

_COLOURS: Final[dict[Origin, str]] = {"accepted": "32", "correction": "33", "bonus": "36", "plain": "0"}
_LEGEND: Final[dict[Origin, str]] = {
    "accepted": "drafted and accepted",
    "correction": "the target's correction",
    "bonus": "the target's bonus",
    "plain": "plain step",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 0, 2 for anything wrong with input or model, 130 for Ctrl-C."""
    arguments = _parser().parse_args(argv)
    logging.getLogger("llm_spec").addHandler(logging.NullHandler())  # what matters here is said in one line of its own
    try:
        return _COMMANDS[arguments.command](arguments)
    except LlmSpecError as error:
        print(f"llm-spec: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has seen enough; keep the interpreter from complaining about it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="llm-spec", description="Speculative decoding as middleware.")
    parser.add_argument("--version", action="version", version=f"llm-spec {llm_spec.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("providers", help="what is installed, and what each can do")
    run = commands.add_parser("run", help="answer a prompt, the draft helping the target")
    run.add_argument("prompt", metavar="PROMPT", help="the user's message; - reads it from standard input")
    run.add_argument("--target", default="builtin:target", help="the model whose answer counts (%(default)s)")
    run.add_argument(
        "--draft", default="lookup+builtin:draft", help="who drafts: a model, lookup, or both (%(default)s)"
    )
    run.add_argument("--strategy", default="auto", choices=get_args(StrategyName), help="how to verify (%(default)s)")
    run.add_argument(
        "--lookahead", default="adaptive", metavar="N", help="tokens a draft proposes, 1 to 32 (%(default)s)"
    )
    run.add_argument("--max-tokens", type=int, default=128, metavar="N", help="longest answer (%(default)s)")
    run.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (the target's default)")
    run.add_argument("--top-p", type=float, metavar="P")
    run.add_argument("--seed", type=int, metavar="N", help="one seed, one text, with and without speculation")
    run.add_argument("--prediction", metavar="FILE", help="what the answer will probably be (strategy predict)")
    run.add_argument("--target-price", metavar="IN:OUT[:CACHED]", help="for a million tokens, for the summary's cost")
    run.add_argument("--draft-price", metavar="IN:OUT[:CACHED]")
    run.add_argument("--max-cost", type=float, metavar="X", help="end the answer where it would cost more")
    run.add_argument("--no-speculation", action="store_true", help="the target alone")
    run.add_argument("--compare", action="store_true", help="also run the target alone: same text? how much faster?")
    run.add_argument("--json", action="store_true", help="one JSON object instead of text")
    from llm_spec.cli_plan import add_plan
    from llm_spec.cli_serve import add_serve

    add_plan(commands)
    add_serve(commands)
    return parser


def _serve(arguments: argparse.Namespace) -> int:
    from llm_spec.cli_serve import run_serve

    return run_serve(arguments)


def _plan(arguments: argparse.Namespace) -> int:
    from llm_spec.cli_plan import print_plan, read_situation

    situation, acceptances = asyncio.run(read_situation(arguments))
    print_plan(situation, acceptances, names=(arguments.target, arguments.draft), out=sys.stdout)
    return 0


def _list_providers(_: argparse.Namespace) -> int:
    for name, entry in registered_providers().items():
        state = f"needs: {entry.install}" if entry.missing else "ready"
        print(f"{name:<10} {entry.summary}\n{'':<10} {state}")
    return 0


_COMMANDS: Final[Mapping[str, Callable[[argparse.Namespace], int]]] = {
    "plan": _plan,
    "providers": _list_providers,
    "run": lambda arguments: asyncio.run(_run(arguments)),
    "serve": _serve,
}


async def _run(arguments: argparse.Namespace) -> int:
    request = ChatRequest.create(
        _prompt(arguments.prompt),
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        seed=arguments.seed,
        prediction=_read(arguments.prediction),
    )
    strategy: StrategyName = "plain" if arguments.no_speculation else arguments.strategy
    told = {arguments.target: arguments.target_price, arguments.draft: arguments.draft_price}
    config = SpeculativeConfig(
        strategy=strategy,
        lookahead=_lookahead(arguments.lookahead),
        prices={name.partition("@")[0]: read_price(price) for name, price in told.items() if price is not None},
        max_request_cost=arguments.max_cost,
    )
    target = open_provider(arguments.target)
    draft = None if strategy == "plain" else open_draft(arguments.draft)
    try:
        decoder = SpeculativeDecoder(draft, target, config)
        result = await _answer(decoder, request, _Screen(sys.stdout, silent=arguments.json))
        same_text = None
        if arguments.compare:
            request = replace(request, sampling=replace(request.sampling, seed=result.seed))
            plain = await SpeculativeDecoder(None, target).decode(request)
            result = replace(result, plain_s=plain.timings.total_s, speedup_basis="a plain run beside this one")
            same_text = plain.content == result.content
    finally:
        await target.aclose()
        if draft is not None:
            await draft.aclose()
    _report(result, same_text, as_json=arguments.json)
    return 0


def _prompt(argument: str) -> str:
    prompt = sys.stdin.read() if argument == "-" else argument
    if not prompt.strip():
        raise InvalidRequestError("the prompt is empty; give the user's message, or - and a message on standard input")
    return prompt


def _read(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise InvalidRequestError(f"the prediction {path} cannot be read: {error}") from error


def _lookahead(argument: str) -> LookaheadPolicy:
    if argument == "adaptive":
        return CostAware()
    try:
        return Fixed(int(argument))
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"lookahead is {argument!r}; it must be 'adaptive' or an integer from 1 to 32") from error


async def _answer(decoder: SpeculativeDecoder, request: ChatRequest, screen: _Screen) -> SpeculativeResult:
    screen.legend()
    async with decoder.stream(request) as events:
        async for event in events:
            match event:
                case TextDelta():
                    screen.show(event)
                case SpeculativeFinish(result=SpeculativeResult() as result):
                    screen.end()
                    return result
                case _:
                    pass
    raise TargetError(f"{decoder.name} ended without a result")


class _Screen:
    """Where the answer appears: in colours on a terminal, as the text alone in a pipe or file."""

    def __init__(self, out: TextIO, *, silent: bool) -> None:
        self._out = out
        self._silent = silent
        self._terminal = out.isatty() and not silent
        self._colours = self._terminal and "NO_COLOR" not in os.environ

    def legend(self) -> None:
        if self._colours:
            self._write("  ".join(self._paint(text, origin) for origin, text in _LEGEND.items()) + "\n\n")

    def show(self, delta: TextDelta) -> None:
        if not self._silent:
            self._write(self._paint(_harmless(delta.text), delta.origin) if self._terminal else delta.text)

    def end(self) -> None:
        if self._terminal:
            self._write("\n")

    def _paint(self, text: str, origin: Origin) -> str:
        return f"\033[{_COLOURS[origin]}m{text}\033[0m" if self._colours else text

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def _harmless(text: str) -> str:
    """What a model wrote, unable to steer the terminal: control characters show as symbols."""
    return "".join(c if c in "\n\t" or c.isprintable() or c == "\u00a0" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _report(result: SpeculativeResult, same_text: bool | None, *, as_json: bool) -> None:
    for reason in result.fallbacks:
        print(f"llm-spec: the draft failed and the target went on alone: {reason}", file=sys.stderr)
    if as_json:
        extra = {} if same_text is None else {"same_text_as_plain": same_text}
        print(json.dumps(result.to_dict() | extra))
    elif sys.stdout.isatty():
        print(f"\n{result.summary()}")
        if same_text is not None:
            print(f"the target alone: {result.plain_s:.3f} s, {'the same text' if same_text else 'ANOTHER TEXT'}")
