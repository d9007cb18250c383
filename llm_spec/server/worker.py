"""A worker: the process that serves, under a supervisor that started it."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
from collections.abc import Callable, Coroutine
from typing import Any, Final

from llm_spec.server.app import Server
from llm_spec.server.config import ServerConfig
from llm_spec.server.metrics import use_worker_metrics_files
from llm_spec.server.usage_ledger import UsageLedger
from llm_spec.server.worker_process import READY, send_worker_report

__all__ = ["run_server_worker"]

# New objects; at the default of 700, every other request would look for cycles
_GC_THRESHOLD: Final = 20_000


def run_server_worker(
    config: ServerConfig, sock: socket.socket, ledger: UsageLedger, worker: int, channel: socket.socket
) -> None:
    """Serve until SIGINT, SIGTERM or the end of the supervisor.

    `channel`: leads to the supervisor, which is told once this worker serves.
    """

    async def serve_until_stopped() -> None:
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, ended.set)
        loop.add_reader(channel.fileno(), ended.set)  # a worker does not outlive its supervisor
        async with Server(config, sock=sock, ledger=ledger, worker=worker):
            gc.collect()
            gc.freeze()  # these objects stay, so they need not be scanned again
            gc.set_threshold(_GC_THRESHOLD)
            send_worker_report(channel, READY)
            await ended.wait()

    use_worker_metrics_files(worker)
    ledger.settle_dead_worker(worker)
    _run_on_fastest_loop(serve_until_stopped)


def _run_on_fastest_loop(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine function, on uvloop if it is installed: a relayed piece costs half there."""
    with asyncio.Runner(loop_factory=_get_loop_factory()) as runner:
        runner.run(main())


def _get_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None

    return uvloop.new_event_loop
