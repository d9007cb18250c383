"""Running a server: its socket, and the workers that share it.

This process waits beside its workers for as long as they live. So it imports little: no numpy, no aiohttp, no asyncio.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Final

from llm_spec.errors import ConfigError, LlmSpecError
from llm_spec.server.config import ServerConfig
from llm_spec.server.metrics_files import clear_worker_gauges, create_metrics_folder
from llm_spec.server.supervisor import READY, Supervisor
from llm_spec.server.usage_ledger import UsageLedger

__all__ = ["serve"]

_BACKLOG: Final = 1024
# For workers, whose C library otherwise keeps what long bodies took: a heap for each thread, and holes of their size
_MALLOC_OPTIONS: Final = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": "4194304"}


def serve(config: ServerConfig, *, on_ready: Callable[[str], None] = print) -> None:
    """Serve until SIGINT or SIGTERM; then running answers end, for `shutdown_s` seconds at most.

    The workers are processes, started by `spawn` (a program that calls this needs `if __name__ == "__main__":`), and
    started again when they die. `on_ready` is called with the address once one of them serves. Raises ConfigError for
    what keeps them from serving.
    """
    config.check_address()
    for name, value in _MALLOC_OPTIONS.items():
        os.environ.setdefault(name, value)
    with _open_socket(config) as sock, ExitStack() as stack, contextlib.suppress(KeyboardInterrupt):
        stack.enter_context(create_metrics_folder(config))
        ledger = UsageLedger(config.workers, len(config.keys))
        supervisor = Supervisor(
            config.workers, _run_worker_process, (config, sock, ledger), on_death=clear_worker_gauges
        )
        stack.callback(supervisor.stop, config.shutdown_s + 5.0)
        signal.signal(signal.SIGTERM, _exit_on_signal)
        supervisor.start()
        host, port = sock.getsockname()[:2]
        suffix = f" with {config.workers} workers" if config.workers > 1 else ""
        on_ready(f"llm-spec serves at http://{f'[{host}]' if ':' in host else host}:{port}{suffix}")
        supervisor.restart_dead_workers()


@contextmanager
def _open_socket(config: ServerConfig) -> Generator[socket.socket]:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    with contextlib.closing(sock):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((config.host, config.port))
        except OSError as error:
            raise ConfigError(f"host {config.host!r}, port {config.port} cannot be bound: {error}") from error
        sock.listen(_BACKLOG)
        sock.setblocking(False)
        yield sock


def _exit_on_signal(*_: object) -> None:
    sys.exit(0)


def _run_worker_process(
    config: ServerConfig, sock: socket.socket, ledger: UsageLedger, worker: int, reports: Connection
) -> None:
    """A worker's process; it reports to its parent what keeps it from serving."""
    from llm_spec.server.worker import run_worker  # here: the process that starts workers needs nothing of theirs

    with reports:
        try:
            run_worker(config, sock, ledger, worker, lambda: reports.send(READY))
        except LlmSpecError as error:
            reports.send(str(error))
            sys.exit(1)
