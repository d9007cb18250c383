"""The virtual clock: timers cost no time, while threads and sockets keep working."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from functools import partial

import pytest

from llm_spec.testing import VirtualClockEventLoop, run_virtual


def test_a_sleep_takes_no_real_time() -> None:
    """An hour of the loop's time passes at once, and exactly."""

    async def main() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    started = time.monotonic()
    assert run_virtual(main()) == pytest.approx(3600)
    assert time.monotonic() - started < 1800  # by real time it would be an hour


def test_timers_fire_in_order() -> None:
    """Sleepers wake by their own time, whatever the order in which they began."""
    woken: list[tuple[float, float]] = []

    async def sleeper(seconds: float) -> None:
        await asyncio.sleep(seconds)
        woken.append((seconds, round(asyncio.get_running_loop().time(), 6)))

    async def main() -> None:
        await asyncio.gather(*(sleeper(s) for s in (3, 0.1, 200, 7)))

    run_virtual(main())
    assert woken == [(0.1, 0.1), (3, 3), (7, 7), (200, 200)]


def test_a_timeout_ends_what_takes_too_long() -> None:
    """`asyncio.timeout` goes by the loop's clock."""

    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(5)


def test_a_queue_hands_over_between_tasks() -> None:
    """Producer and consumer meet at the producer's times."""

    async def main() -> list[float]:
        queue: asyncio.Queue[float] = asyncio.Queue()

        async def produce() -> None:
            for _ in range(3):
                await asyncio.sleep(10)
                await queue.put(asyncio.get_running_loop().time())

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(produce())
            return [await queue.get() for _ in range(3)]

    assert run_virtual(main()) == [10, 20, 30]


def test_a_thread_is_not_overtaken_by_a_timer() -> None:
    """The clock waits in real time for a thread, so a long timeout does not fire under a short piece of work."""

    async def main() -> str:
        async with asyncio.timeout(60):
            await asyncio.to_thread(time.sleep, 0.05)
        return "done"

    assert run_virtual(main()) == "done"


def test_a_timer_fires_while_a_thread_works() -> None:
    """While a thread works the clock goes on, so that a deadline still ends a request that hangs in one."""
    release = threading.Event()

    async def main() -> None:
        work = asyncio.get_running_loop().run_in_executor(None, release.wait)
        await asyncio.sleep(0.05)
        release.set()
        assert await work

    run_virtual(main())


def test_a_thread_can_sleep_by_the_clock() -> None:
    """What is due before it wakes happens before, at its own time."""

    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualClockEventLoop)
        times: list[float] = []

        def work() -> None:
            for _ in range(2):
                loop.sleep_in_thread(3600.0)
                times.append(loop.time())

        async def wait() -> None:
            await asyncio.sleep(5400.0)
            times.append(loop.time())

        await asyncio.gather(asyncio.to_thread(work), wait())
        return times

    assert run_virtual(main()) == pytest.approx([3600.0, 5400.0, 7200.0], abs=60.0)


def test_the_clock_jumps_again_after_a_thread() -> None:
    """A thread that has ended, or was never begun, leaves nothing behind that would hold the clock."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(asyncio.to_thread(time.sleep, 0.01) for _ in range(20)))
        abandoned = [loop.run_in_executor(None, time.sleep, 0.02) for _ in range(40)]
        for work in abandoned:
            work.cancel()
        await asyncio.sleep(0.1)
        await asyncio.sleep(3600)

    started = time.monotonic()
    run_virtual(main())
    assert time.monotonic() - started < 1800  # by real time it would be an hour


def test_a_call_from_a_bare_thread_arrives() -> None:
    """With no timer waiting, the loop waits for `call_soon_threadsafe` from any thread."""

    async def main() -> str:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[str] = loop.create_future()
        thread = threading.Timer(0.02, loop.call_soon_threadsafe, (future.set_result, "hello"))
        thread.start()
        try:
            return await future
        finally:
            thread.join()

    assert run_virtual(main()) == "hello"


def test_sockets_work() -> None:
    """A real connection answers within a timeout of virtual seconds."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readline())
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async def main() -> bytes:
        server = await asyncio.start_server(echo, "127.0.0.1", 0, family=socket.AF_INET)
        async with server, asyncio.timeout(30):
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(b"hello\n")
            line = await reader.readline()
            writer.close()
            await writer.wait_closed()
            return line

    assert run_virtual(main()) == b"hello\n"


def test_sockets_have_a_while_before_each_jump() -> None:
    """What comes from outside of the loop, within `socket_grace_s` of real time, comes before the next timer."""

    async def main() -> tuple[bytes, float]:
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        sending = threading.Timer(0.02, theirs.sendall, (b"hello\n",))
        sending.start()
        async with asyncio.timeout(60):
            line = await reader.readline()
        sending.join()
        theirs.close()
        writer.close()
        return line, asyncio.get_running_loop().time()

    with asyncio.Runner(loop_factory=partial(VirtualClockEventLoop, socket_grace_s=600.0)) as runner:
        assert runner.run(main()) == (b"hello\n", 0.0)


def test_a_deadlock_is_told() -> None:
    """Waiting for what can never come raises instead of hanging."""
    loop = VirtualClockEventLoop(patience_s=0.05)

    async def main() -> None:
        await asyncio.Event().wait()

    task = loop.create_task(main())
    with pytest.raises(RuntimeError, match="deadlock"):
        loop.run_until_complete(task)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(task)
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


def test_cancellation_reaches_a_sleeper() -> None:
    """A cancelled sleep ends at the time of its cancellation."""

    async def main() -> float:
        task = asyncio.create_task(asyncio.sleep(1000))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 1
