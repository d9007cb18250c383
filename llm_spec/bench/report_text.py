"""The report on a terminal: tables in plain text."""

from __future__ import annotations

from typing import Final

from llm_spec.bench.report import BenchReport, describe_conditions
from llm_spec.bench.report_tables import Table, build_tables, list_notes
from llm_spec.cli_screen import escape_control_characters

__all__ = ["format_report"]

_MAX_NAME: Final = 34


def format_report(report: BenchReport) -> str:
    """The whole report."""
    tables = [_format_table(table) for table in build_tables(report)]
    parts = ["\n".join(describe_conditions(report)), *tables, "\n".join(list_notes(report))]
    return escape_control_characters("\n\n".join(part for part in parts if part))


def _format_table(table: Table) -> str:
    """Columns aligned, the first to the left."""
    lines = [table.head, *((_shorten(row[0]), *row[1:]) for row in table.rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = [
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        )
        for line in lines
    ]
    return "\n".join(line.rstrip() for line in shown)


def _shorten(name: str) -> str:
    """Both ends of a long name, which tell more than its middle."""
    half = (_MAX_NAME - 1) // 2
    return name if len(name) <= _MAX_NAME else f"{name[:half]}…{name[-half:]}"
