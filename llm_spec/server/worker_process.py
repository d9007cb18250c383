"""Processes that a server's supervisor starts, and their reports to it.

Like processes of multiprocessing's `spawn`, they know the main program's classes. Unlike those,
they need no further process that tracks what is shared, and the process that starts them stays
small.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, Final

__all__ = [
    "READY",
    "SupervisedWorker",
    "WorkerProgram",
    "build_python_program_options",
    "read_worker_channel",
    "send_worker_report",
]

READY: Final = ""  # what a worker reports once it serves; any other text says why it cannot
_END_OF_REPORT: Final = b"\0"
_PROGRAM: Final = (
    "import pickle, sys; file = open({number}, 'rb', closefd=False); sys.path[:] = pickle.load(file); "
    "pickle.load(file)(file, {number})"
)


def build_python_program_options(number: int) -> list[str]:
    """Return the options with which Python runs a program from a file descriptor.

    The file has, pickled, a `sys.path` and a function. The function is called with the file, to
    read on, and with the descriptor.
    """
    return ["-P", "-c", _PROGRAM.format(number=number)]


def send_worker_report(channel: socket.socket, report: str) -> None:
    """Tell the supervisor that this worker serves (`READY`), or why it cannot."""
    channel.sendall(report.encode() + _END_OF_REPORT)


def read_worker_channel(channel: int) -> bytes:
    """Read what has come from a worker; return nothing once it has ended."""
    try:
        return os.read(channel, 65536)
    except OSError:
        return b""


class WorkerProgram:
    """The program of a worker: `target(*arguments, worker, channel)`.

    `inherited`: the file descriptors that it has open.
    """

    def __init__(self, target: Callable[..., None], arguments: tuple[Any, ...], inherited: Sequence[int]) -> None:
        from multiprocessing import spawn  # here: a process that only restarts workers needs none

        command = spawn.get_command_line()
        # The interpreter of this process, with its options
        self._command = command[: command.index("-c")]
        preparation = spawn.get_preparation_data("llm-spec")
        del preparation["authkey"]  # it may not be pickled
        parts = (sys.path, _run_worker_target, preparation, (target, arguments, inherited))
        self._pickled = b"".join(map(pickle.dumps, parts))
        for number in inherited:
            os.set_inheritable(number, True)

    def start(self, worker: int) -> tuple[int, int]:
        """Start a worker; return its process id and the file descriptor of its channel."""
        ours, theirs = socket.socketpair()
        with theirs, _ignore_interrupts():
            theirs.set_inheritable(True)
            command = [*self._command, *build_python_program_options(theirs.fileno()), f"llm-spec-worker-{worker}"]
            no_input = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
            pid = os.posix_spawn(command[0], command, os.environ, file_actions=[no_input])
        with suppress(ConnectionError):  # it has died; the end of the channel will tell
            ours.sendall(self._pickled + pickle.dumps(worker))
        return pid, ours.detach()


class SupervisedWorker:
    """A worker, across all its processes."""

    def __init__(self, pid: int, channel: int) -> None:
        self.pid = pid
        self.channel = channel  # a file descriptor; it ends when the process does
        self.started_s = time.monotonic()
        self.restart_at_s: float | None = None  # when it is started again; None while it lives
        self.num_starts = 1
        self.num_quick_deaths = 0
        self._unread = b""

    def read_report(self, chunk: bytes) -> str | None:
        """Add a chunk of a report; return the report once it is complete, else None."""
        report, end, self._unread = (self._unread + chunk).partition(_END_OF_REPORT)
        if end:
            return report.decode()
        self._unread = report
        return None

    def reap(self) -> int:
        """Close its channel; return its exit code, negative for a signal."""
        os.close(self.channel)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def set_new_process(self, pid: int, channel: int) -> None:
        """Record the worker's new process."""
        self.pid, self.channel = pid, channel
        self.started_s = time.monotonic()
        self.restart_at_s = None
        self.num_starts += 1
        self._unread = b""


def _run_worker_target(file: BinaryIO, number: int) -> None:
    """Run the supervisor's target in a worker."""
    from multiprocessing.spawn import prepare  # here: the supervisor needs none

    with file:
        prepare(pickle.load(file))  # noqa: S301 - from the supervisor, as is what follows
        target, arguments, inherited = pickle.load(file)  # noqa: S301
        worker = pickle.load(file)  # noqa: S301
    for each in (number, *inherited):
        os.set_inheritable(each, False)
    # So that the channel ends with the process, and not when Python closes its own descriptor
    os.dup(number)
    target(*arguments, worker, socket.socket(fileno=number))


@contextmanager
def _ignore_interrupts() -> Generator[None]:
    """Start processes inside that ignore Ctrl-C until they handle it.

    Their terminal sends it to all of them.
    """
    previous_handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous_handler)
