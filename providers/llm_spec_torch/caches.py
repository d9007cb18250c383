"""Key-value caches: a fixed number of slots, each the cache of one request at a time.

A slot that was given back keeps its tokens until another request needs it. So the next turn of a
conversation reads only what is new.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llm_spec import TargetError
from llm_spec.local.caches import KeptTokens, choose_idle_cache
from llm_spec.local.forks import reset_in_forked_child
from llm_spec_torch.network import KeyValueCache, TransformerNetwork

__all__ = ["CachePool", "CacheSlot", "count_bytes_per_token"]


@dataclass(eq=False, slots=True)
class CacheSlot(KeptTokens):
    """One sequence's cache, and the tokens that it holds."""

    index: int
    cache: KeyValueCache  # batch of one

    def check_room(self, num_tokens: int, name: str) -> None:
        """Raise TargetError unless `num_tokens` more fit: CUDA itself would report it too late."""
        length = len(self.token_ids) + num_tokens
        if length > self.cache.capacity:
            raise TargetError(f"{name}: {length} tokens do not fit into a cache of {self.cache.capacity}")

    def erase(self) -> None:
        """Forget all tokens and zero the memory: a NaN would reach others in spite of masks."""
        self.truncate(0)
        for stored in self.cache.layers:
            stored.zero_()


class CachePool:
    """All slots of a model; several threads may use it."""

    def __init__(self, network: TransformerNetwork, *, num_slots: int, capacity: int) -> None:
        shape = network.attention
        dtype, device = network.dtype, network.embedding.device
        sizes = (num_slots, capacity, 2 * shape.num_kv_heads, shape.head_dim)
        self.cache = KeyValueCache(tuple(_allocate_zeros(sizes, dtype, device) for _ in network.layers))
        self.num_slots = num_slots
        self._lock = threading.Lock()
        self._slots = [CacheSlot(index, self.cache.select_sequences(index, index + 1)) for index in range(num_slots)]
        self._idle = [*self._slots]  # the longest idle one first
        reset_in_forked_child(self)

    def reset_after_fork(self) -> None:
        self._lock = threading.Lock()
        for slot in self._slots:
            if slot not in self._idle:  # a thread of the parent was writing into it
                slot.truncate(0)
                self._idle.append(slot)

    def acquire_slot(self, token_ids: Sequence[int], *, exact: bool) -> CacheSlot:
        """Return the idle slot that holds most of a prompt, cut to the part that may be used.

        Raises TargetError if none is idle.
        """
        with self._lock:
            if not self._idle:
                raise TargetError(f"all {self.num_slots} key-value caches are in use; raise max_requests or wait")
            choice = choose_idle_cache(self._idle, token_ids, exact=exact, may_add=False)
            slot = self._idle.pop(choice.place or 0)
        slot.truncate(choice.num_reused)
        return slot

    def release_slot(self, slot: CacheSlot) -> None:
        """Put a slot back; its tokens stay until another request takes it."""
        with self._lock:
            self._idle.append(slot)


def count_bytes_per_token(network: TransformerNetwork) -> int:
    """Return the bytes of one token's keys and values in all layers."""
    shape = network.attention
    return 2 * len(network.layers) * shape.num_kv_heads * shape.head_dim * network.dtype.itemsize


def _allocate_zeros(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate zeros, because leftovers might be NaN; on a CPU only written memory is taken."""
    if device.type != "cpu":
        return torch.zeros(sizes, dtype=dtype, device=device)
    words = np.zeros(int(np.prod(sizes)) * dtype.itemsize // 2, np.int16)
    return torch.as_tensor(words).view(dtype).view(sizes)
