"""StreamReader: the target's own stream, read in a task beside the calls of rows, and what its times tell."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Final, NamedTuple

from llm_spec.contract.events import Finish, StreamEvent
from llm_spec.measure.baseline import MIN_BASELINE_TOKENS, TargetSpeedBaseline
from llm_spec.measure.clock import get_loop_clock
from llm_spec.measure.pair_stats import StreamTimer
from llm_spec.strategies.draft_gate import DraftGate

__all__ = ["StreamArrival", "StreamReader"]

_READ_AHEAD: Final = 256  # events of a stream that may wait for the consumer


class StreamArrival(NamedTuple):
    """Something that a stream gave, or (an error, or None at its end) how it ended."""

    event: StreamEvent | Exception | None
    arrived_s: float
    reader: StreamReader
    has_calls: bool  # whether calls were under way then, or when the one before it arrived
    seconds: float  # since the one before, or since the stream was opened, …
    drafting_s: float  # … and for how long of them the draft wrote, …
    is_beside_draft: bool  # … which may have made it later

    @property
    def is_disturbed(self) -> bool:
        """Whether it says nothing of the stream alone."""
        return self.has_calls or self.is_beside_draft


class StreamReader:
    """The target's own stream, read in a task of its own. `begins_at`: tokens of the answer before it.

    `is_in_step`: the answer goes up to where its last piece did. `is_at_boundary`: that piece ended with whole tokens'
    text. `arrivals`: a queue that it may share with other streams.
    """

    def __init__(
        self,
        opened: AbstractAsyncContextManager[AsyncIterator[StreamEvent]],
        timer: StreamTimer,
        *,
        begins_at: int,
        has_calls: Callable[[], bool],
        changed: Callable[[], None],
        gate: DraftGate,
        arrivals: asyncio.Queue[StreamArrival] | None = None,
    ) -> None:
        self.begins_at = begins_at
        self.arrivals: asyncio.Queue[StreamArrival] = asyncio.Queue(_READ_AHEAD) if arrivals is None else arrivals
        self.timer = timer
        self.is_in_step = self.is_at_boundary = True
        self._num_undisturbed = 0  # tokens after the first piece that came before anything disturbed it, …
        self._undisturbed_s = timer.opened_s  # … the last of them at this time
        self._drafting_s = 0.0  # until then, though that was not known to disturb
        self._is_disturbed = self._had_calls = self._was_beside_draft = self._is_late_for_consumer = False
        self._has_calls = has_calls
        self._changed = changed
        self._clock = get_loop_clock()
        self._gate = gate
        self._last_s, self._last_drafting_s = timer.opened_s, gate.measure_drafting_s()
        self.task = asyncio.create_task(self._read_stream_to_end(opened))

    def time_arrived_tokens(self, num_tokens: int, arrival: StreamArrival) -> None:
        """Take the time of what came."""
        self.count_undisturbed_tokens(num_tokens, arrival)
        self.timer.add_tokens(num_tokens, arrival.arrived_s, is_disturbed=arrival.is_disturbed)

    def count_undisturbed_tokens(self, num_tokens: int, arrival: StreamArrival) -> None:
        """Count what came, before its time is taken elsewhere."""
        is_first = self.timer.first_s is None
        self._is_disturbed |= arrival.is_disturbed
        if not self._is_disturbed:
            self._drafting_s += arrival.drafting_s
        if not (self._is_disturbed or is_first):
            self._num_undisturbed += num_tokens
            self._undisturbed_s = arrival.arrived_s

    def stop_timing(self) -> None:
        """Its tokens cannot be counted, so that its times tell nothing."""
        self.timer.stop_timing()
        self._num_undisturbed, self._is_disturbed = 0, True

    def add_times_to_baseline(
        self,
        baseline: TargetSpeedBaseline,
        num_characters: int,
        *,
        token_s: float | None = None,
        num_measured: int | None = None,
        tokens_per_piece: float = 1.0,
    ) -> None:
        """What it wrote by itself, from the answer's start, tells the target's own speed.

        `token_s`: the seconds of a token as they were counted, where they are known better than from that alone, by so
        many tokens as `num_measured` says.
        `tokens_per_piece`: how many the server counts for one that was counted here.
        """
        first_s, num_tokens = self.timer.first_s, self._num_undisturbed
        seconds = self._undisturbed_s - self.timer.opened_s
        if token_s is None and self._gate.may_disturb(self._drafting_s, seconds):
            return
        if self.begins_at == 0 and num_tokens >= MIN_BASELINE_TOKENS and first_s is not None:
            rest_s = self._undisturbed_s - first_s if token_s is None else num_tokens * token_s
            num_counted = max(1, round(num_tokens * tokens_per_piece))
            baseline.add_answer(
                num_characters,
                1 + num_counted,
                first_s - self.timer.opened_s,
                rest_s,
                num_measured=num_measured,
                is_beside_draft=self._gate.is_beside_draft(self._drafting_s, seconds),
            )

    async def _read_stream_to_end(self, opened: AbstractAsyncContextManager[AsyncIterator[StreamEvent]]) -> None:
        try:
            async with opened as events:
                async for event in events:
                    await self._put_event(event)
                    if isinstance(event, Finish):
                        return
            await self._put_event(None)
        except Exception as error:  # noqa: BLE001 - judged where it is taken
            await self._put_event(error)

    async def _put_event(self, event: StreamEvent | Exception | None) -> None:
        has_to_wait = self.arrivals.full()
        if has_to_wait:
            self.timer.stop_timing()
        await self.arrivals.put(self._make_arrival(event))
        if has_to_wait:  # for the consumer: what comes next is later by that, and what comes then was written meanwhile
            self._last_s, self._last_drafting_s = self._clock(), self._gate.measure_drafting_s()
            self._is_disturbed = self._is_late_for_consumer = True
        self._changed()

    def _make_arrival(self, event: StreamEvent | Exception | None) -> StreamArrival:
        now_s, now_drafting_s, has_calls = self._clock(), self._gate.measure_drafting_s(), self._has_calls()
        has_calls = has_calls or self._is_late_for_consumer
        seconds, drafting_s = now_s - self._last_s, now_drafting_s - self._last_drafting_s
        is_beside_draft = self._gate.may_disturb(drafting_s, seconds)
        disturbs = is_beside_draft or self._was_beside_draft  # the step may have begun when the draft was writing
        arrival = StreamArrival(event, now_s, self, has_calls or self._had_calls, seconds, drafting_s, disturbs)
        self._last_s, self._last_drafting_s, self._had_calls = now_s, now_drafting_s, has_calls
        self._was_beside_draft = is_beside_draft
        return arrival
