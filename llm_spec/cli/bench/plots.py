"""SVG plots as wide as the page.

Positions are percentages, so that text keeps its size. The colours come from the page's style
sheet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from llm_spec.cli.screen import escape_control_characters

__all__ = [
    "RatioDot",
    "RatioStrip",
    "ShareCurve",
    "choose_axis_ticks",
    "draw_ratio_strips",
    "draw_share_curves",
    "escape_html",
    "make_cumulative_distribution",
]

_RATIO_TICKS: Final = (
    (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0),
    (0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0),
    (0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5),
)  # coarse to fine; the finest that has room is used
_MAX_TICKS: Final = 7
_ROW: Final = 54  # pixels
_TOP, _HEIGHT, _BOTTOM = 10, 150, 24


def escape_html(text: str) -> str:
    """Escape a text for the page, so that it cannot contain markup."""
    return escape(escape_control_characters(text))


@dataclass(frozen=True, kw_only=True)
class RatioDot:
    """A ratio and its label."""

    value: float
    label: str


@dataclass(frozen=True, kw_only=True)
class RatioStrip:
    """The ratios of one contender; `index` selects its colour."""

    name: str
    index: int
    dots: Sequence[RatioDot]
    median: float
    low: float | None
    high: float | None


@dataclass(frozen=True, kw_only=True)
class ShareCurve:
    """Points (x, y), with y from 0 to 1."""

    name: str
    index: int
    points: Sequence[tuple[float, float]]


def draw_ratio_strips(strips: Sequence[RatioStrip]) -> str:
    """Draw a row for each contender.

    A row has a dot for each prompt on a logarithmic axis, the median and its interval.
    """
    values = [dot.value for strip in strips for dot in strip.dots] + [0.95, 1.05]
    low, high = math.log(min(values)) - 0.03, math.log(max(values)) + 0.03

    def place(value: float) -> str:
        return f"{2 + 96 * (math.log(value) - low) / (high - low):.2f}%"

    ticks = _choose_ratio_ticks(low, high)
    height = _ROW * len(strips)
    parts = [
        f'<line class="{"one" if tick == 1 else "grid"}" x1="{place(tick)}" x2="{place(tick)}" y1="0" y2="{height}"/>'
        f'<text class="tick" x="{place(tick)}" y="{height + 16}" text-anchor="middle">{tick:g}x</text>'
        for tick in ticks
    ]
    for row, strip in enumerate(strips):
        middle = _ROW * row + 34
        parts.append(f'<text class="name" x="0" y="{_ROW * row + 14}">{escape_html(strip.name)}</text>')
        if strip.low is not None and strip.high is not None:
            ends = f'x1="{place(strip.low)}" x2="{place(strip.high)}"'
            parts.append(f'<line class="interval s{strip.index}" {ends} y1="{middle}" y2="{middle}"/>')
        for number, dot in enumerate(strip.dots):
            y = middle + (number * 7 % 11 - 5)  # spread, so that dots of equal value stay visible
            parts.append(
                f'<circle class="dot s{strip.index}" cx="{place(dot.value)}" cy="{y}" r="3.5">'
                f"<title>{escape_html(dot.label)}</title></circle>"
            )
        x = place(strip.median)
        parts.append(f'<line class="median s{strip.index}" x1="{x}" x2="{x}" y1="{middle - 11}" y2="{middle + 11}"/>')
    return _wrap_in_svg("Speedup by prompt", height + _BOTTOM, parts)


def _choose_ratio_ticks(low: float, high: float) -> Sequence[float]:
    """Return round ratios in the range, including 1; finer ones only if they reach both ends."""
    inside = [[tick for tick in ticks if low <= math.log(tick) <= high] for ticks in _RATIO_TICKS]
    fitting = [
        ticks
        for ticks, all_ticks in zip(inside, _RATIO_TICKS, strict=True)
        if len(ticks) <= _MAX_TICKS and low >= math.log(all_ticks[0] / 2) and high <= math.log(all_ticks[-1] * 2)
    ]
    return fitting[-1] if fitting else inside[0]


def draw_share_curves(
    title: str, curves: Sequence[ShareCurve], *, x_ticks: Sequence[tuple[float, str]], points: bool = False
) -> str:
    """Draw curves of shares from 0 to 100 %; `x_ticks` are values and their labels."""
    drawn = [x for curve in curves for x, _ in curve.points] + [x for x, _ in x_ticks]
    first, last = min(drawn, default=0.0), max(drawn, default=1.0)

    def place(x: float) -> float:
        return 2 + 96 * (x - first) / ((last - first) or 1.0)

    bottom = _TOP + _HEIGHT
    parts: list[str] = []
    for percent in (0, 50, 100):
        y = bottom - _HEIGHT * percent / 100
        parts.append(f'<line class="grid" x1="0" x2="100%" y1="{y:g}" y2="{y:g}"/>')
        parts.append(f'<text class="tick" x="0" y="{y + (11 if percent == 100 else -3):g}">{percent} %</text>')
    parts += [
        f'<text class="tick" x="{place(x):.2f}%" y="{bottom + 16}" text-anchor="middle">{escape_html(label)}</text>'
        for x, label in x_ticks
    ]
    parts.append(f'<svg y="{_TOP}" width="100%" height="{_HEIGHT}" viewBox="0 0 100 100" preserveAspectRatio="none">')
    for curve in curves:
        line = " ".join(f"{place(x):.3f},{100 - 100 * y:.2f}" for x, y in curve.points)
        name = f"<title>{escape_html(curve.name)}</title>"
        parts.append(f'<polyline class="curve s{curve.index}" points="{line}">{name}</polyline>')
    parts.append("</svg>")
    for curve in curves if points else ():
        parts += [
            f'<circle class="dot s{curve.index}" cx="{place(x):.2f}%" cy="{bottom - _HEIGHT * y:.1f}" r="3">'
            f"<title>{escape_html(curve.name)}, {x:g}: {y:.0%}</title></circle>"
            for x, y in curve.points
        ]
    return _wrap_in_svg(title, bottom + _BOTTOM, parts)


def choose_axis_ticks(end: float) -> list[float]:
    """Return four to six round numbers from 0 to less than `end`."""
    step = 10.0 ** math.floor(math.log10(end))
    step = next(step * part for part in (0.2, 0.25, 0.5, 1.0, 2.0) if end / (step * part) < 5.5)
    return [step * number for number in range(math.ceil(0.93 * end / step))]


def make_cumulative_distribution(values: Sequence[float], *, end: float) -> list[tuple[float, float]]:
    """Return the cumulative share of values as steps from 0 to `end`."""
    ordered = sorted(values)
    points = [(0.0, 0.0)]
    for number, value in enumerate(ordered, 1):
        if value > end:
            break
        points += [(value, points[-1][1]), (value, number / len(ordered))]
    return [*points, (end, points[-1][1])]


def _wrap_in_svg(title: str, height: float, parts: Sequence[str]) -> str:
    return f'<svg role="img" aria-label="{escape_html(title)}" width="100%" height="{height:g}">{"".join(parts)}</svg>'
