"""Sessions with key-value caches on one onnxruntime session.

The cache is one buffer that is written in place, or arrays that the model returns longer each time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from llm_spec.local.caches import KeptTokens, choose_idle_cache
from llm_spec.local.forks import leave_to_parent, reset_in_forked_child

__all__ = [
    "GrowingCacheSession",
    "IdleBuffers",
    "InPlaceCacheSession",
    "LoadedOnnxModel",
    "SharedSession",
    "ThreadChoice",
]

# tokens of a pass that stays bound; wider ones are prompts, which are read once
_MAX_KEPT_WIDTH: Final = 33
_FIRST_CAPACITY: Final = 512  # tokens of a new shared buffer; it doubles when it is full


class SharedSession:
    """An onnxruntime session for any number of threads. A forked child loads it again.

    The parent's session has threads and locks that may be in use during the fork. The child's
    passes and its end would wait for them.
    """

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load
        self._lock = threading.Lock()
        # onnxruntime.InferenceSession; the package has no type information
        self._loaded: Any = load()
        reset_in_forked_child(self)

    def reset_after_fork(self) -> None:
        self._lock = threading.Lock()
        leave_to_parent(self._loaded)
        self._loaded = None

    def get(self) -> Any:
        """Return the session of this process."""
        with self._lock:
            if self._loaded is None:
                self._loaded = self._load()
            return self._loaded


@dataclass(frozen=True, slots=True)
class LoadedOnnxModel:
    """A loaded model and the form of its inputs; shared by all sessions and never changed."""

    shared_session: SharedSession
    cache_names: tuple[str, ...]  # past_key_values.0.key, …, in the model's order
    num_kv_heads: int
    head_dim: int
    cache_dtype: np.dtype[Any]
    logits_dtype: np.dtype[Any]
    takes_positions: bool
    vocab_size: int
    context_length: int

    @property
    def session(self) -> Any:
        """The onnxruntime session of this process."""
        return self.shared_session.get()

    def make_empty_cache(self, length: int) -> NDArray[Any]:
        """Make one key or value cache, [1, num_kv_heads, length, head_dim]."""
        return np.zeros((1, self.num_kv_heads, length, self.head_dim), self.cache_dtype)


class ThreadChoice:
    """Chooses a graph for each pass: one with several threads while only one cache is in use.

    Concurrent answers are faster with one thread each. `parallel` gives the same bits as `single`,
    or is None if no number of threads is faster. Safe to use from several threads.
    """

    def __init__(self, single: LoadedOnnxModel, parallel: LoadedOnnxModel | None = None) -> None:
        self.single = single
        self.parallel = parallel
        self.reset_after_fork()
        reset_in_forked_child(self)

    def reset_after_fork(self) -> None:
        self._num_open = 0
        self._lock = threading.Lock()

    def count_opened(self, number: int) -> None:
        """Count `number` more caches in use; -1 counts one less."""
        with self._lock:
            self._num_open += number

    def choose_graph(self) -> LoadedOnnxModel:
        """Return the graph for the next pass."""
        return self.parallel if self.parallel is not None and self._num_open == 1 else self.single


class GrowingCacheSession:
    """A session for exports that return a longer cache: it keeps this cache, cut if needed."""

    def __init__(self, graph: LoadedOnnxModel, min_rows: int) -> None:
        self._graph = graph
        self._min_rows = min_rows
        self._outputs = ["logits", *(name.replace("past_key_values", "present") for name in graph.cache_names)]
        self._cache: list[NDArray[Any]] = [graph.make_empty_cache(0) for _ in graph.cache_names]
        self.length = 0

    def forward(self, token_ids: Sequence[int], *, num_rows: int) -> NDArray[np.float32]:
        ids = _pad_token_ids(token_ids, self._min_rows)
        total = self.length + ids.shape[1]
        feeds = {"input_ids": ids, "attention_mask": np.ones((1, total), np.int64)}
        if self._graph.takes_positions:
            feeds["position_ids"] = np.arange(self.length, total, dtype=np.int64)[None]
        feeds |= dict(zip(self._graph.cache_names, self._cache, strict=True))
        logits, *self._cache = self._graph.session.run(self._outputs, feeds)
        self.length = total
        self.truncate(total - ids.shape[1] + len(token_ids))
        rows: NDArray[np.float32] = logits[0, len(token_ids) - num_rows : len(token_ids)].astype(np.float32, copy=False)
        return rows

    def truncate(self, length: int) -> None:
        if length < self.length:
            self._cache = [np.ascontiguousarray(cache[:, :, :length]) for cache in self._cache]
            self.length = length

    def close(self) -> None:
        self._cache = []


@dataclass(slots=True)
class CacheBuffers:
    """Keys and values of one sequence at a time, and the passes bound to them.

    `calls` has the passes by graph and width.
    """

    kept: KeptTokens = field(default_factory=KeptTokens)
    capacity: int = 0
    cache: list[NDArray[Any]] = field(default_factory=list[NDArray[Any]])
    calls: dict[tuple[int, int], _BoundForwardPass] = field(default_factory=dict[tuple[int, int], "_BoundForwardPass"])


class IdleBuffers:
    """Buffers of closed sessions, the longest idle first. Safe to use from several threads."""

    def __init__(self, max_idle: int) -> None:
        self._max_idle = max_idle
        self._lock = threading.Lock()
        self._idle: list[CacheBuffers] = []
        reset_in_forked_child(self)

    def reset_after_fork(self) -> None:
        """Forget the buffers: their passes are bound to the parent's session."""
        self._lock = threading.Lock()
        leave_to_parent(self._idle)
        self._idle = []

    def acquire(self, token_ids: Sequence[int], *, exact: bool) -> CacheBuffers:
        """Return buffers for a prompt, cut to the part of it that they hold and may reuse."""
        with self._lock:
            kept = [buffers.kept for buffers in self._idle]
            # no new cache: binding its passes takes long, too
            choice = choose_idle_cache(kept, token_ids, exact=exact, may_add=False)
            buffers = CacheBuffers() if choice.place is None else self._idle.pop(choice.place)
        buffers.kept.truncate(choice.num_reused)
        return buffers

    def release(self, buffers: CacheBuffers) -> None:
        """Offer buffers to other sessions; their tokens stay until then."""
        with self._lock:
            self._idle.append(buffers)
            del self._idle[: -self._max_idle]

    def clear(self) -> None:
        """Forget all buffers."""
        with self._lock:
            self._idle.clear()


