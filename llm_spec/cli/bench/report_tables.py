"""The tables and notes of a report, the same on a terminal and in the HTML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from llm_spec.cli.bench.figures import NUM_FIRST, ContenderSummary, LatencyFigures, PromptRatio, TextDifference
from llm_spec.cli.bench.report import (
    BenchReport,
    describe_measurement_noise,
    format_as_percent,
    format_estimate_interval,
    format_ratio,
    format_seconds,
)
from llm_spec.decoder.result import PLAIN_REASONS

__all__ = ["ReportTable", "build_report_tables", "describe_text_difference", "list_report_notes"]

_MAX_DIFFERENCES: Final = 3  # shown for each contender
_VERDICTS: Final = {"reference": "", "no difference": "no difference shown"}


@dataclass(frozen=True, kw_only=True)
class ReportTable:
    """A table of texts. Each row begins with a contender's name; `indexes` has its index."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    indexes: tuple[int, ...]

    @classmethod
    def create_without_empty_columns(
        cls, title: str, head: Sequence[str], rows: Mapping[int, Sequence[str]]
    ) -> ReportTable:
        """Make a table, leaving out the columns that are empty in all rows."""
        kept = [column for column in range(len(head)) if column == 0 or any(row[column] for row in rows.values())]
        return cls(
            title=title,
            head=tuple(head[column] for column in kept),
            rows=tuple(tuple(row[column] for column in kept) for row in rows.values()),
            indexes=tuple(rows),
        )


def build_report_tables(report: BenchReport) -> list[ReportTable]:
    """Return the tables of speed, times, work and categories; a table without rows is left out."""
    everyone = dict(enumerate(report.contenders))
    answering = {index: summary for index, summary in everyone.items() if summary.num_answers}
    tables = [
        ReportTable.create_without_empty_columns(
            "Speed", _SPEED_HEAD, {i: _format_speed_table_row(s) for i, s in everyone.items()}
        ),
        ReportTable.create_without_empty_columns(
            "Times", _TIME_HEAD, {i: _format_time_table_row(s) for i, s in answering.items()}
        ),
        ReportTable.create_without_empty_columns(
            "Answers", _WORK_HEAD, {i: _format_work_table_row(s) for i, s in answering.items()}
        ),
    ]
    categories = report.prompt_categories
    if len(categories) > 1:
        rows = {i: _format_category_table_row(s, categories) for i, s in answering.items() if s.ratios.categories and i}
        tables.append(ReportTable.create_without_empty_columns("Categories", ["median by category", *categories], rows))
    return [table for table in tables if table.rows]


_SPEED_HEAD: Final = (
    "plain's time / the contender's",
    "median",
    "95 % interval",
    "verdict",
    "worst",
    "best",
    "total",
    f"first {NUM_FIRST}",
)
_TIME_HEAD: Final = (
    "median (90th percentile)",
    "first token",
    "between tokens",
    "longest pause",
    "whole answer",
    "tokens/s",
)
_WORK_HEAD: Final = (
    "answers, tokens",
    "answers",
    "speculated",
    "tokens accepted",
    "of drafted",
    "reported",
    "by clock",
    "same text",
    "input",
    "output",
    "drafted",
    "draft read",
    "wrote",
    "cost",
    "of draft",
)


def _format_speed_table_row(summary: ContenderSummary) -> list[str]:
    ratios, verdict = summary.ratios, _VERDICTS.get(summary.verdict, summary.verdict)
    if summary.kind == "plain" or ratios.median is None:
        return [summary.name, "", "", verdict, "", "", "", ""]
    return [
        summary.name,
        format_ratio(ratios.median.ratio),
        format_estimate_interval(ratios.median),
        verdict,
        format_ratio(ratios.worst_prompt.ratio if ratios.worst_prompt else None),
        format_ratio(ratios.best_prompt.ratio if ratios.best_prompt else None),
        format_ratio(ratios.totals),
        format_ratio(ratios.first_ten),
    ]


