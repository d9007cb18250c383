"""`regenerate`: the target's own text, and honest counts of what the draft would have been worth."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from llm_spec import (
    ConcurrencyLimit,
    Fixed,
    ReferenceDraft,
    Round,
    SpeculativeConfig,
    SpeculativeDecoder,
    SpeculativeResult,
    TextDelta,
    Usage,
)
from llm_spec.contract.draft import DraftProvider
from llm_spec.contract.provider import LlmProvider
from llm_spec.drafting.ngrams import SequenceFollower
from llm_spec.measure.tokens import split_into_pieces
from llm_spec.strategies.regenerate import replay_draft_rounds
from llm_spec.testing import LocalProvider, ScriptedProvider, TableModel, run_virtual

ANSWER = " ".join(f"word{i}" for i in range(20))  # 20 pieces of text


def regenerate(draft: LlmProvider | DraftProvider, target: LlmProvider, **config: Any) -> SpeculativeResult:
    decoder = SpeculativeDecoder(target=target, draft=draft, config=SpeculativeConfig(strategy="regenerate", **config))
    return run_virtual(decoder.decode("tell"))


def replayed(draft: str, answer: str) -> Iterator[Round]:
    return replay_draft_rounds(SequenceFollower(split_into_pieces(draft)), split_into_pieces(answer))


def counts(reports: list[Round]) -> list[tuple[int, int, int]]:
    return [(r.num_draft_tokens, r.num_accepted_tokens, r.num_emitted_tokens) for r in reports]


# ------------------------------------------------------------------------------------- rounds by hand


def test_an_identical_draft_is_accepted_whole() -> None:
    """Eight pieces and a bonus a round, until the answer ends."""
    assert counts(list(replayed(ANSWER, ANSWER))) == [(8, 8, 9), (8, 8, 9), (2, 2, 2)]


def test_a_draft_that_diverges_is_realigned_behind_the_difference() -> None:
    """One wrong piece costs its round; the next begins behind it."""
    draft = ANSWER.replace("word5", "other")
    reports = list(replayed(draft, ANSWER))
    assert counts(reports)[0] == (8, 5, 6)
    assert reports[0].rejection_index == 5
    accepted = sum(report.num_accepted_tokens for report in reports)
    assert sum(report.num_emitted_tokens for report in reports) == 20
    # pieces 0-4, the correction in the place of a drafted piece, 6-13, a bonus, 15-19
    assert counts(reports) == [(8, 5, 6), (8, 8, 9), (5, 5, 5)]
    assert accepted == 18


def test_an_inserted_piece_does_not_cost_the_rest() -> None:
    """A draft with something extra in the middle is picked up again after it."""
    draft = ANSWER.replace("word9", "very nice word9")
    reports = list(replayed(draft, ANSWER))
    assert sum(report.num_emitted_tokens for report in reports) == 20
    assert sum(report.num_accepted_tokens for report in reports) >= 16


@pytest.mark.parametrize("draft", ["", "nothing", "nothing in common whatsoever"])
def test_a_useless_draft_is_accepted_nowhere(draft: str) -> None:
    """Every round then emits one piece."""
    reports = list(replayed(draft, ANSWER))
    assert sum(report.num_accepted_tokens for report in reports) == 0
    assert [report.num_emitted_tokens for report in reports] == [1] * 20
    assert [report.index for report in reports] == list(range(20))


def test_a_draft_shorter_or_longer_than_the_answer() -> None:
    """What lies behind the answer's end is drafted and not accepted; what lies behind the draft's is plain."""
    assert counts(list(replayed("a b c d", "a b"))) == [(4, 2, 2)]
    assert counts(list(replayed("a b", "a b c d"))) == [(2, 2, 3), (0, 0, 1)]
    assert list(replayed("a b", "")) == []


# ------------------------------------------------------------------------------------- whole requests


def test_the_text_is_the_targets_whatever_the_draft_says() -> None:
    """Right, wrong, empty: the same answer, ending and usage; acceptance tells them apart."""
    rates: list[float | None] = []
    for text in (ANSWER, "nothing alike", ""):
        target = ScriptedProvider(ANSWER, usage=Usage(output_tokens=20))
        draft = ScriptedProvider(text)
        result = regenerate(draft, target)
        assert result.content == ANSWER
        assert result.finish_reason == "stop"
        assert result.usage == Usage(output_tokens=20)
        assert (result.strategy, result.guarantee, result.same_text) == ("regenerate", "exact", True)
        assert result.fallbacks == ()
        assert (target.num_open, draft.num_open) == (0, 0)
        rates.append(result.stats.draft_acceptance_rate)
    assert rates == [1.0, 0.0, None]


def test_the_request_reaches_the_target_unchanged() -> None:
    """Nothing is injected into the target's prompt."""
    target = ScriptedProvider(ANSWER)
    regenerate(ReferenceDraft("x"), target)
    plain = ScriptedProvider(ANSWER)
    run_virtual(SpeculativeDecoder(target=plain, draft=None).decode("tell"))
    assert target.requests == plain.requests


