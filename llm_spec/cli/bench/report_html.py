"""The report as one HTML file: tables and plots, for light and dark screens and phones.

The page loads nothing. Text from a model, a server or a file is escaped by `escape_html`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Final

from llm_spec.cli.bench.advice import find_advice
from llm_spec.cli.bench.figures import percentile
from llm_spec.cli.bench.plots import (
    RatioDot,
    RatioStrip,
    ShareCurve,
    choose_axis_ticks,
    draw_ratio_strips,
    draw_share_curves,
    escape_html,
    make_cumulative_distribution,
)
from llm_spec.cli.bench.records import AnswerRecord
from llm_spec.cli.bench.report import BenchReport, describe_bench_conditions, format_ratio, format_seconds
from llm_spec.cli.bench.report_tables import (
    ReportTable,
    build_report_tables,
    describe_text_difference,
    list_report_notes,
)

__all__ = ["render_report_page"]

_MAX_POSITIONS: Final = 16
_MIN_ROUNDS: Final = 10  # a share of fewer rounds says little
_NUM_COLOURS: Final = 9


def render_report_page(report: BenchReport) -> str:
    """Render the whole page."""
    style = (files("llm_spec.cli.bench") / "report.css").read_text(encoding="utf-8")
    title = f"llm-spec bench: {report.plain.target}"
    advice = find_advice(report)
    sections = [
        _render_line_section("Advice", [] if advice is None else [advice.text]),
        _draw_speedups(report),
        *(_render_table(table) for table in build_report_tables(report)),
        *_draw_latency_distributions(report),
        _draw_acceptance_by_position(report),
        _render_line_section("Notes", list_report_notes(report)),
        _render_text_differences(report),
    ]
    conditions = "".join(f"<p>{escape_html(line)}</p>" for line in describe_bench_conditions(report))
    body = "\n".join(section for section in sections if section)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape_html(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        f"<header><h1>{escape_html(title)}</h1>{conditions}</header>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _render_section(title: str, content: str, kind: str = "") -> str:
    return f'<section class="{kind}"><h2>{escape_html(title)}</h2>{content}</section>' if content else ""


def _render_colour_chip(index: int, name: str) -> str:
    """Render a contender's name with its line as in the plots: colour and dashes."""
    line = f'<line class="curve s{index % _NUM_COLOURS}" x2="22" y1="5" y2="5"/>'
    return f'<span class="chip"><svg aria-hidden="true" width="22" height="10">{line}</svg>{escape_html(name)}</span>'


def _render_colour_legend(report: BenchReport, indexes: Sequence[int]) -> str:
    chips = "".join(_render_colour_chip(index, report.contenders[index].name) for index in indexes)
    return f'<p class="legend">{chips}</p>'


def _render_table(table: ReportTable) -> str:
    head = "".join(f'<th scope="col">{escape_html(name)}</th>' for name in table.head)
    rows = "".join(
        f'<tr><th scope="row">{_render_colour_chip(index, row[0])}</th>'
        + "".join(f"<td>{escape_html(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for index, row in zip(table.indexes, table.rows, strict=True)
    )
    content = (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    )
    return _render_section(table.title, content, "wide")


def _render_line_section(title: str, lines: Sequence[str]) -> str:
    return _render_section(title, "".join(f"<p>{escape_html(line)}</p>" for line in lines), "wide")


def _draw_speedups(report: BenchReport) -> str:
    strips = [
        RatioStrip(
            name=f"{summary.name}: {format_ratio(median.ratio)}",
            index=index % _NUM_COLOURS,
            dots=[
                RatioDot(value=prompt.ratio, label=f"{prompt.id}: {format_ratio(prompt.ratio)}")
                for prompt in summary.ratios.prompts
            ],
            median=median.ratio,
            low=median.low,
            high=median.high,
        )
        for index, summary in enumerate(report.contenders)
        if index and (median := summary.ratios.median) is not None
    ]
    if not strips:
        return ""
    lead = "<p>Plain's time / the contender's: a dot for each prompt, the median and its 95 % interval. "
    return _render_section("Speedup by prompt", f"{lead}Right of 1x is faster.</p>{draw_ratio_strips(strips)}", "wide")


def _draw_acceptance_by_position(report: BenchReport) -> str:
    curves: list[ShareCurve] = []
    shown: list[int] = []
    for index, summary in enumerate(report.contenders):
        counts = zip(summary.speculation.accepted_at, summary.speculation.drafted_at, strict=True)
        points = [(float(at), a / d) for at, (a, d) in enumerate(counts, 1) if d >= _MIN_ROUNDS]
        if points:
            curves.append(ShareCurve(name=summary.name, index=index % _NUM_COLOURS, points=points[:_MAX_POSITIONS]))
            shown.append(index)
    if not curves:
        return ""
    width = max(len(curve.points) for curve in curves)
    ticks = [(float(at), str(at)) for at in range(1, width + 1, 1 + width // 9)]
    lead = "<p>Of the tokens drafted at each position of a draft, how many were accepted.</p>"
    plot = draw_share_curves("Acceptance by position", curves, x_ticks=ticks, points=True)
    return _render_section("Acceptance by position", lead + _render_colour_legend(report, shown) + plot)


def _draw_latency_distributions(report: BenchReport) -> list[str]:
    readers: list[tuple[str, Callable[[AnswerRecord], float | None]]] = [
        ("Time to the first token", lambda answer: answer.first_s),
        ("Time between tokens", lambda answer: answer.between_s),
        ("Time of the whole answer", lambda answer: answer.total_s),
    ]
    return [_draw_latency_distribution(report, title, read) for title, read in readers]


def _draw_latency_distribution(report: BenchReport, title: str, read: Callable[[AnswerRecord], float | None]) -> str:
    values: dict[str, list[float]] = {summary.name: [] for summary in report.contenders}
    for answer in report.answers:
        if answer.error is None and (value := read(answer)) is not None:
            values[answer.key.contender].append(value)
    end = max((percentile(of_one, 98) or 0.0 for of_one in values.values()), default=0.0)
    if not end:
        return ""
    shown = [index for index, summary in enumerate(report.contenders) if values[summary.name]]
    curves = [
        ShareCurve(name=name, index=index % _NUM_COLOURS, points=make_cumulative_distribution(values[name], end=end))
        for index in shown
        for name in [report.contenders[index].name]
    ]
    ticks = [(tick, format_seconds(tick) if tick else "0") for tick in choose_axis_ticks(end)]
    has_more = any(value > end for of_one in values.values() for value in of_one)
    beyond = " The slowest lie beyond the right edge." if has_more else ""
    lead = f"<p>Share of the answers that took no longer.{beyond}</p>"
    return _render_section(
        title, lead + _render_colour_legend(report, shown) + draw_share_curves(title, curves, x_ticks=ticks)
    )


def _render_text_differences(report: BenchReport) -> str:
    items = "".join(
        f"<li>{escape_html(summary.name)}: {escape_html(describe_text_difference(difference))}</li>"
        for summary in report.contenders
        for difference in summary.texts.differences
    )
    return _render_section("Texts that differ from plain's", f"<ul>{items}</ul>" if items else "", "wide")
