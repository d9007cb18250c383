"""`llm-spec bench`: measure the speedup on the user's own prompts."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from llm_spec.cli.bench.contenders import list_contenders, open_contenders
from llm_spec.cli.bench.environment import BenchEnvironment, read_system_load
from llm_spec.cli.bench.prompts import BenchPrompt, get_default_prompts, load_prompts, prompt_from_text, sample_prompts
from llm_spec.cli.bench.report import BenchReport
from llm_spec.cli.bench.report_files import check_report_path, write_report
from llm_spec.cli.bench.report_text import format_text_report
from llm_spec.cli.bench.run import BenchOptions, BenchRun
from llm_spec.cli.screen import ProgressBar, Spinner
from llm_spec.contract.checks import check_number
from llm_spec.contract.errors import ConfigError, TargetError
from llm_spec.decoder.config import SpeculativeConfig
from llm_spec.decoder.entry_points import strip_address, strip_credentials
from llm_spec.decoder.pricing import parse_price
from llm_spec.kit.model_folder.hub import show_fetches_on

__all__ = ["run_bench_command"]


def run_bench_command(arguments: argparse.Namespace) -> int:
    """Measure, and write the reports, also after Ctrl-C.

    The models are loaded before an event loop runs.
    """
    for path in arguments.output:
        check_report_path(path)
    prompts, data = _load_bench_prompts(arguments)
    options = BenchOptions(
        concurrency=arguments.concurrency,
        warmup=arguments.warmup,
        repeat=arguments.repeat,
        seed=arguments.seed,
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        streams=arguments.streams,
        primes=not arguments.no_priming,
    )
    others = _parse_name_value_pairs(arguments.contender, "contender", "NAME=SPEC")
    drafts = arguments.draft or ([] if others else ["lookup"])
    specs = list_contenders(arguments.target, drafts, arguments.strategy or ["auto"], others)
    prices = {
        strip_address(name): parse_price(price)
        for name, price in _parse_name_value_pairs(arguments.price, "price", "SPEC=IN:OUT").items()
    }
    config = SpeculativeConfig(prices=prices, max_concurrent_streams=options.streams)
    load_before, models = read_system_load(), AsyncExitStack()
    with Spinner("loading the models", sys.stderr) as spinner, show_fetches_on(spinner):
        contenders = open_contenders(specs, config, models)
    with ProgressBar(sys.stderr) as bar:
        run = BenchRun(contenders, prompts, options, bar.show_progress)
        is_interrupted = _measure_unless_interrupted(run, models)
    environment = BenchEnvironment.read_current()
    report = BenchReport.from_run(run, data=data, environment=environment, loads=(load_before, read_system_load()))
    return _print_and_write_reports(report, arguments.output, is_interrupted=is_interrupted)


def _measure_unless_interrupted(run: BenchRun, models: AsyncExitStack) -> bool:
    """Measure and close the models; returns True if Ctrl-C ended the measurement."""

    async def measure_and_close() -> None:
        async with models:
            await run.measure_all_contenders()

    try:
        asyncio.run(measure_and_close())
    except KeyboardInterrupt:
        return True
    return False


def _print_and_write_reports(report: BenchReport, paths: Sequence[str], *, is_interrupted: bool) -> int:
    if report.plain.num_answers == 0 and not is_interrupted:
        raise TargetError(f"{report.plain.target} answered nothing: {report.plain.failure or report.plain.errors[-1]}")
    if report.answers:
        print(format_text_report(report))
        for path in paths:
            write_report(report, path)
            print(f"written: {path}", file=sys.stderr)
    if is_interrupted:
        print("llm-spec: interrupted", file=sys.stderr)
        return 130
    return 0 if report.is_complete else 2


def _load_bench_prompts(arguments: argparse.Namespace) -> tuple[list[BenchPrompt], str]:
    """Return the prompts and a text that names their sources."""
    check_number(ConfigError, "num-prompts", arguments.num_prompts, 1, integer=True)
    check_number(ConfigError, "max-turns", arguments.max_turns, 1, integer=True)
    given = [prompt_from_text(text, number) for number, text in enumerate(arguments.prompt, 1)]
    sources = ["the command line"] if given else []
    for path in arguments.data:
        given += load_prompts(path)
        sources.append(Path(path).name)
    if not given:
        given, sources = get_default_prompts(arguments.target), ["the package"]
    chosen = sample_prompts(
        given, seed=arguments.seed, num_prompts=arguments.num_prompts, max_turns=arguments.max_turns
    )
    return chosen, " and ".join(sources)


def _parse_name_value_pairs(texts: Sequence[str], what: str, form: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise ConfigError(f"{what} is {strip_credentials(text)!r}; write it as {form}")
        if name in pairs:
            raise ConfigError(f"{what} {strip_credentials(name)!r} is given twice")
        pairs[name] = value
    return pairs