def test_no_more_rounds_are_compared_than_may_be() -> None:
    """The answer is whole: it came by one request."""
    result = regenerate(ReferenceDraft(ANSWER), ScriptedProvider(ANSWER), max_iterations=2)
    assert (result.content, result.finish_reason) == (ANSWER, "stop")
    assert counts(list(result.rounds)) == [(8, 8, 9), (8, 8, 9)]


def test_the_drafts_usage_is_told() -> None:
    """What the draft cost is in the result."""
    result = regenerate(ScriptedProvider(ANSWER, usage=Usage(output_tokens=7)), ScriptedProvider(ANSWER))
    assert result.draft_usage == Usage(output_tokens=7)


@pytest.mark.parametrize("at", [0, 3])
def test_a_failing_draft_is_told_and_changes_nothing(at: int) -> None:
    """What it had said before it failed is still compared."""
    draft = ScriptedProvider(ANSWER, fail_at={at: ConnectionError("down")})
    result = regenerate(draft, ScriptedProvider(ANSWER))
    assert result.content == ANSWER
    assert len(result.fallbacks) == 1
    assert "down" in result.fallbacks[0]
    assert result.stats.num_fallbacks == 1
    assert result.stats.num_accepted_draft_tokens == at


def test_a_slow_draft_is_waited_for_no_longer_than_its_timeout() -> None:
    """The answer's end comes at most `draft_timeout_s` after the answer; the draft has been left by then."""
    draft = ScriptedProvider(ANSWER, delay_piece_s=1000.0)
    target = ScriptedProvider(ANSWER, delay_piece_s=0.1)
    result = regenerate(draft, target, draft_timeout_s=5.0)
    assert result.content == ANSWER
    assert 5.0 <= result.timings.total_s <= 8.0
    assert len(result.fallbacks) == 1
    assert (draft.num_open, draft.num_closed) == (0, 1)


def test_the_answer_does_not_wait_for_the_draft() -> None:
    """Text comes at the target's own pace."""
    result = regenerate(ScriptedProvider(ANSWER, delay_first_s=20.0), ScriptedProvider(ANSWER, delay_first_s=0.5))
    assert result.timings.first_text_s == pytest.approx(0.5, abs=0.1)
    assert result.fallbacks == ()


def test_a_slow_draft_does_not_change_how_a_finished_answer_ended() -> None:
    """A deadline that passes while only the draft is waited for cut nothing off: the answer is whole and says so."""
    result = regenerate(ScriptedProvider(ANSWER, delay_piece_s=1000.0), ScriptedProvider(ANSWER), deadline_s=2.0)
    assert result.content == ANSWER
    assert result.timings.total_s <= 3.0
    assert result.finish_reason == "stop"
    assert result.stopped_by != "deadline"


def test_what_a_request_waited_before_counts_for_its_deadline() -> None:
    """An answer that is whole waits for its draft no longer than that leaves, however late it began."""
    limit = ConcurrencyLimit(2)
    config = SpeculativeConfig(strategy="regenerate", deadline_s=2.0, limit=limit)
    draft, target = ScriptedProvider(ANSWER, delay_piece_s=1000.0), ScriptedProvider(ANSWER, stopped_by="eos")
    decoder = SpeculativeDecoder(target=target, draft=draft, config=config)

    async def check() -> SpeculativeResult:
        async with limit.hold_place(), limit.hold_place():
            answering = asyncio.create_task(decoder.decode("tell"))
            await asyncio.sleep(1.5)
        return await answering

    result = run_virtual(check())
    assert (result.content, result.finish_reason, result.stopped_by) == (ANSWER, "stop", "eos")
    assert result.timings.total_s < 2.0


