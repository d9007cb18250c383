"""A decoder that has answered in a process answers in a child that is forked from it, whatever goes on meanwhile."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from make_pair import find_pair
from support.tiny_models import BUILTIN

from llm_spec import BreakerPolicy, Budget, ConcurrencyLimit, TransientError
from llm_spec.decoder.breaker import CircuitBreaker
from llm_spec.drafting.suffix_automaton import PastAnswers
from llm_spec.kit.event_loops import PerLoopResource
from llm_spec.local import threads as worker
from llm_spec.local.concurrent_answers import count_concurrent_answers, count_open_answers
from llm_spec.local.threads import DaemonThreadPool

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")

PAIR = find_pair()

# The program forks at the moment MOMENT. The child answers, and has 60 s for it; what it says is printed.
PROGRAM = """
import asyncio, os, signal, sys, threading, time
from aiohttp import web
from llm_spec import SpeculativeDecoder

kind, moment, folder = sys.argv[1:]
parent = os.getpid()
if kind.startswith("torch"):
    import torch
    torch.set_num_threads(int(kind[-1]))
    from llm_spec_torch import TorchProvider
    target = TorchProvider(folder, max_requests=4)
elif kind.startswith("onnx"):
    from llm_spec_onnx import OnnxProvider
    target = OnnxProvider(folder, threads=int(kind[-1]))

async def answer_chat(request):
    text = {"role": "assistant", "content": (await request.json())["messages"][-1]["content"].upper()}
    choice = {"index": 0, "message": text, "finish_reason": "stop"}
    return web.json_response({"id": "1", "object": "chat.completion", "model": "m", "choices": [choice]})

def serve(ready):
    async def run():
        app = web.Application()
        app.router.add_post("/v1/chat/completions", answer_chat)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        ready.append(site._server.sockets[0].getsockname()[1])
        await asyncio.Event().wait()
    asyncio.run(run())

if kind in ("generic", "openai"):
    reader, writer = os.pipe()
    if not (server := os.fork()):
        def end_with_parent():
            while os.getppid() == parent:
                time.sleep(0.1)
            os._exit(0)
        threading.Thread(target=end_with_parent, daemon=True).start()
        class Port(list):
            def append(self, port): os.write(writer, str(port).encode() + b"\\n")
        serve(Port())
    port = int(os.read(reader, 10))
    os.environ.update(OPENAI_API_KEY="k", LLM_SPEC_API_KEY="k")
    target = f"{kind}:m@http://127.0.0.1:{port}/v1"

decoder = SpeculativeDecoder(target=target, draft=None)

async def answer(number=0, max_tokens=12):
    return (await decoder.decode(f"def f{number}():", max_tokens=max_tokens, temperature=0.0)).content

async def stay():
    while True:
        await asyncio.gather(*(answer(number, 60) for number in range(6)))

def answer_in_child(expected):
    assert asyncio.run(answer()) == expected
    async def both(): return await asyncio.gather(answer(), answer())
    assert asyncio.run(both()) == [expected] * 2
    if moment == "idle, and the child's interpreter ends":
        sys.exit(0)
    asyncio.run(decoder.aclose())
    os._exit(0)

def fork_and_wait(expected):
    child = os.fork()
    if not child:
        try:
            answer_in_child(expected)
        except Exception:
            os._exit(1)
    give_up_s = time.monotonic() + 60
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > give_up_s:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "hangs"
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(ended[1])

expected = asyncio.run(answer())
found = []
try:
    if moment.startswith("idle"):
        found = [fork_and_wait(expected)]
    elif moment == "others answer":
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(stay(), loop)
        for number in range(5):
            time.sleep(0.05 + 0.013 * number)
            found.append(fork_and_wait(expected))
        found.append(int(asyncio.run_coroutine_threadsafe(answer(), loop).result(60) != expected))
    else:
        async def fork_in_loop():
            others = asyncio.create_task(stay())
            await asyncio.sleep(0.05)
            if moment == "in a loop":
                found.append(fork_and_wait(expected))
            else:
                found.append(await asyncio.to_thread(fork_and_wait, expected))
            assert await answer() == expected
            others.cancel()
        asyncio.run(fork_in_loop())
finally:
    if kind in ("generic", "openai") and os.getpid() == parent:
        os.kill(server, signal.SIGKILL)
print(found)
os._exit(0)
"""

KINDS = {
    "onnx, 1 thread": ("onnx1", "onnxruntime", BUILTIN / "target"),
    "onnx, 2 threads": ("onnx2", "onnxruntime", BUILTIN / "target"),
    "onnx, as many threads as are fastest": ("onnx0", "onnxruntime", BUILTIN / "target"),
    "torch, 1 thread": ("torch1", "torch", PAIR / "target"),
    "torch, 2 threads": ("torch2", "torch", PAIR / "target"),
    "generic": ("generic", "aiohttp", Path()),
    "openai": ("openai", "openai", Path()),
}


@pytest.mark.parametrize(
    "moment",
    [
        "idle",
        "idle, and the child's interpreter ends",
        "others answer",
        pytest.param("in a loop", marks=pytest.mark.slow),
        pytest.param("in a thread of a loop", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_forked_child_answers(kind: str, moment: str) -> None:
    """With the parent's text, and the parent goes on."""
    name, package, folder = KINDS[kind]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, name, moment, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    num_children = 6 if moment == "others answer" else 1
    assert (done.stdout.strip(), done.stderr) == (str([0] * num_children), "")


