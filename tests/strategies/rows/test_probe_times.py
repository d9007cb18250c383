"""Probing, left early or measured: nothing stays open, and times and costs are what they are."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.probing import EMOJI, WORDS, TextDraft, patient, probed, probing
from support.strategy_runs import run_strategy
from support.targets import Fault, Target, bytewise

from llm_spec import (
    ChatRequest,
    Fixed,
    SpeculativeResult,
    Usage,
)
from llm_spec.measure.pair_stats import PairStats
from llm_spec.measure.tokens import split_into_pieces
from llm_spec.strategies.rows.probe import prepare_or_refuse
from llm_spec.testing.clock import run_virtual
from llm_spec.testing.simulated import SimulatedDraft

# ------------------------------------------------------------------------------------------ leaving


@pytest.mark.parametrize("number", range(40))
def test_cancelling_ends_every_call_at_once(number: int) -> None:
    """At any moment: before the prompt is encoded, drafting, with rounds under way, going on alone."""

    async def run() -> None:
        target = Target(bytewise(WORDS), call_s=0.011, faults=[Fault("sample_next", 12)])
        draft = TextDraft(WORDS.replace("word7", "other"), token_s=0.003)
        decoder = probing(draft, target, lookahead=Fixed(3), max_concurrent_streams=4)
        task = asyncio.create_task(decoder.decode("tell"))
        for _ in range(number % 4):
            await asyncio.sleep(0)
        await asyncio.sleep(number * 0.0037)
        is_over = task.done()
        task.cancel()
        if not is_over:
            with pytest.raises(asyncio.CancelledError):
                await task
        assert (target.num_open, draft.num_open) == (0, 0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(run())


@pytest.mark.parametrize("number", range(0, 300, 7))
def test_cancelling_at_any_turn_of_the_loop_leaves_nothing(number: int) -> None:
    """Nothing takes time: every await is a turn of the loop, and any of them may be the last."""

    async def run() -> None:
        target = Target(bytewise(EMOJI * 4))
        draft = TextDraft(EMOJI * 2 + "x" + EMOJI)
        task = asyncio.create_task(probing(draft, target, lookahead=Fixed(3)).decode("tell"))
        for _ in range(number):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (target.num_open, draft.num_open) == (0, 0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(run())


@pytest.mark.parametrize("num_events", [1, 4, 30])
def test_leaving_the_stream_ends_every_call(num_events: int) -> None:
    """A caller that goes away takes all calls with it, rounds and draft both."""

    async def run() -> None:
        target = Target(bytewise(WORDS), call_s=0.05)
        draft = TextDraft(WORDS, token_s=0.01)
        async with probing(draft, target, max_concurrent_streams=4).stream("tell") as events:
            for _ in range(num_events):
                await anext(events)
            await asyncio.sleep(0)  # what was sent with the last event begins
            assert target.num_open > 0
        assert (target.num_open, draft.num_open) == (0, 0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(run())


@pytest.mark.parametrize("after_s", [0.03, 0.09, 0.21])
def test_whoever_leaves_waits_until_every_call_is_closed(after_s: float) -> None:
    """Closing a connection takes a moment, of a round and of text that is being encoded: then it is over."""

    async def run() -> None:
        target = Target(bytewise(WORDS), call_s=0.05, encode_s=0.02, close_s=0.005)
        decoder = probing(TextDraft(WORDS, token_s=0.002), target, lookahead=Fixed(2))
        task = asyncio.create_task(decoder.decode("tell"))
        await asyncio.sleep(0.05 + after_s)
        assert target.num_open > 0
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert target.num_open == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(run())


def test_a_deadline_gives_the_confirmed_text() -> None:
    """It ends all calls then, and says what ended the answer."""
    target = Target(bytewise(WORDS), call_s=0.1)
    draft = TextDraft(WORDS, token_s=0.03)
    result = probed(draft, target, deadline_s=1.05)
    assert (result.finish_reason, result.stopped_by) == ("length", "deadline")
    assert WORDS.startswith(result.content)
    assert 0 < len(result.content) < len(WORDS)
    assert result.timings.total_s == pytest.approx(1.05)
    assert (target.num_open, draft.num_open) == (0, 0)


# ------------------------------------------------------------------------------------------ times


@pytest.mark.parametrize("streams", [1, 3])
def test_rounds_tell_what_draft_and_target_took(streams: int) -> None:
    """The draft's time is that of the tokens of the round, and the target's that of its call, without the draft's."""
    pieces = split_into_pieces(WORDS)
    target = Target([p.encode() for p in pieces], encode_size=100, call_s=0.1)
    request = ChatRequest.create("tell", max_tokens=len(pieces))
    draft = TextDraft(WORDS, token_s=0.02)
    result = run_virtual(patient(draft, target, lookahead=Fixed(4), max_concurrent_streams=streams).decode(request))
    assert result.content == WORDS
    for report in result.rounds:
        num_pieces = report.draft_s / 0.02  # the target may make one token of several
        assert num_pieces == pytest.approx(round(num_pieces), abs=1e-6)
        assert num_pieces >= report.num_draft_tokens - 1e-6
        assert report.verify_s == pytest.approx(0.1, abs=1e-6)
    assert result.stats.draft_s <= 0.02 * len(pieces) + 1e-6
    assert result.stats.num_draft_tokens > len(pieces) / 3
    assert result.stats.mean_lookahead == result.stats.num_draft_tokens / result.stats.num_spec_steps


