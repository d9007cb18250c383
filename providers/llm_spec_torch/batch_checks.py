"""Checks, when a model is loaded, that a row of a joined pass does not depend on the other rows.

The same tokens are read after the same cached prefix in each slot, alone and with neighbours at
other positions (and so with other numbers of keys), at different places of a pass. The content of
the other slots, and of the places after the prefix, changes each time. Prefixes are random numbers,
which cost less than reading a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from llm_spec_torch.caches import CachePool, CacheSlot
from llm_spec_torch.pass_queue import ForwardPass, PassResult
from llm_spec_torch.shape import PassShape

__all__ = ["do_joined_passes_agree"]

RunAll: TypeAlias = Callable[[Sequence[ForwardPass]], Sequence[PassResult]]

_NUM_STEPS: Final = 3  # of keys that are tested; later ones are read in the same way
_POSITION_STRIDE: Final = 97  # tokens from one neighbour's position to the next one's


class _SlotGroup(NamedTuple):
    """Slots whose rows are compared, and their neighbours with their last position."""

    members: Sequence[int]
    neighbours: Sequence[int] = ()
    max_position: int = 1


class _TokenSpan(NamedTuple):
    """Some of the tokens whose rows are compared."""

    offset: int
    length: int


def do_joined_passes_agree(run_all: RunAll, pool: CachePool, shape: PassShape, token_ids: Sequence[int]) -> bool:
    """Return True if each row of a joined pass has the same bits whatever the other rows are.

    The passes have a width of `max_width`; `token_ids` needs at least twice as many. The caches are
    empty afterwards.
    """
    width = shape.max_width
    num_places = min(_NUM_STEPS * shape.key_step, pool.cache.capacity - width)
    near_the_ends = [shape.key_step * step - 2 * width for step in range(1, _NUM_STEPS)]
    starts = [start for start in (21, *near_the_ends) if 0 <= start <= num_places - 2 * width]
    try:
        return all(
            _RowAgreementCheck(run_all, pool, shape, token_ids, start=start).do_rows_agree_within(num_places)
            for start in starts
        )
    finally:
        for stored in _list_cache_tensors(pool):
            stored[:, :num_places] = 0
            stored[:, -width:] = 0


class _RowAgreementCheck:
    """Reads tokens after one prefix with every kind of neighbour, and compares the rows."""

    def __init__(
        self, run_all: RunAll, pool: CachePool, shape: PassShape, token_ids: Sequence[int], *, start: int
    ) -> None:
        self._run_all = run_all
        self._pool = pool
        self._shape = shape
        self._start = start
        self._own_ids = token_ids[: shape.max_width]
        self._other_ids = token_ids[shape.max_width : 2 * shape.max_width]
        generator = torch.Generator().manual_seed(start)
        sizes = (start + 2 * shape.max_width, *pool.cache.layers[0].shape[2:])
        self._noise = [torch.randn(sizes, generator=generator).to(stored) for stored in _list_cache_tensors(pool)]

    def do_rows_agree_within(self, num_places: int) -> bool:
        """Compare rows with all groups of neighbours, which are within the first `num_places`."""
        whole = _TokenSpan(0, self._shape.max_width)
        self._fill_all_slots(num_places)
        self._fill_slots([0], turn=0)
        reference = self._read_member_rows(_SlotGroup([0]), 0, [whole])[0]
        for turn, slot_group in enumerate(self._make_slot_groups(num_places)):
            self._fill_slots(slot_group.members, turn)
            for parts in (
                [whole] * len(slot_group.members),
                [self._choose_token_span(turn, index) for index in slot_group.members],
            ):
                rows = self._read_member_rows(slot_group, turn, parts)
                expected = [reference[part.offset : part.offset + part.length] for part in parts]
                if not all(np.array_equal(found, right) for found, right in zip(rows, expected, strict=True)):
                    return False
        return True

    # --------------------------------------------------------------------------------------- inside

    def _make_slot_groups(self, num_places: int) -> list[_SlotGroup]:
        every = range(self._pool.num_slots)
        one_step, two_steps = (min(num_places, steps * self._shape.key_step) for steps in (1, 2))
        return [
            _SlotGroup(every[:1]),
            _SlotGroup(every),
            _SlotGroup(every[-1:]),
            _SlotGroup(every[:1], every[1:], one_step),
            _SlotGroup(every[::2], every[1::4], two_steps),
            _SlotGroup(every[1::2], every[::4], num_places),
            _SlotGroup(every[-1:], every[:-1], num_places),
        ]

    def _choose_token_span(self, turn: int, index: int) -> _TokenSpan:
        width = self._shape.max_width
        offset = (5 * index + 3 * turn) % width
        return _TokenSpan(offset, 1 + (index + turn) % (width - offset))

    def _read_member_rows(self, slot_group: _SlotGroup, turn: int, parts: Sequence[_TokenSpan]) -> list[np.ndarray]:
        """Return each member's rows of its part, [length, vocab_size] each.

        Other tokens follow the part.
        """
        passes = [self._make_member_pass(index, part) for index, part in zip(slot_group.members, parts, strict=True)]
        passes += [self._make_neighbour_pass(index, turn, slot_group.max_position) for index in slot_group.neighbours]
        outcomes = self._run_all(passes)[: len(parts)]
        errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        if errors:
            raise errors[0]
        return [np.asarray(outcome)[: part.length] for outcome, part in zip(outcomes, parts, strict=True)]

    def _make_member_pass(self, index: int, part: _TokenSpan) -> ForwardPass:
        own = self._own_ids[part.offset : part.offset + part.length]
        others = self._other_ids[: self._shape.max_width - part.length]
        return self._make_forward_pass(index, self._start + part.offset, [*own, *others])

    def _make_neighbour_pass(self, index: int, turn: int, max_position: int) -> ForwardPass:
        at = (7 + _POSITION_STRIDE * (index + 3 * turn)) % max(1, max_position - self._shape.max_width)
        return self._make_forward_pass(index, at, self._other_ids[: 1 + index % self._shape.max_width])

    def _make_forward_pass(self, index: int, at: int, token_ids: Sequence[int]) -> ForwardPass:
        slot = CacheSlot(index, self._pool.cache.select_sequences(index, index + 1), token_ids=[0] * at)
        num_keys = self._shape.pad_num_keys(at + len(token_ids) - 1)
        return ForwardPass(slot, token_ids, self._shape.max_width, num_keys, len(token_ids))

    def _fill_all_slots(self, num_places: int) -> None:
        """Write something into every slot."""
        for stored, noise in zip(_list_cache_tensors(self._pool), self._noise, strict=True):
            stored[:, :num_places] = noise[torch.arange(num_places) % len(noise)]

    def _fill_slots(self, members: Sequence[int], turn: int) -> None:
        """Write the prefix into the members' slots, and other numbers everywhere else."""
        for stored, noise in zip(_list_cache_tensors(self._pool), self._noise, strict=True):
            for index in range(self._pool.num_slots):
                stored[index, : len(noise)] = noise.flip(0) * (1 + 0.1 * (index + turn))
            stored[list(members), : self._start] = noise[: self._start]


def _list_cache_tensors(pool: CachePool) -> tuple[Tensor, ...]:
    return pool.cache.layers
