"""The last line of a report: what to use, or what is missing to tell."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from llm_spec.cli.bench.advice import find_advice
from llm_spec.cli.bench.contenders import ContenderSpec
from llm_spec.cli.bench.figures import BenchSummarizer, ContenderSummary
from llm_spec.cli.bench.prompts import prompt_from_text
from llm_spec.cli.bench.records import AnswerKey, AnswerRecord, PromptBlockRecord
from llm_spec.cli.bench.report import BenchReport
from llm_spec.cli.bench.report_files import render_json
from llm_spec.cli.bench.report_html import render_report_page
from llm_spec.cli.bench.report_text import format_text_report
from llm_spec.cli.bench.run import BenchOptions

from .doubles import MACHINE
from .simulated import simulate

Factors = Sequence[float]  # plain's time / the contender's, by prompt


def make_spec(name: str) -> ContenderSpec:
    if name.startswith(("plain", "other")):
        kind = {"plain": "plain", "plain again": "again"}.get(name, "other")
        return ContenderSpec(name=name, kind=kind, target="t")  # type: ignore[arg-type]
    draft, strategy = name.split()
    return ContenderSpec(name=name, kind="pair", target="t", draft=draft, strategy=strategy)


def make_report(
    contenders: dict[str, Factors], *, failures: dict[str, str] | None = None, concurrency: int = 1
) -> BenchReport:
    """Every prompt of plain takes 1 s; a factor of 0 is an answer that failed."""
    contenders = {"plain": [1.0] * max(map(len, contenders.values()), default=6)} | contenders
    answers: list[AnswerRecord] = []
    for name, factors in contenders.items():
        for number, factor in enumerate(factors):
            key = AnswerKey(run=0, block=number, prompt=number, turn=0, contender=name, place=0)
            error = None if factor else "down"
            answers.append(AnswerRecord(key=key, total_s=1 / factor if factor else 1.0, error=error))
    blocks = [
        PromptBlockRecord(run=0, block=a.key.block, turn=0, contender=a.key.contender, total_s=a.total_s)
        for a in answers
    ]
    prompts = [prompt_from_text(f"question {n}", n) for n in range(len(contenders["plain"]))]
    summarizer = BenchSummarizer(prompts, answers, blocks, "plain")
    return BenchReport(
        data="a test",
        options=BenchOptions(concurrency=concurrency),
        environment=MACHINE,
        load_before=None,
        load_after=None,
        is_complete=True,
        prompts=prompts,
        contenders=[summarizer.summarize(make_spec(name), (failures or {}).get(name)) for name in contenders],
        answers=answers,
        priming_s={},
    )


FAST = [1.5, 1.7, 1.8, 1.9, 2.1, 2.2, 2.4]
SLOW = [1 / factor for factor in FAST]
EVEN = [0.97, 0.98, 0.99, 1.0, 1.01, 1.02, 1.03]
WIDE = [0.8, 0.9, 0.95, 1.01, 1.1, 1.2, 1.3]

CASES: dict[str, tuple[dict[str, Factors], dict[str, str], str, str, int | None]] = {
    "one that is faster": (
        {"lookup race": FAST},
        {},
        "lookup race",
        "use: --draft lookup --strategy race: 1.90x (1.50x to 2.40x) on these 7 prompts",
        None,
    ),
    "the fastest of several": (
        {"lookup race": FAST, "suffix probe": [2 * f for f in FAST], "suffix race": WIDE},
        {},
        "suffix probe",
        "use: --draft suffix --strategy probe: 3.80x (3.00x to 4.80x) on these 7 prompts",
        None,
    ),
    "a tie goes to the first": (
        {"lookup race": FAST, "suffix race": FAST},
        {},
        "lookup race",
        "use: --draft lookup --strategy race: 1.90x (1.50x to 2.40x) on these 7 prompts",
        None,
    ),
    "another server": (
        {"lookup race": WIDE, "other": FAST},
        {},
        "other",
        "use: other: 1.90x (1.50x to 2.40x) on these 7 prompts",
        None,
    ),
    "faster, on the prompts that it answered": (
        {"lookup race": [*FAST, 0.0]},
        {},
        "lookup race",
        "use: --draft lookup --strategy race: 1.90x (1.50x to 2.40x) on these 7 prompts",
        None,
    ),
    "slower": ({"lookup race": SLOW}, {}, "plain", "plain: no draft was faster here", None),
    "slower than another target": ({"other": SLOW}, {}, "plain", "plain: no contender was faster here", None),
    "as fast, surely": ({"lookup race": EVEN}, {}, "plain", "plain: no draft was faster here", None),
    "equal to the microsecond": ({"lookup race": [1.0] * 7}, {}, "plain", "plain: no draft was faster here", None),
    "one that may be faster": (
        {"lookup race": WIDE, "suffix race": SLOW},
        {},
        "plain",
        "plain: no difference shown; about 687 more prompts would show a gain of 5%",
        687,
    ),
    "too few prompts": (
        {"lookup race": [2.0, 2.1]},
        {},
        "plain",
        "too few prompts to tell; at least 4 more are needed",
        4,
    ),
    "all failed": (
        {"lookup race": [0.0] * 7},
        {"lookup race": "down"},
        "plain",
        "plain: each draft failed, as the notes say",
        None,
    ),
    "failed after it was faster": (
        {"lookup race": [*FAST, 0.0, 0.0, 0.0]},
        {"lookup race": "down"},
        "plain",
        "plain: each draft failed, as the notes say",
        None,
    ),
    "one failed, the other is slower": (
        {"lookup race": [0.0] * 7, "suffix race": SLOW},
        {"lookup race": "down"},
        "plain",
        "plain: no draft was faster here",
        None,
    ),
    "plain against itself differs as much": (
        {"plain again": [1.4, 1.5, 1.5, 1.6, 1.6, 1.7, 1.8], "lookup race": FAST},
        {},
        "plain",
        "measure again on a quieter machine: plain against itself is 1.60x",
        None,
    ),
    "plain against itself differs by less": (
        {"plain again": EVEN, "lookup race": FAST},
        {},
        "lookup race",
        "use: --draft lookup --strategy race: 1.90x (1.50x to 2.40x) on these 7 prompts",
        None,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_advice(name: str) -> None:
    """Which contender, in which words, and how many prompts more."""
    contenders, failures, use, text, more_prompts = CASES[name]
    advice = find_advice(make_report(contenders, failures=failures))
    assert advice is not None
    assert (advice.use, advice.text, advice.more_prompts) == (use, text, more_prompts)


@pytest.mark.parametrize("contenders", [{}, {"plain again": EVEN}])
def test_without_anything_to_compare_there_is_none(contenders: dict[str, Factors]) -> None:
    assert find_advice(make_report(contenders)) is None


def test_a_target_that_failed_gives_none() -> None:
    """Its own times are not known."""
    assert find_advice(make_report({"lookup race": FAST}, failures={"plain": "down"})) is None


def test_prompts_that_are_answered_at_once_count_as_one_group() -> None:
    """Four prompts give one ratio, so four times as many are needed."""
    found = find_advice(make_report({"lookup race": [2.0, 2.1]}, concurrency=4))
    assert found is not None
    assert found.more_prompts == 16


@pytest.mark.parametrize("render", [format_text_report, render_report_page, render_json])
def test_every_report_has_it(render: Callable[[BenchReport], str]) -> None:
    """The terminal at its end, JSON as a field."""
    shown = render(make_report({"lookup race": FAST}))
    line = "use: --draft lookup --strategy race: 1.90x (1.50x to 2.40x) on these 7 prompts"
    assert line in shown
    if render is format_text_report:
        assert shown.endswith(f"\n\n{line}")
    if render is render_json:
        assert json.loads(shown)["advice"] == {"use": "lookup race", "text": line, "more_prompts": None}


def advise(summaries: list[ContenderSummary], num_prompts: int) -> tuple[str, int | None]:
    report = make_report({"plain": [1.0] * num_prompts})
    advice = find_advice(replace(report, contenders=[report.plain, *summaries]))
    assert advice is not None
    return advice.use, advice.more_prompts


def test_so_many_more_prompts_do_tell() -> None:
    """Where the advice names a number, a gain of 5 % is found with so many more in nine measurements of ten."""
    num_found = num_asked = 0
    for seed in range(60):
        first = simulate({"fast": 1 / 1.05}, num_prompts=20, seed=seed, scale=0.06)
        use, more = advise(first, 20)
        if more is not None:
            assert use == "plain"
            num_asked += 1
            then = simulate({"fast": 1 / 1.05}, num_prompts=20 + more, seed=1000 + seed, scale=0.06)
            num_found += advise(then, 20 + more)[0] == "fast"
    assert num_asked >= 20
    assert num_found >= 0.9 * num_asked


def test_noise_is_seldom_taken_for_a_gain() -> None:
    """Of three contenders that are equal to plain, at most one measurement in ten advises any."""
    rng = np.random.default_rng(1)
    equal = {"a": 1.0, "b": 1.0, "c": 1.0}
    uses = [advise(simulate(equal, num_prompts=20, seed=int(rng.integers(1 << 30))), 20)[0] for _ in range(100)]
    assert sum(use != "plain" for use in uses) <= 10