def _format_time_table_row(summary: ContenderSummary) -> list[str]:
    times = summary.times
    cells = map(_format_latency, (times.first, times.between, times.pause, times.whole))
    return [summary.name, *cells, "" if times.tokens_per_s is None else f"{times.tokens_per_s:.1f}"]


def _format_latency(latency: LatencyFigures) -> str:
    if latency.median_s is None:
        return ""
    return f"{format_seconds(latency.median_s)} ({format_seconds(latency.p90_s)})"


def _format_work_table_row(summary: ContenderSummary) -> list[str]:
    speculation, tokens, texts, ratios = summary.speculation, summary.tokens, summary.texts, summary.ratios
    of_pair = [
        format_as_percent(speculation.request_share),
        format_as_percent(speculation.accepted_share),
        format_as_percent(speculation.acceptance_rate),
        format_ratio(ratios.reported_speedup),
        format_ratio(ratios.clock_speedup),
    ]
    is_pair = summary.kind == "pair"
    return [
        summary.name,
        str(summary.num_answers),
        *(of_pair if is_pair else [""] * len(of_pair)),
        "" if summary.kind == "plain" else f"{texts.num_same} of {texts.num_compared}",
        f"{tokens.input:,}",
        f"{tokens.output:,}",
        f"{tokens.drafted:,}" if is_pair else "",
        f"{tokens.draft_input:,}" if tokens.draft_input else "",
        f"{tokens.draft_output:,}" if tokens.draft_output else "",
        "" if tokens.cost is None else f"{tokens.cost:.4g}",
        f"{tokens.draft_cost:.4g}" if tokens.draft_cost else "",
    ]


def _format_category_table_row(summary: ContenderSummary, categories: Sequence[str]) -> list[str]:
    found = {category.category: category.estimate for category in summary.ratios.categories}
    estimates = [found.get(category) for category in categories]
    return [summary.name, *(format_ratio(estimate.ratio) if estimate else "" for estimate in estimates)]


def list_report_notes(report: BenchReport) -> list[str]:
    """Return notes to the tables, one line each."""
    notes = [noise for noise in [describe_measurement_noise(report)] if noise is not None]
    for summary in report.contenders:
        notes += [f"{summary.name}: {note}" for note in _list_contender_notes(summary)]
    return notes


def _list_contender_notes(summary: ContenderSummary) -> list[str]:
    notes = [] if summary.failure is None else [f"left out, {summary.failure}"]
    notes += [f"failed, {error}" for error in summary.errors if error != summary.failure]
    worst, best, differences = summary.ratios.worst_prompt, summary.ratios.best_prompt, summary.texts.differences
    if summary.kind in ("pair", "other") and worst is not None and best is not None:
        notes.append(f"worst at {_format_prompt_with_ratio(worst)}, best at {_format_prompt_with_ratio(best)}")
    reasons = summary.speculation.plain_reasons
    if summary.kind == "pair" and reasons:
        counts = "; ".join(f"{count} because {PLAIN_REASONS[name]}" for name, count in reasons.items())
        notes.append(f"answers without speculation: {counts}")
    notes += [f"another text, {describe_text_difference(difference)}" for difference in differences[:_MAX_DIFFERENCES]]
    if len(differences) > _MAX_DIFFERENCES:
        notes.append(f"another text in {len(differences) - _MAX_DIFFERENCES} more answers")
    return notes


def _format_prompt_with_ratio(prompt: PromptRatio) -> str:
    return f"{prompt.id} ({format_ratio(prompt.ratio)})"


def describe_text_difference(difference: TextDifference) -> str:
    """Describe where the texts differ, and what plain and the contender say there."""
    place = f"{difference.id}" + (f", turn {difference.turn + 1}" if difference.turn else "")
    return (
        f"{place}, from character {difference.character} (word {difference.word}): "
        f"plain has {difference.plain!r}, it has {difference.other!r}"
    )
