"""Key-value caches over one onnxruntime session: one buffer that is moved along in, or one that the model grows."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["GrowingCacheSession", "InPlaceCacheSession", "LoadedOnnxModel"]

_FIRST_CAPACITY: Final = 512  # tokens a shared buffer has room for at first; it doubles when they are used up


@dataclass(frozen=True, slots=True)
class LoadedOnnxModel:
    """A loaded model and what its inputs look like; shared by all sessions and never changed."""

    session: Any  # onnxruntime.InferenceSession; the package has no type information
    cache_names: tuple[str, ...]  # past_key_values.0.key, …, in the model's order
    num_kv_heads: int
    head_dim: int
    cache_dtype: np.dtype[Any]
    logits_dtype: np.dtype[Any]
    takes_positions: bool
    vocab_size: int
    context_length: int

    def make_empty_cache(self, length: int) -> NDArray[Any]:
        """One key or value cache, [1, num_kv_heads, length, head_dim]."""
        return np.zeros((1, self.num_kv_heads, length, self.head_dim), self.cache_dtype)


class GrowingCacheSession:
    """For exports that append to the cache they are given: what they return is kept, cut where it must be."""

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


class InPlaceCacheSession:
    """For exports whose past and present may be one buffer: every input and output is bound once for each width.

    Positions from `length` on hold leftovers that the model never reads; so a closed session's buffers and bindings,
    which take longer to make than a round, may serve the next request: `idle` is where they wait for it.
    """

    def __init__(self, graph: LoadedOnnxModel, min_rows: int, idle: deque[InPlaceCacheSession]) -> None:
        self._graph = graph
        self._min_rows = min_rows
        self._idle = idle
        self.length = 0
        self._capacity = 0
        self._cache: list[NDArray[Any]] = []
        self._calls: dict[int, _BoundForwardPass] = {}

    def forward(self, token_ids: Sequence[int], *, num_rows: int) -> NDArray[np.float32]:
        count = len(token_ids)
        width = max(count, self._min_rows)
        self._grow_cache(self.length + width)
        call = self._calls.get(width)
        if call is None:
            call = self._calls[width] = _BoundForwardPass(self._graph, self._cache, width, self._capacity)
        call.run(token_ids, self.length)
        self.length += count
        return call.logits[0, count - num_rows : count].astype(np.float32, copy=False)

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)

    def close(self) -> None:
        """Leave the buffers to the next session; the oldest that wait there go when there are many."""
        if self._cache:
            heir = InPlaceCacheSession(self._graph, self._min_rows, self._idle)
            heir._capacity, heir._cache, heir._calls = self._capacity, self._cache, self._calls
            self._capacity, self._cache, self._calls = 0, [], {}
            self._idle.append(heir)

    def _grow_cache(self, num_tokens: int) -> None:
        if num_tokens <= self._capacity:
            return
        self._capacity = max(_FIRST_CAPACITY, 2 * self._capacity, num_tokens)
        old, self._cache = self._cache, [self._graph.make_empty_cache(self._capacity) for _ in self._graph.cache_names]
        for kept, grown in zip(old, self._cache, strict=False):
            grown[:, :, : self.length] = kept[:, :, : self.length]
        self._calls.clear()  # they are bound to the old buffers


class _BoundForwardPass:
    """One width's buffers, bound to the model by address, so that a call costs nothing but the call."""

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
