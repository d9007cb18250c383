"""Upstream: one request's way to its target, under its deadline, its timeouts, its retries and its error rules."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Final, NoReturn, TypeAlias, TypeVar

from llm_spec.chat import ChatRequest, ChatResponse, Fallback, Finish, Progress, Retry, StreamEvent
from llm_spec.config import SpeculativeConfig
from llm_spec.counting import cap_response
from llm_spec.deadline import Deadline
from llm_spec.errors import LlmSpecError, TargetError, TransientError, is_refusal, one_line
from llm_spec.provider import LlmProvider
from llm_spec.recording import Recording
from llm_spec.resilience import CircuitBreaker, asked_again
from llm_spec.strategies.resume import CannotContinueError, can_continue, continue_by_text
from llm_spec.telemetry import RequestContext, log_event

__all__ = ["Run", "Upstream"]

T = TypeVar("T")
Run: TypeAlias = Callable[[], AbstractAsyncContextManager[AsyncIterator[StreamEvent]]]

_LEAST_S: Final = 1e-6  # a deadline is never 0


class Upstream:
    """Waiting for one request's answer. Its deadline begins when this is made."""

    def __init__(
        self, target: LlmProvider, config: SpeculativeConfig, recording: Recording, breaker: CircuitBreaker
    ) -> None:
        self.target = target
        self.config = config
        self.recording = recording
        self.breaker = breaker.for_request()
        self.deadline = Deadline(config.deadline_s)
        self.log_context = RequestContext()

    @property
    def deadline_reached(self) -> bool:
        """Whether the deadline ended the answer."""
        return self.deadline.is_reached and self.recording.finish is None

    @property
    def config_now(self) -> SpeculativeConfig:
        """The configuration, with as much time as is left until the deadline."""
        left_s = self.deadline.left_s
        return self.config if left_s is None else replace(self.config, deadline_s=max(left_s, _LEAST_S))

    def events(self, run: Run, plain: Run | None, *, is_whole: bool) -> AsyncGenerator[StreamEvent]:
        """The answer that `run` gives, up to its Finish or the deadline; all behind it is closed at the end.

        `plain` takes its place where it fails before it has given anything: at once, or (a target that fails for a
        while) later. None: it is plain itself. An answer that has begun goes on from where it is; where it cannot, and
        nobody has been given any of it (`is_whole`), it begins anew. Where there is a limit the whole answer has one
        place.
        """
        attempts = _Attempts(self, run, plain, is_whole=is_whole)
        return attempts.events() if self.config.deadline_s is None else self._events_in_time(attempts)

    async def _events_in_time(self, attempts: _Attempts) -> AsyncGenerator[StreamEvent]:
        async with aclosing(self.deadline.bound(attempts.events())) as events:
            async for event in events:
                yield event
        for happened in attempts.take_progress():
            yield happened

    async def response(self, told: Callable[[TransientError, float], None]) -> ChatResponse:
        """The whole answer in one call, without a deadline; `told` hears of each attempt that is made again."""
        policy, breaker = self.config.retry, self.breaker
        async with self.place():
            asking = asked_again(self._complete, policy, breaker, max_attempts=policy.max_attempts, told=told)
            response = await self.step(asking)
        breaker.see(None)
        return response

    async def _complete(self) -> ChatResponse:
        with self.breaker.attempt():
            request = self.recording.request
            return cap_response(await self.target.complete(request), request.max_tokens)

    def place(self) -> AbstractAsyncContextManager[None]:
        """The answer's place, where there is a limit; waits for it."""
        limit = self.config.limit
        return nullcontext() if limit is None else limit.place()

    async def step(self, awaitable: Awaitable[T]) -> T:
        """Await one thing of the strategy; an error that is not ours becomes TargetError."""
        try:
            if not self.log_context.is_wanted:
                return await awaitable
            with self.log_context:
                return await awaitable
        except Exception as error:  # noqa: BLE001 - it is raised again
            self.reraise(error)

    def read(self, events: AsyncIterator[StreamEvent]) -> Awaitable[StreamEvent | None]:
        """The next event, None after the last one. Its errors are as they came: see `reraise`."""
        following = anext(events, None)
        return self.step(following) if self.log_context.is_wanted else following

    def reraise(self, error: Exception) -> NoReturn:
        """Raise an error of the target with the text so far; one that is not ours becomes TargetError."""
        if isinstance(error, TargetError):
            error.partial_text = self.recording.content or error.partial_text
        if isinstance(error, LlmSpecError):
            raise error
        message = f"target {self.target.name} failed: {type(error).__name__}: {error}"
        raise TargetError(message, partial_text=self.recording.content) from error

    async def close(self, opened: AbstractAsyncContextManager[object]) -> None:
        """Close what was opened; the answer does not depend on how that ends."""
        try:
            await opened.__aexit__(None, None, None)
        except Exception as error:  # noqa: BLE001 - whatever was verified stays verified
            with self.log_context:
                log_event("closing_failed", level=logging.WARNING, error=type(error).__name__)


