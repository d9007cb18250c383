"""The results of a measurement as one value, and the number formats of all reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llm_spec.cli.bench.contenders import Contender
from llm_spec.cli.bench.environment import BenchEnvironment
from llm_spec.cli.bench.figures import BenchSummarizer, ContenderSummary, RatioEstimate, percentile
from llm_spec.cli.bench.prompts import BenchPrompt
from llm_spec.cli.bench.records import AnswerRecord
from llm_spec.cli.bench.run import BenchOptions, BenchRun
from llm_spec.decoder.entry_points import strip_credentials

__all__ = [
    "BenchReport",
    "describe_bench_conditions",
    "describe_measurement_noise",
    "format_as_percent",
    "format_ratio",
    "format_seconds",
]


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """The data of all reports.

    The first contender is plain. `data` names the source of the prompts.
    """

    data: str
    options: BenchOptions
    environment: BenchEnvironment
    load_before: float | None
    load_after: float | None
    is_complete: bool
    prompts: Sequence[BenchPrompt]
    contenders: Sequence[ContenderSummary]
    answers: Sequence[AnswerRecord]
    priming_s: dict[str, float]

    @property
    def plain(self) -> ContenderSummary:
        """The target alone."""
        return self.contenders[0]

    @property
    def prompt_categories(self) -> list[str]:
        """The prompts' categories, in order."""
        return list(dict.fromkeys(prompt.category for prompt in self.prompts if prompt.category is not None))

    @classmethod
    def from_run(
        cls, run: BenchRun, *, data: str, environment: BenchEnvironment, loads: tuple[float | None, float | None]
    ) -> BenchReport:
        """Make a report of a measurement, finished or not."""
        contenders: Sequence[Contender] = run.contenders
        summarizer = BenchSummarizer(run.prompts, run.answers, run.blocks, contenders[0].name)
        medians = {name: percentile(values, 50) for name, values in run.priming_s.items()}
        return cls(
            data=data,
            options=run.options,
            environment=environment,
            load_before=loads[0],
            load_after=loads[1],
            is_complete=run.is_complete,
            prompts=run.prompts,
            contenders=[summarizer.summarize(contender.spec, contender.failure) for contender in contenders],
            answers=run.answers,
            priming_s={strip_credentials(name): median for name, median in medians.items() if median is not None},
        )


def describe_bench_conditions(report: BenchReport) -> list[str]:
    """Describe how it was measured, in lines for people."""
    options, environment = report.options, report.environment
    sampling = "greedy" if options.temperature == 0 else f"temperature {options.temperature:g}"
    runs = "" if options.repeat == 1 else f", {options.repeat} runs"
    at_once = "one at a time" if options.concurrency == 1 else f"{options.concurrency} at once"
    versions = ", ".join(f"{name} {version}" for name, version in environment.packages.items())
    loads = [f"{load:.2f}" for load in (report.load_before, report.load_after) if load is not None]
    cut = "" if report.is_complete else f"Not finished: plain has given {report.plain.num_answers} answers.\n"
    primed = [f"{name} {format_seconds(seconds)}" for name, seconds in report.priming_s.items()]
    lines = [
        f"{cut}{report.plain.target}: {len(report.prompts)} prompts of {report.data}{runs}, {at_once}, {sampling}, "
        f"at most {options.max_tokens} tokens, seed {options.seed}, warm-up {options.warmup}",
        f"{environment.date}, Python {environment.python}, {versions}",
        f"{environment.system}, {environment.processor}, {environment.cores} cores"
        + (f", {environment.accelerator}" if environment.accelerator else "")
        + (f", load {' before, '.join(loads)} after" if len(loads) == 2 else ""),
    ]
    lines += _describe_contender_models(report.contenders)
    if options.concurrency > 1:
        lines.append(f"Medians are of throughput, by groups of {options.concurrency} prompts")
    if primed:
        lines.append(f"Each prompt was read once in advance, outside of all times: {', '.join(primed)} (median)")
    return [part for line in lines for part in line.split("\n")]


def _describe_contender_models(contenders: Sequence[ContenderSummary]) -> list[str]:
    """Explain the names of contenders."""
    drafts = dict.fromkeys(summary.draft for summary in contenders if summary.draft is not None)
    others = [f"{summary.name} = {summary.target}" for summary in contenders if summary.kind == "other"]
    lines = [f"Drafts: {', '.join(drafts)}"] if drafts else []
    return [*lines, f"Other models: {', '.join(others)}"] if others else lines


def describe_measurement_noise(report: BenchReport) -> str | None:
    """Describe the ratio of plain against plain, or return None if it was not measured."""
    again = next((summary for summary in report.contenders if summary.kind == "again"), None)
    if again is None or again.ratios.median is None or again.ratios.median.low is None:
        return None
    interval = format_estimate_interval(again.ratios.median)
    if again.ratios.median.excludes_one:
        return f"Plain against itself is {interval}: more than noise differs, so do not trust ratios near that."
    return f"Noise: plain against itself is {interval}."


def format_ratio(value: float | None) -> str:
    """Format a ratio, such as 1.52x, with three decimals near 1."""
    if value is None:
        return ""
    return f"{value:.3f}x" if 0.9 < value < 1.1 else f"{value:.2f}x"


def format_estimate_interval(estimate: RatioEstimate) -> str:
    """Format the interval of an estimate."""
    if estimate.low is None:
        return ""
    return f"{format_ratio(estimate.low)} to {format_ratio(estimate.high)}"


def format_seconds(value: float | None) -> str:
    """Format seconds in s or ms, with three digits."""
    if value is None:
        return ""
    if value >= 100:
        return f"{value:.0f} s"
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def format_as_percent(value: float | None) -> str:
    """Format a share in percent."""
    return "" if value is None else f"{value:.0%}"
