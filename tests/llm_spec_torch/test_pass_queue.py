"""Who leads, who waits, and in which order: the queue of passes with runners that compute nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from llm_spec_torch import pass_queue
from llm_spec_torch.caches import CacheSlot
from llm_spec_torch.network import KeyValueCache
from llm_spec_torch.pass_queue import ForwardPass, PassQueue, PassResult

from llm_spec import TargetError

LONG_S = 120.0
SLOTS = [CacheSlot(index, KeyValueCache(())) for index in range(8)]


class Recorder:
    """A runner that notes which slots go together; its passes wait for `gate`."""

    def __init__(self, log: list[list[int]], *, max_tokens: int | None = 100) -> None:
        self.max_tokens = max_tokens
        self.log = log
        self.gate = threading.Event()
        self.gate.set()
        self.is_running = threading.Event()
        self.error: Exception | None = None
        self.last: Callable[[], object] = lambda: None  # what a pass waits for before it ends

    def run_all(self, passes: Sequence[ForwardPass]) -> list[PassResult]:
        self.log.append(sorted(one.slot.index for one in passes))
        self.is_running.set()
        assert self.gate.wait(LONG_S)
        self.last()
        if self.error is not None:
            raise self.error
        return [np.full((1, 1), one.slot.index, np.float32) for one in passes]


def pass_of(index: int) -> ForwardPass:
    return ForwardPass(SLOTS[index], [1], 1, 1, 1)


class Desk:
    """A queue, with a thread for each pass that is handed in."""

    def __init__(self) -> None:
        self.queue = PassQueue()
        self.threads = ThreadPoolExecutor(16)

    def run(self, runner: Recorder, index: int) -> np.ndarray:
        return self.queue.run_pass(runner, pass_of(index))[0]

    def hand_in(self, runner: Recorder, index: int) -> Future[Any]:
        """Return once it is in the queue, or running."""
        before = len(self.queue._waiting)
        given = self.threads.submit(self.run, runner, index)
        wait_until(lambda: len(self.queue._waiting) > before or self.queue._has_leader or given.done())
        return given

    def take_up(self, runner: Recorder, index: int) -> Future[Any]:
        """Return once it runs."""
        runner.gate.clear()
        runner.is_running.clear()
        given = self.hand_in(runner, index)
        assert runner.is_running.wait(LONG_S)
        return given

    def hand_in_all(self, runner: Recorder, indices: Sequence[int]) -> list[Future[Any]]:
        """All in this order, while something else runs."""
        given: list[Future[Any]] = []
        for index in indices:
            before = len(self.queue._waiting)
            given.append(self.threads.submit(self.run, runner, index))
            wait_until(lambda before=before: len(self.queue._waiting) > before)
        return given


def wait_until(holds: Callable[[], bool]) -> None:
    limit = threading.Event()
    for _ in range(int(LONG_S * 1000)):
        if holds():
            return
        limit.wait(0.001)
    raise AssertionError("it never came")


@pytest.fixture
def desk() -> Any:
    desk = Desk()
    yield desk
    desk.threads.shutdown()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_queue, "_MAX_WAIT_RATIO", 1e8)


def test_what_is_handed_in_meanwhile_goes_together(desk: Desk) -> None:
    """And each thread has its own result."""
    log: list[list[int]] = []
    joined, alone = Recorder(log), Recorder(log, max_tokens=None)
    first = desk.take_up(alone, 7)
    given = desk.hand_in_all(joined, range(5))
    alone.gate.set()
    assert [float(each.result(LONG_S)[0, 0]) for each in [first, *given]] == [7, 0, 1, 2, 3, 4]
    assert log == [[7], [0, 1, 2, 3, 4]]


def test_prompts_and_rounds_take_turns_as_they_came(desk: Desk) -> None:
    """A prompt goes alone; a round that came behind it joins one that came before it."""
    log: list[list[int]] = []
    joined, alone = Recorder(log), Recorder(log, max_tokens=None)
    first = desk.take_up(alone, 7)
    given = [
        *desk.hand_in_all(alone, [6]),
        *desk.hand_in_all(joined, [0]),
        *desk.hand_in_all(alone, [5]),
        *desk.hand_in_all(joined, [1]),
    ]
    alone.gate.set()
    for each in [first, *given]:
        each.result(LONG_S)
    assert log == [[7], [6], [0, 1], [5]]


def test_a_long_prompt_and_rounds_do_not_starve_each_other(desk: Desk) -> None:
    """A prompt in ten chunks beside a session that takes ten rounds: neither gets two turns while the other waits."""
    log: list[list[int]] = []
    joined, alone = Recorder(log), Recorder(log, max_tokens=None)
    num_left = {0: 10, 1: 10}

    def repeat(runner: Recorder, index: int) -> None:
        while num_left[index]:
            num_left[index] -= 1
            desk.run(runner, index)

    def other_hands_in() -> None:
        """The other thread's next pass waits while this one runs."""
        wait_until(lambda: bool(desk.queue._waiting) or 0 in num_left.values())

    blocked = desk.take_up(alone, 7)
    given = [desk.threads.submit(repeat, joined, 0), desk.threads.submit(repeat, alone, 1)]
    wait_until(lambda: len(desk.queue._waiting) == 2)
    joined.last = alone.last = other_hands_in
    alone.gate.set()
    for each in [blocked, *given]:
        each.result(LONG_S)
    turns = [group[0] for group in log[1:]]
    assert sorted(turns) == [0] * 10 + [1] * 10
    assert max(abs(turns[:n].count(0) - turns[:n].count(1)) for n in range(20)) <= 3


