"""The host's side of rounds on a device: what to start next, and what came of it.

While the device works on a round, the next one is started behind it wherever that is safe without knowing how the
first ends, and each round brings one small copy to the host: how many tokens were accepted, which one follows, and
which were drafted.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from llm_spec import DeviceRound, ModelOutputError, Sampling
from llm_spec.provider import read_prompt
from llm_spec_torch.caches import Slot
from llm_spec_torch.faults import not_finite, running_on
from llm_spec_torch.lane import Lane, Lanes, Part, Report
from llm_spec_torch.sampling import Switches
from llm_spec_torch.session import TorchSession
from llm_spec_torch.shape import Shape

__all__ = ["RoundTaker", "TorchRounds", "open_rounds"]


class RoundTaker(Protocol):
    """What rounds need of a model that takes part in them."""

    @property
    def name(self) -> str: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_length(self) -> int: ...

    def open(self, *, exact: bool = True) -> TorchSession: ...

    def part(self, slot: Slot) -> Part:
        """Its weights, and the cache of a slot."""
        ...


def open_rounds(
    target: RoundTaker,
    draft: RoundTaker | None,
    prompt_ids: Sequence[int],
    *,
    sampling: Sampling,
    seed: int,
    lanes: Lanes,
    shape: Shape,
    cancelled: Callable[[], bool],
) -> TorchRounds | None:
    """Let target and draft read a prompt of at least two tokens; a draft that cannot is left out.

    None when it was cancelled on the way.
    """
    with ExitStack() as opened:
        own = opened.enter_context(closing(target.open()))
        read_prompt(own, prompt_ids[:-1], cancelled)
        started = time.perf_counter()
        drafting = None if draft is None else _open_draft(draft, prompt_ids, cancelled)
        open_draft_s = 0.0 if draft is None else time.perf_counter() - started
        if cancelled():
            if drafting is not None:
                drafting.close()
            return None
        parts = [target.part(own.slot)]
        places: list[object] = [own.slot.index]
        if draft is not None and drafting is not None:
            opened.enter_context(closing(drafting))
            parts.append(draft.part(drafting.slot))
            places += [draft, drafting.slot.index]
        with running_on(target.name, target.device):
            switches = Switches.of(sampling, target.vocab_size)
            lane = lanes.take(places, parts, switches, target.vocab_size, shape.max_width - 1)
            lane.sampler.load(sampling, seed)
            lane.begin(torch.tensor(prompt_ids, device=target.device))
        return TorchRounds(
            lane,
            shape,
            target,
            own.slot,
            None if drafting is None else drafting.slot,
            draft_context=target.context_length if draft is None or drafting is None else draft.context_length,
            open_draft_s=open_draft_s,
            release=opened.pop_all().close,
        )


def _open_draft(draft: RoundTaker, prompt_ids: Sequence[int], cancelled: Callable[[], bool]) -> TorchSession | None:
    """A draft's session behind all of a prompt but its last two tokens; None if the draft fails."""
    if len(prompt_ids) >= draft.context_length:
        return None
    session = draft.open(exact=False)
    try:
        read_prompt(session, prompt_ids[:-2], cancelled)
        session.adopt(())  # a cache of its own even where there was nothing to read
    except Exception:  # noqa: BLE001 - whatever a draft does, the target answers
        session.close()
        return None
    return session


