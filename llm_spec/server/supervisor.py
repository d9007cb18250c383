"""Worker processes that are started again when they die."""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Final

from llm_spec.errors import ConfigError
from llm_spec.telemetry import log_event

__all__ = ["READY", "Supervisor", "get_restart_wait_s"]

READY: Final = ""  # what a worker reports once it serves; any other text says why it cannot
_MIN_LIFETIME_S: Final = 10.0  # who lived so long is started again at once
_MAX_WAIT_S: Final = 30.0
_MAX_STARTS: Final = 3  # of a worker, while none has ever been ready


def get_restart_wait_s(num_quick_deaths: int) -> float:
    """Seconds until a worker is started again that has died so often in succession, soon after its start."""
    return 0.0 if num_quick_deaths == 0 else min(_MAX_WAIT_S, 0.25 * 2.0 ** min(num_quick_deaths, 16))


@dataclass(slots=True)
class _WorkerProcess:
    process: BaseProcess
    reports: Connection | None
    started_s: float
    num_starts: int = 1
    num_quick_deaths: int = 0
    restart_at_s: float | None = None  # when it is started again; None while it lives


class Supervisor:
    """Runs `target(*arguments, worker, reports)` in a process for each worker, and starts again what has died.

    A worker sends `READY` into `reports` once it serves, or why it cannot. `on_death` gets each worker that died.
    """

    def __init__(
        self,
        num_workers: int,
        target: Callable[..., None],
        arguments: tuple[Any, ...],
        *,
        on_death: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._num_workers = num_workers
        self._target = target
        self._arguments = arguments
        self._on_death = on_death
        self._context = multiprocessing.get_context("spawn")  # a forked process would share the threads' locks
        self._workers: list[_WorkerProcess] = []
        self._has_served = False  # one of them has been

    def start(self) -> None:
        """Start all, and wait until one of them serves; raises ConfigError, in its words, where one cannot."""
        for index in range(self._num_workers):
            self._workers.append(_WorkerProcess(*self._start_process(index)))
        while not self._has_served:
            self._handle_next_event()

    def restart_dead_workers(self) -> None:
        """Start again what dies, until an exception such as KeyboardInterrupt ends it."""
        while True:
            self._handle_next_event()

    def stop(self, timeout_s: float) -> None:
        """End all, letting running answers end for so long."""
        for worker in self._workers:
            if worker.process.is_alive() and worker.process.pid is not None:
                os.kill(worker.process.pid, signal.SIGTERM)
        for worker in self._workers:
            worker.process.join(timeout_s)
            if worker.process.is_alive():
                worker.process.kill()

    # ------------------------------------------------------------------------------------------ inside

    def _handle_next_event(self) -> None:
        """Wait for the next thing that happens to a worker, and see to it."""
        multiprocessing.connection.wait(self._list_wait_objects(), self._get_wait_timeout_s())
        for index, worker in enumerate(self._workers):
            if worker.reports is not None and worker.reports.poll():
                self._read_report(index, worker)
            if worker.restart_at_s is None and not worker.process.is_alive():
                self._handle_death(index, worker)
            if worker.restart_at_s is not None and worker.restart_at_s <= time.monotonic():
                self._restart_worker(index, worker)

    def _list_wait_objects(self) -> list[Any]:
        living = [worker.process.sentinel for worker in self._workers if worker.restart_at_s is None]
        return [*living, *(worker.reports for worker in self._workers if worker.reports is not None)]

    def _get_wait_timeout_s(self) -> float | None:
        times_s = [worker.restart_at_s for worker in self._workers if worker.restart_at_s is not None]
        return max(0.0, min(times_s) - time.monotonic()) if times_s else None

    def _read_report(self, index: int, worker: _WorkerProcess) -> None:
        """A worker's report; without one it has died, which its sentinel tells."""
        assert worker.reports is not None  # noqa: S101 - as its caller has seen
        try:
            report = worker.reports.recv()
        except (EOFError, OSError):
            report = None
        worker.reports.close()
        worker.reports = None
        if report == READY:
            self._has_served = True
        elif report is not None and worker.num_starts == 1:
            raise ConfigError(report)
        elif report is not None:
            log_event("worker_cannot_serve", level=logging.ERROR, worker=index, why=report)

    def _handle_death(self, index: int, worker: _WorkerProcess) -> None:
        code = worker.process.exitcode
        if not self._has_served and worker.num_starts >= _MAX_STARTS:
            raise ConfigError(f"worker {index} ended {worker.num_starts} times before it could serve, with code {code}")
        self._on_death(index)
        lived_s = time.monotonic() - worker.started_s
        worker.num_quick_deaths = 0 if lived_s >= _MIN_LIFETIME_S else worker.num_quick_deaths + 1
        wait_s = get_restart_wait_s(worker.num_quick_deaths)
        worker.restart_at_s = time.monotonic() + wait_s
        log_event("worker_died", level=logging.ERROR, worker=index, code=code, lived_s=round(lived_s, 1), wait_s=wait_s)

    def _restart_worker(self, index: int, worker: _WorkerProcess) -> None:
        worker.process.close()
        if worker.reports is not None:
            worker.reports.close()
        worker.process, worker.reports, worker.started_s = self._start_process(index)
        worker.num_starts += 1
        worker.restart_at_s = None

    def _start_process(self, index: int) -> tuple[BaseProcess, Connection, float]:
        reports, report_sender = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=self._target, args=(*self._arguments, index, report_sender), name=f"llm-spec-{index}"
        )
        with report_sender, _ignore_interrupts():
            process.start()
        return process, reports, time.monotonic()


@contextmanager
def _ignore_interrupts() -> Generator[None]:
    """A process that is started inside does not hear Ctrl-C, which its terminal sends to all, before it asks for it."""
    previous_handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous_handler)
