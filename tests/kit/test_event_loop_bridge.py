"""The bridge keeps all work of one object on one loop, whoever calls."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from contextvars import ContextVar

import pytest

from llm_spec import ClosedError
from llm_spec.kit.event_loop_bridge import EventLoopBridge

PLACE: ContextVar[str] = ContextVar("PLACE", default="nowhere")


class Numbers:
    """Counts up, and remembers on which loops, and how many of its streams are open."""

    def __init__(self, *, last: int = 5, fail: bool = False) -> None:
        self.loops: list[asyncio.AbstractEventLoop] = []
        self.num_open = 0
        self.begun = threading.Event()
        self._last = last
        self._fail = fail

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[AsyncIterator[int]]:
        self.loops.append(asyncio.get_running_loop())
        self.num_open += 1
        try:
            async with asyncio.timeout(60):  # has to be left by the task that entered it
                yield self._count()
        finally:
            self.num_open -= 1

    async def _count(self) -> AsyncGenerator[int]:
        for number in range(self._last):
            await asyncio.sleep(0.001)
            yield number
        if self._fail:
            raise LookupError("no more")

    async def one(self) -> int:
        self.loops.append(asyncio.get_running_loop())
        await asyncio.sleep(0)
        return 1

    async def forever(self) -> int:
        self.num_open += 1
        self.begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            self.num_open -= 1
        return 1


@pytest.mark.parametrize("owns_loop", [True, False])
def test_blocking_calls_share_one_loop(owns_loop: bool) -> None:
    numbers, bridge = Numbers(), EventLoopBridge("numbers", owns_loop=owns_loop)
    answers: list[list[int]] = []
    threads = [threading.Thread(target=lambda: answers.append([*bridge.stream(numbers.open)])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [[0, 1, 2, 3, 4]] * 8
    assert bridge.run(numbers.one) == 1
    assert len(set(numbers.loops)) == 1
    bridge.close()
    assert numbers.loops[0].is_closed()
    assert numbers.num_open == 0


async def test_a_first_call_by_a_coroutine_makes_its_loop_the_home() -> None:
    """It goes straight through; a later blocking call from a thread is carried to it."""
    numbers, bridge = Numbers(), EventLoopBridge("numbers", owns_loop=False)
    assert [n async for n in bridge.astream(numbers.open)] == [0, 1, 2, 3, 4]
    assert await asyncio.to_thread(bridge.run, numbers.one) == 1
    assert set(numbers.loops) == {asyncio.get_running_loop()}
    await bridge.aclose()


async def test_what_owns_its_loop_serves_every_loop_from_there() -> None:
    numbers, bridge = Numbers(), EventLoopBridge("numbers", owns_loop=True)
    assert [n async for n in bridge.astream(numbers.open)] == [0, 1, 2, 3, 4]
    assert await asyncio.to_thread(asyncio.run, bridge.arun(numbers.one)) == 1
    assert bridge.run(numbers.one) == 1  # with a loop running here
    assert len(set(numbers.loops)) == 1
    assert asyncio.get_running_loop() not in numbers.loops
    await bridge.aclose()


async def test_a_blocking_call_that_would_wait_for_itself_is_refused() -> None:
    numbers, bridge = Numbers(), EventLoopBridge("numbers", owns_loop=False)
    await bridge.arun(numbers.one)
    with pytest.raises(RuntimeError, match="await the async method"):
        bridge.run(numbers.one)


@pytest.mark.parametrize("first", ["loop", "thread"])
def test_a_home_that_has_ended_is_left(first: str) -> None:
    """A caller's provider works on any number of loops, one after another, and on a thread's."""
    numbers, bridge = Numbers(), EventLoopBridge("numbers", owns_loop=False)
    found = [bridge.run(numbers.one)] if first == "thread" else []
    found += [asyncio.run(bridge.arun(numbers.one)) for _ in range(2)]
    found += [bridge.run(numbers.one), asyncio.run(bridge.arun(numbers.one))]
    assert set(found) == {1}
    assert len(set(map(id, numbers.loops))) == (1 if first == "thread" else 3)
    bridge.close()


@pytest.mark.parametrize("owns_loop", [True, False])
async def test_leaving_early_ends_the_work_first(owns_loop: bool) -> None:
    numbers, bridge = Numbers(last=1000), EventLoopBridge("numbers", owns_loop=owns_loop)
    values = bridge.astream(numbers.open)
    assert await anext(values) == 0
    await values.aclose()
    assert numbers.num_open == 0
    await bridge.aclose()


def test_leaving_a_blocking_stream_early_ends_the_work_first() -> None:
    numbers, bridge = Numbers(last=1000), EventLoopBridge("numbers", owns_loop=True)
    values = bridge.stream(numbers.open)
    assert next(values) == 0
    values.close()
    assert numbers.num_open == 0
    bridge.close()


async def test_cancelling_ends_the_work_first() -> None:
    numbers, bridge = Numbers(), EventLoopBridge("numbers", owns_loop=True)
    task = asyncio.create_task(bridge.arun(numbers.forever))
    await asyncio.to_thread(numbers.begun.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert numbers.num_open == 0
    await bridge.aclose()


async def test_errors_come_as_they_are_after_what_came_before() -> None:
    numbers, bridge = Numbers(last=2, fail=True), EventLoopBridge("numbers", owns_loop=True)
    got: list[int] = []

    def collect() -> None:
        for number in bridge.stream(numbers.open):
            got.append(number)  # noqa: PERF402 - what came before the error counts

    async def acollect() -> None:
        async for number in bridge.astream(numbers.open):
            got.append(number)  # noqa: PERF401 - as above

    with pytest.raises(LookupError, match="no more"):
        collect()
    with pytest.raises(LookupError, match="no more"):
        await acollect()
    assert got == [0, 1, 0, 1]
    await bridge.aclose()


def test_the_callers_context_goes_along() -> None:
    async def place() -> str:
        return PLACE.get()

    bridge = EventLoopBridge("places", owns_loop=True)
    PLACE.set("here")
    assert bridge.run(place) == "here"
    bridge.close()


def test_closing_ends_what_is_under_way() -> None:
    """Waiting calls get an error; afterwards nothing is served."""
    numbers, bridge = Numbers(), EventLoopBridge("numbers", owns_loop=True)
    told: list[BaseException] = []

    def wait() -> None:
        try:
            bridge.run(numbers.forever)
        except ClosedError as error:
            told.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    numbers.begun.wait()
    bridge.close()
    waiting.join()
    assert str(told) == "[ClosedError('numbers was closed while it answered; make another')]"
    assert numbers.num_open == 0
    with pytest.raises(ClosedError, match="numbers is closed"):
        bridge.run(numbers.one)


@pytest.mark.parametrize("is_used", [True, False])
def test_closing_runs_what_ends_the_object_once_on_its_loop(is_used: bool) -> None:
    numbers = Numbers()

    async def finish() -> None:
        numbers.loops.append(asyncio.get_running_loop())

    bridge = EventLoopBridge("numbers", owns_loop=True, finish=finish)
    if is_used:
        bridge.run(numbers.one)
    bridge.close()
    bridge.close()
    asyncio.run(bridge.aclose())
    assert len(numbers.loops) == 1 + is_used
    assert len(set(numbers.loops)) == 1


@pytest.mark.parametrize("owns_loop", [True, False])
async def test_what_is_under_way_ends_before_the_object(owns_loop: bool) -> None:
    """Nobody's work finds that what it works with is closed; also where home is the caller's loop."""
    numbers, num_open = Numbers(last=10_000), []

    async def finish() -> None:
        num_open.append(numbers.num_open)

    bridge = EventLoopBridge("numbers", owns_loop=owns_loop, finish=finish)
    await bridge.arun(numbers.one)
    blocked = asyncio.create_task(asyncio.to_thread(lambda: [*bridge.stream(numbers.open)]))
    while not numbers.num_open:  # noqa: ASYNC110 - it has no event
        await asyncio.sleep(0.001)
    await bridge.aclose()
    with pytest.raises(ClosedError, match="numbers was closed while it answered"):
        await blocked
    assert num_open == [0]


def test_a_loop_that_ends_amid_a_stream_does_not_complain(caplog: pytest.LogCaptureFixture) -> None:
    """A script may leave a stream and end: its loop then closes all generators at once, and the work ends."""
    numbers, bridge = Numbers(last=10_000), EventLoopBridge("numbers", owns_loop=True)

    async def values() -> AsyncGenerator[int]:
        async with aclosing(bridge.astream(numbers.open)) as arriving:
            async for value in arriving:
                yield value

    async def leave() -> AsyncGenerator[int]:
        left = values()
        assert await anext(left) == 0
        return left

    left = asyncio.run(leave())
    assert left
    bridge.close()
    assert numbers.num_open == 0
    assert caplog.records == []


def test_a_forgotten_stream_may_be_collected_at_home() -> None:
    """The collector may run on the thread that does the work; that ends the work and waits for nothing."""
    numbers, bridge = Numbers(last=10_000), EventLoopBridge("numbers", owns_loop=True)
    values = bridge.stream(numbers.open)
    assert next(values) == 0

    async def collect() -> None:
        values.close()

    bridge.run(collect)
    bridge.close()
    assert numbers.num_open == 0


def test_a_forgotten_bridge_takes_its_thread_along() -> None:
    bridge: EventLoopBridge | None = EventLoopBridge("forgotten", owns_loop=True)
    assert bridge is not None
    bridge.run(Numbers().one)
    (thread,) = [t for t in threading.enumerate() if t.name == "llm_spec forgotten"]
    bridge = None
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


# ------------------------------------------------------------------------------------- processes and their end

IS_FORKABLE = pytest.mark.skipif(sys.platform != "linux", reason="forks")
FORKED = """
import asyncio, os, sys, threading
from llm_spec.kit.event_loop_bridge import EventLoopBridge

