"""Which numbers of rows give a row the same bits on this machine: searched when a model is loaded.

Kernels choose their way by shapes and dtypes, not by numbers. So the head, and one layer of each kind after several
numbers of keys, sort out the widths at a small part of the model's cost. One pass of the whole model in each width that
is left confirms it. Widths that an earlier load has found are looked at again in the same small parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from llm_spec_torch.caches import CachePool
from llm_spec_torch.checks import ReadRowsAt, find_agreeing_widths
from llm_spec_torch.network import TransformerNetwork
from llm_spec_torch.session import FloatArray
from llm_spec_torch.shape import PassShape

__all__ = ["AgreeingWidthSearch"]

_FIRST_POSITION: Final = 21  # after a place where attention begins to read more
_NUM_STEPS: Final = 3  # of keys that are looked at; a CPU's attention reads blocks of two


class AgreeingWidthSearch:
    """Looks for the widths of a network whose caches have `capacity` places; to be run in inference mode.

    `shape` says how many keys attention reads at a position; `token_ids`: two for each row of the widest pass.
    """

    def __init__(
        self, network: TransformerNetwork, shape: PassShape, *, capacity: int, token_ids: Sequence[int]
    ) -> None:
        self._network = network
        self._shape = shape
        self._capacity = capacity
        self._token_ids = token_ids

    def search_agreeing_widths(self, candidates: Sequence[int], max_width: int) -> list[int]:
        """The candidates that agree with the widest pass, `max_width` or where that fails half of it; [] for none."""
        while max_width > 1:
            widths = self._filter_agreeing_widths([*(width for width in candidates if width < max_width), max_width])
            if widths:
                read_all = self._make_row_reader(self._network, _FIRST_POSITION, has_head=True)
                widths = find_agreeing_widths(read_all, self._token_ids, widths, start=_FIRST_POSITION, thorough=False)
            if widths:
                return widths
            max_width //= 2
        return []

    def are_widths_still_agreeing(self, widths: Sequence[int]) -> bool:
        """Whether widths that an earlier load has found agree today."""
        return self._filter_agreeing_widths(widths) == list(widths)

    # ------------------------------------------------------------------------------------------ inside

    def _filter_agreeing_widths(self, widths: Sequence[int]) -> list[int]:
        """The widths that agree in the head, and in one layer of each kind wherever it is read."""
        agreeing = find_agreeing_widths(self._compute_head_logits, self._token_ids, widths, start=0)
        sample = self._network.copy_with_one_layer_of_each_kind()
        for start in self._list_start_positions():
            if agreeing:
                read_layers = self._make_row_reader(sample, start, has_head=False)
                agreeing = find_agreeing_widths(read_layers, self._token_ids, agreeing, start=start)
        return agreeing

    def _list_start_positions(self) -> list[int]:
        """Positions at which attention reads ever more keys, as far as the cache reaches."""
        starts = [_FIRST_POSITION]
        while len(starts) < _NUM_STEPS:
            starts.append(self._shape.pad_num_keys(starts[-1]) + _FIRST_POSITION)
        return [start for start in starts if start + len(self._token_ids) <= self._capacity]

    def _compute_head_logits(self, _: int, token_ids: Sequence[int]) -> FloatArray:
        """The head's part of a pass, in which places make no difference."""
        ids = torch.tensor(token_ids, device=self._network.embedding.device)
        return _convert_to_numpy(self._network.compute_logits(self._network.look_up_embeddings(ids)))

    def _make_row_reader(self, network: TransformerNetwork, start: int, *, has_head: bool) -> ReadRowsAt:
        """Passes of a network about position `start`, after random numbers: that costs less than to read a prompt."""
        num_keys = self._shape.pad_num_keys(start)
        num_places = min(self._capacity, num_keys + len(self._token_ids))
        cache = CachePool(network, num_slots=1, capacity=num_places).cache
        noise = torch.randn(cache.layers[0].shape, generator=torch.Generator().manual_seed(0))
        for stored in cache.layers:
            stored.copy_(noise)

        def read_rows_at(at: int, token_ids: Sequence[int]) -> FloatArray:
            ids = torch.tensor([token_ids], device=network.embedding.device)
            positions = torch.arange(at, at + len(token_ids), device=ids.device)[None]
            states = network.compute_hidden_states(ids, positions, cache, num_keys)
            return _convert_to_numpy(network.compute_logits(states) if has_head else states)

        return read_rows_at


def _convert_to_numpy(rows: Tensor) -> FloatArray:
    array: FloatArray = rows.float().cpu().numpy()
    return array