class InPlaceCacheSession:
    """A session for exports whose past and present may be one buffer.

    Every input and output is bound once for each width. Positions from `length` on hold leftovers
    that the model never reads. So the next request may reuse a closed session's buffers and
    bindings, which take longer to make than a round; `idle` holds them until then.
    """

    def __init__(self, threads: ThreadChoice, min_rows: int, idle: IdleBuffers, *, exact: bool) -> None:
        self._threads = threads
        self._min_rows = min_rows
        self._idle = idle
        self._exact = exact
        self._buffers: CacheBuffers | None = None
        self._is_open = True
        threads.count_opened(1)

    @property
    def length(self) -> int:
        return 0 if self._buffers is None else len(self._buffers.kept.token_ids)

    def reuse_prefix(self, token_ids: Sequence[int]) -> int:
        """Start with a prompt's part that idle buffers hold; returns its number of tokens."""
        self._get_buffers(token_ids)
        return self.length

    def forward(self, token_ids: Sequence[int], *, num_rows: int) -> NDArray[np.float32]:
        buffers = self._get_buffers()
        length, count = len(buffers.kept.token_ids), len(token_ids)
        width = max(count, self._min_rows)
        graph = self._threads.choose_graph()
        self._grow_cache(buffers, length + width)
        call = buffers.calls.get((id(graph), width))
        if call is None:
            call = _BoundForwardPass(graph, buffers.cache, width, buffers.capacity)
            if width <= _MAX_KEPT_WIDTH:
                buffers.calls[id(graph), width] = call
        call.run(token_ids, length)
        buffers.kept.record_tokens(token_ids, exact=self._exact)
        return call.logits[0, count - num_rows : count].astype(np.float32, copy=False)

    def truncate(self, length: int) -> None:
        if self._buffers is not None:
            self._buffers.kept.truncate(length)

    def close(self) -> None:
        """Release the buffers for the next session."""
        if self._is_open:
            self._is_open = False
            self._threads.count_opened(-1)
            buffers, self._buffers = self._buffers, None
            if buffers is not None:
                self._idle.release(buffers)

    def _get_buffers(self, token_ids: Sequence[int] = ()) -> CacheBuffers:
        if self._buffers is None:
            self._buffers = self._idle.acquire(token_ids, exact=self._exact)
        return self._buffers

    def _grow_cache(self, buffers: CacheBuffers, num_tokens: int) -> None:
        if num_tokens <= buffers.capacity:
            return
        graph, length = self._threads.single, len(buffers.kept.token_ids)
        capacity = max(_FIRST_CAPACITY, 2 * buffers.capacity, num_tokens)
        cache = [graph.make_empty_cache(capacity) for _ in graph.cache_names]
        for kept, grown in zip(buffers.cache, cache, strict=False):
            grown[:, :, :length] = kept[:, :, :length]
        buffers.calls.clear()  # they are bound to the old buffers
        buffers.cache, buffers.capacity = cache, capacity


class _BoundForwardPass:
    """The buffers of one width, bound to the model by address, so that a call is cheap."""

    def __init__(self, graph: LoadedOnnxModel, cache: Sequence[NDArray[Any]], width: int, capacity: int) -> None:
        self._session = graph.session
        self._binding: Any = graph.session.io_binding()
        self._ids = np.zeros((1, width), np.int64)
        self._positions = np.zeros((1, width), np.int64)
        self._mask = np.zeros((1, capacity), np.int64)
        self._num_ones = 0
        self._steps = np.arange(width)
        self.logits = np.empty((1, width, graph.vocab_size), graph.logits_dtype)
        inputs = {"input_ids": self._ids, "attention_mask": self._mask}
        if graph.takes_positions:
            inputs["position_ids"] = self._positions
        for name, array in inputs.items():
            self._binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        self._binding.bind_output("logits", "cpu", 0, self.logits.dtype, self.logits.shape, self.logits.ctypes.data)
        for name, array in zip(graph.cache_names, cache, strict=True):
            place = ("cpu", 0, array.dtype, array.shape, array.ctypes.data)
            self._binding.bind_input(name, *place)
            self._binding.bind_output(name.replace("past_key_values", "present"), *place)

    def run(self, token_ids: Sequence[int], past: int) -> None:
        self._ids[0] = token_ids[-1]  # rows beyond the tokens are padding
        self._ids[0, : len(token_ids)] = token_ids
        np.add(self._steps, past, out=self._positions[0])
        total = past + len(self._steps)
        self._mask[0, total : self._num_ones] = 0
        self._mask[0, self._num_ones : total] = 1
        self._num_ones = total
        self._session.run_with_iobinding(self._binding)


def _pad_token_ids(token_ids: Sequence[int], min_rows: int) -> NDArray[np.int64]:
    ids = np.full((1, max(len(token_ids), min_rows)), token_ids[-1], np.int64)
    ids[0, : len(token_ids)] = token_ids
    return ids