class Connection:
    async def ask(self):  # as an HTTP client's: of the loop that opened it, whose selector it is in
        loop = asyncio.get_running_loop()
        if loop not in self.held:
            ours, theirs = socket.socketpair()
            self.held[loop] = (await asyncio.open_connection(sock=ours), theirs)
        (reader, _), theirs = self.held[loop]
        theirs.send(b"answer\\n")
        return (await reader.readline()).decode().strip()

import socket
connection = Connection()
connection.held = {}
async def use_other_loop(bridge):
    return await bridge.arun(connection.ask)

def ask(bridge):
    return [bridge.run(connection.ask), asyncio.run(use_other_loop(bridge))]

def check_child(bridge):
    ENDING
    pid = os.fork()
    if not pid:
        print("child", *ask(bridge), flush=True)
        leave()
    assert os.waitpid(pid, 0)[1] == 0

bridge = EventLoopBridge("a", owns_loop=OWNS_LOOP)
print("parent", *ask(bridge), flush=True)
for _ in range(2):
    check_child(bridge)
    print("parent", *ask(bridge), flush=True)
"""


@IS_FORKABLE
@pytest.mark.parametrize("ending", ["leave = sys.exit", "leave = lambda: os._exit(0)", "leave = bridge.close"])
@pytest.mark.parametrize("owns_loop", [True, False])
def test_a_forked_process_begins_anew(owns_loop: bool, ending: str) -> None:
    """It answers, however often the parent has; and the parent answers afterwards, however the child ended."""
    program = FORKED.replace("ENDING", ending).replace("OWNS_LOOP", str(owns_loop))
    if "close" in ending:
        program = program.replace("        leave()\n", "        leave()\n        sys.exit()\n")
    ended = run_program(program)
    asked = ["answer answer"] * 5
    assert ended.stdout.splitlines() == [
        f"{who} {said}" for who, said in zip(["parent", "child", "parent", "child", "parent"], asked, strict=True)
    ]


@IS_FORKABLE
def test_a_stream_that_the_parent_began_is_told_in_the_child() -> None:
    """In one error, in place of waiting for a thread that is not there."""
    ended = run_program("""
