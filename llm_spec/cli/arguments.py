"""The arguments of `llm-spec` and its commands."""

from __future__ import annotations

import argparse
import re
from typing import Any, Final, NoReturn, TypeAlias

from llm_spec import __version__
from llm_spec.contract.checks import suggest_name
from llm_spec.strategies.registry import list_strategy_choices

__all__ = ["build_argument_parser"]

# argparse has no public name for it
_Commands: TypeAlias = "argparse._SubParsersAction[_SuggestingParser]"  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]


_INVALID_CHOICE: Final = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")
_UNRECOGNIZED: Final = re.compile(r"unrecognized arguments: (--[^\s=]+)")


class _SuggestingParser(argparse.ArgumentParser):
    """An ArgumentParser whose errors suggest the command, choice or option that was probably meant.

    `option_names` has the options of all commands.
    """

    option_names: Final[list[str]] = []

    def add_argument(self, *names: Any, **settings: Any) -> argparse.Action:
        self.option_names.extend(name for name in names if name.startswith("--"))
        return super().add_argument(*names, **settings)

    def error(self, message: str) -> NoReturn:
        if choice := _INVALID_CHOICE.search(message):
            message += suggest_name(choice[1], re.findall(r"[\w-]+", choice[2]))
        elif option := _UNRECOGNIZED.search(message):
            message += suggest_name(option[1], self.option_names)
        super().error(message)