@pytest.mark.usefixtures("patient")
def test_nobody_is_waited_for_who_would_find_no_room(desk: Desk) -> None:
    """A pass that is full goes at once."""
    log: list[list[int]] = []
    joined, alone = Recorder(log, max_tokens=1), Recorder(log, max_tokens=None)
    first = desk.take_up(alone, 7)
    given = desk.hand_in_all(joined, [0, 1])
    alone.gate.set()
    for each in [first, *given, desk.hand_in(joined, 0)]:
        each.result(LONG_S)
    assert log == [[7], [0], [1], [0]]


@pytest.mark.usefixtures("patient")
def test_those_who_took_part_are_waited_for(desk: Desk) -> None:
    """The first to come back does not go without the others."""
    log: list[list[int]] = []
    joined, alone = Recorder(log), Recorder(log, max_tokens=None)
    first = desk.take_up(alone, 7)
    given = desk.hand_in_all(joined, [0, 1, 2])
    alone.gate.set()
    for each in [first, *given]:
        each.result(LONG_S)
    given = [desk.hand_in(joined, index) for index in (2, 0)]
    assert not any(each.done() for each in given)
    given.append(desk.hand_in(joined, 1))
    for each in given:
        each.result(LONG_S)
    assert log == [[7], [0, 1, 2], [0, 1, 2]]


@pytest.mark.usefixtures("patient")
def test_who_leaves_is_not_waited_for(desk: Desk) -> None:
    """A session that closes while another waits for it wakes that one."""
    log: list[list[int]] = []
    joined, alone = Recorder(log), Recorder(log, max_tokens=None)
    first = desk.take_up(alone, 7)
    given = desk.hand_in_all(joined, [0, 1])
    alone.gate.set()
    for each in [first, *given]:
        each.result(LONG_S)
    waiting = desk.hand_in(joined, 0)
    assert not waiting.done()
    desk.queue.forget_slot(SLOTS[1])
    waiting.result(LONG_S)
    assert log[-1] == [0]


@pytest.mark.usefixtures("patient")
def test_who_reads_a_prompt_is_not_waited_for(desk: Desk) -> None:
    """It will take a while until its next round."""
    log: list[list[int]] = []
    joined, alone = Recorder(log), Recorder(log, max_tokens=None)
    for runner, index in ((joined, 0), (alone, 0), (joined, 1)):
        desk.hand_in(runner, index).result(LONG_S)
    assert log == [[0], [0], [1]]


