"""The clock that measures: the event loop's own, and a precise one where the loop's is not."""

from __future__ import annotations

import asyncio
import time

import pytest

from llm_spec._clock import now
from llm_spec.simulation import run_virtual


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
