"""Forward passes of several requests, one at a time on the device, joined where they may be.

Each request has a thread of its own, which hands in a pass and sleeps until it has been run. There is no thread beside
them: one of those that wait leads, which is to choose the next group of passes and to run it. The oldest pass decides
what comes next, so nothing starves: a long prompt, handed in chunk by chunk, takes turns with the rounds of others.

A round's pass is worth waiting for, since it costs nothing beside others. So the leader gives those that took part
lately some time to hand in their next one: a fraction of what the last such pass took. Who misses it is not waited for
again until it is back, so a slow draft costs the others that time once a round at most.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llm_spec import TargetError
from llm_spec_torch.caches import Slot

__all__ = ["Outcome", "Pass", "PassQueue", "Runner"]

_PATIENCE: Final = 0.5  # of the last pass's duration

FloatArray: TypeAlias = NDArray[np.float32]
Outcome: TypeAlias = FloatArray | Exception


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """What `Forwards.run` was asked for."""

    slot: Slot
    token_ids: Sequence[int]
    width: int
    num_keys: int
    num_rows: int


class Runner(Protocol):
    """Runs passes that are of one kind, all at once where `joins`; else it is given one at a time."""

    joins: bool

    def run_all(self, passes: Sequence[Pass]) -> Sequence[Outcome]:
        """What each of them gave: logits, or the error that its session shall have. An error raised is for all."""
        ...


@dataclass(slots=True, eq=False)
class _Turn:
    runner: Runner
    handed_in: Pass
    done: threading.Condition
    outcome: Outcome | None = None


@dataclass(slots=True, eq=False)
class _Habit:
    """Whom a runner's passes are joined from."""

    slots: set[int] = field(default_factory=set[int])  # those that will hand in another pass soon
    last_s: float = 0.0  # what the last pass took


class PassQueue:
    """Runs what threads hand in, in order of arrival; passes of one joining runner go together, one of each slot."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)  # only who leads waits for it
        self._waiting: list[_Turn] = []
        self._is_led = False
        self._habits: dict[Runner, _Habit] = {}

    def run(self, runner: Runner, handed_in: Pass) -> FloatArray:
        """Wait until a pass has been run, by this thread or another; its logits. Raises its error."""
        turn = _Turn(runner, handed_in, threading.Condition(self._lock))
        self._hand_in(turn)
        try:
            while turn.outcome is None:
                self._lead(self._next_group(turn))
        except BaseException:
            self._withdraw(turn)
            raise
        if isinstance(turn.outcome, Exception):
            raise turn.outcome
        return turn.outcome

    def leave(self, slot: Slot) -> None:
        """Wait for a slot no longer: its session has closed."""
        with self._lock:
            self._expect(slot, None)
            self._arrived.notify()

    # ------------------------------------------------------------------------------------------ inside

    def _hand_in(self, turn: _Turn) -> None:
        with self._lock:
            self._waiting.append(turn)
            self._expect(turn.handed_in.slot, turn.runner)
            self._arrived.notify()

    def _expect(self, slot: Slot, runner: Runner | None) -> None:
        for habit in self._habits.values():
            habit.slots.discard(slot.index)
        if runner is not None and runner.joins:
            self._habits.setdefault(runner, _Habit()).slots.add(slot.index)

    def _next_group(self, turn: _Turn) -> list[_Turn]:
        """Wait until this thread leads, and gather what is to be run next; [] once its own pass has been run."""
        with self._lock:
            while turn.outcome is None and self._is_led:
                turn.done.wait()
            if turn.outcome is not None:
                return []
            self._is_led = True
            group: list[_Turn] = []
            try:
                group = self._gather(self._waiting[0])
            finally:
                if not group:
                    self._step_down()
            return group

    def _gather(self, first: _Turn) -> list[_Turn]:
        """Take the next group out of those that wait; [] where all of it has been withdrawn meanwhile."""
        group = [first]
        if first.runner.joins:
            self._await_others(first.runner)
            group = [turn for turn in self._waiting if turn.runner is first.runner]
        self._waiting = [turn for turn in self._waiting if turn not in group]
        return group

    def _await_others(self, runner: Runner) -> None:
        habit = self._habits[runner]
        give_up_at = time.perf_counter() + _PATIENCE * habit.last_s
        while habit.slots - self._present(runner):
            left_s = give_up_at - time.perf_counter()
            if left_s <= 0:
                break
            self._arrived.wait(left_s)
        habit.slots &= self._present(runner)

    def _present(self, runner: Runner) -> set[int]:
        return {turn.handed_in.slot.index for turn in self._waiting if turn.runner is runner}

    def _lead(self, group: list[_Turn]) -> None:
        if not group:
            return
        started = time.perf_counter()
        outcomes: Sequence[Outcome] = ()
        try:
            outcomes = _run(group)
        finally:
            with self._lock:
                if group[0].runner.joins:
                    self._habits[group[0].runner].last_s = time.perf_counter() - started
                for index, turn in enumerate(group):
                    turn.outcome = outcomes[index] if outcomes else TargetError("the forward pass was interrupted")
                    turn.done.notify()
                self._step_down()

    def _step_down(self) -> None:
        self._is_led = False
        if self._waiting:
            self._waiting[0].done.notify()

    def _withdraw(self, turn: _Turn) -> None:
        """An interrupt came while waiting: nobody is to run it any more."""
        with self._lock:
            if turn in self._waiting:
                self._waiting.remove(turn)
                self._expect(turn.handed_in.slot, None)
                self._arrived.notify()
                if self._waiting and not self._is_led:
                    self._waiting[0].done.notify()


def _run(group: list[_Turn]) -> Sequence[Outcome]:
    try:
        return group[0].runner.run_all([turn.handed_in for turn in group])
    except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to those whose pass it was
        return [error] if len(group) == 1 else [_own(error) for _ in group]


def _own(error: Exception) -> TargetError:
    """An error for each thread: one that is raised in several gathers all their tracebacks."""
    own = TargetError(str(error) or type(error).__name__)
    own.__cause__ = error
    return own
