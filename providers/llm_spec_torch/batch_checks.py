"""Whether a row of a joined pass has the same bits whatever the others do: looked at when a model is loaded.

The same tokens are read behind the same cached prefix, in each of the slots, alone and beside others that are at other
positions (so with other numbers of keys), at different places of a pass; what the other slots hold, and what is left
over behind the prefix, is something else each time. Prefixes are random numbers: that costs less than to read a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from llm_spec_torch.caches import CachePool, Slot
from llm_spec_torch.pass_queue import Outcome, Pass
from llm_spec_torch.shape import Shape

__all__ = ["rows_agree"]

RunAll: TypeAlias = Callable[[Sequence[Pass]], Sequence[Outcome]]

_NUM_STEPS: Final = 3  # of keys that are looked at; further ones are read as these are
_STRIDE: Final = 97  # tokens from one neighbour's position to the next one's


class _Company(NamedTuple):
    """Slots that are asked, slots that read something else meanwhile, and where those are at most."""

    members: Sequence[int]
    neighbours: Sequence[int] = ()
    below: int = 1


class _Part(NamedTuple):
    """Some of the tokens that are asked."""

    offset: int
    length: int


def rows_agree(run_all: RunAll, pool: CachePool, shape: Shape, token_ids: Sequence[int]) -> bool:
    """Whether joined passes of `max_width` give a row the same bits in all company; leaves the caches empty.

    `token_ids`: at least 2 * max_width of them.
    """
    width = shape.max_width
    num_places = min(_NUM_STEPS * shape.key_step, pool.cache.capacity - width)
    near_the_ends = [shape.key_step * step - 2 * width for step in range(1, _NUM_STEPS)]
    starts = [start for start in (21, *near_the_ends) if 0 <= start <= num_places - 2 * width]
    try:
        return all(_Question(run_all, pool, shape, token_ids, start=start).agrees(num_places) for start in starts)
    finally:
        for stored in _tensors(pool):
            stored[:, :num_places] = 0
            stored[:, -width:] = 0


class _Question:
    """Tokens behind one prefix, asked in all company."""

    def __init__(self, run_all: RunAll, pool: CachePool, shape: Shape, token_ids: Sequence[int], *, start: int) -> None:
        self._run_all = run_all
        self._pool = pool
        self._shape = shape
        self._start = start
        self._own_ids = token_ids[: shape.max_width]
        self._other_ids = token_ids[shape.max_width : 2 * shape.max_width]
        generator = torch.Generator().manual_seed(start)
        sizes = (start + 2 * shape.max_width, *pool.cache.layers[0].shape[2:])
        self._noise = [torch.randn(sizes, generator=generator).to(stored) for stored in _tensors(pool)]

    def agrees(self, num_places: int) -> bool:
        """Ask in all company, neighbours being within the first so many places."""
        whole = _Part(0, self._shape.max_width)
        self._fill_all(num_places)
        self._fill([0], turn=0)
        reference = self._ask(_Company([0]), 0, [whole])[0]
        for turn, company in enumerate(self._companies(num_places)):
            self._fill(company.members, turn)
            for parts in ([whole] * len(company.members), [self._part(turn, index) for index in company.members]):
                rows = self._ask(company, turn, parts)
                wanted = [reference[part.offset : part.offset + part.length] for part in parts]
                if not all(np.array_equal(found, right) for found, right in zip(rows, wanted, strict=True)):
                    return False
        return True

    # ------------------------------------------------------------------------------------------ inside

    def _companies(self, num_places: int) -> list[_Company]:
        every = range(self._pool.num_slots)
        one_step, two_steps = (min(num_places, steps * self._shape.key_step) for steps in (1, 2))
        return [
            _Company(every[:1]),
            _Company(every),
            _Company(every[-1:]),
            _Company(every[:1], every[1:], one_step),
            _Company(every[::2], every[1::4], two_steps),
            _Company(every[1::2], every[::4], num_places),
            _Company(every[-1:], every[:-1], num_places),
        ]

    def _part(self, turn: int, index: int) -> _Part:
        width = self._shape.max_width
        offset = (5 * index + 3 * turn) % width
        return _Part(offset, 1 + (index + turn) % (width - offset))

    def _ask(self, company: _Company, turn: int, parts: Sequence[_Part]) -> list[np.ndarray]:
        """Each member's rows of its part, with other tokens behind them: [length, vocab_size] each."""
        passes = [self._member(index, part) for index, part in zip(company.members, parts, strict=True)]
        passes += [self._neighbour(index, turn, company.below) for index in company.neighbours]
        outcomes = self._run_all(passes)[: len(parts)]
        errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        if errors:
            raise errors[0]
        return [np.asarray(outcome)[: part.length] for outcome, part in zip(outcomes, parts, strict=True)]

    def _member(self, index: int, part: _Part) -> Pass:
        own = self._own_ids[part.offset : part.offset + part.length]
        others = self._other_ids[: self._shape.max_width - part.length]
        return self._read(index, self._start + part.offset, [*own, *others])

    def _neighbour(self, index: int, turn: int, below: int) -> Pass:
        at = (7 + _STRIDE * (index + 3 * turn)) % max(1, below - self._shape.max_width)
        return self._read(index, at, self._other_ids[: 1 + index % self._shape.max_width])

    def _read(self, index: int, at: int, token_ids: Sequence[int]) -> Pass:
        slot = Slot(index, self._pool.cache.rows(index, index + 1), [0] * at)
        num_keys = self._shape.num_keys(at + len(token_ids) - 1)
        return Pass(slot, token_ids, self._shape.max_width, num_keys, len(token_ids))

    def _fill_all(self, num_places: int) -> None:
        """Let every slot hold something."""
        for stored, noise in zip(_tensors(self._pool), self._noise, strict=True):
            stored[:, :num_places] = noise[torch.arange(num_places) % len(noise)]

    def _fill(self, members: Sequence[int], turn: int) -> None:
        """Give members the prefix, and something else to the others and to the places behind it."""
        for stored, noise in zip(_tensors(self._pool), self._noise, strict=True):
            for index in range(self._pool.num_slots):
                stored[index, : len(noise)] = noise.flip(0) * (1 + 0.1 * (index + turn))
            stored[list(members), : self._start] = noise[: self._start]


def _tensors(pool: CachePool) -> tuple[Tensor, ...]:
    return pool.cache.layers