def test_a_deadline_gives_the_verified_text_so_far() -> None:
    """Target and draft are both left, and the text is what the target had said."""
    draft = ScriptedProvider(ANSWER, delay_piece_s=1.0)
    target = ScriptedProvider(ANSWER, delay_piece_s=1.0)
    result = regenerate(draft, target, deadline_s=4.5)
    assert (result.finish_reason, result.stopped_by) == ("length", "deadline")
    assert ANSWER.startswith(result.content)
    assert result.content
    assert result.timings.total_s == pytest.approx(4.5, abs=0.1)
    assert draft.num_open == target.num_open == 0


def test_leaving_early_leaves_the_draft() -> None:
    """Neither draft nor target goes on after the caller has gone."""
    draft = ScriptedProvider(ANSWER, delay_piece_s=1.0)
    target = ScriptedProvider(ANSWER, delay_piece_s=1.0)
    decoder = SpeculativeDecoder(target=target, draft=draft, config=SpeculativeConfig(strategy="regenerate"))

    async def leave() -> None:
        async with decoder.stream("tell") as events:
            assert isinstance(await anext(events), TextDelta)
            assert (draft.num_open, target.num_open) == (1, 1)

    run_virtual(leave())
    assert (draft.num_open, target.num_open, draft.num_closed, target.num_closed) == (0, 0, 1, 1)


def test_cancelling_leaves_the_draft() -> None:
    """Cancellation reaches both and stays cancellation."""
    draft = ScriptedProvider(ANSWER, delay_piece_s=1.0)
    target = ScriptedProvider(ANSWER, delay_piece_s=1.0)
    decoder = SpeculativeDecoder(target=target, draft=draft, config=SpeculativeConfig(strategy="regenerate"))

    async def cancel() -> None:
        task = asyncio.create_task(decoder.decode("tell"))
        await asyncio.sleep(3.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run_virtual(cancel())
    assert (draft.num_open, target.num_open, draft.num_closed, target.num_closed) == (0, 0, 1, 1)


def test_the_cap_on_draft_tokens_is_asked_of_the_draft() -> None:
    """The draft is told how much it may write; a cap of 0 asks for nothing, which is no failure."""
    draft = ScriptedProvider(ANSWER)
    result = regenerate(draft, ScriptedProvider(ANSWER), max_draft_tokens=6)
    assert draft.requests[0].max_tokens == 6
    assert result.stats.num_accepted_draft_tokens == 6
    result = regenerate(ScriptedProvider(ANSWER), ScriptedProvider(ANSWER), max_draft_tokens=0)
    assert result.content == ANSWER
    assert result.fallbacks == ()
    assert result.stats.num_draft_tokens == 0


@pytest.mark.parametrize("cap", range(1, 25))
def test_the_cap_on_draft_tokens_holds_for_the_comparison(cap: int) -> None:
    """A draft that is realigned would be drafted from again and again; beyond the cap the target goes on alone."""
    draft = " ".join(f"word{n} other" for n in range(20))
    result = regenerate(ReferenceDraft(draft), ScriptedProvider(ANSWER), max_draft_tokens=cap)
    assert result.stats.num_draft_tokens <= cap
    assert result.stats.num_emitted_tokens == 20


async def test_a_local_target_can_be_measured_too() -> None:
    """With a local target the text is its plain text and the rounds are the comparison's."""
    model = TableModel("one two three four", order=16)
    config = SpeculativeConfig(strategy="regenerate", lookahead=Fixed(2))
    decoder = SpeculativeDecoder(target=LocalProvider(model), draft=ReferenceDraft("one two three four"), config=config)
    result = await decoder.decode("tell")
    assert result.content == "one two three four"
    assert counts(list(result.rounds)) == [(4, 4, 4)]
    assert model.num_open == 0


def test_no_speedup_is_claimed() -> None:
    """It is never faster than plain, so there is no figure."""
    assert regenerate(ReferenceDraft(ANSWER), ScriptedProvider(ANSWER)).speedup is None
