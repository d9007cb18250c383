"""Can `llm-spec bench` be trusted? It measures one server against itself many times, and against a slower one.

    python benchmarks/bench_accuracy.py [--target vllm:MODEL@http://HOST/v1] [--runs 100] [--prompts 12]
                                        [--slowdown 0.03] [--slow-runs 10] [--slow-prompts 60]

The interval of plain against plain should contain 1 in at least 95 of 100 runs. A server that is slower by
`--slowdown` should be found so. Both servers are `double_server.py`, each in a process of its own, spoken to over
sockets; with `--target` the first part is measured at a server of yours.
Exits with 1 where fewer than 95 % of the intervals contain 1, or one of the slower server does.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from typing import Final

from remote_speed_processes import start_server

from llm_spec import SpeculativeConfig
from llm_spec.cli.bench.contenders import list_contenders, open_contenders
from llm_spec.cli.bench.figures import BenchSummarizer, RatioEstimate
from llm_spec.cli.bench.prompts import BenchPrompt, prompt_from_text
from llm_spec.cli.bench.run import BenchOptions, BenchRun

TOKEN_MS: Final = 4.0
NUM_TOKENS: Final = 24
MIN_COVERAGE: Final = 0.95


def open_double(stack: ExitStack, *, slowdown: float = 0.0) -> str:
    """The provider string of a new server; `slowdown` is of all its times."""
    factor = 1.0 + slowdown
    url = stack.enter_context(
        start_server(
            answer_tokens=NUM_TOKENS, token_ms=TOKEN_MS * factor, first_token_ms=8.0 * factor, lifetime_s=3600.0
        )
    )
    return f"vllm:double@{url}"


async def measure(
    target: str, others: Mapping[str, str], prompts: Sequence[BenchPrompt], seed: int
) -> dict[str, RatioEstimate]:
    """The interval of each contender but plain."""
    specs = list_contenders(target, [], [], others)
    async with AsyncExitStack() as models:
        contenders = open_contenders(specs, SpeculativeConfig(), models)
        run = BenchRun(contenders, prompts, BenchOptions(seed=seed, max_tokens=NUM_TOKENS))
        await run.measure_all_contenders()
    summarizer = BenchSummarizer(prompts, run.answers, run.blocks, specs[0].name)
    estimates = {spec.name: summarizer.summarize(spec).ratios.median for spec in specs[1:]}
    return {name: estimate for name, estimate in estimates.items() if estimate is not None}


def measure_many(
    target: str, others: Mapping[str, str], *, num_runs: int, num_prompts: int
) -> dict[str, list[RatioEstimate]]:
    prompts = [prompt_from_text(f"Write about the number {number}.", number) for number in range(num_prompts)]
    found: dict[str, list[RatioEstimate]] = {}
    for seed in range(num_runs):
        for name, estimate in asyncio.run(measure(target, others, prompts, seed)).items():
            found.setdefault(name, []).append(estimate)
    return found


def print_estimates(name: str, estimates: Sequence[RatioEstimate]) -> int:
    """How many of the intervals contain 1."""
    num_with_one = sum(not estimate.excludes_one for estimate in estimates)
    ratios = sorted(estimate.ratio for estimate in estimates)
    widths = sorted((estimate.high or 0.0) - (estimate.low or 0.0) for estimate in estimates)
    print(
        f"{name:12} {len(estimates):4} runs of {estimates[0].num_units} prompts: ratio {ratios[len(ratios) // 2]:.4f}"
        f" ({ratios[0]:.4f} to {ratios[-1]:.4f}), width of an interval {widths[len(widths) // 2]:.4f};"
        f" {num_with_one} contain 1",
        flush=True,
    )
    return num_with_one


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="a server for the first part; else a double")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--slowdown", type=float, default=0.03)
    parser.add_argument("--slow-runs", type=int, default=10)
    parser.add_argument("--slow-prompts", type=int, default=60)
    arguments = parser.parse_args()
    is_good = True
    with ExitStack() as stack:
        double = open_double(stack)
        if arguments.runs:
            target = arguments.target or double
            found = measure_many(target, {}, num_runs=arguments.runs, num_prompts=arguments.prompts)
            (again,) = found.values()
            is_good &= print_estimates("plain again", again) >= MIN_COVERAGE * len(again)
        if arguments.slow_runs:
            slower = {"slower": open_double(stack, slowdown=arguments.slowdown)}
            found = measure_many(double, slower, num_runs=arguments.slow_runs, num_prompts=arguments.slow_prompts)
            print_estimates("plain again", found["plain again"])
            is_good &= print_estimates("slower", found["slower"]) == 0
    return 0 if is_good else 1


if __name__ == "__main__":
    raise SystemExit(main())
