"""Calls a request's target under the request's deadline, timeouts, retries and error rules."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import NoReturn, TypeVar

from llm_spec.contract.errors import ClosedError, LlmSpecError, TargetError, TransientError, format_error_line
from llm_spec.contract.events import ChatResponse, Fallback, Finish, Progress, Retry, StreamEvent
from llm_spec.contract.provider import LlmProvider
from llm_spec.contract.request import ChatRequest
from llm_spec.decoder.breaker import CircuitBreaker, retry_transient
from llm_spec.decoder.config import SpeculativeConfig
from llm_spec.decoder.record import AnswerRecorder
from llm_spec.decoder.telemetry import RequestLogContext, log_event
from llm_spec.measure.clock import Deadline
from llm_spec.measure.tokens import cut_response_to_max_tokens
from llm_spec.strategies.base import OpenStream
from llm_spec.strategies.resume_plain import CannotContinueError, can_target_continue_text, continue_by_text

__all__ = ["TargetCall"]

T = TypeVar("T")


class TargetCall:
    """One request's wait for its answer. Its deadline begins when this object is made."""

    def __init__(
        self, target: LlmProvider, config: SpeculativeConfig, recorder: AnswerRecorder, breaker: CircuitBreaker
    ) -> None:
        self.target = target
        self.config = config
        self.recorder = recorder
        self.breaker = breaker.for_request()
        self.deadline = Deadline(config.deadline_s)
        self.log_context = RequestLogContext()

    @property
    def is_deadline_reached(self) -> bool:
        """True if the deadline ended the answer."""
        return self.deadline.is_reached and self.recorder.finish is None

    def stream_answer_events(
        self, run: OpenStream, plain: OpenStream | None, *, is_whole: bool
    ) -> AsyncGenerator[StreamEvent]:
        """Stream the events of `run`, up to its Finish or the deadline.

        Everything that it opened is closed at the end. `plain` replaces `run` if `run` fails before
        its first event: at once, or after a wait if the target fails for a while. With None, `run`
        itself is plain. If an answer breaks off after it has begun, the next attempt continues it.
        If that is impossible and the caller has received nothing (`is_whole`), it begins anew. The
        whole answer holds one place of the limit, if there is one.
        """
        attempts = _AnswerAttempts(self, run, plain, is_whole=is_whole)
        return (
            attempts.stream_answer_events()
            if self.config.deadline_s is None
            else self._stream_events_until_deadline(attempts)
        )

    async def _stream_events_until_deadline(self, attempts: _AnswerAttempts) -> AsyncGenerator[StreamEvent]:
        async with aclosing(self.deadline.end_stream_at_deadline(attempts.stream_answer_events())) as events:
            async for event in events:
                yield event
        for progress in attempts.pop_progress_events():
            yield progress

    async def complete(self, on_retry: Callable[[TransientError, float], None]) -> ChatResponse:
        """Return the whole answer in one call, without a deadline.

        `on_retry` is called before each retry.
        """
        policy, breaker = self.config.retry, self.breaker
        async with self.hold_answer_place():
            attempts = retry_transient(
                self._complete_once, policy, breaker, max_attempts=policy.max_attempts, on_retry=on_retry
            )
            response = await self.await_strategy_step(attempts)
        breaker.record_outcome(None)
        return response

    async def _complete_once(self) -> ChatResponse:
        with self.breaker.guard_attempt():
            request = self.recorder.request
            return cut_response_to_max_tokens(await self.target.complete(request), request.max_tokens)

    def hold_answer_place(self) -> AbstractAsyncContextManager[None]:
        """Return a context that waits for the answer's place in the limit, if any, and holds it."""
        limit = self.config.limit
        return nullcontext() if limit is None else limit.hold_place()

    async def await_strategy_step(self, awaitable: Awaitable[T]) -> T:
        """Await one step of the strategy; raises as `raise_with_text_so_far` does."""
        try:
            if not self.log_context.is_request_logged:
                return await awaitable
            with self.log_context:
                return await awaitable
        except Exception as error:  # noqa: BLE001 - it is raised again
            self.raise_with_text_so_far(error)

    def make_event_reader(self, events: AsyncIterator[StreamEvent]) -> Callable[[], Awaitable[StreamEvent | None]]:
        """Return a function that reads the next event, or None after the last.

        Its errors are not translated; see `raise_with_text_so_far`.
        """
        following = partial(anext, events, None)
        return (lambda: self.await_strategy_step(following())) if self.log_context.is_request_logged else following

    def raise_with_text_so_far(self, error: Exception) -> NoReturn:
        """Raise an error of the target with the text so far.

        An error that is not an LlmSpecError becomes TargetError.
        """
        if isinstance(error, TargetError):
            error.partial_text = self.recorder.content or error.partial_text
        if isinstance(error, LlmSpecError):
            raise error
        message = f"target {self.target.name} failed: {type(error).__name__}: {error}"
        raise TargetError(message, partial_text=self.recorder.content) from error

    async def close_logging_errors(self, opened: AbstractAsyncContextManager[object]) -> None:
        """Close a context and log an error in closing: the answer does not depend on it."""
        try:
            await opened.__aexit__(None, None, None)
        except Exception as error:  # noqa: BLE001 - verified text stays verified
            with self.log_context:
                log_event("closing_failed", level=logging.WARNING, error=type(error).__name__)


