"""Sessions of several requests that share forward passes, each at its own position.

Passes are joined under load (`joining.py`), or always have one shape (`BatchedPassRunner`, for
devices). With one shape, exact sessions share passes of [max_requests, max_width]. Every slot has
rows in each pass, even without a token to read, so that a row's kernels never depend on the other
requests. Other dependencies are tested when the model is loaded (`batch_checks.py`). Other
sessions, such as drafts, share passes that are as small as possible.

A slot without tokens writes its rows into places after the context, which nothing reads. So the
prefix that it keeps for a later request survives.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

import numpy as np
import torch
from torch import Tensor

from llm_spec_torch.caches import CachePool, CacheSlot
from llm_spec_torch.device_errors import make_not_finite_error, run_pass_on_device
from llm_spec_torch.network import TransformerNetwork
from llm_spec_torch.pass_queue import FloatArray, ForwardPass, PassQueue, PassResult, PassRunner
from llm_spec_torch.session import ForwardRunner

__all__ = ["BatchedForwardRunner", "BatchedPassRunner", "PassBatching"]

_PADDING_ID: Final = 0


class PassBatching:
    """The pass runners that a model's sessions share, each with the widths that it joins."""

    def __init__(
        self,
        name: str,
        *,
        exact: PassRunner,
        exact_widths: Sequence[int],
        loose: PassRunner,
        loose_widths: Sequence[int],
    ) -> None:
        self._name = name
        self._queue = PassQueue()
        self._exact, self._exact_widths = exact, exact_widths
        self._loose, self._loose_widths = loose, loose_widths

    def make_forward_runner(self, alone: ForwardRunner, *, exact: bool) -> BatchedForwardRunner:
        """Make one session's runner; `alone` runs its prompts.

        `alone` is not kept here: a cycle of references would keep the model's memory.
        """
        joined, widths = (self._exact, self._exact_widths) if exact else (self._loose, self._loose_widths)
        return BatchedForwardRunner(self._name, self._queue, joined, alone, widths)


class BatchedForwardRunner:
    """The `ForwardRunner` of a session.

    Passes as wide as one of `widths` are joined; others run alone.
    """

    def __init__(
        self, name: str, queue: PassQueue, joined: PassRunner, alone: ForwardRunner, widths: Sequence[int]
    ) -> None:
        self._name = name
        self._queue = queue
        self._joined = joined
        self._alone = _SinglePassRunner(alone)
        self._cost_s = 0.0
        self._widths = widths

    def run_forward(
        self, slot: CacheSlot, token_ids: Sequence[int], *, width: int, num_keys: int, num_rows: int
    ) -> FloatArray:
        if not token_ids:
            raise ValueError("token_ids is empty; a pass reads at least one")
        slot.check_room(width, self._name)
        runner = self._joined if width in self._widths else self._alone
        logits, cost_s = self._queue.run_pass(runner, ForwardPass(slot, token_ids, width, num_keys, num_rows))
        self._cost_s += cost_s
        return logits

    def take_cost_s(self) -> float:
        cost_s, self._cost_s = self._cost_s, 0.0
        return cost_s

    def forget_slot(self, slot: CacheSlot) -> None:
        self._queue.forget_slot(slot)


class BatchedPassRunner:
    """Runs passes of several slots as one.

    With `fixed_width`, every pass has that width, and rows of all slots.
    """

    def __init__(
        self, network: TransformerNetwork, pool: CachePool, name: str, *, fixed_width: int | None = None
    ) -> None:
        self._network = network
        self._cache = pool.cache
        self._num_slots = pool.num_slots
        self._name = name
        self._fixed_width = fixed_width

    @property
    def max_tokens(self) -> int:
        return sys.maxsize  # one pass of each slot fits

    def run_all(self, passes: Sequence[ForwardPass]) -> list[PassResult]:
        slots = range(self._num_slots)
        if self._fixed_width is None:
            indices = [one.slot.index for one in passes]
            slots = range(min(indices), max(indices) + 1)
        width = self._fixed_width or max(one.width for one in passes)
        device = self._network.embedding.device
        return run_pass_on_device(self._name, device, lambda: self._run_batch(passes, slots, width, device))

    # --------------------------------------------------------------------------------------- inside

    def _run_batch(
        self, passes: Sequence[ForwardPass], slots: range, width: int, device: torch.device
    ) -> list[PassResult]:
        cache = self._cache.select_sequences(slots.start, slots.stop)
        token_ids = [[_PADDING_ID] * width for _ in slots]
        starts = [[cache.capacity - width] for _ in slots]
        for one in passes:
            row = one.slot.index - slots.start
            token_ids[row] = [*one.token_ids, *[one.token_ids[-1]] * (width - len(one.token_ids))]
            starts[row] = [len(one.slot.token_ids)]
        positions = torch.tensor(starts, device=device) + torch.arange(width, device=device)
        num_keys = max(one.num_keys for one in passes)
        states = self._network.compute_hidden_states(torch.tensor(token_ids, device=device), positions, cache, num_keys)
        return self._split_logits(passes, slots, states.view(len(slots), width, -1))

    def _split_logits(self, passes: Sequence[ForwardPass], slots: range, states: Tensor) -> list[PassResult]:
        """Split the logits of `states`, [num_slots, width, hidden_size], by pass."""
        width = states.shape[1]
        is_finite = dict(zip(slots, states.isfinite().flatten(1).all(1).cpu().numpy(), strict=True))
        self._wipe_non_finite_slots(passes, [index for index in slots if not is_finite[index]], width)
        rows = [
            (one.slot.index - slots.start) * width + row
            for one in passes
            for row in range(len(one.token_ids) - one.num_rows, len(one.token_ids))
        ]
        logits = self._network.compute_logits(states.flatten(0, 1))[rows].cpu().numpy()
        ends = list(accumulate(one.num_rows for one in passes))[:-1]
        return [
            own if is_finite[one.slot.index] else make_not_finite_error(self._name)
            for one, own in zip(passes, np.split(logits, ends), strict=True)
        ]

    def _wipe_non_finite_slots(self, passes: Sequence[ForwardPass], broken: Sequence[int], width: int) -> None:
        """Wipe slots with NaN, which would reach later rows in spite of masks."""
        for one in passes:
            if one.slot.index in broken:
                one.slot.erase()
        for index in set(broken).difference(one.slot.index for one in passes):
            for stored in self._cache.layers:
                stored[index, -width:] = 0


class _SinglePassRunner:
    """Runs prompts: passes of one slot, as wide as their tokens."""

    max_tokens = None

    def __init__(self, forwards: ForwardRunner) -> None:
        self._forwards = forwards

    def run_all(self, passes: Sequence[ForwardPass]) -> list[PassResult]:
        return [
            self._forwards.run_forward(
                one.slot, one.token_ids, width=one.width, num_keys=one.num_keys, num_rows=one.num_rows
            )
            for one in passes
        ]
