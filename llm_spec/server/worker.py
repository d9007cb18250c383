"""A worker: the process that serves, beside the one that started it and watches over it."""

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

_GC_THRESHOLD: Final = 20_000  # objects more than before; at the default 700 every other request would look for cycles


def run_server_worker(
    config: ServerConfig, sock: socket.socket, ledger: UsageLedger, worker: int, channel: socket.socket
) -> None:
    """Serve until SIGINT, SIGTERM or the end of the supervisor, which `channel` leads to; tell it once this serves."""

    async def serve_until_stopped() -> None:
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, ended.set)
        loop.add_reader(channel.fileno(), ended.set)  # a worker does not outlive who began it
        async with Server(config, sock=sock, ledger=ledger, worker=worker):
            gc.collect()
            gc.freeze()  # what is here by now stays: it need not be looked through again and again
            gc.set_threshold(_GC_THRESHOLD)
            send_worker_report(channel, READY)
            await ended.wait()

    use_worker_metrics_files(worker)
    ledger.settle_dead_worker(worker)
    _run_on_fastest_loop(serve_until_stopped)


def _run_on_fastest_loop(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine function, on uvloop where that is installed: it halves what a relayed piece costs."""
    with asyncio.Runner(loop_factory=_get_loop_factory()) as runner:
        runner.run(main())


def _get_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None

    return uvloop.new_event_loop
