"""What waits for a reader: it is bounded, in order, and an end is an end."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from support.serving import HANGS_S

from llm_spec.server.stream_sender import StreamSender
from llm_spec.testing import run_virtual


class Reader:
    """A response whose reader takes what comes when it is let."""

    def __init__(self, *, is_slow: bool = False) -> None:
        self.taken: list[bytes] = []
        self.gate = asyncio.Event()
        self.error: Exception | None = None
        if not is_slow:
            self.gate.set()

    async def write(self, data: bytes) -> None:
        if self.error is not None:
            raise self.error
        await self.gate.wait()
        self.taken.append(data)


def sender(reader: Reader, *, keep_alive_s: float = 10.0) -> StreamSender:
    return StreamSender(cast("Any", reader), keep_alive=b": alive\n\n", keep_alive_s=keep_alive_s)


async def test_what_is_put_is_sent_in_order() -> None:
    """All of it has been sent when the context is left."""
    reader = Reader()
    box = sender(reader)
    async with box.run_sender_task():
        for number in range(100):
            box.put(b"%d " % number)
            if number % 7 == 0:
                await asyncio.sleep(0)
    assert b"".join(reader.taken).split() == [b"%d" % number for number in range(100)]


async def test_what_comes_together_goes_out_together() -> None:
    """Pieces put in one turn of the loop are one write."""
    reader = Reader()
    box = sender(reader)
    async with box.run_sender_task():
        for _ in range(50):
            box.put(b"x")
    assert reader.taken == [b"x" * 50]


@pytest.mark.parametrize("late", [False, True])
async def test_nothing_follows_the_end(late: bool) -> None:
    """Leaving sends no sign of life, whether the sender is idle or not."""
    reader = Reader()
    box = sender(reader)
    async with box.run_sender_task():
        box.put(b"end")
        if late:
            for _ in range(5):
                await asyncio.sleep(0)
    assert reader.taken == [b"end"]


async def test_an_empty_piece_is_nothing() -> None:
    """An event that has no bytes is not sent, and wakes nobody."""
    reader = Reader()
    box = sender(reader)
    async with box.run_sender_task():
        box.put(b"")
        await asyncio.sleep(0)
        box.put(b"")
    assert reader.taken == []


def test_a_pause_is_bridged() -> None:
    """A sign of life goes out every `keep_alive_s` seconds in which nothing else did, and no oftener."""

    async def run() -> list[bytes]:
        reader = Reader()
        box = sender(reader, keep_alive_s=10.0)
        async with box.run_sender_task():
            await asyncio.sleep(9.0)
            box.put(b"a")
            await asyncio.sleep(9.0)
            box.put(b"b")
            await asyncio.sleep(25.0)
            box.put(b"c")
        return reader.taken

    assert run_virtual(run()) == [b"a", b"b", b": alive\n\n", b": alive\n\n", b"c"]


async def test_a_slow_reader_holds_up_the_writer() -> None:
    """Whoever waits for room keeps what waits bounded, and goes on when the reader does."""
    reader = Reader(is_slow=True)
    box = sender(reader)
    largest = 0

    async def write() -> None:
        nonlocal largest
        for _ in range(1000):
            box.put(b"x" * 1000)
            largest = max(largest, box._num_pending_bytes)
            if box.is_full:
                await box.wait_for_room()

    async with box.run_sender_task():
        writing = asyncio.create_task(write())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not writing.done()
        assert box.is_full
        reader.gate.set()
        await writing
    assert largest < 100_000
    assert sum(map(len, reader.taken)) == 1_000_000


async def test_a_quick_reader_leaves_room() -> None:
    """There is room at once where everything has been taken."""
    box = sender(Reader())
    async with box.run_sender_task():
        await box.wait_for_room()
        assert not box.is_full


async def test_a_reader_who_has_gone_is_told_to_the_writer() -> None:
    """The writer that waits for room hears that nobody reads any more."""
    reader = Reader(is_slow=True)
    box = sender(reader)

    async def answer() -> None:
        async with box.run_sender_task():
            box.put(b"x" * 100_000)
            await asyncio.sleep(0)
            reader.error = ConnectionResetError("gone")
            reader.gate.set()
            while True:
                box.put(b"x" * 100_000)
                await box.wait_for_room()

    async with asyncio.timeout(HANGS_S):
        with pytest.raises(ConnectionResetError):
            await answer()


async def test_a_writer_in_no_hurry_hears_of_it_too() -> None:
    """A piece put after the reader has gone says so, long before the room is used up."""
    reader = Reader()
    reader.error = ConnectionResetError("gone")
    box = sender(reader)

    async def answer() -> None:
        async with box.run_sender_task():
            box.put(b"x")
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            box.put(b"y")
            pytest.fail("the second piece was taken")

    with pytest.raises(ConnectionResetError):
        await answer()


async def test_a_reader_who_has_gone_is_told_at_the_end() -> None:
    """What could not be sent is no success."""
    reader = Reader()
    reader.error = ConnectionResetError("gone")
    box = sender(reader)
    with pytest.raises(ConnectionResetError):
        async with box.run_sender_task():
            box.put(b"x")


async def test_an_error_inside_ends_the_sending() -> None:
    """The sender does not outlive its context, whatever ends it, and the error is the one that was raised."""
    reader = Reader(is_slow=True)
    box = sender(reader)
    before = asyncio.all_tasks()

    async def answer() -> None:
        async with box.run_sender_task():
            box.put(b"x")
            await asyncio.sleep(0)
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await answer()
    assert asyncio.all_tasks() == before


async def test_cancellation_ends_the_sending() -> None:
    """Nor does it outlive a cancelled answer."""
    reader = Reader(is_slow=True)
    box = sender(reader)

    async def answer() -> None:
        async with box.run_sender_task():
            box.put(b"x")
            await asyncio.Event().wait()

    before = asyncio.all_tasks()
    task = asyncio.create_task(answer())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.all_tasks() == before
