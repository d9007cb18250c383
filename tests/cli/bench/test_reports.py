"""Reports: what was measured is in them, and text of models and files stays text."""

from __future__ import annotations

import csv
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

import pytest

from llm_spec import PromptLookup, TransientError
from llm_spec.cli.bench.prompts import BenchPrompt, prompt_from_text
from llm_spec.cli.bench.report import BenchReport
from llm_spec.cli.bench.report_files import check_report_path, render_csv, render_json, write_report
from llm_spec.cli.bench.report_html import render_report_page
from llm_spec.cli.bench.report_text import format_text_report
from llm_spec.contract.errors import ConfigError, InvalidRequestError
from llm_spec.testing import RuleBasedProvider, run_virtual

from .doubles import measure, pair, plain, report_of, script

HOSTILE: Final = "<script>alert(1)</script><img src=x onerror=alert(2)> & \" ' \x1b[2J \ud800 </title></style>"


def hostile_report() -> BenchReport:
    """Markup, quotes, escape sequences and half a character wherever a text comes from outside."""
    questions = [
        BenchPrompt(id=f"{HOSTILE}{n}", category=f"{HOSTILE}{n % 2}", turns=prompt_from_text(HOSTILE, n).turns)
        for n in range(7)
    ]
    contenders = [
        plain(script(f"a b {HOSTILE}", name=f"scripted:{HOSTILE}")),
        plain(script(f"a b {HOSTILE}"), "plain again"),
        pair(PromptLookup(), RuleBasedProvider(), "regenerate"),
        plain(script(f"a b c {HOSTILE}"), HOSTILE),
        plain(script(fail_at={0: TransientError(HOSTILE)}), f"down {HOSTILE}"),
    ]
    return report_of(run_virtual(measure(contenders, questions)))


@pytest.fixture(scope="module")
def report() -> BenchReport:
    return hostile_report()


VOID: Final = {"meta"}