def run_in_forked_child(check: Callable[[], object]) -> bool:
    """Whether it gives something true in a child, within a minute."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of threads, which is what this is about
        child = os.fork()
    if not child:
        try:
            os._exit(0 if check() else 1)
        finally:
            os._exit(1)
    give_up_s = time.monotonic() + 60
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > give_up_s:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return False
        time.sleep(0.001)
    return os.waitstatus_to_exitcode(ended[1]) == 0


Busy = Iterator[Callable[[], object]]


@contextmanager
def hold_tokens_of_a_budget() -> Busy:
    budget = Budget(max_tokens=100)
    budget.spend(10, 0.0)
    assert budget.try_reserve(90, 0.0)
    with budget._lock:
        yield lambda: (budget.spent_tokens, budget.reserved_tokens, budget.try_reserve(90, 0.0)) == (10, 0, True)


@contextmanager
def hold_a_place() -> Busy:
    limit = ConcurrencyLimit(1)

    async def take_place() -> bool:
        async with limit.hold_place():
            return True

    loop = asyncio.new_event_loop()
    place = limit.hold_place()
    loop.run_until_complete(place.__aenter__())
    yield lambda: asyncio.run(take_place())
    loop.run_until_complete(place.__aexit__(None, None, None))
    loop.close()


@contextmanager
def try_an_open_circuit() -> Busy:
    breaker = CircuitBreaker("target", BreakerPolicy(max_failures=1, open_s=1e-9))

    async def begin_attempt() -> bool:
        return breaker.begin_attempt()

    async def fail_and_try() -> bool:
        breaker.record_outcome(TransientError("gone"))
        await asyncio.sleep(0.001)
        return breaker.begin_attempt()

    assert asyncio.run(fail_and_try())
    yield lambda: asyncio.run(begin_attempt())


@contextmanager
def write_answers() -> Busy:
    with count_concurrent_answers():
        yield lambda: count_open_answers() == 0


@contextmanager
def add_to_past_answers() -> Busy:
    past = PastAnswers(100, 4)
    past.add_answer("words", [1, 2, 3])
    with past.lock:
        yield lambda: (past.num_tokens, past.add_answer("words", [1])) == (0, None)


@contextmanager
def use_all_threads_of_a_pool() -> Busy:
    pool = DaemonThreadPool(1, "one")
    pool.submit(lambda: None).result()  # it is idle
    with pool._lock:
        yield lambda: pool.submit(lambda: 5).result(30) == 5


@contextmanager
def call_on_a_deep_stack() -> Busy:
    with worker._deep_call:
        yield lambda: worker.call_on_deep_stack(lambda: True)


class Connection:
    """What is open in the parent, and must not be closed in the child."""

    async def close(self) -> None:
        os._exit(1)


@contextmanager
def use_a_connection() -> Busy:
    each = PerLoopResource(Connection)
    loop = asyncio.new_event_loop()
    first = loop.run_until_complete(each.get())

    async def get_another() -> bool:
        await each.aclose()
        return await each.get() is not first

    def run_unclosed() -> bool:
        return asyncio.new_event_loop().run_until_complete(get_another())

    with each._lock:
        yield run_unclosed
    loop.close()


@pytest.mark.parametrize(
    "make_busy",
    [
        hold_tokens_of_a_budget,
        hold_a_place,
        try_an_open_circuit,
        write_answers,
        add_to_past_answers,
        use_all_threads_of_a_pool,
        call_on_a_deep_stack,
        use_a_connection,
    ],
)
def test_what_the_parent_is_doing_does_not_hold_up_a_child(
    make_busy: Callable[[], AbstractContextManager[Callable[[], object]]],
) -> None:
    """Locks are free, and requests of the parent's are not counted."""
    with make_busy() as check:
        assert run_in_forked_child(check)


CONNECTION = """
import asyncio, os, sys
from llm_spec.kit.event_loops import PerLoopResource

class Connection:
    async def close(self): os.write(1, b"closed")
    def __del__(self, write=os.write): write(1, b"finalized")

each = PerLoopResource(Connection)
loop = asyncio.new_event_loop()
loop.run_until_complete(each.get())
child = os.fork()
if not child:
    if sys.argv[1] == "forgotten":
        del each, loop
    sys.exit(0)
ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
os._exit(ended)
"""


@pytest.mark.parametrize("kept", ["kept", "forgotten"])
def test_a_child_never_finalizes_connections_of_its_parent(kept: str) -> None:
    """Not even where its interpreter ends: the sockets, and the epoll, are the parent's, too."""
    command = [sys.executable, "-W", "ignore", "-c", CONNECTION, kept]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


LOOP = """
import asyncio, os, sys
from llm_spec.kit.event_loops import PerLoopResource

class Connection:
    async def close(self): os.write(1, b"closed")

async def fork():
    await PerLoopResource(Connection).get()
    child = os.fork()
    if not child:
        sys.exit(0)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
asyncio.run(fork())
"""


def test_a_child_that_ends_within_the_loop_of_its_parent_closes_nothing() -> None:
    command = [sys.executable, "-W", "ignore", "-c", LOOP]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
