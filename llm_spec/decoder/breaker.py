"""The one owner of retries and circuit breakers.

If a target fails for a passing reason (`TransientError`), the request is sent again as long as nothing of its answer
has been emitted. After that the answer goes on from what was emitted, where that is possible. Drafts are not retried. A
circuit breaker stops calls to a target or draft that keeps failing (after M. Nygard's "Release It!").
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, TypeVar

from llm_spec.contract.draft import DraftPiece, DraftProvider
from llm_spec.contract.errors import CircuitOpenError, ClosedError, TransientError
from llm_spec.contract.optional import WrappedDraft, open_draft_for_request
from llm_spec.contract.request import ChatRequest
from llm_spec.decoder.concurrency_limit import ConcurrencyLimit
from llm_spec.decoder.config import BreakerPolicy, RetryPolicy
from llm_spec.local.forks import reset_in_forked_child
from llm_spec.measure.clock import get_loop_clock, now

__all__ = ["CircuitBreaker", "GuardedDraft", "retry_transient"]

T = TypeVar("T")

_UNAVAILABLE_STATUSES: Final = frozenset({502, 503, 504, *range(520, 530)})  # by a gateway or, overloaded, by itself
_TRIAL_RETRY_S: Final = 1.0  # after which it is worth asking whether a trial has ended


async def retry_transient(
    call: Callable[[], Awaitable[T]],
    policy: RetryPolicy,
    breaker: CircuitBreaker,
    *,
    max_attempts: int,
    on_retry: Callable[[TransientError, float], None],
) -> T:
    """Await `call()` until it does not raise TransientError; the last error is raised.

    Not more than `max_attempts` times, and not once the circuit is open.

    Between two attempts it waits as long as the server says, otherwise longer each time, at random ("full jitter").
    `on_retry` is called with each error but the last, and the seconds to wait.
    """
    try:
        return await call()  # nearly always the last: setting up the others would cost more than all of our own work
    except TransientError as error:
        first = error

    from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt

    async def run_attempt(state: list[TransientError]) -> T:
        if state:
            raise state.pop()
        return await call()

    def choose_wait_s(state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome is not None else None
        wanted = error.retry_after_s if isinstance(error, TransientError) else None
        if wanted is not None:
            return wanted
        longest = min(policy.max_wait_s, policy.first_wait_s * 2 ** (state.attempt_number - 1))
        return random.uniform(0.0, longest)  # noqa: S311 - jitter, no secret

    def report_retry(state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        if isinstance(error, TransientError):
            on_retry(error, state.upcoming_sleep)

    def is_retryable(error: BaseException) -> bool:
        if not isinstance(error, TransientError) or breaker.is_open:
            return False
        return error.retry_after_s is None or error.retry_after_s <= policy.max_retry_after_s

    attempts = AsyncRetrying(
        retry=retry_if_exception(is_retryable),
        stop=stop_after_attempt(max_attempts),
        wait=choose_wait_s,
        before_sleep=report_retry,
        sleep=asyncio.sleep,
        reraise=True,
    )
    return await attempts(run_attempt, [first])


class CircuitBreaker:
    """Stops calls to something that keeps failing: after some failures in a row, for some time, then one trial.

    The next trial waits until that one has ended; one that is left before its end decides nothing.

    What counts is a failure of the server: it cannot be reached, breaks the connection, is silent, or says that it
    cannot serve (502, 503, 504, 529). Any other answer shows that it is alive, 500 as well: that may be the request's
    doing. A cancelled attempt shows nothing. As a request may also break a connection, the failures of one client open
    the circuit to that client alone, until another client's request fails, too. For one event loop at a time.
    """

    def __init__(self, name: str, policy: BreakerPolicy | None = None) -> None:
        policy = policy or BreakerPolicy()
        self._name = name
        self._max_failures = policy.max_failures
        self._open_s = policy.open_s
        self._state = _CircuitState()
        self._client: object = None  # None: all of them together
        self._is_one_request = self._has_failed = False

    @property
    def is_open(self) -> bool:
        """Whether it failed too often; it is so also while one trial is made. Without a client: to any of them."""
        failures = self._state.failures
        if not failures:  # nearly always
            return False
        is_concerned = self._client is None or self._client in failures or len(failures) > 1
        return 0 < self._max_failures <= failures.total() and is_concerned

    def copy_for_new_client(self) -> CircuitBreaker:
        """The breaker for all requests of one client."""
        other = self._copy_sharing_state()
        other._client = object()  # noqa: SLF001 - it is one of us
        return other

    def for_request(self) -> CircuitBreaker:
        """The breaker for all attempts of one request, which count as one failure: it may be what breaks the server."""
        other = self._copy_sharing_state()
        other._is_one_request = True  # noqa: SLF001 - as above
        return other

    def _copy_sharing_state(self) -> CircuitBreaker:
        other = CircuitBreaker.__new__(CircuitBreaker)  # `copy.copy` takes ten times as long, for each request
        vars(other).update(vars(self))
        return other

    def guard_attempt(self) -> AbstractContextManager[None]:
        """One attempt, to its end; raises CircuitOpenError, without making it, while the circuit is open.

        What is raised inside is its outcome; any other is given to `record_outcome` before it is left.
        """
        return _AttemptThroughBreaker(self)

    def begin_attempt(self) -> bool:
        """Let an attempt through, or raise CircuitOpenError; True: it is the trial, and the next waits for its end."""
        if not self.is_open:
            return False
        self._raise_if_refusing()
        self._state.is_trying = True
        return True

    def end_trial(self) -> None:
        """The trial has ended; if nothing was seen of it, the next one may be made."""
        self._state.is_trying = False

    def record_outcome(self, error: Exception | None) -> None:
        """How an attempt ended; None: well. A failure that is not counted keeps an open circuit open."""
        if isinstance(error, ClosedError):
            return  # it shows nothing of the server
        if error is None or not _is_server_breakdown(error):
            self._state.failures.clear()
            return
        if not (self._is_one_request and self._has_failed):
            self._state.failures[self._client] += 1
        self._has_failed = True
        self._state.open_until_s = now() + self._open_s

    def _raise_if_refusing(self) -> None:
        left_s = self._state.open_until_s - now()
        if left_s > 0 or self._state.is_trying:
            raise CircuitOpenError(
                f"{self._name} failed {self._state.failures.total()} times in a row; its circuit is open"
                + (f" for {left_s:.1f} s more" if left_s > 0 else " until one trial has ended"),
                retry_after_s=max(left_s, _TRIAL_RETRY_S),
            )


class _AttemptThroughBreaker(AbstractContextManager[None]):
    def __init__(self, breaker: CircuitBreaker) -> None:
        self._breaker = breaker
        self._is_trial = False

    def __enter__(self) -> None:
        self._is_trial = self._breaker.begin_attempt()

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, Exception):
            self._breaker.record_outcome(error)
        if self._is_trial:
            self._breaker.end_trial()


@dataclass(eq=False)
class _CircuitState:
    """What all clients of a breaker share."""

    failures: Counter[object] = field(default_factory=Counter[object])  # in a row, by client
    open_until_s: float = 0.0  # no attempt is let through before that …
    is_trying: bool = False  # … and then one at a time

    def __post_init__(self) -> None:
        reset_in_forked_child(self)

    def reset_after_fork(self) -> None:
        self.is_trying = False


def _is_server_breakdown(error: Exception) -> bool:
    if isinstance(error, TransientError):
        return error.status is None or error.status in _UNAVAILABLE_STATUSES
    return isinstance(error, (OSError, TimeoutError))


class _DraftHealthWatch:
    """What a draft shows of itself: when it last wrote something, and whether it failed by the time it was left."""

    def __init__(self, breaker: CircuitBreaker, patience_s: float) -> None:
        self._breaker = breaker
        self._patience_s = patience_s
        self._clock = get_loop_clock()
        self._last_piece_s = self._clock()
        self._is_waiting = True
        self._has_answered = False

    async def watch_pieces(self, pieces: AsyncIterator[DraftPiece]) -> AsyncGenerator[DraftPiece]:
        async for piece in pieces:
            self._is_waiting, self._has_answered = False, True
            yield piece
            self._last_piece_s, self._is_waiting = self._clock(), True
        self._is_waiting, self._has_answered = False, True

    def record_draft_outcome(self, _: object, error: BaseException | None, __: object) -> None:
        """Record how the draft was left. An error that it raised is recorded where it is raised."""
        if isinstance(error, Exception):
            return
        if self._is_waiting and self._clock() - self._last_piece_s >= 0.98 * self._patience_s:
            self._breaker.record_outcome(TimeoutError())
        elif self._has_answered:
            self._breaker.record_outcome(None)


class GuardedDraft(WrappedDraft):
    """A draft with a circuit breaker and a limit. If it may not be called, it fails and the target goes on alone.

    One that was left after a silence of `patience_s` seconds has failed, too. One whose place a target takes fails
    without being blamed for it.
    """

    def __init__(
        self, draft: DraftProvider, breaker: CircuitBreaker, limit: ConcurrencyLimit | None, patience_s: float
    ) -> None:
        super().__init__(draft)
        self._breaker = breaker
        self._limit = limit
        self._patience_s = patience_s

    def for_request(self) -> GuardedDraft:
        return GuardedDraft(open_draft_for_request(self._draft), self._breaker, self._limit, self._patience_s)

    @asynccontextmanager
    async def draft(self, request: ChatRequest, max_tokens: int) -> AsyncGenerator[AsyncIterator[DraftPiece]]:
        async with AsyncExitStack() as stack:
            place = None
            if self._limit is not None and not self.capabilities.is_free:  # what is copied asks no server
                place = await stack.enter_async_context(self._limit.hold_draft_place())
            stack.enter_context(self._breaker.guard_attempt())
            health_watch = _DraftHealthWatch(self._breaker, self._patience_s)
            stack.push(health_watch.record_draft_outcome)
            pieces = await stack.enter_async_context(self._draft.draft(request, max_tokens))
            watch_pieces = await stack.enter_async_context(aclosing(health_watch.watch_pieces(pieces)))
            if place is not None:
                stack.callback(place.release_place)
            yield watch_pieces

    async def aclose(self) -> None:
        await self._draft.aclose()