class _Attempts:
    """The attempts at one answer. The first that writes something is the last that begins anew, unless it is whole."""

    def __init__(self, upstream: Upstream, run: Run, plain: Run | None, *, is_whole: bool) -> None:
        self._upstream = upstream
        self._run = run
        self._plain = plain  # to be run instead of a speculative attempt; None: there is no such attempt any more
        self._from_the_start = plain or run
        self._is_whole = is_whole
        self._num_made = 0
        self._broken_by: TransientError | None = None  # what the attempt goes on from that is being made
        self._progress: list[StreamEvent] = []  # what happened before anything was written
        self._opened: AbstractAsyncContextManager[object] | None = None  # the attempt that is being made …
        self._is_trial = False  # … and whether it is the circuit's trial

    async def events(self) -> AsyncGenerator[StreamEvent]:
        upstream = self._upstream
        async with upstream.place():
            try:
                while True:
                    events, event = await self._next_attempt()
                    for happened in self.take_progress():
                        yield happened
                    try:
                        while event is not None and type(event) is not Finish:
                            yield event
                            event = await upstream.read(events)
                    except TransientError as error:
                        if upstream.recording.is_full:  # only its end was missing
                            yield Finish("length", None, "max_tokens")
                            return
                        self._go_on(error)
                    except Exception as error:  # noqa: BLE001 - it is raised again
                        upstream.reraise(error)
                    else:
                        if event is not None:
                            upstream.breaker.see(None)
                            yield event
                        return
            finally:
                await self._close()

    async def _next_attempt(self) -> tuple[AsyncIterator[StreamEvent], StreamEvent | None]:
        """The next attempt that comes to an event; raises the error that the others end with."""
        try:
            return await self._next_begun()
        except CannotContinueError:
            if self._broken_by is None:
                raise
            if not self._is_whole:
                raise self._broken_by from None
        self._num_made -= 1  # nothing was asked
        self._begin_anew()
        return await self._next_begun()

    async def _next_begun(self) -> tuple[AsyncIterator[StreamEvent], StreamEvent | None]:
        upstream, policy = self._upstream, self._upstream.config.retry
        left = policy.max_attempts - self._num_made
        return await upstream.step(
            asked_again(self._begin, policy, upstream.breaker, max_attempts=left, told=self._anew)
        )

    def take_progress(self) -> list[StreamEvent]:
        """What happened since this was last called."""
        progress, self._progress = self._progress, []
        return progress

    async def _begin(self) -> tuple[AsyncIterator[StreamEvent], StreamEvent | None]:
        """One attempt, up to the first event that belongs to the answer."""
        upstream = self._upstream
        self._num_made += 1
        await self._close()  # the attempt before
        self._is_trial = upstream.breaker.begin()
        try:
            if self._broken_by is not None and not await can_continue(upstream.target):
                raise CannotContinueError(f"{upstream.target.name} does not go on from a text")
            return await self._open()
        except Exception as error:
            upstream.breaker.see(error)
            raise

    async def _open(self) -> tuple[AsyncIterator[StreamEvent], StreamEvent | None]:
        """Open an attempt; where speculation asks for what the target does not do, the target is asked plainly."""
        try:
            return await self._first_event()
        except Exception as error:
            if self._plain is None or isinstance(error, TransientError):
                raise
            self._progress.append(Fallback(one_line(error), is_refusal=is_refusal(error)))
        self._run, self._plain = self._plain, None
        await self._close_run()
        return await self._first_event()

    async def _first_event(self) -> tuple[AsyncIterator[StreamEvent], StreamEvent | None]:
        run = self._run()
        events = await run.__aenter__()
        self._opened = run
        event = await anext(events, None)
        while isinstance(event, Progress):
            self._progress.append(event)
            event = await anext(events, None)
        return events, event

    async def _close_run(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            await self._upstream.close(opened)

    async def _close(self) -> None:
        try:
            await self._close_run()
        finally:
            if self._is_trial:
                self._is_trial = False
                self._upstream.breaker.end_trial()

    def _anew(self, error: TransientError, wait_s: float) -> None:
        """An attempt has failed: the next one is made in the same place, without speculation."""
        has_begun = self._upstream.recording.has_begun
        self._progress.append(Retry(one_line(error), wait_s, is_continued=has_begun))
        if self._plain is not None:
            self._run, self._plain = self._plain, None

    def _go_on(self, error: TransientError) -> None:
        """An answer broke off: the next attempt goes on from there, or anew; raises the error where it cannot."""
        upstream = self._upstream
        recording, target = upstream.recording, upstream.target
        error.partial_text = recording.content or error.partial_text
        upstream.breaker.see(error)
        rest = recording.rest()
        is_spent = self._num_made >= upstream.config.retry.max_attempts or upstream.breaker.is_open
        if is_spent or (rest is None and not self._is_whole):
            raise error
        self._anew(error, 0.0)
        self._broken_by = error
        if rest is None:
            self._begin_anew()
        else:
            self._run = partial(_continued, target, rest, recording.content)

    def _begin_anew(self) -> None:
        """The next attempt begins at the start: nobody was given what there is."""
        self._upstream.recording.begin_anew()
        self._progress = [replace(e, is_continued=False) if isinstance(e, Retry) else e for e in self._progress]
        self._run, self._plain, self._broken_by = self._from_the_start, None, None


@asynccontextmanager
async def _continued(
    target: LlmProvider, request: ChatRequest, text: str
) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
    async with aclosing(continue_by_text(target, request, text)) as events:
        yield events
