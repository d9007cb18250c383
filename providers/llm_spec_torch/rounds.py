"""The host's side of rounds on a device: what to start next, and what came of it.

While the device works on a round, the next one is started behind it wherever that is safe without knowing how the
first ends, and each round brings one small copy to the host: how many tokens were accepted, which one follows, and
which were drafted.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from llm_spec import DeviceRound, Sampling
from llm_spec.provider import read_prompt
from llm_spec_torch.caches import Slot
from llm_spec_torch.faults import not_finite, told_when_full
from llm_spec_torch.lane import HEAD, Lane, Lanes, Part
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
) -> TorchRounds:
    """Let target and draft read a prompt of at least two tokens; a draft for which it is too long is left out."""
    if draft is not None and len(prompt_ids) >= draft.context_length:
        draft = None
    with ExitStack() as opened:
        own = opened.enter_context(closing(target.open()))
        read_prompt(own, prompt_ids[:-1])
        parts = [target.part(own.slot)]
        places: list[object] = [own.slot.index]
        if draft is not None:
            other = opened.enter_context(closing(draft.open(exact=False)))
            read_prompt(other, prompt_ids[:-2])
            parts.append(draft.part(other.slot))
            places += [draft, other.slot.index]
        switches = Switches.of(sampling, target.vocab_size)
        lane = lanes.get(places, parts, switches, target.vocab_size, shape.max_width - 1)
        with told_when_full(target.name, target.device), torch.inference_mode():
            lane.sampler.load(sampling, seed)
            lane.begin(torch.tensor(prompt_ids, device=target.device))
        return TorchRounds(
            lane,
            shape,
            target,
            own.slot,
            draft_context=(draft or target).context_length,
            close=opened.pop_all().close,
        )


class TorchRounds:
    """One request's rounds on a lane that stands behind its prompt; see `llm_spec.DeviceRounds`.

    `draft_context`: positions that the draft may read. `close` gives lane and caches back.
    """

    def __init__(
        self,
        lane: Lane,
        shape: Shape,
        target: RoundTaker,
        slot: Slot,
        *,
        draft_context: int,
        close: Callable[[], None],
    ) -> None:
        self._lane = lane
        self._shape = shape
        self._target = target
        self._slot = slot
        self._draft_context = draft_context
        self.close = close
        self._length = len(slot.token_ids) + 1  # of prompt and answer, as far as rounds have been read
        self._flying: deque[_Flight] = deque()
        self._clock: type[_Clock] = _CudaClock if lane.length.device.type == "cuda" else _HostClock

    @property
    def drafts(self) -> bool:
        return self._lane.draft_part is not None

    def draft_and_verify(self, lookahead: int, room: int) -> DeviceRound:
        if not self._flying:
            self._start(self._allowed(lookahead), drafts_here=True)
        if self._clock is _CudaClock and self._may_follow(lookahead, room):
            self._start(lookahead, drafts_here=True)
        return self._land()

    def verify(self, drafted_ids: Sequence[int]) -> DeviceRound:
        num_accepted, verify_s = 0, 0.0
        rest = list(drafted_ids)
        while True:  # once, but where the number of keys changes among the drafted tokens
            part = rest[: self._allowed(len(rest))]
            if part:
                self._lane.drafted[: len(part)].copy_(torch.tensor(part), non_blocking=True)
            self._start(len(part), drafts_here=False)
            done = self._land()
            num_accepted += done.num_accepted
            verify_s += done.verify_s
            if rest == part or done.num_accepted < len(part) or done.next_token_id != rest[len(part)]:
                return DeviceRound(tuple(drafted_ids), num_accepted, done.next_token_id, 0.0, verify_s)
            num_accepted += 1
            rest = rest[len(part) + 1 :]

    # ------------------------------------------------------------------------------------------ inside

    def _allowed(self, lookahead: int) -> int:
        """So many tokens of `lookahead` that the round stays within one number of keys, and the draft's context."""
        border = self._shape.num_keys(self._length - 1)
        return max(0, min(lookahead, border - self._length, self._draft_context - self._length))

    def _may_follow(self, lookahead: int, room: int) -> bool:
        """Whether another round may start before those under way are read, however they end."""
        if len(self._flying) != 1:
            return False
        most = self._length + self._flying[0].lookahead + 1
        fits = room - (most - self._length) >= lookahead and most + lookahead <= self._draft_context
        return fits and self._shape.num_keys(self._length - 1) == self._shape.num_keys(most - 1 + lookahead)

    def _start(self, lookahead: int, *, drafts_here: bool) -> None:
        num_keys = self._shape.num_keys(self._length - 1)
        with told_when_full(self._target.name, self._target.device), torch.inference_mode():
            clock = self._clock()
            if lookahead and drafts_here:
                self._lane.draft(lookahead, num_keys)
            clock.lap()
            self._lane.verify(lookahead, num_keys, self._shape.padded(lookahead + 1))
            report = _to_host(self._lane.report)
            clock.lap()
            self._flying.append(_Flight(lookahead, report, clock))

    def _land(self) -> DeviceRound:
        flight = self._flying.popleft()
        draft_s, verify_s = flight.clock.seconds()  # waits until the copy is there
        numbers = [int(number) for number in flight.report[: HEAD + flight.lookahead].numpy()]
        num_accepted, next_token_id, is_finite = numbers[:HEAD]
        if not is_finite:
            self._slot.wipe()
            raise not_finite(self._target.name)
        self._length += num_accepted + 1
        return DeviceRound(tuple(numbers[HEAD:]), num_accepted, next_token_id, draft_s, verify_s)


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
