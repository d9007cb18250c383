"""The host's side of rounds on a device: it starts rounds and reads their results.

While the device works on a round, the next one is started if that is safe however the first ends.
Each round sends one small copy to the host: how many tokens were accepted, which one follows, and
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

from llm_spec import ModelOutputError, Sampling
from llm_spec.contract.token_model import DeviceRoundResult
from llm_spec.local.caches import prefill_prompt
from llm_spec_torch.caches import CacheSlot
from llm_spec_torch.device_errors import make_not_finite_error, run_on_device
from llm_spec_torch.round_engine import DeviceRoundEngine, DeviceRoundReport, NetworkWithCache, RoundEnginePool
from llm_spec_torch.sampling import SamplingSwitches
from llm_spec_torch.session import TorchSession
from llm_spec_torch.shape import PassShape
from llm_spec_torch.width_agreement import WidthAgreement

__all__ = ["DeviceRoundParticipant", "TorchRoundRunner", "prefill_and_open_rounds"]


class DeviceRoundParticipant(Protocol):
    """The parts of a model that rounds need."""

    @property
    def name(self) -> str: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_length(self) -> int: ...

    def open(self, *, exact: bool = True) -> TorchSession: ...

    def get_network_with_cache(self, slot: CacheSlot) -> NetworkWithCache:
        """Return its weights and the cache of a slot."""
        ...


def prefill_and_open_rounds(
    target: DeviceRoundParticipant,
    draft: DeviceRoundParticipant | None,
    prompt_ids: Sequence[int],
    *,
    sampling: Sampling,
    seed: int,
    engines: RoundEnginePool,
    shape: PassShape,
    agreement: WidthAgreement | None,
    cancelled: Callable[[], bool],
) -> TorchRoundRunner | None:
    """Let target and draft read a prompt of at least two tokens, and return their rounds.

    A draft that cannot read it is left out. Returns None if `cancelled` returned True on the way.
    """
    with ExitStack() as opened:
        own = opened.enter_context(closing(target.open()))
        prefill_prompt(own, prompt_ids[:-1], cancelled)
        started = time.perf_counter()
        drafting = None if draft is None else _prefill_draft_session(draft, prompt_ids, cancelled)
        open_draft_s = 0.0 if draft is None else time.perf_counter() - started
        if cancelled():
            if drafting is not None:
                drafting.close()
            return None
        parts = [target.get_network_with_cache(own.slot)]
        places: list[object] = [own.slot.index]
        if draft is not None and drafting is not None:
            opened.enter_context(closing(drafting))
            parts.append(draft.get_network_with_cache(drafting.slot))
            places += [draft, drafting.slot.index]
        with run_on_device(target.name, target.device):
            switches = SamplingSwitches.from_sampling(sampling, target.vocab_size)
            engine = engines.acquire_engine(places, parts, switches, target.vocab_size, shape.max_width - 1)
            engine.sampler.load_request(sampling, seed)
            engine.begin_request(torch.tensor(prompt_ids, device=target.device))
        return TorchRoundRunner(
            engine,
            shape,
            target,
            own.slot,
            None if drafting is None else drafting.slot,
            agreement=agreement,
            draft_context=target.context_length if draft is None or drafting is None else draft.context_length,
            open_draft_s=open_draft_s,
            release=opened.pop_all().close,
        )


def _prefill_draft_session(
    draft: DeviceRoundParticipant, prompt_ids: Sequence[int], cancelled: Callable[[], bool]
) -> TorchSession | None:
    """Return a draft's session that has read a prompt except its last two tokens.

    Returns None if the draft cannot read it or fails.
    """
    if len(prompt_ids) >= draft.context_length or max(prompt_ids, default=0) >= draft.vocab_size:
        return None
    session = draft.open(exact=False)
    try:
        prefill_prompt(session, prompt_ids[:-2], cancelled)
        session.reuse_prefix(())  # takes a cache even if there was nothing to read
    except Exception:  # noqa: BLE001 - whatever a draft does, the target answers
        session.close()
        return None
    return session


class TorchRoundRunner:
    """One request's rounds on an engine that has read its prompt; see `DeviceRoundRunner`.

    `draft_context` is the number of positions that the draft may read. `release` gives the caches
    back.
    """

    def __init__(
        self,
        engine: DeviceRoundEngine,
        shape: PassShape,
        target: DeviceRoundParticipant,
        slot: CacheSlot,
        draft_slot: CacheSlot | None,
        *,
        agreement: WidthAgreement | None,
        draft_context: int,
        open_draft_s: float,
        release: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._shape = shape
        self._agreement = agreement
        self._target = target
        self._slot = slot
        self._draft_context = draft_context
        self._draft_slot = draft_slot
        self.open_draft_s = open_draft_s
        self._release = release
        engine.in_use = True
        self._num_tokens_missed_by_draft = 0  # of the context, without the last two
        self._length = len(slot.token_ids) + 1  # of prompt and answer, as far as collected
        self._pending_rounds: deque[_PendingRound] = deque()
        self._clock: type[_RoundClock] = _CudaRoundClock if engine.length.device.type == "cuda" else _HostRoundClock

    @property
    def has_device_draft(self) -> bool:
        return self._engine.draft_model is not None

    def draft_and_verify(self, lookahead: int, room: int) -> DeviceRoundResult:
        if not self._pending_rounds:
            self._start_round(self._limit_lookahead(lookahead))
        if self._clock is _CudaRoundClock and self._can_start_next_round(lookahead, room):
            self._start_round(lookahead)
        return self._collect_round()

    def verify(self, drafted_ids: Sequence[int]) -> DeviceRoundResult:
        num_accepted, verify_s = 0, 0.0
        rest = list(drafted_ids)
        while True:  # runs once, unless the number of keys changes among the drafted tokens
            chunk_ids = rest[: self._limit_to_key_padding(len(rest))]
            self._start_round(len(chunk_ids), proposed_ids=chunk_ids)
            done = self._collect_round()
            self._num_tokens_missed_by_draft += done.num_accepted + 1
            num_accepted += done.num_accepted
            verify_s += done.verify_s
            if rest == chunk_ids or done.num_accepted < len(chunk_ids) or done.next_token_id != rest[len(chunk_ids)]:
                return DeviceRoundResult(tuple(drafted_ids), num_accepted, done.next_token_id, 0.0, verify_s)
            num_accepted += 1
            rest = rest[len(chunk_ids) + 1 :]

    # --------------------------------------------------------------------------------------- inside

    def _limit_lookahead(self, lookahead: int) -> int:
        """Limit `lookahead` to one number of keys, and to the draft's context."""
        return max(0, min(self._limit_to_key_padding(lookahead), self._draft_context - self._length))

    def _limit_to_key_padding(self, lookahead: int) -> int:
        """Limit `lookahead` so that the round stays within one number of keys."""
        return min(lookahead, self._shape.pad_num_keys(self._length - 1) - self._length)

    def _can_start_next_round(self, lookahead: int, room: int) -> bool:
        """Return True if another round may start, however the running one ends."""
        if len(self._pending_rounds) != 1:
            return False
        max_length = self._length + self._pending_rounds[0].lookahead + 1
        fits = room - (max_length - self._length) >= lookahead and max_length + lookahead <= self._draft_context
        return fits and self._shape.pad_num_keys(self._length - 1) == self._shape.pad_num_keys(
            max_length - 1 + lookahead
        )

    def _start_round(self, lookahead: int, proposed_ids: Sequence[int] | None = None) -> None:
        """Start a round with the given tokens, or with tokens drafted on the device."""
        engine, num_keys, width = (
            self._engine,
            self._shape.pad_num_keys(self._length - 1),
            self._shape.pad_width(lookahead + 1),
        )
        uses_device_draft = self.has_device_draft and proposed_ids is None
        if self._agreement is not None:
            self._agreement.check_at(num_keys)
        with run_on_device(self._target.name, self._target.device):
            if proposed_ids:
                engine.drafted[:lookahead].copy_(torch.tensor(proposed_ids), non_blocking=True)
            engine.capture_steps(lookahead, num_keys, width, uses_device_draft=uses_device_draft)
            if uses_device_draft:
                self._catch_up_draft(lookahead, num_keys)
            clock = self._clock()
            if uses_device_draft and lookahead:
                engine.run_draft(lookahead, num_keys)
            clock.mark_step_end()
            engine.run_verify(lookahead, num_keys, width)
            report = _copy_report_to_host(engine.report)
            clock.mark_step_end()
        self._pending_rounds.append(_PendingRound(lookahead, report, clock))

    def _catch_up_draft(self, lookahead: int, num_keys: int) -> None:
        """Let the draft read what it missed, or note that it misses a token."""
        if not lookahead:
            self._num_tokens_missed_by_draft += 1
        elif self._num_tokens_missed_by_draft:
            self._engine.catch_up_draft(self._num_tokens_missed_by_draft, num_keys)
            self._num_tokens_missed_by_draft = 0

    def _collect_round(self) -> DeviceRoundResult:
        pending = self._pending_rounds.popleft()
        # This waits until the copy of the report has arrived.
        draft_s, verify_s = pending.clock.measure_draft_and_verify_s()
        report = DeviceRoundReport.from_numbers([int(number) for number in pending.report.numpy()], pending.lookahead)
        if not report.draft_is_finite and self._draft_slot is not None:
            self._draft_slot.erase()
        if not report.is_finite:
            self._slot.erase()
            raise make_not_finite_error(self._target.name)
        self._length += report.num_accepted + 1
        return DeviceRoundResult(report.drafted_ids, report.num_accepted, report.next_token_id, draft_s, verify_s)

    def close(self) -> None:
        """Wait for running rounds, and give caches and engine back."""
        while self._pending_rounds:
            with contextlib.suppress(ModelOutputError):  # nobody will read it
                self._collect_round()
        self._engine.in_use = False
        self._release()


