"""Runs forward passes of several requests, one at a time on the device, and joins them if possible.

Each request's thread hands in a pass and sleeps until it has run. There is no further thread: one
of the waiting threads leads, that is, it chooses the next group of passes and runs it. The oldest
pass decides what comes next, so nothing starves: a long prompt, handed in chunk by chunk, takes
turns with the rounds of others.

A round's pass is worth waiting for, since in a joined pass only its own tokens cost anything. So
the leader gives the slots of recent passes some time to hand in their next one: a share of the time
that a pass takes whatever is in it. It does not wait again for a slot that missed it, until that
slot is back. So a slow draft costs the others that time at most once a round.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llm_spec import TargetError
from llm_spec.local.forks import reset_in_forked_child
from llm_spec_torch.caches import CacheSlot
from llm_spec_torch.pass_times import PassTimes

__all__ = ["ForwardPass", "PassQueue", "PassResult", "PassRunner"]

_MAX_WAIT_RATIO: Final = 0.5  # of a pass's constant time, which joining saves

FloatArray: TypeAlias = NDArray[np.float32]
PassResult: TypeAlias = FloatArray | Exception


@dataclass(frozen=True, slots=True, eq=False)
class ForwardPass:
    """The arguments of one call of `ForwardRunner.run_forward`."""

    slot: CacheSlot
    token_ids: Sequence[int]
    width: int
    num_keys: int
    num_rows: int


class PassRunner(Protocol):
    """Runs passes of one kind together while they have no more than `max_tokens` tokens.

    If `max_tokens` is None, each pass runs alone.
    """

    @property
    def max_tokens(self) -> int | None: ...

    def run_all(self, passes: Sequence[ForwardPass]) -> Sequence[PassResult]:
        """Return each pass's logits, or the error for its session.

        If it raises, the error is for all of them.
        """
        ...


@dataclass(slots=True, eq=False)
class _PendingPass:
    runner: PassRunner
    forward_pass: ForwardPass
    done: threading.Condition
    outcome: PassResult | None = None
    cost_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return len(self.forward_pass.token_ids)


@dataclass(slots=True, eq=False)
class _RunnerHistory:
    """The slots whose passes a runner expects, and the times of its passes."""

    slots: set[int] = field(default_factory=set[int])  # expected to hand in another pass soon
    times: PassTimes = field(default_factory=PassTimes)


class PassQueue:
    """Runs the passes that threads hand in, in order of arrival.

    Passes of one joining runner run together, one of each slot.
    """

    def __init__(self) -> None:
        self.reset_after_fork()
        reset_in_forked_child(self)

    def reset_after_fork(self) -> None:
        self._lock = threading.Lock()
        self._pass_arrived = threading.Condition(self._lock)  # only the leader waits for it
        self._waiting: list[_PendingPass] = []
        self._has_leader = False
        self._histories: dict[PassRunner, _RunnerHistory] = {}

    def run_pass(self, runner: PassRunner, forward_pass: ForwardPass) -> tuple[FloatArray, float]:
        """Wait until this thread or another has run a pass; return its logits and its cost.

        The cost is its part of the seconds of the group, without the time that it waited; see
        `PassTimes`. Raises the error of the pass.
        """
        pending_pass = _PendingPass(runner, forward_pass, threading.Condition(self._lock))
        self._enqueue(pending_pass)
        try:
            while pending_pass.outcome is None:
                self._run_group(self._wait_for_next_group(pending_pass))
        except BaseException:
            self._withdraw_pass(pending_pass)
            raise
        outcome, cost_s = pending_pass.outcome, pending_pass.cost_s
        if not isinstance(outcome, Exception):
            return outcome, cost_s
        try:
            raise outcome
        finally:
            del outcome, pending_pass  # the error's traceback would keep them, and they the error

    def forget_slot(self, slot: CacheSlot) -> None:
        """Stop waiting for a slot because its session has closed."""
        with self._lock:
            self._update_expected_slots(slot, None)
            self._pass_arrived.notify()

    # --------------------------------------------------------------------------------------- inside

    def _enqueue(self, pending_pass: _PendingPass) -> None:
        with self._lock:
            self._waiting.append(pending_pass)
            self._update_expected_slots(pending_pass.forward_pass.slot, pending_pass.runner)
            self._pass_arrived.notify()

    def _update_expected_slots(self, slot: CacheSlot, runner: PassRunner | None) -> None:
        for history in self._histories.values():
            history.slots.discard(slot.index)
        if runner is not None and runner.max_tokens is not None:
            self._histories.setdefault(runner, _RunnerHistory()).slots.add(slot.index)

    def _wait_for_next_group(self, pending_pass: _PendingPass) -> list[_PendingPass]:
        """Wait until this thread leads, and return the next group; [] if its own pass has run."""
        with self._lock:
            while pending_pass.outcome is None and self._has_leader:
                pending_pass.done.wait()
            if pending_pass.outcome is not None:
                return []
            self._has_leader = True
            group: list[_PendingPass] = []
            try:
                group = self._gather_next_group(self._waiting[0])
            finally:
                if not group:
                    self._stop_leading()
            return group

    def _gather_next_group(self, first: _PendingPass) -> list[_PendingPass]:
        """Take the next group from the waiting passes; [] if all of it was withdrawn."""
        group = [first]
        if first.runner.max_tokens is not None:
            self._wait_for_expected_slots(first.runner, first.runner.max_tokens)
            group = self._choose_passes_that_fit(first.runner, first.runner.max_tokens)
        self._waiting = [pending_pass for pending_pass in self._waiting if pending_pass not in group]
        return group

    def _choose_passes_that_fit(self, runner: PassRunner, max_tokens: int) -> list[_PendingPass]:
        """Return the oldest passes of a runner that fit together, at least one."""
        group = [pending_pass for pending_pass in self._waiting if pending_pass.runner is runner]
        totals = itertools.accumulate(pending_pass.num_tokens for pending_pass in group)
        return group[: max(1, sum(total <= max_tokens for total in totals))]

    def _wait_for_expected_slots(self, runner: PassRunner, max_tokens: int) -> None:
        history = self._histories[runner]
        give_up_at = time.perf_counter() + _MAX_WAIT_RATIO * history.times.base_s
        while history.slots - self._find_waiting_slots(runner) and self._count_waiting_tokens(runner) < max_tokens:
            left_s = give_up_at - time.perf_counter()
            if left_s <= 0:
                break
            self._pass_arrived.wait(left_s)
        history.slots &= self._find_waiting_slots(runner)

    def _find_waiting_slots(self, runner: PassRunner) -> set[int]:
        return {pending_pass.forward_pass.slot.index for pending_pass in self._waiting if pending_pass.runner is runner}

    def _count_waiting_tokens(self, runner: PassRunner) -> int:
        return sum(each.num_tokens for each in self._waiting if each.runner is runner)

    def _run_group(self, group: list[_PendingPass]) -> None:
        if not group:
            return
        outcomes: Sequence[PassResult] = ()
        started = time.perf_counter()
        try:
            outcomes = _run_passes(group[0].runner, [pending_pass.forward_pass for pending_pass in group])
        finally:
            last_s = time.perf_counter() - started
            with self._lock:
                try:
                    if outcomes and not any(isinstance(outcome, Exception) for outcome in outcomes):
                        self._note_times(group, last_s)
                finally:
                    self._hand_out(group, outcomes)
            del group, outcomes  # an error's traceback keeps this frame

    def _hand_out(self, group: list[_PendingPass], outcomes: Sequence[PassResult]) -> None:
        for index, pending_pass in enumerate(group):
            pending_pass.outcome = outcomes[index] if outcomes else TargetError("the forward pass was interrupted")
            pending_pass.done.notify()
        self._stop_leading()

    def _note_times(self, group: list[_PendingPass], last_s: float) -> None:
        runner = group[0].runner
        if runner.max_tokens is None:
            group[0].cost_s = last_s
            return
        times, num_tokens = self._histories[runner].times, sum(each.num_tokens for each in group)
        times.update(len(group), num_tokens, last_s)
        for pending_pass in group:
            pending_pass.cost_s = times.estimate_part_s(pending_pass.num_tokens, num_tokens, last_s)

    def _stop_leading(self) -> None:
        self._has_leader = False
        if self._waiting:
            self._waiting[0].done.notify()

    def _withdraw_pass(self, pending_pass: _PendingPass) -> None:
        """Remove a pass whose thread was interrupted while it waited."""
        with self._lock:
            if pending_pass in self._waiting:
                self._waiting.remove(pending_pass)
                self._update_expected_slots(pending_pass.forward_pass.slot, None)
                self._pass_arrived.notify()
                if self._waiting and not self._has_leader:
                    self._waiting[0].done.notify()


def _run_passes(runner: PassRunner, passes: Sequence[ForwardPass]) -> Sequence[PassResult]:
    """Return each pass's result.

    An error's traceback keeps this frame, so nothing in it may hold the results.
    """
    try:
        return runner.run_all(passes)
    except Exception as error:  # noqa: BLE001 - the waiting threads raise it
        return [error] if len(passes) == 1 else [_copy_error_for_thread(error) for _ in passes]


def _copy_error_for_thread(error: Exception) -> TargetError:
    """Return a copy for one thread: an error raised in several collects their tracebacks."""
    own = TargetError(str(error) or type(error).__name__)
    own.__cause__ = error
    return own
