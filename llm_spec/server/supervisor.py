"""Starts worker processes, and restarts them when they die."""

from __future__ import annotations

import os
import pickle
import selectors
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import BufferedRandom
from typing import Any, BinaryIO, Final, NoReturn

from llm_spec.contract.errors import ConfigError
from llm_spec.server.worker_process import (
    READY,
    SupervisedWorker,
    WorkerProgram,
    build_python_program_options,
    read_worker_channel,
)

__all__ = ["WorkerSupervisor", "get_restart_wait_s"]

_MIN_LIFETIME_S: Final = 10.0  # a worker that lived this long is restarted at once
_MAX_WAIT_S: Final = 30.0
_MAX_STARTS: Final = 3  # of a worker, while none has ever been ready
_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


def get_restart_wait_s(num_quick_deaths: int) -> float:
    """Return the seconds to wait before a worker is restarted.

    `num_quick_deaths`: how often in a row it died soon after its start.
    """
    return 0.0 if num_quick_deaths == 0 else min(_MAX_WAIT_S, 0.25 * 2.0 ** min(num_quick_deaths, 16))


class WorkerSupervisor:
    """Runs `target(*arguments, worker, channel)` in a process for each worker, and restarts them.

    Once a worker serves, it sends `READY` through `channel` by `send_worker_report`. If it cannot
    serve, it sends the reason. `channel` ends when this process does.

    `inherited`: the file descriptors that workers have too.
    `on_death`: called with the number of each worker that died.
    """

    def __init__(
        self,
        num_workers: int,
        target: Callable[..., None],
        arguments: tuple[Any, ...],
        *,
        inherited: Sequence[int] = (),
        on_death: Callable[[int], None] | None = None,
    ) -> None:
        self._num_workers = num_workers
        self._program = WorkerProgram(target, arguments, inherited)
        self._inherited = inherited
        self._on_death = on_death
        self._workers: list[SupervisedWorker] = []
        self._has_served = False  # at least one worker has been ready

    def start_workers(self) -> None:
        """Start all workers, and wait until one of them serves.

        Raises ConfigError, in a worker's words, if it cannot serve.
        """
        for index in range(self._num_workers):
            self._workers.append(SupervisedWorker(*self._program.start(index)))
        while not self._has_served:
            self._handle_next_worker_event()

    def restart_dead_workers(self) -> NoReturn:
        """Restart workers that die, until an exception such as KeyboardInterrupt ends it."""
        while True:
            self._handle_next_worker_event()

    def restart_dead_workers_in_small_process(self, stop_timeout_s: float, folder: str | None) -> NoReturn:
        """Replace this program with a smaller one that restarts dead workers.

        SIGINT and SIGTERM end it. Workers then have `stop_timeout_s` seconds, and `folder` is
        removed.
        """
        # Until the other program handles them
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
        channels = [worker.channel for worker in self._workers if worker.restart_at_s is None]
        file = create_memory_file()
        file.write(
            b"".join(map(pickle.dumps, (sys.path, _watch_workers_in_small_process, (self, stop_timeout_s, folder))))
        )
        file.seek(0)
        for number in (file.fileno(), *channels):
            os.set_inheritable(number, True)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.execv(sys.executable, [sys.executable, *build_python_program_options(file.fileno()), *sys.argv])  # noqa: S606 - our own

    def close_inherited(self) -> None:
        """Close the inherited file descriptors in this process; no worker is started any more.

        The system takes connections for a listening socket as long as any process has it open.
        """
        for number in self._inherited:
            os.close(number)

    def stop_workers(self, timeout_s: float) -> None:
        """Stop all workers; their running answers have `timeout_s` seconds to end."""
        living = [worker for worker in self._workers if worker.restart_at_s is None]
        for worker in living:
            os.kill(worker.pid, signal.SIGTERM)
        for worker in living:
            if not _wait_for_worker_end(worker.channel, timeout_s):
                os.kill(worker.pid, signal.SIGKILL)
            worker.reap()
        self._workers.clear()

    # --------------------------------------------------------------------------------------- inside

    def _handle_next_worker_event(self) -> None:
        """Wait for a worker's report, its death or a restart that is due, and handle it."""
        with selectors.DefaultSelector() as selector:
            for number, worker in enumerate(self._workers):
                if worker.restart_at_s is None:
                    selector.register(worker.channel, selectors.EVENT_READ, number)
            events = selector.select(self._get_next_restart_wait_s())
        for key, _ in events:
            index: int = key.data
            self._read_worker_report(index, self._workers[index])
        for index, worker in enumerate(self._workers):
            if worker.restart_at_s is not None and worker.restart_at_s <= time.monotonic():
                worker.set_new_process(*self._program.start(index))

    def _get_next_restart_wait_s(self) -> float | None:
        times_s = [worker.restart_at_s for worker in self._workers if worker.restart_at_s is not None]
        return max(0.0, min(times_s) - time.monotonic()) if times_s else None

    def _read_worker_report(self, index: int, worker: SupervisedWorker) -> None:
        """Read a part of a worker's report; the end of its channel means that it has died."""
        chunk = read_worker_channel(worker.channel)
        report = worker.read_report(chunk)
        if not chunk:
            self._handle_worker_death(index, worker)
        elif report == READY:
            self._has_served = True
        elif report is not None and worker.num_starts == 1:
            raise ConfigError(report)
        elif report is not None:
            _log_worker_error("worker_cannot_serve", worker=index, why=report)

    def _handle_worker_death(self, index: int, worker: SupervisedWorker) -> None:
        code = worker.reap()
        lived_s = time.monotonic() - worker.started_s
        worker.num_quick_deaths = 0 if lived_s >= _MIN_LIFETIME_S else worker.num_quick_deaths + 1
        wait_s = get_restart_wait_s(worker.num_quick_deaths)
        worker.restart_at_s = time.monotonic() + wait_s
        if not self._has_served and worker.num_starts >= _MAX_STARTS:
            raise ConfigError(f"worker {index} ended {worker.num_starts} times before it could serve, with code {code}")
        if self._on_death is not None:
            self._on_death(index)
        _log_worker_error("worker_died", worker=index, code=code, lived_s=round(lived_s, 1), wait_s=wait_s)


