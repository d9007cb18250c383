"""What a stream's times tell, and when they tell nothing since the server or the draft had other work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from llm_spec import ChatRequest, Finish, StreamEvent, TextDelta
from llm_spec.drafting.background_draft import BackgroundDraft
from llm_spec.measure.pair_stats import PairStats
from llm_spec.strategies.draft_gate import DraftGate
from llm_spec.strategies.race.schedule import LossBudget
from llm_spec.strategies.stream_reader import StreamReader
from llm_spec.testing.clock import run_virtual
from llm_spec.testing.simulated import SimulatedDraft

NUM_WORDS = 8


async def read_words(
    stats: PairStats,
    *,
    has_calls: Callable[[int], bool] = lambda _: False,
    is_drafting: Callable[[int], bool] = lambda _: False,
) -> tuple[StreamReader, list[bool]]:
    """A stream of a word a second that has ended, and of which words it may be later.

    The functions say what else goes on in the second after each word.
    """
    word = drafting_s = 0

    @asynccontextmanager
    async def opened() -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        yield write()

    async def write() -> AsyncGenerator[StreamEvent]:
        nonlocal word, drafting_s
        for number in range(NUM_WORDS):
            await asyncio.sleep(1.0)
            drafting_s += is_drafting(number - 1)
            word = number
            yield TextDelta(f"word{number} ")
        yield Finish("stop")

    draft = SimulatedDraft("", 1.0, 0)
    request = ChatRequest.create("Go on.")
    background: Any = BackgroundDraft(draft, request, max_tokens=None, timeout_s=1.0, changed=lambda: None)
    background.measure_drafting_s = lambda: drafting_s
    gate = DraftGate(draft, stats, LossBudget(stats, 0.0), background, max_tokens=None, changed=lambda: None)
    reader = StreamReader(
        opened(),
        stats.start_stream_timer(),
        begins_at=0,
        has_calls=lambda: has_calls(word),
        changed=lambda: None,
        gate=gate,
    )
    await reader.task
    arrivals = [reader.arrivals.get_nowait() for _ in range(NUM_WORDS)]
    for arrival in arrivals:
        reader.time_arrived_tokens(1, arrival)
    return reader, [arrival.is_disturbed for arrival in arrivals]


def make_harmful() -> PairStats:
    """Of a draft that is known to make the target half as fast."""
    stats = PairStats()
    stats.draft_load.add_alone(8, 8.0)
    for _ in range(8):
        stats.draft_load.add_beside(1, 2.0, 2.0)
    assert stats.draft_load.is_harmful
    return stats


def test_a_token_after_a_call_has_ended_is_disturbed_as_well() -> None:
    """The call was under way for a part of the time that it took; the next one is free of it."""
    _, disturbed = run_virtual(read_words(PairStats(), has_calls=lambda word: word == 2))
    assert disturbed == [False, False, True, True, False, False, False, False]


def test_a_token_after_a_harmful_draft_has_ended_is_disturbed_as_well() -> None:
    """Its step may have begun while the draft wrote."""
    _, disturbed = run_virtual(read_words(make_harmful(), is_drafting=lambda word: word == 1))
    assert disturbed == [False, False, True, True, False, False, False, False]


@pytest.mark.parametrize("is_drafting", [False, True])
def test_only_an_answer_without_a_draft_is_the_baseline_for_good(is_drafting: bool) -> None:
    """One beside it counts until the draft is known to make the target slower."""
    stats = PairStats()
    reader, disturbed = run_virtual(read_words(stats, is_drafting=lambda _: is_drafting))
    assert not any(disturbed)
    reader.add_times_to_baseline(stats.baseline, 100)
    assert stats.baseline.estimate_answer_s(100, 8) == pytest.approx(8.0)
    stats.forget_token_times(1.0)
    assert stats.baseline.estimate_answer_s(100, 8) == (None if is_drafting else pytest.approx(8.0))