def test_the_time_of_a_draft_that_was_wrong_counts_where_it_was_verified() -> None:
    """What was drafted and never sent is nobody's."""
    pieces = split_into_pieces(WORDS)
    target = Target([p.encode() for p in pieces], encode_size=100, call_s=0.1)
    draft = SimulatedDraft(WORDS, 0.8, 3, token_s=0.02)
    result = run_virtual(patient(draft, target, lookahead=Fixed(4), max_concurrent_streams=1).decode("tell"))
    assert result.content == WORDS
    drafted = [report for report in result.rounds if report.num_draft_tokens]
    assert drafted
    assert all(0.0 <= report.draft_s <= 0.02 * 4 + 1e-6 for report in result.rounds)
    assert result.stats.draft_s <= 0.02 * (result.stats.num_draft_tokens + len(result.rounds)) + 1e-6
    assert result.stats.draft_s > 0.0


# ------------------------------------------------------------------------------------------ costs


def usage_of(result: SpeculativeResult) -> Usage:
    assert result.usage is not None
    return result.usage


def probe_words(agreement: float, streams: int, **options: Any) -> tuple[Target, SpeculativeResult]:
    """A target whose tokens are the words' pieces, and its answer."""
    pieces = split_into_pieces(WORDS)
    target = Target([p.encode() for p in pieces], encode_size=100, call_s=0.02, num_prompt_tokens=9)
    draft = SimulatedDraft(WORDS, agreement, 1, token_s=0.002)
    request = ChatRequest.create("tell", max_tokens=len(pieces), **options)
    return target, probed(draft, target, request, lookahead=Fixed(4), max_concurrent_streams=streams)


@pytest.mark.parametrize("agreement", [1.0, 0.8, 0.3])
@pytest.mark.parametrize("streams", [1, 3])
def test_usage_is_what_the_target_counted(agreement: float, streams: int) -> None:
    """Everything it read and wrote, and how much of that the target alone would not have."""
    pieces = split_into_pieces(WORDS)
    target, result = probe_words(agreement, streams)
    assert result.content == WORDS
    usage = usage_of(result)
    assert usage.input_tokens == target.num_input_tokens
    assert usage.output_tokens == target.num_output_tokens
    assert usage.input_tokens - usage.extra_input_tokens == 9
    assert usage.output_tokens - usage.cancelled_output_tokens == len(pieces)


@pytest.mark.parametrize("agreement", [1.0, 0.8, 0.3])
@pytest.mark.parametrize("streams", [1, 3])
def test_usage_where_a_stop_string_ends_the_answer(agreement: float, streams: int) -> None:
    """The answer's own tokens are those of rows and stream up to the stop string; what lies behind it is cancelled."""
    pieces = split_into_pieces(WORDS)
    target, result = probe_words(agreement, streams, stop=[pieces[45].strip()])
    assert (result.content, result.stopped_by) == ("".join(pieces[:45]) + " ", "stop_string")
    assert result.rounds
    usage = usage_of(result)
    assert (usage.input_tokens, usage.output_tokens) == (target.num_input_tokens, target.num_output_tokens)
    assert usage.output_tokens - usage.cancelled_output_tokens == 46


def test_an_answer_that_a_stop_string_ends_tells_how_long_answers_are() -> None:
    """What rows may lose in the next one is a share of that."""
    target = Target(bytewise(WORDS), call_s=0.02)
    request, stats = ChatRequest.create("tell", stop=["word9"]), PairStats()
    run_virtual(run_strategy(prepare_or_refuse, TextDraft(WORDS), target, request, stats))
    assert 0.0 < stats.rows.estimate_answer_s(1.0, None) < 0.02 * len(WORDS) / 2


def test_what_a_reader_takes_until_it_leaves_is_no_time_that_rows_have_lost() -> None:
    """The next answer has rows again."""

    async def run() -> None:
        target = Target(bytewise(WORDS), call_s=0.02)
        decoder = probing(TextDraft(WORDS), target, max_concurrent_streams=4)
        async with decoder.stream("tell") as events:
            for _ in range(40):
                await anext(events)
            await asyncio.sleep(1000.0)
        assert (await decoder.decode("tell")).rounds

    run_virtual(run())


@pytest.mark.parametrize("fault", [Fault("sample_next", 4), Fault("sample_next"), Fault("encode_chat")])
def test_usage_of_an_answer_that_the_target_ended_alone(fault: Fault) -> None:
    """The prompt is counted once as the target's own input; what else was read is extra."""
    pieces = split_into_pieces(WORDS)
    target = Target([p.encode() for p in pieces], encode_size=100, call_s=0.02, num_prompt_tokens=9, faults=[fault])
    result = probed(TextDraft(WORDS), target, lookahead=Fixed(4), max_concurrent_streams=1)
    assert result.content == WORDS
    usage = usage_of(result)
    assert usage.input_tokens - usage.extra_input_tokens == 9
    assert usage.output_tokens - usage.cancelled_output_tokens == len(pieces)
    if fault.method == "encode_chat" or fault.first:
        assert usage.input_tokens == target.num_input_tokens


def test_usage_of_an_answer_without_a_draft_is_plain() -> None:
    """No draft tokens are allowed: the target answers alone, and nothing is counted twice."""
    target = Target(bytewise(WORDS), num_prompt_tokens=9)
    usage = usage_of(probed(TextDraft(WORDS), target, max_draft_tokens=0))
    assert (usage.input_tokens, usage.extra_input_tokens) == (9, 0)
    assert usage.cancelled_output_tokens == 0
