"""Scoring: what a target reports is checked before it is believed, whatever scores it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import pytest
from support.probing import make_patient
from support.targets import Target

from llm_spec import SpeculativeConfig, SpeculativeDecoder, SpeculativeResult
from llm_spec.contract.endpoint import TopTokens
from llm_spec.decoder.config import StrategyName
from llm_spec.measure.tokens import split_into_pieces
from llm_spec.strategies.rows import rounds as server_rounds
from llm_spec.strategies.rows.schedule import RowScheduler
from llm_spec.testing.clock import run_virtual
from llm_spec.testing.simulated import SimulatedDraft

TEXT = " ".join(f"word{i}" for i in range(40))
Rows: TypeAlias = list[Any]


def make_scorer(spoil: Callable[[Rows], Rows] = lambda rows: rows, *, num_good: int = 2, **options: Any) -> Target:
    """From its `num_good`th report on, it reports what `spoil` makes of it."""

    def spoil_reply(method: str, number: int, reply: Any) -> Any:
        return spoil(reply) if method == "score" and number >= num_good else reply

    return Target(TEXT, by_ids=True, scores=True, spoil_reply=spoil_reply, **{"token_s": 0.01, **options})


def each(change: Callable[[tuple[tuple[int, float], ...]], Any]) -> Callable[[Rows], Rows]:
    return lambda rows: [TopTokens(change(row.top)) for row in rows]


SPOILT: dict[str, Callable[[Rows], Rows]] = {
    "no rows": lambda _: [],
    "a row too few": lambda rows: rows[1:],
    "a row too many": lambda rows: [rows[0], *rows],
    "empty rows": each(lambda _: ()),
    "fewer tokens than asked for": each(lambda top: top[:-1]),
    "not a number": each(lambda top: ((top[0][0], math.nan), *top[1:])),
    "infinite": each(lambda top: (*top[:-1], (top[-1][0], -math.inf))),
    "worst first": each(lambda top: top[::-1]),
    "one token twice": each(lambda top: (*top[:-1], top[0])),
    "ids as text": each(lambda top: tuple((str(token_id), logprob) for token_id, logprob in top)),
    "negative ids": each(lambda top: tuple((-1 - token_id, logprob) for token_id, logprob in top)),
}


def scored(target: Target, **options: Any) -> SpeculativeResult:
    decoder = SpeculativeDecoder(
        target=target, draft=SimulatedDraft(TEXT, 0.8, 3), config=SpeculativeConfig(strategy="score")
    )
    return run_virtual(decoder.decode("tell", **options))


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 1.0, "top_k": 4}], ids=str)
def test_good_reports_give_the_targets_text(options: dict[str, Any]) -> None:
    """Greedily, and drawn from the likeliest where only one of them is likely."""
    target = make_scorer()
    result = scored(target, **options)
    assert (result.content, result.fallbacks, result.guarantee) == (TEXT, (), "exact")
    assert len(target.get_calls("score")) > 3


def test_rounds_tell_what_draft_and_target_took() -> None:
    """A round's time of the target is that of its call; the draft's is that of the tokens that were judged."""
    target = make_scorer(score_s=0.03)
    decoder = SpeculativeDecoder(
        target=target, draft=SimulatedDraft(TEXT, 0.8, 3, token_s=0.001), config=SpeculativeConfig(strategy="score")
    )
    make_patient(decoder)
    result = run_virtual(decoder.decode("tell", temperature=0.0))
    assert len(result.rounds) > 3
    assert [report.verify_s for report in result.rounds] == pytest.approx([0.03] * len(result.rounds))
    assert 0.0 < result.stats.draft_s <= 0.001 * (result.stats.num_draft_tokens + len(result.rounds)) + 1e-6


def test_a_few_tokens_are_scored_before_a_whole_prompt_is() -> None:
    """A server may take far longer to score a prompt than to read it, so that the trial is a call with scores, too."""
    target = make_scorer(num_prompt_tokens=60)
    decoder = SpeculativeDecoder(
        target=target, draft=SimulatedDraft(TEXT, 0.9, 3), config=SpeculativeConfig(strategy="score")
    )
    assert run_virtual(decoder.decode("tell", temperature=0.0)).content == TEXT
    lengths = [len(call.prefixes[0]) for call in target.get_calls("score")]
    assert lengths[0] == 4
    assert max(lengths) > 60


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 1.0, "top_k": 4}], ids=str)
@pytest.mark.parametrize("fault", SPOILT)
@pytest.mark.parametrize("num_good", [0, 2])
def test_a_bad_report_is_not_believed(num_good: int, fault: str, options: dict[str, Any]) -> None:
    """The target goes on alone from what was confirmed before."""
    target = make_scorer(SPOILT[fault], num_good=num_good)
    result = scored(target, **options)
    assert (result.content, result.guarantee) == (TEXT, "exact")
    assert len(target.get_calls("score")) == num_good + 1
    assert len(result.fallbacks) == 1
    assert "the target scored" in result.fallbacks[0]


def test_an_answer_that_a_deadline_ends_is_rated_too() -> None:
    """Its tokens are approved ones; what the calls wrote beside them is wasted."""
    config = SpeculativeConfig(strategy="score", deadline_s=0.1)
    decoder = SpeculativeDecoder(target=make_scorer(score_s=0.03), draft=SimulatedDraft(TEXT, 0.8, 3), config=config)
    make_patient(decoder)
    result = run_virtual(decoder.decode("tell", temperature=0.0))
    assert result.stopped_by == "deadline"
    assert result.usage is not None
    num_shown = len(split_into_pieces(result.content))
    assert result.usage.approved_output_tokens > 0
    own = result.usage.output_tokens - result.usage.cancelled_output_tokens
    assert own + result.usage.approved_output_tokens == num_shown


def test_a_top_k_of_one_draws_the_likeliest() -> None:
    """More than one is asked for, and only one is drawn from."""
    target = make_scorer(
        each(lambda top: tuple((token_id, -0.01 * n) for n, (token_id, _) in enumerate(top))), num_good=0
    )
    assert scored(target, temperature=1.0, top_k=1).content == TEXT


@pytest.mark.parametrize(("strategy", "is_shared"), [("probe", True), ("score", False)])
def test_scores_are_read_without_a_cache(
    strategy: StrategyName, is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that shares what it has read of prompts scores all of one again: some tokens of it are tried first."""
    seen: list[bool] = []

    class Scheduler(RowScheduler):
        def __init__(self, *args: Any, is_cache_shared: bool, **options: Any) -> None:
            seen.append(is_cache_shared)
            super().__init__(*args, is_cache_shared=is_cache_shared, **options)

    monkeypatch.setattr(server_rounds, "RowScheduler", Scheduler)
    target = make_scorer()
    target.capabilities = replace(target.capabilities, shares_prompt_cache=True)

    async def run() -> None:
        config = SpeculativeConfig(strategy=strategy)
        async with SpeculativeDecoder(target=target, draft=SimulatedDraft(TEXT, 1.0, 0), config=config) as decoder:
            assert (await decoder.decode("q", temperature=0.0)).content == TEXT

    run_virtual(run())
    assert seen == [is_shared]