class Page(HTMLParser):
    """A page that closes what it opens; its tags, attributes, text and plots."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data if "style" not in self.open else ""


def test_html_is_well_formed_and_has_no_markup_from_outside(report: BenchReport) -> None:
    html = render_report_page(report)
    page = Page(html)
    assert page.tags.isdisjoint({"script", "img", "link", "iframe"})
    assert not any(name.startswith("on") or name in ("src", "href") for name in page.attributes)
    assert "<script>alert(1)</script>" in page.text  # as text
    assert "\x1b" not in html
    assert "\ud800" not in html
    plots = re.findall(r"<svg role=.*?</svg>(?!<text|<circle|</svg>)", html, re.DOTALL)
    assert len(plots) >= 4
    for plot in plots:
        ElementTree.fromstring(plot)  # noqa: S314 - our own


def test_html_loads_nothing(report: BenchReport) -> None:
    """One file: no address but those that are shown as text."""
    html = render_report_page(report)
    assert re.findall(r"(?:url\(|@import|https?://|//cdn)", html) == []
    assert "prefers-color-scheme: dark" in html
    assert 'name="viewport"' in html


def test_html_tells_contenders_apart_without_colour(report: BenchReport) -> None:
    """Each kind of line has its own dashes, and the legend shows them; what lies outside a plot is said to."""
    html = render_report_page(report)
    dashes = dict(re.findall(r"\.curve\.s(\d) \{ stroke-dasharray: ([\d ]+); \}", html))
    assert sorted(dashes) == [str(index) for index in range(1, 9)]  # the first is a whole line
    assert len(set(dashes.values())) == 8
    legend = re.findall(r'<p class="legend">(.*?)</p>', html)[0]
    assert re.findall(r'<line class="curve s(\d)"', legend) == [str(index) for index in range(legend.count("chip"))]


def test_html_says_if_a_plot_leaves_something_out() -> None:
    """Answers slower than the 98th percentile lie beyond the right edge."""
    questions = [prompt_from_text(f"q{n}", n) for n in range(3)]
    html = render_report_page(
        report_of(run_virtual(measure([plain(script("a " * 9)), plain(script("a"), "b")], questions)))
    )
    assert "The slowest lie beyond the right edge." in html


def test_html_has_the_plots_and_tables(report: BenchReport) -> None:
    text = Page(render_report_page(report)).text
    for title in ("Speedup by prompt", "Time to the first token", "Time between tokens", "Time of the whole answer"):
        assert title in text
    for title in ("Acceptance by position", "Speed", "Answers", "Categories", "Texts that differ from plain's"):
        assert title in text


def test_html_of_next_to_nothing() -> None:
    """One prompt, one contender: no interval, no plot, and still a page."""
    page = Page(render_report_page(report_of(run_virtual(measure([plain(script())], [prompt_from_text("q", 1)])))))
    assert "Speedup by prompt" not in page.text
    assert "scripted:script" in page.text


def test_json_has_everything(report: BenchReport) -> None:
    content = json.loads(render_json(report))
    assert content["llm_spec_bench"] == 1
    assert len(content["answers"]) == len(report.answers)
    for row, answer in zip(content["answers"], report.answers, strict=True):
        assert (row["text"], row["total_s"], row["contender"]) == (answer.text, answer.total_s, answer.key.contender)
        assert (row["id"], row["prompt"]) == (report.prompts[answer.key.prompt].id, answer.key.prompt)
    names = [contender["name"] for contender in content["contenders"]]
    assert names == [summary.name for summary in report.contenders]
    again = content["contenders"][1]["ratios"]
    assert again["median"]["low"] <= again["median"]["ratio"] <= again["median"]["high"]
    assert again["worst"]["ratio"] <= again["best"]["ratio"]
    assert content["prompts"][0]["turns"] == [[{"role": "user", "content": HOSTILE}]]
    assert content["environment"]["packages"] == {"llm-spec": "1"}
    assert (content["load_before"], content["load_after"]) == (0.5, 0.25)


def test_csv_has_a_row_for_each_answer(report: BenchReport) -> None:
    rows = list(csv.DictReader(io.StringIO(render_csv(report))))
    assert [row["text"] for row in rows] == [answer.text for answer in report.answers]
    assert [float(row["total_s"]) for row in rows] == [answer.total_s for answer in report.answers]
    assert {row["error"] for row in rows if row["contender"].startswith("down")} <= {row["error"] for row in rows} - {
        ""
    }


@pytest.mark.parametrize("ending", [".html", ".json", ".csv"])
def test_files_are_written(report: BenchReport, tmp_path: Path, ending: str) -> None:
    """Half a character, which no file can hold, is written as its escape: JSON has it whole again."""
    path = tmp_path / f"report{ending}"
    check_report_path(str(path))
    write_report(report, str(path))
    text = path.read_text(encoding="utf-8")
    if ending == ".json":
        content: Any = json.loads(text)
        assert content["prompts"][0]["turns"][0][0]["content"] == HOSTILE
    assert len(text) > 1000


@pytest.mark.parametrize(("path", "word"), [("a.txt", ".html"), ("a", ".json"), ("no/such/folder/a.csv", "folder")])
def test_files_that_cannot_be_written_are_refused_before(path: str, word: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(word)):
        check_report_path(path)


def test_a_folder_is_no_file(report: BenchReport, tmp_path: Path) -> None:
    (tmp_path / "a.html").mkdir()
    with pytest.raises(InvalidRequestError, match="cannot be written"):
        write_report(report, str(tmp_path / "a.html"))


def test_the_terminal_is_not_steered(report: BenchReport) -> None:
    shown = format_text_report(report)
    assert "\x1b" not in shown
    assert "\ud800" not in shown


def test_the_table() -> None:
    """Ratios with their interval, verdict, ends; noise; a failure and a difference in words."""
    contenders = [
        plain(script("one two three")),
        plain(script("one two three"), "plain again"),
        plain(script("one two four", token_s=0.05), "fast"),
        plain(script("one two three", token_s=0.2), "slow"),
        pair(PromptLookup(), script(), "probe"),
        pair(PromptLookup(), script("one two three"), "auto"),
    ]
    questions = [prompt_from_text(f"question {n}", n) for n in range(1, 8)]
    shown = format_text_report(report_of(run_virtual(measure(contenders, questions))))
    assert re.search(r"^plain again +1\.000x +1\.000x to 1\.000x +no difference shown", shown, re.MULTILINE)
    assert re.search(r"^fast +2\.00x +2\.00x to 2\.00x +faster +2\.00x +2\.00x +2\.00x +2\.00x$", shown, re.MULTILINE)
    assert re.search(r"^slow +0\.50x +0\.50x to 0\.50x +slower", shown, re.MULTILINE)
    assert re.search(r"^probe +failed$", shown, re.MULTILINE)
    assert "Noise: plain against itself is 1.000x to 1.000x." in shown
    assert "probe: left out, " in shown
    assert "fast: another text, prompt 1, from character 9 (word 3): plain has 'three', it has 'four'" in shown
    assert "fast: another text in 4 more answers" in shown
    assert re.search(r"^fast +7 .*0 of 7", shown, re.MULTILINE)
    assert "7 prompts of a test, one at a time, greedy" in shown
    assert re.search(r"^auto: answers without speculation: 6 because the target cannot verify", shown, re.MULTILINE)
    assert "load 0.50 before, 0.25 after" in shown
