"""The one owner of retries: when a target is asked again, when it is left alone, and how many are asked at once.

A request whose target fails for a while (`TransientError`) is asked again before anything of its answer has been
emitted, and after that goes on from what was emitted, where that can be done. Drafts are never asked again. A target or
draft that keeps failing is left alone for some time (a circuit breaker, after M. Nygard's "Release It!").
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from typing import Final, TypeVar

from llm_spec._checks import check_number
from llm_spec._clock import clock, now
from llm_spec.chat import ChatRequest
from llm_spec.config import RetryPolicy
from llm_spec.errors import CircuitOpenError, ConfigError, DraftError, TransientError
from llm_spec.provider import DraftPiece, DraftProvider

__all__ = ["CircuitBreaker", "ConcurrencyLimit", "GuardedDraft", "asked_again", "within"]

T = TypeVar("T")

_MAX_FAILURES: Final = 5
_OPEN_S: Final = 30.0


async def asked_again(
    ask: Callable[[], Awaitable[T]],
    policy: RetryPolicy,
    breaker: CircuitBreaker,
    *,
    max_attempts: int,
    told: Callable[[TransientError, float], None],
) -> T:
    """Await `ask()` until it does not raise TransientError; the last error is raised.

    Not more than `max_attempts` times, and not once the circuit is open.

    Between two attempts it waits as long as the server wants, otherwise longer each time, by chance ("full jitter").
    `told` hears of each error that is not the last, and the seconds waited for.
    """
    try:
        return await ask()  # nearly always the last: setting up the others would cost more than all of our own work
    except TransientError as error:
        first = error

    from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt

    async def ask_again(state: list[TransientError]) -> T:
        if state:
            raise state.pop()
        return await ask()

    def wait_s(state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome is not None else None
        wanted = error.retry_after_s if isinstance(error, TransientError) else None
        if wanted is not None:
            return wanted
        longest = min(policy.max_wait_s, policy.first_wait_s * 2 ** (state.attempt_number - 1))
        return random.uniform(0.0, longest)  # noqa: S311 - jitter, no secret

    def before_sleep(state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        if isinstance(error, TransientError):
            told(error, state.upcoming_sleep)

    def is_worth_it(error: BaseException) -> bool:
        if not isinstance(error, TransientError) or breaker.is_open:
            return False
        return error.retry_after_s is None or error.retry_after_s <= policy.max_retry_after_s

    attempts = AsyncRetrying(
        retry=retry_if_exception(is_worth_it),
        stop=stop_after_attempt(max_attempts),
        wait=wait_s,
        before_sleep=before_sleep,
        sleep=asyncio.sleep,
        reraise=True,
    )
    return await attempts(ask_again, [first])


async def within(waiting: Awaitable[T], seconds: float | None, message: str) -> T:
    """Await it; raises TransientError(message) when it takes longer. None: it may."""
    if seconds is None:
        return await waiting
    timeout = asyncio.timeout(seconds)
    try:
        async with timeout:
            return await waiting
    except TimeoutError as error:
        if not timeout.expired():
            raise
        raise TransientError(message) from error


class CircuitBreaker:
    """Leaves something alone that keeps failing: after `max_failures` in a row for `open_s` seconds, then one trial.

    An attempt that begins well is judged by how it ends (`see`).

    What counts is what a server cannot help: a connection that breaks, silence, a status of 500 or more. A refusal
    (4xx) shows that it is alive; a cancelled attempt shows nothing. For one event loop.
    """

    def __init__(self, name: str, *, max_failures: int = _MAX_FAILURES, open_s: float = _OPEN_S) -> None:
        check_number(ConfigError, "max_failures", max_failures, 1, integer=True)
        check_number(ConfigError, "open_s", open_s, 0.0, above=True)
        self._name = name
        self._max_failures = max_failures
        self._open_s = open_s
        self._num_failures = 0
        self._closed_until_s = 0.0  # nobody is let through before that …
        self._is_trying = False  # … and then one at a time

    @property
    def is_open(self) -> bool:
        """Whether it failed too often; it is so also while one trial is made."""
        return self._num_failures >= self._max_failures

    @contextmanager
    def attempt(self) -> Generator[None]:
        """One attempt; raises CircuitOpenError, without making it, while the circuit is open."""
        if self.is_open:
            self._refuse()
        self._is_trying = self.is_open
        try:
            yield
        except Exception as error:
            self.see(error)
            raise
        finally:
            self._is_trying = False

    def see(self, error: Exception | None) -> None:
        """How an attempt ended; None: well."""
        if error is None or not _is_breakdown(error):
            self._num_failures = 0
            return
        self._num_failures += 1
        self._closed_until_s = now() + self._open_s

    def _refuse(self) -> None:
        left_s = self._closed_until_s - now()
        if left_s > 0 or self._is_trying:
            raise CircuitOpenError(
                f"{self._name} failed {self._num_failures} times in a row and is left alone"
                + (f" for {left_s:.1f} s more" if left_s > 0 else " until one trial has ended")
            )


def _is_breakdown(error: Exception) -> bool:
    if isinstance(error, TransientError):
        return error.status is None or error.status >= 500
    return isinstance(error, (OSError, TimeoutError))


class ConcurrencyLimit:
    """At most `max_requests` answers at once, of all decoders that are given the same limit.

    A target waits for its turn. A draft does not: it is left out when no place is free, so that a pair that shares one
    limit never waits for itself. One event loop.
    """

    def __init__(self, max_requests: int) -> None:
        check_number(ConfigError, "max_requests", max_requests, 1, integer=True)
        self._places = asyncio.Semaphore(max_requests)

    async def acquire(self) -> None:
        """Wait for a place; whoever got one gives it back by `release`."""
        await self._places.acquire()

    def release(self) -> None:
        """Give a place back."""
        self._places.release()

    @asynccontextmanager
    async def place_at_once(self) -> AsyncGenerator[None]:
        """A place that is free now; raises DraftError when none is."""
        if self._places.locked():
            raise DraftError("no place is free for a draft; raise max_requests")
        await self._places.acquire()
        try:
            yield
        finally:
            self._places.release()


class _Watch:
    """When a draft last said something."""

    def __init__(self, breaker: CircuitBreaker, patience_s: float) -> None:
        self._breaker = breaker
        self._patience_s = patience_s
        self._clock = clock()
        self._heard_s = self._clock()
        self._is_waiting = True

    async def passed(self, pieces: AsyncIterator[DraftPiece]) -> AsyncGenerator[DraftPiece]:
        async for piece in pieces:
            self._breaker.see(None)
            self._is_waiting = False
            yield piece
            self._heard_s, self._is_waiting = self._clock(), True
        self._is_waiting = False

    def end(self) -> None:
        if self._is_waiting and self._clock() - self._heard_s >= 0.98 * self._patience_s:
            self._breaker.see(TimeoutError())


class GuardedDraft:
    """A draft behind a circuit breaker and a limit: when it may not be asked it fails, and the target goes on alone.

    One that was left after a silence of `patience_s` seconds has failed, too.
    """

    def __init__(
        self, draft: DraftProvider, breaker: CircuitBreaker, limit: ConcurrencyLimit | None, patience_s: float
    ) -> None:
        self._draft = draft
        self._breaker = breaker
        self._limit = limit
        self._patience_s = patience_s

    @property
    def name(self) -> str:
        return self._draft.name

    @property
    def continues_prefix(self) -> bool:
        """As the draft itself."""
        return bool(getattr(self._draft, "continues_prefix", True))

    @asynccontextmanager
    async def draft(self, request: ChatRequest, max_tokens: int) -> AsyncGenerator[AsyncIterator[DraftPiece]]:
        async with AsyncExitStack() as stack:
            if self._limit is not None:
                await stack.enter_async_context(self._limit.place_at_once())
            stack.enter_context(self._breaker.attempt())
            watch = _Watch(self._breaker, self._patience_s)
            stack.callback(watch.end)
            pieces = await stack.enter_async_context(self._draft.draft(request, max_tokens))
            yield await stack.enter_async_context(aclosing(watch.passed(pieces)))

    async def aclose(self) -> None:
        await self._draft.aclose()