class _AnswerAttempts:
    """The attempts at one answer.

    Once an attempt has written something, the answer starts over only if the caller waits for all
    of it.
    """

    def __init__(self, target_call: TargetCall, run: OpenStream, plain: OpenStream | None, *, is_whole: bool) -> None:
        self._target_call = target_call
        self._run = run
        # to be run instead of a speculative attempt; None: there is none any more
        self._plain = plain
        self._restart_run = plain or run
        self._is_whole = is_whole
        self._num_attempts = 0
        # the error that the current attempt continues from
        self._break_error: TransientError | None = None
        self._progress: list[StreamEvent] = []  # what happened before the first text
        self._opened: AbstractAsyncContextManager[object] | None = None  # the current attempt
        self._is_circuit_trial = False  # whether the current attempt is the circuit's trial

    async def stream_answer_events(self) -> AsyncGenerator[StreamEvent]:
        target_call = self._target_call
        async with target_call.hold_answer_place():
            try:
                while True:
                    events, event = await self._open_next_attempt()
                    for progress in self.pop_progress_events():
                        yield progress
                    read = target_call.make_event_reader(events)
                    try:
                        while event is not None and type(event) is not Finish:
                            yield event
                            event = await read()
                    except TransientError as error:
                        if target_call.recorder.has_all_tokens:  # only its end was missing
                            yield Finish("length", None, "max_tokens")
                            return
                        self._continue_broken_answer(error)
                    except Exception as error:  # noqa: BLE001 - it is raised again
                        target_call.raise_with_text_so_far(error)
                    else:
                        if event is not None:
                            target_call.breaker.record_outcome(None)
                            yield event
                        return
            finally:
                await self._close_attempt()

    async def _open_next_attempt(self) -> tuple[AsyncIterator[StreamEvent], StreamEvent | None]:
        """Return the next attempt that has an event; raises the error that ends the attempts."""
        try:
            return await self._retry_until_begun()
        except CannotContinueError:
            if self._break_error is None:
                raise
            if not self._is_whole:
                raise self._break_error from None
        self._num_attempts -= 1  # no call was made
        self._restart_answer()
        return await self._retry_until_begun()

    async def _retry_until_begun(self) -> tuple[AsyncIterator[StreamEvent], StreamEvent | None]:
        target_call, policy = self._target_call, self._target_call.config.retry
        num_attempts_left = policy.max_attempts - self._num_attempts
        return await target_call.await_strategy_step(
            retry_transient(
                self._open_one_attempt,
                policy,
                target_call.breaker,
                max_attempts=num_attempts_left,
                on_retry=self._prepare_retry,
            )
        )

    def pop_progress_events(self) -> list[StreamEvent]:
        """Return the progress events since the last call."""
        progress, self._progress = self._progress, []
        return progress

    async def _open_one_attempt(self) -> tuple[AsyncIterator[StreamEvent], StreamEvent | None]:
        """Make one attempt, up to the first event that belongs to the answer."""
        target_call = self._target_call
        self._num_attempts += 1
        await self._close_attempt()  # the attempt before
        self._is_circuit_trial = target_call.breaker.begin_attempt()
        try:
            if self._break_error is not None and not await can_target_continue_text(target_call.target):
                raise CannotContinueError(f"{target_call.target.name} does not continue a text")
            return await self._open_with_fallback()
        except Exception as error:
            target_call.breaker.record_outcome(error)
            # otherwise a draft would continue while the next attempt waits
            await self._close_opened_run()
            raise

    async def _open_with_fallback(self) -> tuple[AsyncIterator[StreamEvent], StreamEvent | None]:
        """Open an attempt, without speculation if the target lacks what speculation needs."""
        try:
            return await self._open_to_first_event()
        except Exception as error:
            if self._plain is None or isinstance(error, TransientError | ClosedError):
                raise
            self._progress.append(Fallback.from_error(error))
        self._run, self._plain = self._plain, None
        await self._close_opened_run()
        return await self._open_to_first_event()

    async def _open_to_first_event(self) -> tuple[AsyncIterator[StreamEvent], StreamEvent | None]:
        run = self._run()
        events = await run.__aenter__()
        self._opened = run
        event = await anext(events, None)
        while isinstance(event, Progress):
            self._progress.append(event)
            event = await anext(events, None)
        return events, event

    async def _close_opened_run(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            await self._target_call.close_logging_errors(opened)

    async def _close_attempt(self) -> None:
        try:
            await self._close_opened_run()
        finally:
            if self._is_circuit_trial:
                self._is_circuit_trial = False
                self._target_call.breaker.end_trial()

    def _prepare_retry(self, error: TransientError, wait_s: float) -> None:
        """Record a failed attempt; the next one holds the same place and does not speculate."""
        has_output = self._target_call.recorder.has_output
        self._progress.append(Retry(format_error_line(error), wait_s, is_continued=has_output))
        if self._plain is not None:
            self._run, self._plain = self._plain, None

    def _continue_broken_answer(self, error: TransientError) -> None:
        """Prepare the next attempt after a broken answer: it continues it or starts over.

        Raises the error if neither is possible.
        """
        target_call = self._target_call
        recorder, target = target_call.recorder, target_call.target
        error.partial_text = recorder.content or error.partial_text
        target_call.breaker.record_outcome(error)
        rest = recorder.build_rest_request()
        is_exhausted = self._num_attempts >= target_call.config.retry.max_attempts or target_call.breaker.is_open
        if is_exhausted or (rest is None and not self._is_whole):
            raise error
        self._prepare_retry(error, 0.0)
        self._break_error = error
        if rest is None:
            self._restart_answer()
        else:
            self._run = partial(_stream_continuation, target, rest, recorder.content)

    def _restart_answer(self) -> None:
        """Prepare to start over: nothing of this attempt was emitted."""
        self._target_call.recorder.discard_answer()
        self._progress = [replace(e, is_continued=False) if isinstance(e, Retry) else e for e in self._progress]
        self._run, self._plain, self._break_error = self._restart_run, None, None


@asynccontextmanager
async def _stream_continuation(
    target: LlmProvider, request: ChatRequest, text: str
) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
    async with aclosing(continue_by_text(target, request, text)) as events:
        yield events