def test_patience_ends(desk: Desk) -> None:
    """Who does not come back in time is left behind, and not waited for again before it is back."""
    log: list[list[int]] = []
    joined, alone = Recorder(log), Recorder(log, max_tokens=None)
    first = desk.take_up(alone, 7)
    given = desk.hand_in_all(joined, [0, 1])
    alone.gate.set()
    for each in [first, *given]:
        each.result(LONG_S)
    desk.hand_in(joined, 0).result(LONG_S)
    assert log[-1] == [0]
    assert desk.queue._histories[joined].slots == {0}


def test_an_error_is_for_those_whose_pass_it_was(desk: Desk) -> None:
    """Each gets one of its own; those who wait for another pass are answered."""
    log: list[list[int]] = []
    joined, alone = Recorder(log), Recorder(log, max_tokens=None)
    joined.error = ValueError("no such thing")
    first = desk.take_up(alone, 7)
    given = desk.hand_in_all(joined, [0, 1])
    behind = desk.hand_in_all(alone, [2])[0]
    alone.gate.set()
    errors = [each.exception(LONG_S) for each in given]
    assert [type(error) for error in errors] == [TargetError, TargetError]
    assert errors[0] is not errors[1]
    assert all(str(error) == "no such thing" for error in errors)
    assert float(behind.result(LONG_S)[0, 0]) == 2
    assert first.exception(LONG_S) is None
    joined.error = None
    assert float(desk.hand_in(joined, 0).result(LONG_S)[0, 0]) == 0


@pytest.mark.usefixtures("patient")
def test_an_interrupt_lets_the_others_go_on(desk: Desk) -> None:
    """Of the thread that leads: those whose pass it was running learn of it, and the next one leads."""
    log: list[list[int]] = []
    joined, alone = Recorder(log), Recorder(log, max_tokens=None)

    def interrupted(_: Sequence[ForwardPass]) -> list[PassResult]:
        raise KeyboardInterrupt

    first = desk.take_up(alone, 7)
    given = desk.hand_in_all(joined, [0, 1])
    behind = desk.hand_in_all(alone, [2])[0]
    joined.run_all = interrupted  # type: ignore[method-assign] - planted
    alone.gate.set()
    errors = {type(each.exception(LONG_S)) for each in given}
    assert errors == {KeyboardInterrupt, TargetError}
    assert float(behind.result(LONG_S)[0, 0]) == 2
    assert first.exception(LONG_S) is None


@pytest.mark.usefixtures("patient")
def test_an_interrupt_while_waiting_withdraws_the_pass(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who gathers and is interrupted takes its pass away; the next one that comes leads."""
    log: list[list[int]] = []
    joined, alone = Recorder(log), Recorder(log, max_tokens=None)
    first = desk.take_up(alone, 7)
    given = desk.hand_in_all(joined, [0, 1])
    alone.gate.set()
    for each in [first, *given]:
        each.result(LONG_S)

    def interrupted(_: float) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(desk.queue._pass_arrived, "wait", interrupted)
        assert isinstance(desk.hand_in(joined, 0).exception(LONG_S), KeyboardInterrupt)
    assert desk.queue._waiting == []
    assert float(desk.hand_in(joined, 1).result(LONG_S)[0, 0]) == 1
    assert log[-1] == [1]


def test_many_threads_come_and_go(desk: Desk) -> None:
    """Thousands of passes by eight threads of two kinds: all are run, once each, and nobody is forgotten."""
    log: list[list[int]] = []
    exact, loose, alone = Recorder(log), Recorder(log), Recorder(log, max_tokens=None)

    def work(index: int) -> int:
        draws = np.random.default_rng(index)
        for _ in range(400):
            runner = (exact, exact, loose, alone)[int(draws.integers(4))]
            assert desk.run(runner, index)[0, 0] == index
            if draws.random() < 0.05:
                desk.queue.forget_slot(SLOTS[index])
        return index

    assert list(desk.threads.map(work, range(8), timeout=LONG_S)) == list(range(8))
    assert sum(len(group) for group in log) == 8 * 400
    assert desk.queue._waiting == []
    assert not desk.queue._has_leader
