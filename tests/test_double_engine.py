"""The clock of `benchmarks/double_server.py`: what its prices mean, by a loop whose time is virtual."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from double_engine import Costs, Engine


class JumpingSelector(selectors.SelectSelector):
    """Waits for nothing: instead the time goes on at once."""

    def __init__(self) -> None:
        super().__init__()
        self.time_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.time_s += timeout or 0.0
        return super().select(0.0)


def run(scene: Callable[[], Awaitable[Any]]) -> Any:
    """What a scene returns, which begins at the time 0."""
    selector = JumpingSelector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.time_s  # type: ignore[method-assign] # the loop's own way to be given a time
    try:
        return loop.run_until_complete(asyncio.wait_for(scene(), 1e6))
    finally:
        loop.close()


async def work(engine: Engine, work_s: float, *, starts_s: float = 0.0, rows: int = 1) -> float:
    """When a call that takes so much work is done."""
    await asyncio.sleep(starts_s)
    async with engine.take_place(rows):
        await engine.sleep_until(engine.now() + work_s)
    return asyncio.get_running_loop().time()


def test_calls_do_not_slow_each_other_where_there_is_room() -> None:
    """As many as there are places."""

    async def scene() -> list[float]:
        engine = Engine(Costs(places=3))
        return await asyncio.gather(*(work(engine, 2.0) for _ in range(3)))

    assert run(scene) == pytest.approx([2.0, 2.0, 2.0])


def test_calls_wait_in_line_for_a_place() -> None:
    """First come, first served."""

    async def scene() -> tuple[list[float], int]:
        engine = Engine(Costs(places=2))
        times = await asyncio.gather(*(work(engine, 2.0) for _ in range(5)))
        return times, engine.stats.num_waited

    times, num_waited = run(scene)
    assert times == pytest.approx([2.0, 2.0, 4.0, 4.0, 6.0])
    assert num_waited == 3


def test_each_further_sequence_slows_all() -> None:
    """Half of the time one is alone; then both go at half the speed."""

    async def scene() -> tuple[float, float]:
        engine = Engine(Costs(slowdown=1.0))
        return await asyncio.gather(work(engine, 2.0), work(engine, 2.0, starts_s=1.0))

    assert run(scene) == pytest.approx((3.0, 4.0), abs=0.01)


def test_rows_of_a_call_count_as_sequences() -> None:
    """Three rows: each goes at half the speed."""

    async def scene() -> float:
        return await work(Engine(Costs(slowdown=0.5)), 2.0, rows=3)

    assert run(scene) == pytest.approx(4.0, abs=0.01)


def test_prompts_cost_what_is_not_cached() -> None:
    """Whole blocks of what was read before are, and scored prompts never; the last token is always read."""

    async def scene() -> list[tuple[float, int]]:
        engine = Engine(Costs(prompt_token_ms=2.0, row_ms=10.0, block_size=4))
        prompt = list(range(10))
        prices = [
            engine.read_prompts([prompt], is_scored=False),
            engine.read_prompts([[*prompt, 10], [*prompt, 11]], is_scored=False),
            engine.read_prompts([prompt[:8]], is_scored=False),
            engine.read_prompts([[99, *prompt]], is_scored=False),
            engine.read_prompts([prompt], is_scored=True),
        ]
        assert engine.stats.cached_tokens == 20
        return prices

    assert run(scene) == [(20.0, 0), (10.0 + 2 * 3 * 2.0, 16), (8.0, 4), (22.0, 0), (20.0, 0)]


def test_without_a_prefix_cache_every_prompt_is_read_again() -> None:
    """From its beginning."""

    async def scene() -> list[tuple[float, int]]:
        engine = Engine(Costs(prompt_token_ms=2.0, prefix_cache=False))
        return [engine.read_prompts([list(range(40))], is_scored=False) for _ in range(2)]

    assert run(scene) == [(80.0, 0), (80.0, 0)]


def test_what_one_token_is_late_the_next_is_not() -> None:
    """Deadlines are absolute."""

    async def scene() -> float:
        engine = Engine(Costs())
        due_s = engine.now()
        for _ in range(10):
            due_s += 1.0
            await engine.sleep_until(due_s)
            await asyncio.sleep(0.5)  # something else keeps the server
        return asyncio.get_running_loop().time()

    assert run(scene) == pytest.approx(10.5)
