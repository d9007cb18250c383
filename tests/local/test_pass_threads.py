"""Forward passes that several threads compute: where they run, in which order, and what becomes of their errors."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from llm_spec.local import pass_threads
from llm_spec.local.pass_threads import run_pass
from llm_spec.local.threads import call_in_own_thread


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_threads, "count_usable_cores", lambda: 2)
    monkeypatch.setattr(pass_threads, "_queues", {})


def test_a_pass_with_one_thread_runs_where_it_is_called() -> None:
    assert run_pass(threading.get_ident, num_threads=1) == threading.get_ident()


def test_passes_with_as_many_threads_as_cores_have_one_thread() -> None:
    """Whichever request they are of: a team of OpenMP's belongs to the thread that calls it."""
    with ThreadPoolExecutor(4) as requests:
        found = list(requests.map(lambda _: run_pass(threading.get_ident, num_threads=2), range(40)))
    assert len(set(found)) == 1
    assert found[0] != threading.get_ident()


def test_as_many_passes_at_once_as_there_are_cores_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of two threads on seven cores."""
    monkeypatch.setattr(pass_threads, "count_usable_cores", lambda: 7)
    together = threading.Barrier(3)
    with ThreadPoolExecutor(3) as requests:
        assert sorted(requests.map(lambda _: run_pass(lambda: together.wait(60), num_threads=2), range(3))) == [0, 1, 2]


def test_passes_run_in_the_order_of_calls() -> None:
    """So no request starves."""
    began, release, order = threading.Event(), threading.Event(), list[int]()

    def wait_for_turn(number: int) -> Callable[[], None]:
        return lambda: order.append(number)

    with ThreadPoolExecutor(6) as requests:
        requests.submit(run_pass, lambda: (began.set(), release.wait()), num_threads=2)
        began.wait()
        for number in range(5):
            requests.submit(run_pass, wait_for_turn(number), num_threads=2)
            while pass_threads._open_queue(2).qsize() <= number:
                time.sleep(0.001)
        release.set()
    assert order == list(range(5))


def test_a_pass_within_a_pass_runs_there() -> None:
    """It would wait for itself otherwise."""
    assert run_pass(lambda: run_pass(threading.get_ident, num_threads=2), num_threads=2) != threading.get_ident()


@pytest.mark.parametrize("error", [ValueError("no logits"), SystemExit(3)], ids=["Exception", "BaseException"])
def test_what_a_pass_raises_is_raised_where_it_is_waited_for(error: BaseException) -> None:
    """And the next one runs."""

    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        run_pass(fail, num_threads=2)
    assert caught.value is error
    assert run_pass(lambda: 5, num_threads=2) == 5


def test_nothing_of_a_pass_outlives_it() -> None:
    """Neither what it read, nor what it gave, nor its error: the logits of a prompt are large."""

    class Large:
        pass

    def check(*, fails: bool) -> weakref.ref[Large]:
        read = Large()

        def compute() -> Large:
            if fails:
                raise ValueError(read)
            return read

        if fails:
            with pytest.raises(ValueError, match="Large"):
                run_pass(compute, num_threads=2)
        else:
            assert run_pass(compute, num_threads=2) is read
        return weakref.ref(read)

    found = [check(fails=False), check(fails=True)]
    run_pass(lambda: None, num_threads=2)
    gc.collect()
    assert [each() for each in found] == [None, None]


def test_an_interrupt_waits_for_the_pass() -> None:
    """What the pass reads is released by whoever was interrupted: it must have ended by then."""
    ended = threading.Event()

    def compute() -> None:
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.05)
        ended.set()

    with pytest.raises(KeyboardInterrupt):
        run_pass(compute, num_threads=2)
    assert ended.is_set()


FORK = """
import os
from llm_spec.local.pass_threads import run_pass

run_pass(lambda: None, num_threads=2)
child = os.fork()
if not child:
    os._exit(run_pass(lambda: 7, num_threads=2))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_process_that_was_forked_has_threads_of_its_own() -> None:
    """Those of its parent are not in it."""
    command = [sys.executable, "-W", "ignore", "-c", FORK]
    assert subprocess.run(command, capture_output=True, check=True, timeout=60).stdout.strip() == b"7"


def test_a_thread_of_its_own_ends_with_its_call() -> None:
    """What OpenMP keeps for it goes with it."""
    found = call_in_own_thread(threading.current_thread)
    found.join(60)
    assert found is not threading.current_thread()
    assert not found.is_alive()
