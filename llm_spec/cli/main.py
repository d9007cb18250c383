"""The entry point of `llm-spec`. The modules of a command are imported when it is called."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from llm_spec.cli.arguments import build_argument_parser
from llm_spec.contract.errors import LlmSpecError
from llm_spec.decoder.entry_points import registered_providers, strip_credentials

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    It is 0, or 2 for any error of the input or of a model, or 130 for Ctrl-C.
    """
    try:
        arguments = build_argument_parser().parse_args(argv)
        if arguments.command != "serve":  # the other commands print a line for all that matters
            logging.getLogger("llm_spec").addHandler(logging.NullHandler())
        return _COMMANDS[arguments.command](arguments)
    except LlmSpecError as error:
        print(f"llm-spec: error: {strip_credentials(' '.join(str(error).split()))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nllm-spec: interrupted" if sys.stderr.isatty() else "llm-spec: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # the reader closed the pipe; without this the interpreter would report it again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _handle_run_command(arguments: argparse.Namespace) -> int:
    from llm_spec.cli.run import run_prompt_command

    return run_prompt_command(arguments)


def _handle_serve_command(arguments: argparse.Namespace) -> int:
    from llm_spec.cli.serve import serve_from_arguments

    return serve_from_arguments(arguments)


def _handle_plan_command(arguments: argparse.Namespace) -> int:
    import asyncio

    from llm_spec.cli.plan import list_possible_strategies, print_plan_table, read_plan_scenario

    situation, acceptances = asyncio.run(read_plan_scenario(arguments))
    names = (arguments.target, arguments.draft)
    print_plan_table(situation, acceptances, names=names, strategies=list_possible_strategies(*names), out=sys.stdout)
    return 0


def _handle_bench_command(arguments: argparse.Namespace) -> int:
    from llm_spec.cli.bench.command import run_bench_command

    return run_bench_command(arguments)


def _handle_providers_command(_: argparse.Namespace) -> int:
    for name, entry in registered_providers().items():
        state = f"needs: {entry.install}" if entry.missing_modules else "ready"
        print(f"{name:<10} {entry.summary}\n{'':<10} {state}")
    return 0


_COMMANDS: Final[Mapping[str, Callable[[argparse.Namespace], int]]] = {
    "bench": _handle_bench_command,
    "plan": _handle_plan_command,
    "providers": _handle_providers_command,
    "run": _handle_run_command,
    "serve": _handle_serve_command,
}
