"""The clock that measures: the event loop's own, and a precise one where the loop's is not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from llm_spec import PromptLookup, SpeculativeDecoder
from llm_spec.measure.clock import now
from llm_spec.testing import LocalProvider, ScriptedProvider, TableModel
from llm_spec.testing.clock import run_virtual


async def _busy_s() -> tuple[float, float]:
    """What a callback of 20 ms takes by the clock, and how far the clock is from the loop's."""
    started, end = now(), time.perf_counter() + 0.02
    while time.perf_counter() < end:
        pass
    return now() - started, abs(now() - asyncio.get_running_loop().time())


def test_the_loops_own_clock() -> None:
    """A virtual one as well: waiting takes the time that it says."""

    async def waited_s() -> float:
        started = now()
        await asyncio.sleep(1000.0)
        return now() - started

    assert run_virtual(waited_s()) == pytest.approx(1000.0)
    assert asyncio.run(_busy_s())[0] >= 0.02


def test_uvloops_clock_goes_on_within_a_callback() -> None:
    """And it is the clock of the loop's timers."""
    uvloop = pytest.importorskip("uvloop")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        busy_s, off_s = runner.run(_busy_s())
    assert busy_s >= 0.02
    assert off_s < 1.0


def make_calls() -> dict[str, Callable[[SpeculativeDecoder], Coroutine[Any, Any, object]]]:
    async def stream(decoder: SpeculativeDecoder) -> None:
        async with decoder.stream("q") as events:
            await anext(events)

    return {"decode": lambda decoder: decoder.decode("q"), "stream": stream, "aclose": lambda decoder: decoder.aclose()}


@pytest.mark.parametrize("call", make_calls())
@pytest.mark.parametrize("target", [LocalProvider(TableModel("one two")), ScriptedProvider("one two")])
@pytest.mark.parametrize("draft", [None, PromptLookup()])
def test_one_sentence_without_a_loop_of_asyncio(target: Any, draft: Any, call: str) -> None:
    """As under trio, which runs coroutines as well."""
    with pytest.raises(RuntimeError, match="llm_spec runs on asyncio, and no event loop of asyncio runs here; call it"):
        make_calls()[call](SpeculativeDecoder(target=target, draft=draft)).send(None)
