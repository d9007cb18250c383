"""Upstream: one request's way to its target, under its deadline, its timeouts, its retries and its error rules."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext
from functools import partial
from typing import TypeAlias, TypeVar, cast

from llm_spec._clock import now
from llm_spec.chat import ChatRequest, ChatResponse, Finish, Progress, Retry, StreamEvent
from llm_spec.config import SpeculativeConfig
from llm_spec.errors import LlmSpecError, TargetError, TransientError, one_line
from llm_spec.provider import LlmProvider
from llm_spec.recording import Recording
from llm_spec.resilience import CircuitBreaker, ConcurrencyLimit, asked_again, within
from llm_spec.strategies.resume import continue_by_text
from llm_spec.telemetry import RequestContext, log_event

__all__ = ["Run", "Upstream"]

T = TypeVar("T")
Run: TypeAlias = Callable[[], AbstractAsyncContextManager[AsyncIterator[StreamEvent]]]


class Upstream:
    """Waiting for one request's answer. `deadline_reached` is set where the deadline ended it."""

    def __init__(
        self, target: LlmProvider, config: SpeculativeConfig, recording: Recording, breaker: CircuitBreaker
    ) -> None:
        self.target = target
        self.config = config
        self.recording = recording
        self.breaker = breaker
        deadline_s = config.deadline_s
        self._deadline = None if deadline_s is None else now() + deadline_s
        self.log_context = RequestContext()
        self.deadline_reached = False
        self._place: ConcurrencyLimit | None = None

    def events(self, run: Run, plain: Run) -> AsyncGenerator[StreamEvent]:
        """The answer that `run` gives, up to its Finish or the deadline; all behind it is closed at the end.

        A target that fails for a while is asked again by `plain`; an answer that has begun goes on from where it is.
        Where there is a limit the whole answer has one place.
        """
        return _Attempts(self, run, plain).events()

    async def response(self, told: Callable[[TransientError, float], None]) -> ChatResponse:
        """The whole answer in one call, without a deadline; `told` hears of each attempt that is made again."""
        policy, breaker = self.config.retry, self.breaker
        await self.take_place()
        try:
            asking = asked_again(self._complete, policy, breaker, max_attempts=policy.max_attempts, told=told)
            response = await self.step(asking)
        finally:
            self.give_place_back()
        breaker.see(None)
        return cast("ChatResponse", response)

    async def _complete(self) -> ChatResponse:
        with self.breaker.attempt():
            return await self.target.complete(self.recording.request)

    async def take_place(self) -> None:
        """Wait for a place where there is a limit, up to the deadline."""
        limit = self.config.limit
        if limit is not None:
            await self.step(limit.acquire())
            self._place = None if self.deadline_reached else limit

    def give_place_back(self) -> None:
        """Leave the place, if there is one."""
        if self._place is not None:
            self._place.release()

    async def step(self, awaitable: Awaitable[T], silence_s: float | None = None) -> T | None:
        """Await one thing of the strategy, for `silence_s` at most; None when the deadline comes first.

        What is not ours becomes TargetError, silence TransientError.
        """
        until = self._deadline
        if silence_s is not None:
            silent_until = now() + silence_s
            until = silent_until if until is None else min(until, silent_until)
        timeout = None if until is None else asyncio.timeout_at(until)
        try:
            if timeout is None and not self.log_context.is_wanted:
                return await awaitable
            with self.log_context if self.log_context.is_wanted else nullcontext():
                async with timeout or nullcontext():
                    return await awaitable
        except LlmSpecError as error:
            if isinstance(error, TargetError):
                error.partial_text = self.recording.content or error.partial_text
            raise
        except Exception as error:
            content = self.recording.content
            if timeout is None or not (isinstance(error, TimeoutError) and timeout.expired()):
                told = f"target {self.target.name} failed: {type(error).__name__}: {error}"
                raise TargetError(told, partial_text=content) from error
            if until != self._deadline:
                told = f"{self.target.name} was silent for {silence_s} s"
                raise TransientError(told, partial_text=content) from error
            self.deadline_reached = True
            return None

    async def close(self, opened: AbstractAsyncContextManager[object]) -> None:
        """Close what was opened; the answer does not depend on how that ends."""
        try:
            await opened.__aexit__(None, None, None)
        except Exception as error:  # noqa: BLE001 - whatever was verified stays verified
            with self.log_context:
                log_event("closing_failed", level=logging.WARNING, error=type(error).__name__)