class TorchRounds:
    """One request's rounds on a lane that stands behind its prompt; see `llm_spec.DeviceRounds`.

    `draft_context`: positions that the draft may read. `release` gives the caches back.
    """

    def __init__(
        self,
        lane: Lane,
        shape: Shape,
        target: RoundTaker,
        slot: Slot,
        draft_slot: Slot | None,
        *,
        draft_context: int,
        open_draft_s: float,
        release: Callable[[], None],
    ) -> None:
        self._lane = lane
        self._shape = shape
        self._target = target
        self._slot = slot
        self._draft_context = draft_context
        self._draft_slot = draft_slot
        self.open_draft_s = open_draft_s
        self._release = release
        lane.in_use = True
        self._num_missed = 0  # tokens of the context that the draft has not read, besides the last two
        self._length = len(slot.token_ids) + 1  # of prompt and answer, as far as rounds have been read
        self._flying: deque[_Flight] = deque()
        self._clock: type[_Clock] = _CudaClock if lane.length.device.type == "cuda" else _HostClock

    @property
    def drafts(self) -> bool:
        return self._lane.draft_part is not None

    def draft_and_verify(self, lookahead: int, room: int) -> DeviceRound:
        if not self._flying:
            self._start(self._allowed(lookahead))
        if self._clock is _CudaClock and self._may_follow(lookahead, room):
            self._start(lookahead)
        return self._land()

    def verify(self, drafted_ids: Sequence[int]) -> DeviceRound:
        num_accepted, verify_s = 0, 0.0
        rest = list(drafted_ids)
        while True:  # once, but where the number of keys changes among the drafted tokens
            part = rest[: self._up_to_border(len(rest))]
            self._start(len(part), given_ids=part)
            done = self._land()
            self._num_missed += done.num_accepted + 1
            num_accepted += done.num_accepted
            verify_s += done.verify_s
            if rest == part or done.num_accepted < len(part) or done.next_token_id != rest[len(part)]:
                return DeviceRound(tuple(drafted_ids), num_accepted, done.next_token_id, 0.0, verify_s)
            num_accepted += 1
            rest = rest[len(part) + 1 :]

    # ------------------------------------------------------------------------------------------ inside

    def _allowed(self, lookahead: int) -> int:
        """So many tokens of `lookahead` that the round stays within one number of keys, and the draft's context."""
        return max(0, min(self._up_to_border(lookahead), self._draft_context - self._length))

    def _up_to_border(self, lookahead: int) -> int:
        """So many tokens of `lookahead` that the round stays within one number of keys."""
        return min(lookahead, self._shape.num_keys(self._length - 1) - self._length)

    def _may_follow(self, lookahead: int, room: int) -> bool:
        """Whether another round may start before those under way are read, however they end."""
        if len(self._flying) != 1:
            return False
        most = self._length + self._flying[0].lookahead + 1
        fits = room - (most - self._length) >= lookahead and most + lookahead <= self._draft_context
        return fits and self._shape.num_keys(self._length - 1) == self._shape.num_keys(most - 1 + lookahead)

    def _start(self, lookahead: int, given_ids: Sequence[int] | None = None) -> None:
        """Start a round with tokens drafted here, or given."""
        lane, num_keys, width = self._lane, self._shape.num_keys(self._length - 1), self._shape.padded(lookahead + 1)
        drafts_here = self.drafts and given_ids is None
        with running_on(self._target.name, self._target.device):
            if given_ids:
                lane.drafted[:lookahead].copy_(torch.tensor(given_ids), non_blocking=True)
            lane.prepare(lookahead, num_keys, width, drafts_here=drafts_here)
            if drafts_here:
                self._catch_up(lookahead, num_keys)
            clock = self._clock()
            if drafts_here and lookahead:
                lane.draft(lookahead, num_keys)
            clock.lap()
            lane.verify(lookahead, num_keys, width)
            report = _to_host(lane.report)
            clock.lap()
        self._flying.append(_Flight(lookahead, report, clock))

    def _catch_up(self, lookahead: int, num_keys: int) -> None:
        """Before a round with a draft: what rounds without one have kept from it."""
        if not lookahead:
            self._num_missed += 1
        elif self._num_missed:
            self._lane.catch_up(self._num_missed, num_keys)
            self._num_missed = 0

    def _land(self) -> DeviceRound:
        flight = self._flying.popleft()
        draft_s, verify_s = flight.clock.seconds()  # waits until the copy is there
        report = Report.read([int(number) for number in flight.report.numpy()], flight.lookahead)
        if not report.draft_is_finite and self._draft_slot is not None:
            self._draft_slot.wipe()
        if not report.is_finite:
            self._slot.wipe()
            raise not_finite(self._target.name)
        self._length += report.num_accepted + 1
        return DeviceRound(report.drafted_ids, report.num_accepted, report.next_token_id, draft_s, verify_s)

    def close(self) -> None:
        """Wait for what is under way, and give caches and lane back."""
        while self._flying:
            with contextlib.suppress(ModelOutputError):  # nobody will read it
                self._land()
        self._lane.in_use = False
        self._release()


@dataclass(frozen=True, slots=True)
class _Flight:
    """A round under way."""

    lookahead: int
    report: Tensor  # on the host, complete when the clock has stopped
    clock: _Clock


class _Clock(Protocol):
    """Times the two steps of a round."""

    def lap(self) -> None: ...

    def seconds(self) -> tuple[float, float]:
        """Of drafting and verifying; waits until both are over."""
        ...


class _HostClock:
    """Where steps are over when they return."""

    def __init__(self) -> None:
        self._times = [time.perf_counter()]

    def lap(self) -> None:
        self._times.append(time.perf_counter())

    def seconds(self) -> tuple[float, float]:
        start, middle, end = self._times
        return middle - start, end - middle


class _CudaClock:
    """CUDA events on the stream that the steps run on."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self.lap()

    def lap(self) -> None:
        make: Callable[..., torch.cuda.Event] = torch.cuda.Event
        event = make(enable_timing=True)
        event.record()
        self._events.append(event)

    def seconds(self) -> tuple[float, float]:
        start, middle, end = self._events
        end.synchronize()
        return start.elapsed_time(middle) / 1e3, middle.elapsed_time(end) / 1e3


def _to_host(report: Tensor) -> Tensor:
    """A copy on the host, under way when this returns."""
    if report.device.type == "cpu":
        return report.clone()
    copied = torch.empty(report.shape, dtype=report.dtype, pin_memory=True)
    return copied.copy_(report, non_blocking=True)
