"""TrialPace: calls that find out what a server can do, so far apart that none of them holds an answer up for long.

A server without room to spare writes nothing of an answer while it reads the prompt of another call. How late an answer
is after a call tells what the next one would cost: that one waits until an answer has taken so long that it does not
matter, or until there was none for a second, since one answer often follows another. Where an answer goes on in time
while a call is under way, the next one need not wait for what the first one gives.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from typing import Final, TypeVar

from llm_spec import StreamEvent
from llm_spec.provider_kit import now

__all__ = ["TrialPace"]

T = TypeVar("T")

_MAX_LATE: Final = 0.12  # of an answer's time so far: what calls may hold it up, all together …
_MAX_LATE_OF_ALL: Final = 0.03  # … or of all answers' time, of which one answer may take …
_MAX_LATE_AT_ONCE: Final = 0.25  # … so much of its own
_CALL_TIMEOUT_S: Final = 60.0  # a server may compile something for its first scored prompt: vLLM does, for seconds
_MIN_IDLE_S: Final = 1.0  # without an answer, until none is expected soon …
_IDLE_POLL_S: Final = 0.05  # … and whether there is one again is looked at so often
_MIN_EVENTS: Final = 5  # of an answer, to tell its pace from
_ROOM_SHARE: Final = 1 / 3  # of the wait for an answer's first token, after which a call would have made it late …
_LATE_TOLERANCE: Final = 0.1  # … by a greater share of the time since than this
_MAX_WAIT_S: Final = 1.0
_MAX_SILENCE_S: Final = 10.0  # after which nobody waits for an answer: its reader may have stopped reading


class TrialPace:
    """The answers under way at one server, and calls beside them. Any number of event loops may use it."""

    def __init__(self) -> None:
        self._answers: list[_WatchedAnswer] = []
        self._ended_s = -math.inf  # when the last answer did
        self._answers_s = self._late_s = 0.0  # that answers before took, and that calls held any answer up
        self._late_per_token_s: float | None = None  # after the last call, for each token that it read
        self._calls: list[_CallBesideAnswer] = []  # that are under way

    @property
    def has_seen_room(self) -> bool:
        """Whether a call that is under way does not make an answer late, or, if there is none, the last one did not."""
        return any(call.has_room for call in self._calls) if self._calls else self._late_per_token_s == 0.0

    @asynccontextmanager
    async def watch(
        self, opened: AbstractAsyncContextManager[AsyncIterator[StreamEvent]]
    ) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        """An answer's stream, whose pace is watched while it is open."""
        answer = _WatchedAnswer()
        self._answers.append(answer)
        try:
            async with opened as events, aclosing(answer.time_events(events)) as timed:
                yield timed
        finally:
            answer.close()
            self._answers.remove(answer)
            self._ended_s = now()
            self._answers_s += self._ended_s - answer.opened_s

    async def run_call(self, num_tokens: int, call: Callable[[], Awaitable[T]]) -> T:
        """What a call gives that reads so many tokens; raises what it raises, and TimeoutError after 60 s."""
        answer = await self._wait_for_room(num_tokens)
        if answer is None:
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                return await call()
        beside = _CallBesideAnswer(answer)
        self._calls.append(beside)
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                result = await call()
            late_s = await beside.measure_delay_s()
        finally:
            self._calls.remove(beside)
        self._late_per_token_s = late_s / num_tokens
        self._late_s += late_s
        for each in self._list_active_answers():  # what makes one late makes all late
            each.late_s += late_s
        return result

    async def run_call_in_idle_time(self, call: Callable[[], Awaitable[T]]) -> T:
        """What a call gives that may hold up every answer for seconds; made when there was none for a second."""
        while (answer := await self._find_answer_or_idle_time()) is not None:
            await answer.wait_for_event()
        async with asyncio.timeout(_CALL_TIMEOUT_S):
            return await call()

    async def _wait_for_room(self, num_tokens: int) -> _WatchedAnswer | None:
        """Wait until a call may be made; the answer that it is made beside, or None."""
        while (answer := await self._find_answer_or_idle_time()) is not None:
            if answer.num_events < _MIN_EVENTS or (self._calls and not self.has_seen_room):
                await answer.wait_for_event()
                continue
            wait_s = self._estimate_wait_s(answer, num_tokens * (self._late_per_token_s or 0.0))
            if wait_s <= 0.0:
                break
            await answer.wait_for_end(min(wait_s, _MAX_WAIT_S))  # not for each of its tokens
        return answer

    def _estimate_wait_s(self, answer: _WatchedAnswer, seconds: float) -> float:
        """How long until that is little of this answer's time, or of all answers' and not too much of this one's."""
        late_s = answer.late_s + seconds
        little_of_all_s = (self._late_s + seconds) / _MAX_LATE_OF_ALL - self._answers_s
        return min(late_s / _MAX_LATE, max(little_of_all_s, late_s / _MAX_LATE_AT_ONCE)) - (now() - answer.opened_s)

    async def _find_answer_or_idle_time(self) -> _WatchedAnswer | None:
        """The active answer that wrote last; None once there was none for a second, so that none is expected soon."""
        while True:
            answer, idle_s = self._find_latest_active_answer(), now() - self._ended_s
            if answer is not None or idle_s >= _MIN_IDLE_S:
                return answer
            await asyncio.sleep(min(_IDLE_POLL_S, _MIN_IDLE_S - idle_s))

    def _find_latest_active_answer(self) -> _WatchedAnswer | None:
        """The one that wrote last."""
        return max(self._list_active_answers(), key=lambda answer: answer.last_s, default=None)

    def _list_active_answers(self) -> list[_WatchedAnswer]:
        """Those of this event loop that wrote not long ago."""
        loop, silent_s = asyncio.get_running_loop(), now() - _MAX_SILENCE_S
        return [answer for answer in self._answers if answer.loop is loop and answer.last_s > silent_s]


