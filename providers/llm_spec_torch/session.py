"""One request's key-value cache: the TokenSession of a torch model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llm_spec.local.caches import PREFILL_CHUNK_TOKENS
from llm_spec_torch.caches import CachePool, CacheSlot
from llm_spec_torch.shape import PassShape
from llm_spec_torch.width_agreement import WidthAgreement

__all__ = ["FloatArray", "ForwardRunner", "TorchSession"]

FloatArray: TypeAlias = NDArray[np.float32]


class ForwardRunner(Protocol):
    """Runs forward passes."""

    def run_forward(
        self, slot: CacheSlot, token_ids: Sequence[int], *, width: int, num_keys: int, num_rows: int
    ) -> FloatArray:
        """Append tokens to a slot, padded to `width`; return logits after the last `num_rows`."""
        ...

    def take_cost_s(self) -> float | None:
        """Return the cost of the session's passes since the last call, in seconds.

        Returns None if they cost the time that they took by the clock.
        """
        ...

    def forget_slot(self, slot: CacheSlot) -> None:
        """Note that no more tokens come for a slot until another session takes it."""
        ...


class TorchSession:
    """One request's cache, taken when it is first needed; used by one thread at a time.

    Prompts are read in chunks that begin at multiples of PREFILL_CHUNK_TOKENS. Shorter calls are
    padded as `shape` says, and cut where attention starts to read more places. Before a call reads
    a number of keys that was not tested, `agreement` tests it.
    """

    def __init__(
        self,
        pool: CachePool,
        forwards: ForwardRunner,
        shape: PassShape,
        agreement: WidthAgreement | None = None,
        *,
        exact: bool,
    ) -> None:
        self._pool = pool
        self._forwards = forwards
        self._shape = shape
        self._agreement = agreement
        self._exact = exact
        self._slot: CacheSlot | None = None
        self._forward_cost_s: float | None = None

    @property
    def forward_cost_s(self) -> float | None:
        """The cost of the last `forward` in seconds; see `PassSharingSession`."""
        return self._forward_cost_s

    @property
    def length(self) -> int:
        return 0 if self._slot is None else len(self._slot.token_ids)

    @property
    def slot(self) -> CacheSlot:
        """The session's cache."""
        return self._acquire_slot()

    def reuse_prefix(self, token_ids: Sequence[int]) -> int:
        """Take an idle cache and return how many of the prompt's tokens it already holds."""
        self._acquire_slot(token_ids)
        return self.length

    def forward(self, token_ids: Sequence[int], *, num_rows: int) -> FloatArray:
        slot = self._acquire_slot()
        is_prompt = len(token_ids) > self._shape.max_width
        first_row = len(token_ids) - num_rows
        rows: list[FloatArray] = []
        start = 0
        check_s, started = 0.0, time.perf_counter()
        for end in self._split_forward(len(slot.token_ids), len(token_ids), is_prompt=is_prompt):
            part = token_ids[start:end]
            at = len(slot.token_ids)
            num_keys = self._shape.pad_num_keys(at + len(part) - 1)
            if self._agreement is not None and part and not is_prompt:
                check_s += self._agreement.check_at(num_keys)
            logits = self._forwards.run_forward(
                slot,
                part,
                width=len(part) if is_prompt else self._shape.pad_width(len(part)),
                num_keys=num_keys,
                num_rows=max(0, end - max(start, first_row)),
            )
            slot.record_tokens(part, exact=self._exact)
            rows.append(logits)
            start = end
        self._forward_cost_s = self._forwards.take_cost_s()
        if check_s and self._forward_cost_s is None:
            self._forward_cost_s = time.perf_counter() - started - check_s
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    def truncate(self, length: int) -> None:
        if self._slot is not None:
            self._slot.truncate(length)

    def close(self) -> None:
        slot, self._slot = self._slot, None
        if slot is not None:
            self._forwards.forget_slot(slot)
            self._pool.release_slot(slot)

    def _acquire_slot(self, token_ids: Sequence[int] = ()) -> CacheSlot:
        if self._slot is None:
            self._slot = self._pool.acquire_slot(token_ids, exact=self._exact)
        return self._slot

    def _split_forward(self, at: int, count: int, *, is_prompt: bool) -> list[int]:
        """Return the ends of the passes that read `count` tokens from position `at` on."""
        if is_prompt:
            first = at - at % PREFILL_CHUNK_TOKENS + PREFILL_CHUNK_TOKENS
            borders = range(first, at + count, PREFILL_CHUNK_TOKENS)
            return [*(border - at for border in borders), count]
        border = self._shape.pad_num_keys(at)
        return [border - at, count] if self._exact and border < at + count else [count]
