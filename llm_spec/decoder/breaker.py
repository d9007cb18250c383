"""Retries and circuit breakers; nothing else in the package retries.

If a target fails for a temporary reason (`TransientError`), the request is sent again as long as
nothing of its answer has been emitted. After that the answer continues from the emitted text, if
possible. Drafts are not retried. A circuit breaker stops calls to a target or draft that keeps
failing (after M. Nygard's "Release It!").
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

# from a gateway, or from an overloaded server itself
_UNAVAILABLE_STATUSES: Final = frozenset({502, 503, 504, *range(520, 530)})
# the least time after which a caller should ask again while a trial runs
_TRIAL_RETRY_S: Final = 1.0


async def retry_transient(
    call: Callable[[], Awaitable[T]],
    policy: RetryPolicy,
    breaker: CircuitBreaker,
    *,
    max_attempts: int,
    on_retry: Callable[[TransientError, float], None],
) -> T:
    """Await `call()` again while it raises TransientError; raises the last error.

    It is called at most `max_attempts` times, and not again once the circuit is open. Between two
    attempts it waits as long as the server says. Otherwise it waits at random, on average longer
    each time ("full jitter"). `on_retry` is called with each error but the last, and the seconds to
    wait.
    """
    try:
        # nearly always enough: setting up retries costs more than the rest of our own work
        return await call()
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
    """Stops calls to a server that keeps failing.

    After `max_failures` failures in a row it lets nothing through for `open_s` seconds, then one
    trial. The next trial waits until that one has ended. A trial that is cancelled before its end
    decides nothing.

    A failure counts if the server caused it: it cannot be reached, breaks the connection, is
    silent, or says that it cannot serve (502, 503, 504, 520 to 529). Any other answer shows that
    the server is alive. This includes 500, which the request may have caused. A cancelled attempt
    shows nothing. A request may also break a connection, so the failures of one client open the
    circuit to that client alone, until another client's request fails, too. For one event loop at a
    time.
    """

    def __init__(self, name: str, policy: BreakerPolicy | None = None) -> None:
        policy = policy or BreakerPolicy()
        self._name = name
        self._max_failures = policy.max_failures
        self._open_s = policy.open_s
        self._state = _CircuitState()
        self._client: object = None  # None: all clients together
        self._is_one_request = self._has_failed = False

    @property
    def is_open(self) -> bool:
        """True if it failed too often, also during a trial. Without a client: for any client."""
        failures = self._state.failures
        if not failures:  # nearly always true
            return False
        is_concerned = self._client is None or self._client in failures or len(failures) > 1
        return 0 < self._max_failures <= failures.total() and is_concerned

    def copy_for_new_client(self) -> CircuitBreaker:
        """Return a breaker for all requests of one client."""
        other = self._copy_sharing_state()
        other._client = object()  # noqa: SLF001 - same class
        return other

    def for_request(self) -> CircuitBreaker:
        """Return a breaker for all attempts of one request.

        They count as one failure, because the request may be what breaks the server.
        """
        other = self._copy_sharing_state()
        other._is_one_request = True  # noqa: SLF001 - same class
        return other

    def _copy_sharing_state(self) -> CircuitBreaker:
        other = CircuitBreaker.__new__(CircuitBreaker)  # `copy.copy` takes ten times as long
        vars(other).update(vars(self))
        return other

    def guard_attempt(self) -> AbstractContextManager[None]:
        """Guard one attempt; raises CircuitOpenError on entry while the circuit is open.

        An error raised inside is the outcome. Any other outcome must be recorded with
        `record_outcome` inside.
        """
        return _AttemptThroughBreaker(self)

    def begin_attempt(self) -> bool:
        """Let an attempt through, or raise CircuitOpenError.

        Returns True if the attempt is the trial: the next trial waits for its end.
        """
        if not self.is_open:
            return False
        self._raise_if_refusing()
        self._state.is_trying = True
        return True

    def end_trial(self) -> None:
        """End the trial; if it had no outcome, the next one may be made."""
        self._state.is_trying = False

    def record_outcome(self, error: Exception | None) -> None:
        """Record how an attempt ended; None is a success.

        A failure that is not counted still keeps an open circuit open.
        """
        if isinstance(error, ClosedError):
            return  # it says nothing about the server
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
    """The state that all clients of a breaker share."""

    failures: Counter[object] = field(default_factory=Counter[object])  # in a row, by client
    open_until_s: float = 0.0  # no attempt passes before this time
    is_trying: bool = False  # one attempt at a time passes after it

    def __post_init__(self) -> None:
        reset_in_forked_child(self)

    def reset_after_fork(self) -> None:
        self.is_trying = False


def _is_server_breakdown(error: Exception) -> bool:
    if isinstance(error, TransientError):
        return error.status is None or error.status in _UNAVAILABLE_STATUSES
    return isinstance(error, (OSError, TimeoutError))


class _DraftHealthWatch:
    """The time of a draft's last piece, and whether it had failed when it was left."""

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
        """Record how the draft was left. An error of its own is recorded where it is raised."""
        if isinstance(error, Exception):
            return
        if self._is_waiting and self._clock() - self._last_piece_s >= 0.98 * self._patience_s:
            self._breaker.record_outcome(TimeoutError())
        elif self._has_answered:
            self._breaker.record_outcome(None)


class GuardedDraft(WrappedDraft):
    """A draft with a circuit breaker and a limit.

    If it may not be called, it fails and the target continues alone. A draft that is left after a
    silence of `patience_s` seconds has failed, too. A draft whose place a target takes raises an
    error, which does not count as its failure.
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
            # a copying draft calls no server
            if self._limit is not None and not self.capabilities.is_free:
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
