"""Figures of a contender from its records."""

from __future__ import annotations

from typing import Any

import pytest

from llm_spec.cli.bench.contenders import ContenderSpec
from llm_spec.cli.bench.figures import BenchSummarizer, ContenderSummary, find_first_difference
from llm_spec.cli.bench.prompts import BenchPrompt, prompt_from_text
from llm_spec.cli.bench.records import AnswerKey, AnswerRecord, PromptBlockRecord

Values = dict[str, Any]


def make_prompts(number: int) -> list[BenchPrompt]:
    """Of two categories, by turns."""
    texts = [prompt_from_text(f"question {n}", n) for n in range(number)]
    return [BenchPrompt(id=p.id, turns=p.turns, category="ab"[n % 2]) for n, p in enumerate(texts)]


def make_answer(contender: str, prompt: int, run: int = 0, **values: Any) -> AnswerRecord:
    key = AnswerKey(run=run, block=prompt, prompt=prompt, turn=0, contender=contender, place=0)
    times: Values = {"total_s": 1.0}
    return AnswerRecord(key=key, **(times | values))


def summarize(plain: list[Values], other: list[Values], *, num_runs: int = 1, kind: Any = "pair") -> ContenderSummary:
    """The other's figures; its answers and plain's are in the order of runs and prompts."""
    size = len(plain) // num_runs
    answers = [
        make_answer(name, index % size, index // size, **values)
        for name, all_values in (("plain", plain), ("other", other))
        for index, values in enumerate(all_values)
    ]
    blocks = [
        PromptBlockRecord(run=a.key.run, block=a.key.block, turn=0, contender=a.key.contender, total_s=a.total_s)
        for a in answers
    ]
    spec = ContenderSpec(name="other", kind=kind, target="t")
    return BenchSummarizer(make_prompts(size), answers, blocks, "plain").summarize(spec)


def test_totals_and_the_first_ten() -> None:
    """Sums of times; the first ten are those of a decoder's beginning."""
    plain = [{"total_s": 2.0}] * 12
    other = [{"total_s": 4.0}] * 10 + [{"total_s": 0.5}] * 2
    ratios = summarize(plain, other).ratios
    assert ratios.first_ten == pytest.approx(0.5)
    assert ratios.totals == pytest.approx(24 / 41)
    assert ratios.median is not None
    assert ratios.median.ratio == pytest.approx(0.5)
    assert ratios.worst_prompt is not None
    assert ratios.best_prompt is not None
    assert (ratios.worst_prompt.ratio, ratios.best_prompt.ratio, ratios.best_prompt.id) == (0.5, 4.0, "prompt 10")


def test_a_prompts_ratio_is_the_median_of_its_runs() -> None:
    """Plain and contender of the same run are a pair: what slows both slows neither."""
    plain = [{"total_s": 1.0}, {"total_s": 10.0}, {"total_s": 1.0}]
    other = [{"total_s": 0.5}, {"total_s": 5.0}, {"total_s": 5.0}]
    (prompt,) = summarize(plain, other, num_runs=3).ratios.prompts
    assert prompt.ratio == pytest.approx(2.0)


def test_categories() -> None:
    plain: list[Values] = [{"total_s": 1.0}, {"total_s": 3.0}] * 4
    ratios = summarize(plain, [{}] * 8).ratios
    assert [(c.category, c.estimate.ratio, c.estimate.num_units) for c in ratios.categories] == [
        ("a", pytest.approx(1.0), 4),
        ("b", pytest.approx(3.0), 4),
    ]


def test_what_is_reported_stands_beside_the_clock_of_the_same_answers() -> None:
    """Answers for which the library has no figure are left out on both sides."""
    other: list[Values] = [{"total_s": 0.5, "reported_speedup": 1.8}] * 3 + [{"total_s": 0.1}] * 5
    ratios = summarize([{}] * 8, other).ratios
    assert (ratios.reported_speedup, ratios.clock_speedup) == (1.8, pytest.approx(2.0))


def test_how_much_was_speculated() -> None:
    speculated = {
        "answer_tokens": 10,
        "drafted_tokens": 8,
        "accepted_tokens": 6,
        "drafted_at": (3, 3, 2),
        "accepted_at": (3, 2, 1),
    }
    refused = {"answer_tokens": 30, "plain_reason": "baseline", "drafted_at": (1,), "accepted_at": (0,)}
    speculation = summarize([{}] * 4, [speculated, speculated, refused, refused]).speculation
    assert speculation.request_share == 0.5
    assert speculation.accepted_share == pytest.approx(12 / 80)
    assert speculation.acceptance_rate == pytest.approx(12 / 16)
    assert speculation.plain_reasons == {"baseline": 2}
    assert (speculation.drafted_at, speculation.accepted_at) == ((8, 6, 4), (6, 4, 2))


def test_money_is_known_where_all_of_it_is() -> None:
    answers: list[Values] = [{"cost": 2.0, "draft_cost": 0.5}, {"cost": 1.0, "draft_cost": None}]
    tokens = summarize([{}] * 2, answers).tokens
    assert (tokens.cost, tokens.draft_cost) == (3.0, None)


def test_failed_answers_count_for_nothing() -> None:
    """Of either side; and the same error is reported once."""
    plain: list[Values] = [{"error": "down"}, {}, {}, {}]
    other: list[Values] = [{}, {"error": "late"}, {"error": "late"}, {"total_s": 0.5}]
    summary = summarize(plain, other)
    assert [prompt.prompt for prompt in summary.ratios.prompts] == [3]
    assert summary.ratios.totals == pytest.approx(2.0)
    assert (summary.num_answers, summary.errors) == (2, ("late",))
    assert (summary.texts.num_compared, summary.verdict) == (1, "too few to tell")


@pytest.mark.parametrize(
    ("plain", "other", "place"),
    [
        ("one two", "one two", None),
        ("one two", "one too", (6, 2, "one t", "wo", "oo")),
        ("one two", "one", (4, 2, "one", " two", "")),
        ("", "one", (1, 1, "", "", "one")),
    ],
)
def test_the_first_difference(plain: str, other: str, place: tuple[Any, ...] | None) -> None:
    """Its character and word, counted from 1, and what stands there on both sides."""
    found = find_first_difference(make_answer("plain", 0, text=plain), make_answer("other", 0, text=other), "p")
    if place is None:
        assert found is None
    else:
        assert found is not None
        assert (found.character, found.word, found.before, found.plain, found.other) == place


def test_reasoning_is_compared_too() -> None:
    plain, other = make_answer("plain", 0, reasoning="a", text="b"), make_answer("other", 0, reasoning="c", text="b")
    assert find_first_difference(plain, other, "p") is not None
