"""What a stream's times tell, and when they tell nothing since the server had other work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

from llm_spec import ChatRequest, Finish, StreamEvent, TextDelta
from llm_spec.drafting.background_draft import BackgroundDraft
from llm_spec.pair_stats import PairStats
from llm_spec.simulation import SimulatedDraft, run_virtual
from llm_spec.strategies.draft_gate import DraftGate
from llm_spec.strategies.loss_budget import LossBudget
from llm_spec.strategies.stream_reader import StreamReader


def test_a_token_after_a_call_has_ended_is_disturbed_as_well() -> None:
    """The call was under way for a part of the time that it took; the next one is free of it."""

    async def check() -> None:
        has_calls = False

        @asynccontextmanager
        async def opened() -> AsyncGenerator[AsyncIterator[StreamEvent]]:
            yield write()

        async def write() -> AsyncGenerator[StreamEvent]:
            nonlocal has_calls
            for number in range(5):
                await asyncio.sleep(1.0)
                has_calls = number == 2
                yield TextDelta(f"word{number} ")
            yield Finish("stop")

        timer = PairStats().start_stream_timer()
        draft, request = SimulatedDraft("", 1.0, 0), ChatRequest.create("Go on.")
        background = BackgroundDraft(draft, request, max_tokens=None, timeout_s=1.0, changed=lambda: None)
        gate = DraftGate(draft, PairStats(), LossBudget(PairStats(), 0.0), background, None)
        reader = StreamReader(
            opened(), timer, begins_at=0, has_calls=lambda: has_calls, changed=lambda: None, gate=gate
        )
        await reader.task
        news = [reader.arrivals.get_nowait() for _ in range(5)]
        assert [entry.is_disturbed for entry in news] == [False, False, True, True, False]

    run_virtual(check())
