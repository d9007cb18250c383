"""Counts what clients use, over all workers."""

from __future__ import annotations

import mmap
import os
from typing import Final

from llm_spec.decoder.budget import SPENT_AND_RESERVED_COLUMNS

__all__ = ["OPEN_COLUMN", "UsageLedger"]

OPEN_COLUMN: Final = 4  # requests being answered; follows the columns of a budget
_NUM_COLUMNS: Final = 5
_FLOAT_BYTES: Final = 8


class UsageLedger:
    """What every client uses, in memory that all workers share.

    Its shape is [worker, client, (columns of the client's budget, open requests)]. Each worker
    writes only its own rows, so no lock is needed, and none is left held if a worker dies. Callers
    count first and compare with a bound then. So at the bound, two requests that come at once may
    both be refused.

    `file`: the descriptor of a file, empty at first, that all workers map; without it the memory is
    this process's own.
    """

    def __init__(self, num_workers: int, num_clients: int, file: int | None = None) -> None:
        self.num_workers = num_workers
        self.num_clients = num_clients
        num_bytes = max(1, num_workers * num_clients * _NUM_COLUMNS) * _FLOAT_BYTES
        if file is not None:
            os.ftruncate(file, num_bytes)
        self._array = memoryview(mmap.mmap(-1 if file is None else file, num_bytes)).cast("d")

    def sum_over_workers(self, client: int, column: int) -> float:
        """Return the sum of a client's column over all workers."""
        return sum(self._array[self._get_cell_offset(worker, client, column)] for worker in range(self.num_workers))

    def add_usage(self, worker: int, client: int, column: int, value: float) -> None:
        """Add to a client's column in one worker's rows."""
        self._array[self._get_cell_offset(worker, client, column)] += value

    def settle_dead_worker(self, worker: int) -> None:
        """Settle what the previous process of a worker has left.

        It has no open requests any more, and what it reserved counts as spent.
        """
        for client in range(self.num_clients):
            self._array[self._get_cell_offset(worker, client, OPEN_COLUMN)] = 0.0
            for spent, held in SPENT_AND_RESERVED_COLUMNS:
                self.add_usage(worker, client, spent, self._array[self._get_cell_offset(worker, client, held)])
                self._array[self._get_cell_offset(worker, client, held)] = 0.0

    def _get_cell_offset(self, worker: int, client: int, column: int) -> int:
        return (worker * self.num_clients + client) * _NUM_COLUMNS + column
