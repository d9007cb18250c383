"""A program ends when its main thread does: answers under way in a daemon thread's loop do not hold it up."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time

import pytest
from make_pair import find_pair
from support.tiny_models import BUILTIN

PAIR = find_pair()
MAX_END_S = 20.0  # far less than the answers take, and far more than the end: machines are slow at times

DAEMON = """
import asyncio, os, sys, threading, time
from llm_spec import SpeculativeDecoder
{setup}
decoder = SpeculativeDecoder(target=target, draft={draft})
loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()
async def answer_for_ever(number):
    while True:
        await decoder.decode(f"import os{{number}}", max_tokens=400, temperature=1.3, seed=number)
async def start():
    global tasks
    tasks = [asyncio.create_task(answer_for_ever(number)) for number in range(60)]
asyncio.run_coroutine_threadsafe(start(), loop).result()
time.sleep(0.5)
print("ends", flush=True)
{last}
"""
SLOW = """
from llm_spec.testing import LocalProvider, TableModel
target = LocalProvider(TableModel("one two three " * 1000, forward_s=0.05))
"""
ONNX = f"""
from llm_spec_onnx import OnnxProvider
target = OnnxProvider({str(BUILTIN / "target")!r})
"""
TORCH = f"""
import torch
torch.set_num_threads(%d)
from llm_spec_torch import TorchProvider
target = TorchProvider({str(PAIR / "target")!r})
"""
TARGETS = {
    "onnx": ("onnxruntime", ONNX, None),
    "onnx with a draft": ("onnxruntime", ONNX, "lookup"),
    "torch, 1 thread": ("torch", TORCH % 1, None),
    "torch, 2 threads": ("torch", TORCH % 2, "lookup"),
    "a model of the program's own": ("numpy", SLOW, None),
}


@pytest.mark.parametrize("is_interrupted", [False, True], ids=["its main thread ends", "Ctrl-C"])
@pytest.mark.parametrize("target", TARGETS)
def test_local_answers_do_not_hold_up_the_end(target: str, *, is_interrupted: bool) -> None:
    """Those under way are cancelled, those that wait for a thread do not begin, and nothing is printed."""
    package, setup, draft = TARGETS[target]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    program = DAEMON.format(setup=setup, draft=repr(draft), last="time.sleep(60)" if is_interrupted else "")
    command = [sys.executable, "-W", "ignore", "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
        try:
            assert started.stdout is not None
            assert started.stdout.readline() == "ends\n"
            if is_interrupted:
                os.kill(started.pid, signal.SIGINT)
            began_s = time.monotonic()
            _, errors = started.communicate(timeout=MAX_END_S)
        finally:
            started.kill()
    assert time.monotonic() - began_s < MAX_END_S
    if is_interrupted:
        assert errors.splitlines()[-1] == "KeyboardInterrupt"
        assert errors.count("Traceback") == 1
    else:
        assert (started.returncode, errors) == (0, "")


THREAD = """
import asyncio, threading, time
from llm_spec import SpeculativeDecoder
from llm_spec.testing import LocalProvider, TableModel
main = threading.main_thread()
async def answer():
    decoder = SpeculativeDecoder(target=LocalProvider(TableModel("one two three", forward_s=0.02)), draft=None)
    first = asyncio.create_task(decoder.decode("q"))
    while main.is_alive():
        await asyncio.sleep(0.001)
    print((await first).content, (await decoder.decode("q")).content)
threading.Thread(target=asyncio.run, args=(answer(),)).start()
time.sleep(0.01)
"""


def test_answers_of_a_thread_that_is_no_daemon_go_on() -> None:
    """Python waits for such a thread: what it began is finished, and what it begins later, too."""
    done = subprocess.run([sys.executable, "-c", THREAD], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.stderr) == ("one two three one two three\n", "")