class _Attempts:
    """The attempts at one answer. The first that writes something is the last that begins anew."""

    def __init__(self, upstream: Upstream, run: Run, plain: Run) -> None:
        self._upstream = upstream
        self._run = run
        self._plain = plain
        self._num_made = 0
        self._told: list[StreamEvent] = []  # what happened before anything was written
        self._opened: AbstractAsyncContextManager[object] | None = None  # the attempt that is being made

    async def events(self) -> AsyncGenerator[StreamEvent]:
        upstream, policy = self._upstream, self._upstream.config.retry
        silence_s = upstream.config.timeouts.between_chunks_s
        await upstream.take_place()
        try:
            while not upstream.deadline_reached:
                left = policy.max_attempts - self._num_made
                asking = asked_again(self._begin, policy, upstream.breaker, max_attempts=left, told=self._anew)
                try:
                    begun = await upstream.step(asking)
                finally:
                    told, self._told = self._told, []
                for happened in told:
                    yield happened
                if begun is None:
                    return
                events, event = begun
                try:
                    while event is not None:
                        yield event
                        if isinstance(event, Finish):
                            upstream.breaker.see(None)
                            return
                        event = await upstream.step(anext(events, None), silence_s)
                    return
                except TransientError as error:
                    if upstream.recording.is_full:  # only its end was missing
                        yield Finish("length", None, "max_tokens")
                        return
                    self._go_on(error)
        finally:
            await self._close()
            upstream.give_place_back()

    async def _begin(self) -> tuple[AsyncIterator[StreamEvent], StreamEvent | None]:
        """One attempt, up to the first event that belongs to the answer."""
        upstream = self._upstream
        self._num_made += 1
        await self._close()  # the attempt before
        with upstream.breaker.attempt():
            silence_s = upstream.config.timeouts.first_chunk_s
            return await within(self._first_event(), silence_s, f"{upstream.target.name} was silent for {silence_s} s")

    async def _first_event(self) -> tuple[AsyncIterator[StreamEvent], StreamEvent | None]:
        run = self._run()
        events = await run.__aenter__()
        self._opened = run
        event = await anext(events, None)
        while isinstance(event, Progress):
            self._told.append(event)
            event = await anext(events, None)
        return events, event

    async def _close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            await self._upstream.close(opened)

    def _anew(self, error: TransientError, wait_s: float) -> None:
        """An attempt has failed: the next one is made in the same place, without speculation."""
        has_begun = self._upstream.recording.has_begun
        self._told.append(Retry(one_line(error), wait_s, is_continued=has_begun))
        if not has_begun:
            self._run = self._plain

    def _go_on(self, error: TransientError) -> None:
        """An answer broke off: the next attempt goes on from there; raises the error where it cannot."""
        upstream = self._upstream
        recording, target = upstream.recording, upstream.target
        upstream.breaker.see(error)
        rest = recording.rest() if target.capabilities.continue_prefix else None
        is_spent = self._num_made >= upstream.config.retry.max_attempts or upstream.breaker.is_open
        if is_spent or rest is None:
            raise error
        self._anew(error, 0.0)
        self._run = partial(_continued, target, rest, recording.content)


@asynccontextmanager
async def _continued(
    target: LlmProvider, request: ChatRequest, text: str
) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
    async with aclosing(continue_by_text(target, request, text)) as events:
        yield events