import os
from contextlib import asynccontextmanager
from llm_spec.kit.event_loop_bridge import EventLoopBridge

@asynccontextmanager
async def open_numbers():
    async def count():
        for number in range(3):
            yield number
    yield count()

def say(text):
    os.write(1, f"{text}\\n".encode())  # at once: both processes write

bridge = EventLoopBridge("numbers", owns_loop=True)
numbers = bridge.stream(open_numbers)
say(next(numbers))
pid = os.fork()
try:
    say(list(numbers))
except RuntimeError as error:
    say(error)
if pid:
    assert os.waitpid(pid, 0)[1] == 0
""")
    assert sorted(ended.stdout.splitlines()) == [
        "0",
        "[1, 2]",
        "numbers answers in the parent of this process; ask anew after a fork",
    ]


def test_the_end_of_the_process_ends_the_thread_first() -> None:
    """What its loop holds open is closed by its generators, as by `asyncio.run`."""
    ended = run_program("""
import asyncio
from llm_spec.kit.event_loop_bridge import EventLoopBridge

async def hold():
    try:
        yield
    finally:
        print("closed", flush=True)

held = []
async def work():
    held.append(hold())
    await anext(held[0])
    return "asked"

print(EventLoopBridge("work", owns_loop=True).run(work))
bridge = EventLoopBridge("work", owns_loop=True)
held.clear()
print(bridge.run(work))
""")
    assert ended.stdout.count("closed") == 2


def test_the_end_of_the_process_waits_for_a_forgotten_bridge() -> None:
    """Its thread was told to end when nothing held it any more, and is still at it."""
    ended = run_program("""
import asyncio
from llm_spec.kit.event_loop_bridge import EventLoopBridge

async def hold():
    try:
        yield
    finally:
        await asyncio.sleep(0.2)
        print("closed", flush=True)

held = hold()
async def work():
    await anext(held)

EventLoopBridge("work", owns_loop=True).run(work)
""")
    assert ended.stdout == "closed\n"


def run_program(program: str) -> subprocess.CompletedProcess[str]:
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended
