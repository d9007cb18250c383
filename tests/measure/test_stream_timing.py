"""Arrivals of the target's own answer: they are timed as they come, and no answer piles up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from llm_spec import ChatRequest, Finish, StreamEvent, TextDelta, Usage
from llm_spec.measure.pair_stats import PairStats
from llm_spec.measure.stream_timing import record_plain_answer_times
from llm_spec.testing import run_virtual

QUESTION = ChatRequest.create("q")


class Answer:
    """So many pieces, one each 10 ms after a first one at 0.5 s."""

    def __init__(
        self,
        num_pieces: int,
        usage: Usage | None = None,
        error: BaseException | None = None,
        *,
        frame: int = 1,
        piece: str = " a",
    ) -> None:
        self.num_given = self.num_open = 0
        self._num_pieces = num_pieces
        self._usage = usage
        self._error = error
        self._frame = frame
        self._piece = piece

    @asynccontextmanager
    async def run(self) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        self.num_open += 1
        try:
            async with aclosing(self._events()) as events:
                yield events
        finally:
            self.num_open -= 1

    async def _events(self) -> AsyncGenerator[StreamEvent]:
        for number in range(self._num_pieces):
            await asyncio.sleep(0.01 if number else 0.5)
            self.num_given += 1
            if self.num_given % self._frame == 0 or self.num_given == self._num_pieces:
                num_held = (self.num_given - 1) % self._frame + 1
                yield TextDelta(self._piece * num_held)
        if self._error is not None:
            raise self._error
        yield Finish("stop", self._usage)


async def read(answer: Answer, pause_s: float, pair_stats: PairStats) -> tuple[int, int]:
    """Read it with a pause after each event: how many there were, and how many were ahead of the reader at most."""
    num_read = most = 0
    async with record_plain_answer_times(answer.run, pair_stats, QUESTION) as events:
        async for _ in events:
            num_read += 1
            most = max(most, answer.num_given - num_read)
            await asyncio.sleep(pause_s)
    return num_read, most


@pytest.mark.parametrize("pause_s", [0.0, 0.02, 1.0])
@pytest.mark.parametrize("tokens_a_piece", [1, 2])
def test_a_slow_consumer_changes_no_time_and_lets_nothing_pile_up(pause_s: float, tokens_a_piece: int) -> None:
    """Reading waits for it; the answer's time is that of what came before."""
    answer, pair_stats = Answer(5000, Usage(output_tokens=5000 * tokens_a_piece)), PairStats()
    num_read, most = run_virtual(read(answer, pause_s, pair_stats))
    assert num_read == 5001
    assert most <= 1100
    expected_s = 0.5 + (5000 * tokens_a_piece - 1) * 0.01 / tokens_a_piece
    assert pair_stats.baseline.estimate_answer_s(1, 5000 * tokens_a_piece) == pytest.approx(expected_s, rel=0.002)


@pytest.mark.parametrize("usage", [None, Usage(output_tokens=60)])
@pytest.mark.parametrize("frame", [1, 2, 7, 25])
def test_tokens_that_come_at_once_are_counted(frame: int, usage: Usage | None) -> None:
    """The first event comes with the last of its tokens."""
    answer, pair_stats = Answer(60, usage, frame=frame), PairStats()
    run_virtual(read(answer, 0.0, pair_stats))
    assert pair_stats.baseline.estimate_answer_s(1, 60) == pytest.approx(0.5 + 59 * 0.01, rel=0.02)
    assert pair_stats.baseline.estimate_answer_s(1, 1) == pytest.approx(0.5, rel=0.02)


def test_how_many_tokens_text_has_is_measured() -> None:
    """What `judge` approves is counted in pieces of text: its time for the target alone is that of tokens."""
    pair_stats = PairStats()
    assert pair_stats.baseline.tokens_per_piece == 1.0
    run_virtual(read(Answer(60, Usage(output_tokens=150)), 0.0, pair_stats))
    assert pair_stats.baseline.tokens_per_piece == pytest.approx(2.5)


@pytest.mark.parametrize("error", [ValueError("broken"), asyncio.CancelledError()])
@pytest.mark.parametrize("num_pieces", [3, 2000])
def test_what_the_answer_raises_comes_behind_its_pieces(num_pieces: int, error: BaseException) -> None:
    """Also where the reader is far behind, and where it is a cancellation that nobody caused."""
    answer, pair_stats = Answer(num_pieces, error=error), PairStats()
    num_read = 0

    async def check() -> None:
        nonlocal num_read
        async with record_plain_answer_times(answer.run, pair_stats, QUESTION) as events:
            async for _ in events:
                num_read += 1
                await asyncio.sleep(0.1)

    with pytest.raises(type(error)):
        run_virtual(check())
    assert num_read == num_pieces
    assert not pair_stats.baseline.is_measured


@pytest.mark.parametrize("num_read", [1, 10])
def test_leaving_closes_it(num_read: int) -> None:
    """Also while reading waits for the consumer."""

    async def check() -> None:
        answer, left = Answer(5000), num_read
        async with record_plain_answer_times(answer.run, PairStats(), QUESTION) as events:
            async for _ in events:
                await asyncio.sleep(30.0)
                left -= 1
                if not left:
                    break
        assert answer.num_given < 1100
        assert answer.num_open == 0

    run_virtual(check())


@pytest.mark.parametrize("piece", [" a", "!", "\n"])
@pytest.mark.parametrize("frame", [1, 2, 5])
def test_where_nothing_is_counted_tokens_are_the_pieces_of_the_whole_text(frame: int, piece: str) -> None:
    """However many come at once, so that answers are compared in one unit."""
    answer, pair_stats = Answer(200, frame=frame, piece=piece), PairStats()
    run_virtual(read(answer, 0.0, pair_stats))
    assert not pair_stats.baseline.is_counted
    told_s = pair_stats.baseline.estimate_answer_s(1, 200)
    assert told_s == pytest.approx(0.5 + 199 * 0.01, rel=0.02)
