"""Worker processes that are started again when they die."""

from __future__ import annotations

import logging
import os
import pickle
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import spawn
from typing import Any, BinaryIO, Final

from llm_spec.errors import ConfigError
from llm_spec.telemetry import log_event

__all__ = ["READY", "Supervisor", "get_restart_wait_s", "send_report"]

READY: Final = ""  # what a worker reports once it serves; any other text says why it cannot
_END_OF_REPORT: Final = b"\0"
_MIN_LIFETIME_S: Final = 10.0  # who lived so long is started again at once
_MAX_WAIT_S: Final = 30.0
_MAX_STARTS: Final = 3  # of a worker, while none has ever been ready


# What a worker's process runs: it gets its work through a socket. As with multiprocessing, it finds the classes of the
# main program; but no further process tracks what is shared.
_WORKER_PROGRAM: Final = (
    "import pickle, socket; from multiprocessing.spawn import prepare; channel = socket.socket(fileno={channel}); "
    "file = channel.makefile('rb'); prepare(pickle.load(file)); pickle.load(file)(channel, file)"
)


def send_report(channel: socket.socket, report: str) -> None:
    """Tell the supervisor, from a worker, that this one serves (`READY`), or why it cannot."""
    channel.sendall(report.encode() + _END_OF_REPORT)


def get_restart_wait_s(num_quick_deaths: int) -> float:
    """Seconds until a worker is started again that has died so often in succession, soon after its start."""
    return 0.0 if num_quick_deaths == 0 else min(_MAX_WAIT_S, 0.25 * 2.0 ** min(num_quick_deaths, 16))


@dataclass(slots=True)
class _WorkerProcess:
    process: subprocess.Popen[bytes]
    channel: socket.socket  # to the worker; it ends when the worker does
    started_s: float
    report: bytes = b""  # what it has said so far
    num_starts: int = 1
    num_quick_deaths: int = 0
    restart_at_s: float | None = None  # when it is started again; None while it lives


class Supervisor:
    """Runs `target(*arguments, worker, channel)` in a process for each worker, and starts again what has died.

    A worker sends `READY` through `channel` by `send_report` once it serves, or why it cannot; `channel` ends when this
    process does. `inherited`: the file descriptors that workers have too. `on_death` gets each worker that died.
    """

    def __init__(
        self,
        num_workers: int,
        target: Callable[..., None],
        arguments: tuple[Any, ...],
        *,
        inherited: Sequence[int] = (),
        on_death: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._num_workers = num_workers
        self._target = target
        self._arguments = arguments
        self._inherited = inherited
        self._on_death = on_death
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
            worker.process.terminate()
        for worker in self._workers:
            try:
                worker.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
            worker.channel.close()

    # ------------------------------------------------------------------------------------------ inside

    def _handle_next_event(self) -> None:
        """Wait for the next thing that happens to a worker, and see to it."""
        with selectors.DefaultSelector() as selector:
            for number, worker in enumerate(self._workers):
                if worker.restart_at_s is None:
                    selector.register(worker.channel, selectors.EVENT_READ, number)
            events = selector.select(self._get_wait_timeout_s())
        for key, _ in events:
            index: int = key.data
            self._read_channel(index, self._workers[index])
        for index, worker in enumerate(self._workers):
            if worker.restart_at_s is not None and worker.restart_at_s <= time.monotonic():
                self._restart_worker(index, worker)

    def _get_wait_timeout_s(self) -> float | None:
        times_s = [worker.restart_at_s for worker in self._workers if worker.restart_at_s is not None]
        return max(0.0, min(times_s) - time.monotonic()) if times_s else None

    def _read_channel(self, index: int, worker: _WorkerProcess) -> None:
        """Read a part of a worker's report; at the end of its channel it has died."""
        try:
            chunk = worker.channel.recv(65536)
        except OSError:
            chunk = b""
        worker.report += chunk
        if not chunk:
            self._handle_death(index, worker)
        elif chunk.endswith(_END_OF_REPORT):
            self._handle_report(index, worker, worker.report.removesuffix(_END_OF_REPORT).decode())

    def _handle_report(self, index: int, worker: _WorkerProcess, report: str) -> None:
        if report == READY:
            self._has_served = True
        elif worker.num_starts == 1:
            raise ConfigError(report)
        else:
            log_event("worker_cannot_serve", level=logging.ERROR, worker=index, why=report)

    def _handle_death(self, index: int, worker: _WorkerProcess) -> None:
        worker.channel.close()
        code = worker.process.wait()
        if not self._has_served and worker.num_starts >= _MAX_STARTS:
            raise ConfigError(f"worker {index} ended {worker.num_starts} times before it could serve, with code {code}")
        self._on_death(index)
        lived_s = time.monotonic() - worker.started_s
        worker.num_quick_deaths = 0 if lived_s >= _MIN_LIFETIME_S else worker.num_quick_deaths + 1
        wait_s = get_restart_wait_s(worker.num_quick_deaths)
        worker.restart_at_s = time.monotonic() + wait_s
        log_event("worker_died", level=logging.ERROR, worker=index, code=code, lived_s=round(lived_s, 1), wait_s=wait_s)

    def _restart_worker(self, index: int, worker: _WorkerProcess) -> None:
        worker.process, worker.channel, worker.started_s = self._start_process(index)
        worker.report = b""
        worker.num_starts += 1
        worker.restart_at_s = None

    def _start_process(self, index: int) -> tuple[subprocess.Popen[bytes], socket.socket, float]:
        preparation = spawn.get_preparation_data(f"llm-spec-{index}")
        del preparation["authkey"]
        work = (self._target, (*self._arguments, index), self._inherited)
        parts = (preparation, _run_work, work)
        channel, worker_channel = socket.socketpair()
        with worker_channel, _ignore_interrupts():
            process = subprocess.Popen(  # noqa: S603 - our own
                _make_command(worker_channel, index),
                stdin=subprocess.DEVNULL,
                pass_fds=(worker_channel.fileno(), *self._inherited),
            )
        with suppress(ConnectionError):  # it has died, which the end of the channel tells
            channel.sendall(b"".join(map(pickle.dumps, parts)))
        return process, channel, time.monotonic()


def _make_command(channel: socket.socket, index: int) -> list[str]:
    """What starts a worker, by this process's interpreter and its options; the last part is for readers of `ps`."""
    command = spawn.get_command_line()
    program = _WORKER_PROGRAM.format(channel=channel.fileno())
    return [*command[: command.index("-c")], "-c", program, f"llm-spec-worker-{index}"]


def _run_work(channel: socket.socket, file: BinaryIO) -> None:
    """In a worker: do what the supervisor says."""
    with file:
        target, arguments, inherited = pickle.load(file)  # noqa: S301 - from the process that began this one
    for number in (channel.fileno(), *inherited):
        os.set_inheritable(number, False)
    target(*arguments, channel)


@contextmanager
def _ignore_interrupts() -> Generator[None]:
    """A process that is started inside does not hear Ctrl-C, which its terminal sends to all, before it asks for it."""
    previous_handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous_handler)
