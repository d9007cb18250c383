"""The double's own clock: places, a pace that many sequences may share, a prefix cache, and what was counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass

__all__ = ["Costs", "Engine", "ServerStats"]

_MS = 1e-3


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a server takes, in milliseconds of its own clock.

    first_token_ms: a stream's first token. token_ms: each further one. call_ms: a completion of one token that is not
    streamed. row_ms: each further prompt of a call. prompt_token_ms: a token of a prompt that is not in the prefix
    cache, or was asked to be scored. round_trip_ms: the way to the server and back, of every call of any kind.
    places: streams and calls at once; others wait in line. slowdown: each further sequence at once slows all by this
    share. prefix_cache: False, and every prompt is read from its beginning. block_size: tokens that the cache keeps
    together.
    """

    first_token_ms: float = 45.0
    token_ms: float = 25.0
    call_ms: float = 45.0
    row_ms: float = 0.0
    prompt_token_ms: float = 0.0
    round_trip_ms: float = 0.0
    places: int = 12
    slowdown: float = 0.0
    prefix_cache: bool = True
    block_size: int = 16


@dataclass(slots=True)
class ServerStats:
    """What a server has done since it was started, and how well it keeps its times."""

    num_calls: int = 0  # of the model: streams and completions
    num_token_calls: int = 0  # `/tokenize` and `/detokenize`
    num_streams: int = 0
    num_rows: int = 0
    num_left: int = 0  # calls that their client did not wait for
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    most_at_once: int = 0
    num_waited: int = 0  # calls that had to wait for a place
    num_sleeps: int = 0
    late_s: float = 0.0  # all together
    most_late_s: float = 0.0

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


class Engine:
    """Lets calls take their time. Deadlines are absolute: what one token is late, the next is not."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.stats = ServerStats()
        self._places = asyncio.Semaphore(costs.places)
        self._num_at_once = 0
        self._pace = _Pace(costs.slowdown)
        self._cache = _PrefixCache(costs.block_size)

    async def travel(self) -> None:
        """The way to the server and back."""
        if self.costs.round_trip_ms:
            await asyncio.sleep(self.costs.round_trip_ms * _MS)

    @asynccontextmanager
    async def take_place(self, num_rows: int) -> AsyncGenerator[None]:
        """One of the places, when it is free; meanwhile `num_rows` sequences are at work."""
        self.stats.num_waited += self._places.locked()
        async with self._places:
            self._num_at_once += 1
            self.stats.most_at_once = max(self.stats.most_at_once, self._num_at_once)
            try:
                with self._pace.share(num_rows):
                    yield
            finally:
                self._num_at_once -= 1

    def read_prompts(self, prompts: Sequence[Sequence[int]], *, is_scored: bool) -> tuple[float, int]:
        """Milliseconds that prompts take beyond the price of a call, and how many of their tokens were cached."""
        num_tokens, num_cached = sum(map(len, prompts)), 0
        for prompt in prompts:
            if self.costs.prefix_cache:
                num_cached += 0 if is_scored else self._cache.match(prompt)
                self._cache.add(prompt)
        self.stats.num_rows += len(prompts)
        self.stats.prompt_tokens += num_tokens
        self.stats.cached_tokens += num_cached
        extra_ms = (len(prompts) - 1) * self.costs.row_ms + (num_tokens - num_cached) * self.costs.prompt_token_ms
        return extra_ms, num_cached

    def remember(self, token_ids: Sequence[int]) -> None:
        """Keep what was written in the prefix cache, when a block of it is full."""
        if self.costs.prefix_cache and len(token_ids) % self.costs.block_size == 0:
            self._cache.add(token_ids)

    def now(self) -> float:
        """Seconds of work that a sequence could have done: those of the clock, or fewer where many share it."""
        return self._pace.now()

    async def sleep_until(self, deadline: float) -> None:
        """Wait for a time of `now`."""
        await self._pace.sleep_until(deadline)
        late_s = self._pace.now() - deadline
        self.stats.num_sleeps += 1
        self.stats.late_s += late_s
        self.stats.most_late_s = max(self.stats.most_late_s, late_s)


class _Pace:
    """A clock that goes slower the more sequences share it."""

    def __init__(self, slowdown: float) -> None:
        self._slowdown = slowdown
        self._num_shares = 0
        self._done, self._since = 0.0, 0.0
        self._changed = asyncio.Event()

    def now(self) -> float:
        return self._done + (asyncio.get_running_loop().time() - self._since) / self._factor

    @contextmanager
    def share(self, num: int) -> Generator[None]:
        self._change(num)
        try:
            yield
        finally:
            self._change(-num)

    async def sleep_until(self, deadline: float) -> None:
        while (left_s := deadline - self.now()) > 0:
            if not self._slowdown:
                await asyncio.sleep(left_s)
                continue
            try:
                async with asyncio.timeout(left_s * self._factor):
                    await self._changed.wait()
            except TimeoutError:
                pass

    @property
    def _factor(self) -> float:
        return 1.0 + self._slowdown * max(0, self._num_shares - 1)

    def _change(self, num: int) -> None:
        if self._slowdown:
            self._done, self._since = self.now(), asyncio.get_running_loop().time()
            self._changed.set()
            self._changed = asyncio.Event()
        self._num_shares += num


class _PrefixCache:
    """Which beginnings of prompts were read before, by whole blocks; nothing is ever dropped."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._known: set[int] = set()

    def match(self, token_ids: Sequence[int]) -> int:
        """How many leading tokens are known; the last one of a prompt is always read."""
        num = 0
        for key in self._list_keys(token_ids[:-1]):
            if key not in self._known:
                break
            num += self._block_size
        return num

    def add(self, token_ids: Sequence[int]) -> None:
        self._known.update(self._list_keys(token_ids))

    def _list_keys(self, token_ids: Sequence[int]) -> Generator[int]:
        key, size = 0, self._block_size
        for end in range(size, len(token_ids) + 1, size):
            key = hash((key, *token_ids[end - size : end]))
            yield key