@dataclass(frozen=True, slots=True)
class _PendingRound:
    """A running round."""

    lookahead: int
    report: Tensor  # on the host; complete when the clock has stopped
    clock: _RoundClock


class _RoundClock(Protocol):
    """Times the two steps of a round."""

    def mark_step_end(self) -> None: ...

    def measure_draft_and_verify_s(self) -> tuple[float, float]:
        """Wait for both steps and return the seconds of each."""
        ...


class _HostRoundClock:
    """A clock for steps that have ended when they return."""

    def __init__(self) -> None:
        self._times = [time.perf_counter()]

    def mark_step_end(self) -> None:
        self._times.append(time.perf_counter())

    def measure_draft_and_verify_s(self) -> tuple[float, float]:
        start, middle, end = self._times
        return middle - start, end - middle


class _CudaRoundClock:
    """A clock of CUDA events on the stream of the steps."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self.mark_step_end()

    def mark_step_end(self) -> None:
        make: Callable[..., torch.cuda.Event] = torch.cuda.Event
        event = make(enable_timing=True)
        event.record()
        self._events.append(event)

    def measure_draft_and_verify_s(self) -> tuple[float, float]:
        start, middle, end = self._events
        end.synchronize()
        return start.elapsed_time(middle) / 1e3, middle.elapsed_time(end) / 1e3


def _copy_report_to_host(report: Tensor) -> Tensor:
    """Start to copy a report to the host and return the copy."""
    if report.device.type == "cpu":
        return report.clone()
    copied = torch.empty(report.shape, dtype=report.dtype, pin_memory=True)
    return copied.copy_(report, non_blocking=True)
