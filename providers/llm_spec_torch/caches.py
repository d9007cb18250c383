"""Where keys and values live: a fixed number of slots, made once, each the cache of one request at a time.

A slot that has been given back keeps its tokens until somebody else needs it, so that the next turn of a conversation
reads only what is new. Kept is what gives the same bits as reading it again: for exact sessions whole chunks of a
prompt, read from the same position in one pass; what was read in rounds stands beside other neighbours, and may differ
in the last bit.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from llm_spec import TargetError
from llm_spec_torch.network import KeyValueCache, TransformerNetwork

__all__ = ["CHUNK_TOKENS", "CachePool", "CacheSlot", "count_bytes_per_token"]

CHUNK_TOKENS = 256  # of a prompt, read in one pass; the places where chunks begin are multiples of it


@dataclass(eq=False, slots=True)
class CacheSlot:
    """One sequence's cache, and which tokens it holds."""

    index: int
    cache: KeyValueCache  # batch of one
    token_ids: list[int] = field(default_factory=list[int])
    num_in_chunks: int = 0  # leading tokens that were read in whole chunks

    def record_tokens(self, token_ids: Sequence[int]) -> None:
        """Note tokens that have been read in one pass."""
        if self.num_in_chunks == len(self.token_ids) and len(token_ids) == CHUNK_TOKENS:
            self.num_in_chunks += CHUNK_TOKENS
        self.token_ids.extend(token_ids)

    def check_room(self, num_tokens: int, name: str) -> None:
        """Raise TargetError unless so many tokens more fit; on CUDA nothing else would say so before it is too late."""
        length = len(self.token_ids) + num_tokens
        if length > self.cache.capacity:
            raise TargetError(f"{name}: {length} tokens do not fit into a cache of {self.cache.capacity}")

    def truncate(self, length: int) -> None:
        """Forget all but the first tokens."""
        del self.token_ids[length:]
        self.num_in_chunks = min(self.num_in_chunks, length // CHUNK_TOKENS * CHUNK_TOKENS)

    def erase(self) -> None:
        """Forget all, and what the memory holds: a NaN would reach others even from behind a mask."""
        self.truncate(0)
        for stored in self.cache.layers:
            stored.zero_()

    def count_reusable_tokens(self, token_ids: Sequence[int], *, exact: bool) -> int:
        """How many leading tokens of a prompt it holds already, in such a way that they may be used."""
        limit = min(len(token_ids), self.num_in_chunks if exact else len(self.token_ids))
        shared = next((i for i in range(limit) if self.token_ids[i] != token_ids[i]), limit)
        return shared // CHUNK_TOKENS * CHUNK_TOKENS if exact else shared


class CachePool:
    """All slots of a model. Safe to use from several threads."""

    def __init__(self, network: TransformerNetwork, *, num_slots: int, capacity: int) -> None:
        shape = network.attention
        dtype, device = network.dtype, network.embedding.device
        sizes = (num_slots, capacity, 2 * shape.num_kv_heads, shape.head_dim)
        self.cache = KeyValueCache(tuple(_allocate_zeros(sizes, dtype, device) for _ in network.layers))
        self.num_slots = num_slots
        self._lock = threading.Lock()
        self._idle = [
            CacheSlot(index, self.cache.select_sequences(index, index + 1)) for index in range(num_slots)
        ]  # the longest idle one first

    def acquire_slot(self, token_ids: Sequence[int], *, exact: bool) -> CacheSlot:
        """The idle slot that shares most with a prompt, cut to what may be used of it; else the longest idle.

        Raises TargetError when none is idle.
        """
        with self._lock:
            if not self._idle:
                raise TargetError(f"all {self.num_slots} key-value caches are in use; raise max_requests or wait")
            shared = [slot.count_reusable_tokens(token_ids, exact=exact) for slot in self._idle]
            slot = self._idle.pop(shared.index(max(shared)))
        slot.truncate(max(shared))
        return slot

    def release_slot(self, slot: CacheSlot) -> None:
        """Let others have a slot; its tokens stay until then."""
        with self._lock:
            self._idle.append(slot)


def count_bytes_per_token(network: TransformerNetwork) -> int:
    """Bytes of keys and values that one token takes."""
    shape = network.attention
    return 2 * len(network.layers) * shape.num_kv_heads * shape.head_dim * network.dtype.itemsize


def _allocate_zeros(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros (never leftovers, which might be NaN); on a CPU, memory that is taken only where it is written."""
    if device.type != "cpu":
        return torch.zeros(sizes, dtype=dtype, device=device)
    words = np.zeros(int(np.prod(sizes)) * dtype.itemsize // 2, np.int16)
    return torch.as_tensor(words).view(dtype).view(sizes)
