"""The advice in the last line of a report.

It follows from the verdicts and intervals of the table. An interval narrows with the square root of
the number of prompts. Once it is as narrow as a gain of `WORTHWHILE_GAIN`, it cannot hold both 1
and that gain.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

from llm_spec.cli.bench.figures import MIN_UNITS, ContenderSummary, RatioEstimate
from llm_spec.cli.bench.report import BenchReport, format_estimate_interval, format_ratio

__all__ = ["WORTHWHILE_GAIN", "BenchAdvice", "find_advice"]

# the smallest gain that more prompts should show or a plan should promise
WORTHWHILE_GAIN: Final = 0.05


@dataclass(frozen=True, kw_only=True)
class BenchAdvice:
    """The name of the contender to use, and the line that says so.

    `more_prompts`: how many more prompts would show whether another contender is faster, or None if
    that is known or more prompts would not help.
    """

    use: str
    text: str
    more_prompts: int | None = None


class _Measured(NamedTuple):
    summary: ContenderSummary
    median: RatioEstimate


def find_advice(report: BenchReport) -> BenchAdvice | None:
    """Return the advice, or None if nothing was compared with plain, or plain failed."""
    compared = [summary for summary in report.contenders if summary.kind in ("pair", "other")]
    if not compared or report.plain.failure is not None:
        return None
    plain, what = report.plain.name, "draft" if all(s.kind == "pair" for s in compared) else "contender"
    measured = [_Measured(s, s.ratios.median) for s in compared if s.failure is None and s.ratios.median is not None]
    if not measured:
        return BenchAdvice(use=plain, text=f"{plain}: each {what} failed, as the notes say")
    faster = [one for one in measured if one.summary.verdict == "faster"]
    if faster:
        return _advise_to_use(max(faster, key=_get_ratio), report)
    undecided = [one for one in measured if _may_be_faster(one.median)]
    if not undecided:
        return BenchAdvice(use=plain, text=f"{plain}: no {what} was faster here")
    return _advise_to_measure_more(max(undecided, key=_get_ratio).median, report)


def _get_ratio(measured: _Measured) -> float:
    return measured.median.ratio


def _may_be_faster(median: RatioEstimate) -> bool:
    """Return True if the interval leaves room for a worthwhile gain."""
    return median.high is None or median.high >= 1 + WORTHWHILE_GAIN


def _advise_to_use(best: _Measured, report: BenchReport) -> BenchAdvice:
    summary, median = best
    again = next((s.ratios.median for s in report.contenders if s.kind == "again"), None)
    if again is not None and median.low is not None and again.ratio >= median.low:
        noise = f"{report.plain.name} against itself is {format_ratio(again.ratio)}"
        return BenchAdvice(use=report.plain.name, text=f"measure again on a quieter machine: {noise}")
    what = f"--draft {summary.draft} --strategy {summary.strategy}" if summary.kind == "pair" else summary.name
    figures = f"{format_ratio(median.ratio)} ({format_estimate_interval(median)})"
    return BenchAdvice(use=summary.name, text=f"use: {what}: {figures} on these {len(summary.ratios.prompts)} prompts")


def _advise_to_measure_more(median: RatioEstimate, report: BenchReport) -> BenchAdvice:
    size = report.options.concurrency  # prompts that give one ratio
    if median.low is None or median.high is None:
        more = (MIN_UNITS - median.num_units) * size
        text = f"too few prompts to tell; at least {more} more are needed"
    else:
        narrowing = math.log(median.high / median.low) / math.log(1 + WORTHWHILE_GAIN)
        more = math.ceil(median.num_units * (narrowing**2 - 1)) * size
        shown = f"{report.plain.name}: no difference shown"
        text = f"{shown}; about {more} more prompts would show a gain of {WORTHWHILE_GAIN:.0%}"
    return BenchAdvice(use=report.plain.name, text=text, more_prompts=more)
