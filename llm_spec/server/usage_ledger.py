"""What clients use, counted over all workers."""

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
    """What every client uses, in memory that all workers share: [worker, client, (columns of its budget, open)].

    Each worker writes its own rows alone, so no lock is needed and one that dies leaves none held; what must not
    exceed a bound is counted first and compared then: at the bound, two that come at once may both be refused.
    `file`: the descriptor of a file, empty at first, that all workers map; without it the memory is this process's own.
    """

    def __init__(self, num_workers: int, num_clients: int, file: int | None = None) -> None:
        self.num_workers = num_workers
        self.num_clients = num_clients
        num_bytes = max(1, num_workers * num_clients * _NUM_COLUMNS) * _FLOAT_BYTES
        if file is not None:
            os.ftruncate(file, num_bytes)
        self._array = memoryview(mmap.mmap(-1 if file is None else file, num_bytes)).cast("d")

    def sum_over_workers(self, client: int, column: int) -> float:
        """The sum over all workers."""
        return sum(self._array[self._get_cell_offset(worker, client, column)] for worker in range(self.num_workers))

    def add_usage(self, worker: int, client: int, column: int, value: float) -> None:
        """Count for one worker."""
        self._array[self._get_cell_offset(worker, client, column)] += value

    def settle_dead_worker(self, worker: int) -> None:
        """A worker that begins has no request open, whatever the one before it left; what that one held is spent."""
        for client in range(self.num_clients):
            self._array[self._get_cell_offset(worker, client, OPEN_COLUMN)] = 0.0
            for spent, held in SPENT_AND_RESERVED_COLUMNS:
                self.add_usage(worker, client, spent, self._array[self._get_cell_offset(worker, client, held)])
                self._array[self._get_cell_offset(worker, client, held)] = 0.0

    def _get_cell_offset(self, worker: int, client: int, column: int) -> int:
        return (worker * self.num_clients + client) * _NUM_COLUMNS + column
