"""Passes of several requests that are joined only where several wait: a request that runs alone pays nothing for it.

The sequences of a joined pass share its matrix products; attention is each sequence's own, with the shapes that it has
alone (continuous batching of single steps: Yu et al., Orca, OSDI 2022). So a row of a joined pass differs from the
same row alone in the number of rows that matrices are multiplied with, and that is one of those that agreed bit for bit
when the model was loaded. Whether that is all is looked at then as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from llm_spec_torch.caches import CachePool
from llm_spec_torch.device_errors import make_not_finite_error, run_on_device
from llm_spec_torch.network import SequenceRows, TransformerNetwork
from llm_spec_torch.pass_queue import ForwardPass, PassResult
from llm_spec_torch.shape import PassShape

__all__ = ["JoinedPassRunner", "do_joined_sequences_agree"]

_CHECKED_LENGTHS: Final = ((1, 1), (2, 1, 1), (1, 3, 2), (1,) * 7, (3, 1, 4))  # of the sequences of a pass
_CHECKED_POSITIONS: Final = (21, 303, 6, 250, 40, 511, 130)  # where they begin: with several numbers of keys


class JoinedPassRunner:
    """Runs passes of several slots as one; each session's passes have the widths of `shape`."""

    def __init__(self, network: TransformerNetwork, pool: CachePool, name: str, shape: PassShape) -> None:
        self._network = network
        self._cache = pool.cache
        self._name = name
        self._shape = shape

    @property
    def max_tokens(self) -> int:
        return self._shape.max_width

    def run_all(self, passes: Sequence[ForwardPass]) -> list[PassResult]:
        with run_on_device(self._name, self._network.embedding.device):
            sequences = [
                SequenceRows(
                    index=one.slot.index,
                    token_ids=one.token_ids,
                    position=len(one.slot.token_ids),
                    width=one.width,
                    num_keys=one.num_keys,
                )
                for one in passes
            ]
            num_rows = self._shape.pad_width(sum(len(one.token_ids) for one in passes))
            states = self._network.compute_joined_hidden_states(sequences, self._cache, num_rows)
            return self._split_logits(passes, states)

    def _split_logits(self, passes: Sequence[ForwardPass], states: Tensor) -> list[PassResult]:
        logits = self._network.compute_logits(states)
        results: list[PassResult] = []
        end = 0
        for one in passes:
            start, end = end, end + len(one.token_ids)
            if bool(torch.isfinite(states[start:end].sum(dtype=torch.float32))):
                results.append(logits[end - one.num_rows : end].cpu().numpy())
            else:
                one.slot.erase()  # or its NaN would reach later rows even from behind a mask
                results.append(make_not_finite_error(self._name))
        return results


def do_joined_sequences_agree(
    network: TransformerNetwork, shape: PassShape, *, context_length: int, token_ids: Sequence[int]
) -> bool:
    """Whether rows of joined passes have the bits that they have alone; to be run in inference mode.

    Looked at in one layer of each kind, after random numbers. `token_ids`: `shape.max_width` of them.
    """
    places = [position % (context_length - shape.max_width) for position in _CHECKED_POSITIONS]
    sample = network.copy_with_one_layer_of_each_kind()
    num_slots = max(map(len, _CHECKED_LENGTHS))
    num_places = max(map(shape.pad_num_keys, places)) + shape.max_width
    cache = CachePool(sample, num_slots=num_slots, capacity=num_places).cache
    noise = [
        torch.randn(stored.shape, generator=torch.Generator().manual_seed(layer)).to(stored)
        for layer, stored in enumerate(cache.layers)
    ]

    def compute_states(sequences: Sequence[SequenceRows]) -> Tensor:
        for stored, numbers in zip(cache.layers, noise, strict=True):
            stored.copy_(numbers)
        num_tokens = sum(len(each.token_ids) for each in sequences)
        return sample.compute_joined_hidden_states(sequences, cache, shape.pad_width(num_tokens))[:num_tokens]

    for lengths in _CHECKED_LENGTHS:
        if sum(lengths) > shape.max_width:
            continue
        ends = [sum(lengths[:count]) for count in range(1, len(lengths) + 1)]
        sequences = [
            SequenceRows(
                index=index,
                token_ids=token_ids[end - length : end],
                position=position,
                width=shape.pad_width(length),
                num_keys=shape.pad_num_keys(position + length - 1),
            )
            for index, (length, end, position) in enumerate(zip(lengths, ends, places, strict=False))
        ]
        if not torch.equal(compute_states(sequences), torch.cat([compute_states([each]) for each in sequences])):
            return False
    return True
