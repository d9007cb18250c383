"""The report on a terminal: plain-text tables."""

from __future__ import annotations

from typing import Final

from llm_spec.cli.bench.advice import find_advice
from llm_spec.cli.bench.report import BenchReport, describe_bench_conditions
from llm_spec.cli.bench.report_tables import ReportTable, build_report_tables, list_report_notes
from llm_spec.cli.screen import escape_control_characters

__all__ = ["format_text_report"]

_MAX_NAME: Final = 34


def format_text_report(report: BenchReport) -> str:
    """Format the whole report."""
    tables = [_format_text_table(table) for table in build_report_tables(report)]
    advice = find_advice(report)
    parts = [
        "\n".join(describe_bench_conditions(report)),
        *tables,
        "\n".join(list_report_notes(report)),
        "" if advice is None else advice.text,
    ]
    return escape_control_characters("\n\n".join(part for part in parts if part))


def _format_text_table(table: ReportTable) -> str:
    """Align the columns, the first to the left."""
    lines = [table.head, *((_shorten_middle(row[0]), *row[1:]) for row in table.rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = [
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        )
        for line in lines
    ]
    return "\n".join(line.rstrip() for line in shown)


def _shorten_middle(name: str) -> str:
    """Shorten a long name in the middle, since its ends tell more."""
    half = (_MAX_NAME - 1) // 2
    return name if len(name) <= _MAX_NAME else f"{name[:half]}…{name[-half:]}"
