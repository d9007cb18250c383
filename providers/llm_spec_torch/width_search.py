"""Finds the numbers of rows at which a row has the same bits on this machine.

The search runs when a model is loaded. Kernels are chosen by shapes and dtypes, not by numbers. So
widths are first tested in the head, and in one layer of each kind after several numbers of keys, at
a small part of the model's cost. One pass of the whole model in each remaining width confirms them.
Widths that an earlier load found are tested again in the same small parts.

If outputs are rounded to bfloat16, passes do not show how they were computed. Then
`order_probes.py` tests the kernels themselves. The number of keys is part of attention's shape. So
the first pass that reads more keys than any before tests the widths again (`width_agreement.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from llm_spec_torch.caches import CachePool
from llm_spec_torch.checks import ReadRowsAt, find_agreeing_widths
from llm_spec_torch.network import TransformerNetwork
from llm_spec_torch.order_probes import (
    ReadRows,
    hides_order,
    list_attention_probes,
    list_elementwise_probes,
    list_matrix_probes,
)
from llm_spec_torch.session import FloatArray
from llm_spec_torch.shape import PassShape

__all__ = ["AgreeingWidthSearch"]

_FIRST_POSITION: Final = 21  # after a place where attention begins to read more
_MAX_ROWS_OF_ONE: Final = 2
# Of keys, tested when a model is loaded. A CPU's attention reads blocks of two steps.
_NUM_STEPS: Final = 3


class AgreeingWidthSearch:
    """Searches the widths of a network whose caches have `capacity` places.

    `shape` says how many keys attention reads at a position. `token_ids` needs two for each row of
    the widest pass. Call it in inference mode.
    """

    def __init__(
        self, network: TransformerNetwork, shape: PassShape, *, capacity: int, token_ids: Sequence[int]
    ) -> None:
        self._network = network
        self._shape = shape
        self._capacity = capacity
        self._token_ids = token_ids

    def search_agreeing_widths(self, candidates: Sequence[int], max_width: int) -> list[int]:
        """Return the candidates that agree with the widest pass; [] if there are none.

        The widest pass has `max_width` rows; if nothing agrees, half as many, and so on. If outputs
        are rounded, returns [] unless a single row is padded by one row at most: more would slow
        down plain decoding.
        """
        while max_width > 1:
            widths = self._filter_agreeing_widths([*(width for width in candidates if width < max_width), max_width])
            if widths:
                read_all = self._make_row_reader(self._network, self._shape.pad_num_keys(0), has_head=True)
                widths = find_agreeing_widths(read_all, self._token_ids, widths, start=_FIRST_POSITION, thorough=False)
            if widths:
                return widths if widths[0] <= _MAX_ROWS_OF_ONE or not hides_order(self._network) else []
            max_width //= 2
        return []

    def are_widths_still_agreeing(self, widths: Sequence[int]) -> bool:
        """Return True if the widths that an earlier load found agree now."""
        return self._filter_agreeing_widths(widths) == list(widths)

    def do_widths_agree_at(self, widths: Sequence[int], num_keys: int) -> bool:
        """Return True if widths agree when attention reads that many keys."""
        sample = self._network.copy_with_one_layer_of_each_kind()
        return self._filter_widths_at(sample, widths, num_keys) == list(widths)

    def list_first_key_counts(self) -> list[int]:
        """Return the numbers of keys at a cache's first positions, which every search tests."""
        counts = [self._shape.pad_num_keys(0)]
        while len(counts) < _NUM_STEPS and counts[-1] < self._capacity - len(self._token_ids) // 2:
            counts.append(self._shape.pad_num_keys(counts[-1]))
        return counts

    # --------------------------------------------------------------------------------------- inside

    def _filter_agreeing_widths(self, widths: Sequence[int]) -> list[int]:
        """Return the widths that agree in the head, and in one layer of each kind."""
        agreeing = list(widths)
        sample = self._network.copy_with_one_layer_of_each_kind()
        if hides_order(self._network):
            agreeing = self._filter_widths_by_probes(list_matrix_probes(sample), agreeing)
            agreeing = self._filter_widths_by_probes(list_elementwise_probes(sample), agreeing)
        else:
            agreeing = find_agreeing_widths(self._compute_head_logits, self._token_ids, agreeing, start=0)
        for num_keys in self.list_first_key_counts():
            if agreeing:
                agreeing = self._filter_widths_at(sample, agreeing, num_keys)
        return agreeing

    def _filter_widths_at(self, sample: TransformerNetwork, widths: Sequence[int], num_keys: int) -> list[int]:
        """Return the widths that agree in layers when attention reads that many keys."""
        num_keys = min(num_keys, self._capacity)
        start = min(max(0, num_keys - self._shape.key_step) + _FIRST_POSITION, self._capacity - len(self._token_ids))
        read_layers = self._make_row_reader(sample, num_keys, has_head=False)
        agreeing = find_agreeing_widths(read_layers, self._token_ids, widths, start=start)
        if hides_order(self._network):
            agreeing = self._filter_widths_by_probes(list_attention_probes(sample, num_keys), agreeing)
        return agreeing

    def _filter_widths_by_probes(self, probes: Iterable[ReadRows], widths: Sequence[int]) -> list[int]:
        agreeing = list(widths)
        for probe in probes:
            if agreeing:
                read_rows = partial(_read_probe, probe)
                agreeing = find_agreeing_widths(read_rows, range(len(self._token_ids)), agreeing, start=0)
        return agreeing

    def _compute_head_logits(self, _: int, token_ids: Sequence[int]) -> FloatArray:
        """Compute the head's part of a pass, in which positions make no difference."""
        ids = torch.tensor(token_ids, device=self._network.embedding.device)
        return _convert_to_numpy(self._network.compute_logits(self._network.look_up_embeddings(ids)))

    def _make_row_reader(self, network: TransformerNetwork, num_keys: int, *, has_head: bool) -> ReadRowsAt:
        """Make a function that runs passes over `num_keys` random keys, cheaper than a prompt."""
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


def _read_probe(probe: ReadRows, _: int, numbers: Sequence[int]) -> FloatArray:
    return _convert_to_numpy(probe(numbers))


def _convert_to_numpy(rows: Tensor) -> FloatArray:
    array: FloatArray = rows.float().cpu().numpy()
    return array