class _WatchedAnswer:
    """When the events of one stream came."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.opened_s = self.last_s = now()
        self.num_events = 0
        self.late_s = 0.0  # through calls beside it
        self._first_s = self.opened_s
        self.ended_s: float | None = None  # while it goes on
        self._changed, self._ended = asyncio.Event(), asyncio.Event()

    async def time_events(self, events: AsyncIterator[StreamEvent]) -> AsyncGenerator[StreamEvent]:
        async for event in events:
            self.last_s = now()
            if not self.num_events:
                self._first_s = self.last_s
            self.num_events += 1
            self._changed.set()
            yield event

    def close(self) -> None:
        self.ended_s = now()
        self._changed.set()
        self._ended.set()

    async def wait_for_event(self) -> None:
        """Wait for its next event, or its end, or a second: another answer may be livelier by then."""
        self._changed.clear()
        await _wait_for(self._changed, _MAX_WAIT_S)

    async def wait_for_end(self, seconds: float) -> None:
        """Wait for its end, so many seconds at most."""
        await _wait_for(self._ended, seconds)

    @property
    def step_s(self) -> float:
        """Seconds from one event to the next, without what calls beside it cost."""
        return (self.last_s - self._first_s - self.late_s) / max(1, self.num_events - 1)

    @property
    def first_wait_s(self) -> float:
        """Seconds until its first event."""
        return self._first_s - self.opened_s


async def _wait_for(event: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


class _CallBesideAnswer:
    """A call that is made now beside an answer, and how late that is by it."""

    def __init__(self, answer: _WatchedAnswer) -> None:
        self._answer = answer
        self._last_s, self._num_events, self._step_s = answer.last_s, answer.num_events, answer.step_s

    @property
    def has_room(self) -> bool:
        """Whether the answer has gone on in time for long enough to tell that the call does not hold it up."""
        answer = self._answer
        num_new, seconds = answer.num_events - self._num_events, answer.last_s - self._last_s
        is_long_enough = num_new >= _MIN_EVENTS and seconds >= _ROOM_SHARE * answer.first_wait_s
        return is_long_enough and seconds <= (1.0 + _LATE_TOLERANCE) * num_new * self._step_s

    async def measure_delay_s(self) -> float:
        """How late the answer is by the call, which has ended now."""
        answer, ended_s, num_seen = self._answer, now(), self._answer.num_events
        if ended_s - self._last_s <= (num_seen - self._num_events + 1) * self._step_s:
            return 0.0  # not even its next event is due
        while answer.ended_s is None and answer.num_events == num_seen and now() - ended_s < _MAX_SILENCE_S:
            await answer.wait_for_event()
        if answer.ended_s is not None:  # no more than one event was due when it ended
            return max(0.0, answer.ended_s - self._last_s - (answer.num_events - self._num_events + 1) * self._step_s)
        if answer.num_events == num_seen:  # its reader has stopped
            return ended_s - self._last_s
        return max(0.0, answer.last_s - self._last_s - (answer.num_events - self._num_events) * self._step_s)