def build_argument_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line; its `command` is the name of the command."""
    parser = _SuggestingParser(prog="llm-spec", description="Speculative decoding as async middleware.")
    parser.add_argument("--version", action="version", version=f"llm-spec {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("providers", help="list the installed providers and what each can do")
    _add_run_arguments(commands)
    _add_plan_arguments(commands)
    _add_bench_arguments(commands)
    _add_serve_arguments(commands)
    return parser


def _add_run_arguments(commands: _Commands) -> None:
    run = commands.add_parser(
        "run",
        help="answer a prompt with a target and a draft",
        description="Answers a prompt, and shows how and how fast. First it finds out what a server can do, and times "
        "one answer of the server alone. It does neither if the output is a pipe, unless you give --compare or --json.",
    )
    run.add_argument("prompt", metavar="PROMPT", nargs="?", help="the user's message; - reads it from standard input")
    run.add_argument("--system", metavar="TEXT", help="the system message")
    run.add_argument(
        "--file", metavar="FILE", action="append", default=[], help="a file to append to the prompt; may be repeated"
    )
    run.add_argument("--target", default="builtin:target", help="the model whose answer counts (%(default)s)")
    run.add_argument(
        "--draft", default="lookup+builtin:draft", help="the draft: a model, lookup, or both (%(default)s)"
    )
    run.add_argument("--strategy", default="auto", choices=list_strategy_choices(), help="how to verify (%(default)s)")
    run.add_argument(
        "--lookahead", default="adaptive", metavar="N", help="tokens a draft proposes, 1 to 32 (%(default)s)"
    )
    run.add_argument(
        "--max-tokens", type=int, default=128, metavar="N", help="maximum length of the answer (%(default)s)"
    )
    run.add_argument(
        "--stop", metavar="TEXT", action="append", default=[], help="stop before this text; may be repeated"
    )
    run.add_argument(
        "--temperature", type=float, metavar="T", help="0 is greedy (the target's default; 0 for --compare at a server)"
    )
    run.add_argument("--top-p", type=float, metavar="P")
    run.add_argument(
        "--seed", type=int, metavar="N", help="the same seed gives the same text, with and without speculation"
    )
    run.add_argument("--prediction", metavar="FILE", help="a file with the probable answer (strategy predict)")
    run.add_argument(
        "--target-price", metavar="IN:OUT[:CACHED]", help="price per million tokens, used for the cost in the summary"
    )
    run.add_argument("--draft-price", metavar="IN:OUT[:CACHED]")
    run.add_argument("--max-cost", type=float, metavar="X", help="end each answer before it costs more than this")
    run.add_argument("--no-speculation", action="store_true", help="use the target alone")
    run.add_argument("--compare", action="store_true", help="also run the target alone, and compare text and time")
    run.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def _add_plan_arguments(commands: _Commands) -> None:
    plan = commands.add_parser(
        "plan",
        help="estimate the time and cost of each strategy",
        description="Simulates the strategies with models of the given speeds and prices; no model is called. "
        "Speeds are assumed unless you give them or measure them with --measure.",
    )
    plan.add_argument("--target", required=True, help="the model whose answer counts, such as openai:gpt-4.1")
    plan.add_argument("--draft", required=True, help="the draft, such as openai:gpt-4.1-nano")
    plan.add_argument("--context", type=int, default=2000, metavar="N", help="tokens of the prompt (%(default)s)")
    plan.add_argument("--output", type=int, default=600, metavar="N", help="tokens of the answer (%(default)s)")
    plan.add_argument(
        "--acceptance", type=float, metavar="A", help="probability that a drafted token is accepted, 0 to 1"
    )
    plan.add_argument(
        "--measure", metavar="PROMPT", help="send this prompt to both models and measure their speeds and acceptance"
    )
    for name, first_s, rate in (("target", "0.5", "60"), ("draft", "0.3; lookup, suffix: 0", "200; any number")):
        plan.add_argument(f"--{name}-first-token-s", type=float, metavar="S", help=f"({first_s})")
        plan.add_argument(f"--{name}-tokens-per-s", type=float, metavar="N", help=f"({rate})")
        plan.add_argument(f"--{name}-price", metavar="IN:OUT[:CACHED]", help="price per million tokens")
    plan.add_argument(
        "--streams", type=int, default=4, metavar="N", help="maximum number of concurrent requests (%(default)s)"
    )


def _add_bench_arguments(commands: _Commands) -> None:
    bench = commands.add_parser(
        "bench",
        help="measure the speedup on your own prompts",
        description="Every contender answers every prompt, in balanced order: the target alone, the target alone once "
        "more (this shows the noise), each draft with each strategy, and other models. See docs/bench.md.",
    )
    _add_bench_contenders(bench)
    _add_bench_prompts(bench)
    bench.add_argument(
        "--concurrency", type=int, default=1, metavar="N", help="prompts answered at the same time (%(default)s)"
    )
    bench.add_argument(
        "--warmup", type=int, default=0, metavar="N", help="untimed first requests to each decoder (%(default)s)"
    )
    bench.add_argument(
        "--repeat", type=int, default=1, metavar="N", help="runs of all prompts, each with new decoders (%(default)s)"
    )
    bench.add_argument(
        "--seed", type=int, default=0, metavar="N", help="the seed of the order and of sampling (%(default)s)"
    )
    bench.add_argument(
        "--max-tokens", type=int, default=256, metavar="N", help="maximum length of an answer (%(default)s)"
    )
    bench.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 is greedy: texts can be compared (%(default)s)"
    )
    bench.add_argument(
        "--streams",
        type=int,
        default=4,
        metavar="N",
        help="maximum number of concurrent requests to the target for one answer (%(default)s)",
    )
    bench.add_argument(
        "--no-priming",
        action="store_true",
        help="do not send each prompt to the target in advance; the first contender then pays for reading it",
    )
    bench.add_argument(
        "--output", metavar="FILE", action="append", default=[], help="write FILE.html, .json or .csv; may be repeated"
    )


def _add_bench_contenders(bench: argparse.ArgumentParser) -> None:
    bench.add_argument("--target", default="builtin:target", metavar="SPEC", help="the model to speed up (%(default)s)")
    bench.add_argument(
        "--draft",
        metavar="SPEC",
        action="append",
        default=[],
        help="a draft; may be repeated (lookup, unless you give --contender)",
    )
    bench.add_argument(
        "--strategy",
        action="append",
        default=[],
        choices=list_strategy_choices(),
        help="a strategy for each draft; may be repeated (auto)",
    )
    bench.add_argument(
        "--contender",
        metavar="NAME=SPEC",
        action="append",
        default=[],
        help="another model to compare with, such as ngram=vllm:model@http://host:8001/v1; may be repeated",
    )
    bench.add_argument(
        "--price", metavar="SPEC=IN:OUT[:CACHED]", action="append", default=[], help="price per million tokens"
    )


def _add_bench_prompts(bench: argparse.ArgumentParser) -> None:
    bench.add_argument(
        "--data",
        metavar="FILE",
        action="append",
        default=[],
        help="prompts: JSON lines with prompt, messages or turns, or ShareGPT's format; may be repeated "
        "(a small set in the package)",
    )
    bench.add_argument("--prompt", metavar="TEXT", action="append", default=[], help="a prompt; may be repeated")
    bench.add_argument("--num-prompts", type=int, metavar="N", help="use N random prompts, drawn by the seed (all)")
    bench.add_argument("--max-turns", type=int, metavar="N", help="use the first N turns of a conversation (all)")


def _add_serve_arguments(commands: _Commands) -> None:
    parser = commands.add_parser("serve", help="serve OpenAI's and Anthropic's APIs, and a page")
    parser.add_argument(
        "--config", metavar="FILE", help="a TOML file (without one, the built-in pair is served as model builtin)"
    )
    parser.add_argument("--host", metavar="ADDRESS", help="where to listen (127.0.0.1)")
    parser.add_argument("--port", type=int, metavar="N", help="0 chooses a free port (8700)")
    parser.add_argument("--workers", type=int, metavar="N", help="processes; each loads its own local models (1)")
    parser.add_argument(
        "--check",
        action="store_true",
        help="open the models, call each server once, and exit",
    )
