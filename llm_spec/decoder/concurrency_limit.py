"""Limits how many answers may run at once, in all decoders that share a limit."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from llm_spec.contract.checks import check_number
from llm_spec.contract.errors import ConfigError, DraftError
from llm_spec.decoder.shared_objects import SharedByDecoders
from llm_spec.local.forks import reset_in_forked_child

__all__ = ["ConcurrencyLimit", "DraftPlace"]


class ConcurrencyLimit(SharedByDecoders):
    """At most `max_requests` answers at once, in all decoders that are given the same limit.

    A target waits for its turn, behind other targets only. A draft never waits: it takes a free
    place or is left out. It loses its place to a target that finds none free. So speculation delays
    no target, and a pair that shares one limit never waits for itself. A draft that calls no model
    (`is_free`) takes no place. For one event loop at a time. Raises ConfigError if it is in use on
    another loop that is still running.
    """

    _config_field = "limit"

    def __init__(self, max_requests: int) -> None:
        check_number(ConfigError, "max_requests", max_requests, 1, integer=True)
        self._max_requests = max_requests
        self._places: _LoopPlaces | None = None
        reset_in_forked_child(self)

    def __repr__(self) -> str:
        return f"ConcurrencyLimit({self._max_requests})"

    def reset_after_fork(self) -> None:
        """Reset in a forked child, which has places of its own."""
        self._places = None

    @asynccontextmanager
    async def hold_place(self) -> AsyncGenerator[None]:
        """Wait for a target's place, and hold it."""
        places = self._get_loop_places()
        await places.acquire()
        try:
            yield
        finally:
            places.release()

    @asynccontextmanager
    async def hold_draft_place(self) -> AsyncGenerator[DraftPlace]:
        """Hold a draft's place, in the task that drafts.

        Raises DraftError if no place is free. If a target needs the place, it cancels what runs
        inside, then raises DraftError.
        """
        places = self._get_loop_places()
        if not places.num_free:
            raise DraftError("no place is free for a draft; raise max_requests")
        place = DraftPlace(places)
        try:
            async with place.timeout:
                yield place
        except TimeoutError as error:
            if not place.timeout.expired():
                raise
            raise DraftError("a target needed the draft's place; raise max_requests") from error
        finally:
            place.release_place()

    def _get_loop_places(self) -> _LoopPlaces:
        """Return the places of the running event loop; a closed loop holds none."""
        loop, places = asyncio.get_running_loop(), self._places
        if places is None or places.loop is not loop:
            if places is not None and places.is_used and not places.loop.is_closed():
                raise ConfigError("this ConcurrencyLimit is in use on another event loop; make one for each loop")
            places = self._places = _LoopPlaces(self._max_requests, loop)
        return places


class DraftPlace:
    """A draft's place in a limit, until it gives it back or a target takes it."""

    def __init__(self, places: _LoopPlaces) -> None:
        self.timeout = asyncio.timeout(None)
        self._places = places
        places.num_free -= 1
        places.spare_places.append(self)

    def release_place(self) -> None:
        """Release the place unless a target has taken it; no target interrupts what follows."""
        if self in self._places.spare_places:
            self._places.spare_places.remove(self)
            self._places.release()


class _LoopPlaces:
    """The places of one event loop. While a caller waits, none is free and none is spare."""

    def __init__(self, num_free: int, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.num_free = num_free
        self.spare_places: list[DraftPlace] = []  # the newest last
        self._num_places = num_free
        self._waiters: deque[asyncio.Future[None]] = deque()

    @property
    def is_used(self) -> bool:
        return self.num_free < self._num_places

    async def acquire(self) -> None:
        """Wait for a place, which the caller must release once."""
        if self.num_free:
            self.num_free -= 1
            return
        if self.spare_places:
            # the newest draft has written the least
            self.spare_places.pop().timeout.reschedule(self.loop.time())
            return
        waiter: asyncio.Future[None] = self.loop.create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled():
                self.release()  # its turn came at the same moment
            raise
        finally:
            self._waiters.remove(waiter)

    def release(self) -> None:
        """Pass a place on to the caller that has waited longest."""
        waiter = next((waiter for waiter in self._waiters if not waiter.done()), None)
        if waiter is None:
            self.num_free += 1
        else:
            waiter.set_result(None)