def create_memory_file() -> BufferedRandom:
    """Create an empty file, in memory if the system supports it.

    It ends with the last process that has it open.
    """
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("llm-spec"), "w+b")
    import tempfile  # here: it is rarely needed

    return tempfile.TemporaryFile()


def _watch_workers_in_small_process(file: BinaryIO, number: int) -> None:
    """Supervise the workers until a signal ends this program, which replaced the first one."""
    with file:
        supervisor, stop_timeout_s, folder = pickle.load(file)  # noqa: S301 - from ourselves
    os.close(number)
    signal.signal(signal.SIGTERM, exit_on_signal)
    with suppress(KeyboardInterrupt):
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
            supervisor.restart_dead_workers()
        finally:
            supervisor.close_inherited()
            supervisor.stop_workers(stop_timeout_s)
            if folder is not None:
                import shutil  # here: it is only needed at the end

                shutil.rmtree(folder, ignore_errors=True)


def exit_on_signal(*_: object) -> NoReturn:
    """Handle a signal by exiting with status 0."""
    sys.exit(0)


def _wait_for_worker_end(channel: int, timeout_s: float) -> bool:
    """Wait until a worker has ended; return False if it has not in that time."""
    end_s = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        while selector.select(max(0.0, end_s - time.monotonic())):
            if not read_worker_channel(channel):
                return True
    return False


def _log_worker_error(event: str, **fields: object) -> None:
    import logging  # here: a server whose workers live needs neither

    from llm_spec.decoder.telemetry import log_event

    log_event(event, level=logging.ERROR, **fields)
