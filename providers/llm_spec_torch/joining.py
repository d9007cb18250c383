"""Joins passes of several requests only while several wait: a single request pays nothing.

The sequences of a joined pass share its matrix products. Attention runs for each sequence
separately, with the same shapes as alone (continuous batching of single steps: Yu et al., Orca,
OSDI 2022). So a row of a joined pass differs from the same row alone only in the number of rows of
the matrix products. That number is one of those that agreed bit for bit when the model was loaded.
The search also tests joined passes themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import islice
from typing import Final

import torch
from torch import Tensor

from llm_spec_torch.caches import CachePool
from llm_spec_torch.device_errors import make_not_finite_error, run_pass_on_device
from llm_spec_torch.network import SequenceRows, TransformerNetwork
from llm_spec_torch.order_probes import ReadRows, hides_order, list_elementwise_probes, list_matrix_probes
from llm_spec_torch.pass_queue import ForwardPass, PassResult
from llm_spec_torch.shape import PassShape, pad_to_next

__all__ = ["MAX_JOINED_ROWS", "JoinedPassRunner", "find_joined_row_counts"]

MAX_JOINED_ROWS: Final = 64
_WIDER_ROW_COUNTS: Final = (24, 32, 48, MAX_JOINED_ROWS)  # wider than a session's own passes
_CHECKED_LENGTHS: Final = ((1, 1), (2, 1, 1), (1, 3, 2), (1,) * 7, (3, 1, 4))  # of sequences
_CHECKED_POSITIONS: Final = (21, 303, 6, 250, 40, 511, 130, 77)  # for several numbers of keys


class JoinedPassRunner:
    """Runs passes of several slots as one, padded to the next of `row_counts`, ascending."""

    def __init__(self, network: TransformerNetwork, pool: CachePool, name: str, row_counts: Sequence[int]) -> None:
        self._network = network
        self._cache = pool.cache
        self._name = name
        self._row_counts = row_counts

    @property
    def max_tokens(self) -> int:
        return self._row_counts[-1]

    def run_all(self, passes: Sequence[ForwardPass]) -> list[PassResult]:
        return run_pass_on_device(self._name, self._network.embedding.device, lambda: self._run_joined(passes))

    def _run_joined(self, passes: Sequence[ForwardPass]) -> list[PassResult]:
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
        num_tokens = sum(len(one.token_ids) for one in passes)
        num_rows = pad_to_next(self._row_counts, num_tokens)
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
                one.slot.erase()  # a NaN would reach later rows in spite of masks
                results.append(make_not_finite_error(self._name))
        return results


def find_joined_row_counts(
    network: TransformerNetwork, shape: PassShape, *, context_length: int, token_ids: Sequence[int]
) -> list[int]:
    """Return the numbers of rows, ascending, at which joined passes keep each row's bits.

    Returns [] if there are none. The first are the widths of `shape`, those of one session's
    passes. The check uses one layer of each kind, after random numbers, and the head. Call it in
    inference mode with at least MAX_JOINED_ROWS `token_ids`.
    """
    check = _JoinedRowsCheck(network, shape, context_length, token_ids)
    halves = (shape.max_width - shape.max_width // 2, shape.max_width // 2)
    checked = [lengths for lengths in (*_CHECKED_LENGTHS, halves) if sum(lengths) <= shape.max_width]
    if not all(map(check.do_sequences_agree, checked)):
        return []
    row_counts = list(shape.widths)
    for count in _WIDER_ROW_COUNTS:
        if shape.max_width < count <= len(_CHECKED_POSITIONS) * shape.max_width:
            whole, rest = divmod(count, shape.max_width)
            check.row_counts = [*row_counts, count]
            lengths = [shape.max_width] * whole + [rest] * bool(rest)
            if not (check.do_rows_agree(count) and check.do_sequences_agree(lengths)):
                break
            row_counts.append(count)
    return row_counts


class _JoinedRowsCheck:
    """Compares rows of joined passes, padded to one of `row_counts`, with each sequence's own."""

    def __init__(
        self, network: TransformerNetwork, shape: PassShape, context_length: int, token_ids: Sequence[int]
    ) -> None:
        self.row_counts: Sequence[int] = shape.widths
        self._shape = shape
        self._network = network
        self._sample = network.copy_with_one_layer_of_each_kind()
        self._token_ids = token_ids
        self._positions = [position % max(1, context_length - shape.max_width) for position in _CHECKED_POSITIONS]
        num_places = max(shape.pad_num_keys(position + shape.max_width) for position in self._positions)
        self._cache = CachePool(self._sample, num_slots=len(self._positions), capacity=num_places).cache
        self._states_alone: dict[tuple[int, ...], Tensor] = {}
        generator = torch.Generator().manual_seed(0)
        self._noise = [torch.randn(stored.shape, generator=generator).to(stored) for stored in self._cache.layers]

    def do_sequences_agree(self, lengths: Sequence[int]) -> bool:
        """Return True if sequences of these lengths have the same rows joined and alone."""
        sequences: list[SequenceRows] = []
        ids = iter(self._token_ids)
        for index, (length, position) in enumerate(zip(lengths, self._positions, strict=False)):
            sequences.append(
                SequenceRows(
                    index=index,
                    token_ids=list(islice(ids, length)),
                    position=position,
                    width=self._shape.pad_width(length),
                    num_keys=self._shape.pad_num_keys(position + length - 1),
                )
            )
        alone = torch.cat([self._compute_states_alone(each) for each in sequences])
        return torch.equal(self._compute_states(sequences), alone)

    def do_rows_agree(self, count: int) -> bool:
        """Return True if rows of the head or of probes are the same in both numbers of rows.

        The numbers are `count`, and the most rows of one session's pass.
        """
        return all(torch.equal(read(range(count)), rows[:count]) for read, rows in self._readers_and_rows)

    @cached_property
    def _readers_and_rows(self) -> list[tuple[ReadRows, Tensor]]:
        """Functions that read rows, and their rows in passes as wide as a session's widest."""
        readers: list[ReadRows] = [self._compute_head_logits]
        if hides_order(self._network):
            readers = [*list_matrix_probes(self._sample), *list_elementwise_probes(self._sample)]
        width = self._shape.max_width
        parts = [range(start, start + width) for start in range(0, MAX_JOINED_ROWS, width)]
        return [(read, torch.cat([read(part) for part in parts])) for read in readers]

    def _compute_head_logits(self, numbers: Sequence[int]) -> Tensor:
        ids = torch.tensor(self._token_ids)[torch.tensor(numbers) % len(self._token_ids)]
        return self._network.compute_logits(self._network.look_up_embeddings(ids))

    def _compute_states_alone(self, sequence: SequenceRows) -> Tensor:
        key = (sequence.index, *sequence.token_ids)
        if key not in self._states_alone:
            self._states_alone[key] = self._compute_states([sequence])
        return self._states_alone[key]

    def _compute_states(self, sequences: Sequence[SequenceRows]) -> Tensor:
        for stored, numbers in zip(self._cache.layers, self._noise, strict=True):
            stored.copy_(numbers)
        num_tokens = sum(len(each.token_ids) for each in sequences)
        num_rows = pad_to_next(self.row_counts, num_tokens)
        return self._sample.compute_joined_hidden_states(sequences, self._cache, num_rows)[:num_tokens]
