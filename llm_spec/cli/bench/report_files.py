"""The report as files: JSON with all data, CSV with a row for each answer, HTML."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from llm_spec.cli.bench.advice import find_advice
from llm_spec.cli.bench.records import AnswerRecord
from llm_spec.cli.bench.report import BenchReport
from llm_spec.cli.bench.report_html import render_report_page
from llm_spec.contract.errors import ConfigError, InvalidRequestError

__all__ = ["check_report_path", "render_csv", "render_json", "write_report"]

_FORMAT_VERSION: Final = 1


def check_report_path(path: str) -> None:
    """Raise ConfigError if no report can be written to this path."""
    if Path(path).suffix not in _RENDERERS:
        raise ConfigError(f"output is {path!r}; its name must end in one of {', '.join(_RENDERERS)}")
    if not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"output is {path!r}; the folder {Path(path).parent} does not exist")


def write_report(report: BenchReport, path: str) -> None:
    """Write the report in the format of the file's extension.

    Raises InvalidRequestError if the file cannot be written.
    """
    try:
        Path(path).write_text(
            _RENDERERS[Path(path).suffix](report), encoding="utf-8", errors="backslashreplace", newline=""
        )
    except OSError as error:
        raise InvalidRequestError(f"the report {path} cannot be written: {error}") from error


def render_json(report: BenchReport) -> str:
    """Render the settings, the machine, each contender's figures, each prompt and each answer."""
    contenders: list[dict[str, Any]] = []
    for summary in report.contenders:
        values = asdict(summary)
        ends = {"worst": summary.ratios.worst_prompt, "best": summary.ratios.best_prompt}
        values["ratios"] |= {name: None if end is None else asdict(end) for name, end in ends.items()}
        contenders.append(values)
    advice = find_advice(report)
    content = {
        "llm_spec_bench": _FORMAT_VERSION,
        "is_complete": report.is_complete,
        "data": report.data,
        "options": asdict(report.options),
        "environment": asdict(report.environment),
        "load_before": report.load_before,
        "load_after": report.load_after,
        "priming_s": report.priming_s,
        "advice": None if advice is None else asdict(advice),
        "contenders": contenders,
        "prompts": [
            {
                "id": prompt.id,
                "category": prompt.category,
                "turns": [[message.to_openai() for message in turn] for turn in prompt.turns],
            }
            for prompt in report.prompts
        ],
        "answers": [_flatten_answer_to_row(report, answer) for answer in report.answers],
    }
    return json.dumps(content, ensure_ascii=False, indent=1) + "\n"


def render_csv(report: BenchReport) -> str:
    """Render one row for each answer, with its text last."""
    rows = [_flatten_answer_to_row(report, answer) for answer in report.answers]
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, [*(name for name in rows[0] if name != "text"), "text"], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        counts = {name: " ".join(map(str, row[name])) for name in ("drafted_at", "accepted_at")}
        writer.writerow(row | counts)
    return out.getvalue()


def _flatten_answer_to_row(report: BenchReport, answer: AnswerRecord) -> dict[str, Any]:
    values = asdict(answer)
    key = values.pop("key")
    prompt = report.prompts[answer.key.prompt]
    return {**key, "id": prompt.id, "category": prompt.category, **values}


_RENDERERS: Final[Mapping[str, Callable[[BenchReport], str]]] = {
    ".html": render_report_page,
    ".json": render_json,
    ".csv": render_csv,
}
