"""Runs a server: opens its socket, and starts the workers that share it.

This process lives as long as its workers. So it imports little: no numpy, no aiohttp, no asyncio.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Final

from llm_spec.contract.errors import ConfigError, LlmSpecError
from llm_spec.server.config import ServerConfig
from llm_spec.server.metrics_files import clear_worker_gauges, create_metrics_folder
from llm_spec.server.supervisor import WorkerSupervisor, create_memory_file, exit_on_signal
from llm_spec.server.worker_process import send_worker_report

__all__ = ["serve"]

_BACKLOG: Final = 1024
# For workers. Their C library would otherwise keep the memory of long bodies: a heap for each
# thread, and holes of their size
_MALLOC_OPTIONS: Final = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": "4194304"}


def serve(config: ServerConfig, *, on_ready: Callable[[str], None] = print, may_replace_program: bool = False) -> None:
    """Serve until SIGINT or SIGTERM; then running answers have `shutdown_s` seconds to end.

    The workers are processes, which are restarted if they die. They import the main program, as
    with multiprocessing's `spawn`, so a program that calls this needs `if __name__ == "__main__":`.

    `on_ready`: called with a line that names the address, once a worker serves.
    `may_replace_program`: a smaller program then replaces this one in its process, and this
    function never returns.

    Raises ConfigError if the workers cannot serve.
    """
    config.check_address_is_protected()
    for name, value in _MALLOC_OPTIONS.items():
        os.environ.setdefault(name, value)
    with _open_listening_socket(config) as sock, ExitStack() as stack, contextlib.suppress(KeyboardInterrupt):
        folder = stack.enter_context(create_metrics_folder(config))
        ledger_file = stack.enter_context(create_memory_file())
        shared = (sock.fileno(), ledger_file.fileno())
        on_death = None if folder is None else clear_worker_gauges
        supervisor = WorkerSupervisor(
            config.workers, _run_worker_process, (config, *shared), inherited=shared, on_death=on_death
        )
        stop_timeout_s = config.shutdown_s + 5.0
        stack.callback(supervisor.stop_workers, stop_timeout_s)
        # Before the workers end; otherwise the system would accept connections that nobody serves
        stack.callback(sock.close)
        signal.signal(signal.SIGTERM, exit_on_signal)
        supervisor.start_workers()
        host, port = sock.getsockname()[:2]
        suffix = f" with {config.workers} workers" if config.workers > 1 else ""
        on_ready(f"llm-spec serves at http://{f'[{host}]' if ':' in host else host}:{port}{suffix}")
        if may_replace_program:
            supervisor.restart_dead_workers_in_small_process(stop_timeout_s, folder)
        supervisor.restart_dead_workers()


@contextmanager
def _open_listening_socket(config: ServerConfig) -> Generator[socket.socket]:
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


def _run_worker_process(config: ServerConfig, sock: int, ledger_file: int, worker: int, channel: socket.socket) -> None:
    """Run a worker; report to the supervisor why it cannot serve."""
    from llm_spec.server.usage_ledger import UsageLedger
    from llm_spec.server.worker import (
        run_server_worker,  # here: the process that starts workers needs nothing of theirs
    )

    ledger = UsageLedger(config.workers, len(config.keys), ledger_file)
    try:
        run_server_worker(config, socket.socket(fileno=sock), ledger, worker, channel)
    except LlmSpecError as error:
        send_worker_report(channel, str(error))
        sys.exit(1)
