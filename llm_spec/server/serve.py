"""Running a server: its sockets, workers and signals."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import multiprocessing
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Generator, MutableMapping
from contextlib import AsyncExitStack, ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Final, Self, cast

from aiohttp import hdrs, web

from llm_spec.errors import ConfigError, LlmSpecError
from llm_spec.server.clients import Clients, UsageLedger
from llm_spec.server.config import ServerConfig
from llm_spec.server.gateway import SERVER_NAME, Gateway
from llm_spec.server.metrics import Metrics
from llm_spec.server.metrics_files import clear_worker_gauges, create_metrics_folder, share_metrics
from llm_spec.server.models import ServedModels
from llm_spec.server.supervisor import READY, Supervisor
from llm_spec.strategies.choice import load_strategies

__all__ = ["Server", "serve"]

_BACKLOG: Final = 1024
_GC_THRESHOLD: Final = 20_000  # objects more than before; at the default 700 every other request would look for cycles
_LINGERING_S: Final = 10.0  # what is left of a refused body is read for so long, or its sender would miss the answer


class _ErrorTypeLogger(logging.LoggerAdapter[logging.Logger]):
    """For what aiohttp logs: of an error its type, as its message quotes headers that may hold a key."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        error = kwargs.pop("exc_info", None)
        return (f"{msg}: {type(error).__name__}" if isinstance(error, BaseException) else msg), kwargs


class _Connection(web.RequestHandler):
    """A connection on which aiohttp's own answers, to what is no HTTP, do not tell which version of what this is."""

    __slots__ = ()

    def handle_error(self, *args: Any, **kwargs: Any) -> web.StreamResponse:
        response = super().handle_error(*args, **kwargs)
        response.headers[hdrs.SERVER] = SERVER_NAME
        return response


class _ConnectionFactory(web.Server):
    """aiohttp's maker of connections, which takes no class for them."""

    def __call__(self) -> _Connection:
        connection = super().__call__()
        connection.__class__ = _Connection
        return cast("_Connection", connection)


class Server:
    """A server inside an event loop, for `async with`: `url` is its address once it listens.

    `sock` is a listening socket that stays the caller's; without one the config's address is bound.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        sock: socket.socket | None = None,
        ledger: UsageLedger | None = None,
        worker: int = 0,
    ) -> None:
        config.check_address()
        ledger = ledger or UsageLedger(1, len(config.keys))
        self._config = config
        self._socket = sock
        self._clients = Clients(config.keys, ledger, worker)
        self._metrics = partial(Metrics, num_workers=ledger.num_workers)
        self._models = ServedModels(config)
        self._stack = AsyncExitStack()
        self._gateway: Gateway | None = None
        self.url = ""

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._models.aclose)
            self._models.open(self._clients.all)
            load_strategies()  # now: the first request of each would hold up all others
            self._gateway = Gateway(self._config, self._models, self._clients, self._metrics())
            runner = web.AppRunner(
                self._gateway.build_app(),
                handler_cancellation=True,
                keepalive_timeout=self._config.idle_s,
                shutdown_timeout=max(self._config.shutdown_s, 0.001),  # aiohttp takes 0 for: as long as it takes
                access_log=None,
                lingering_time=min(_LINGERING_S, self._config.body_timeout_s),
                logger=_ErrorTypeLogger(logging.getLogger("llm_spec")),
            )
            await runner.setup()
            cast("web.Server", runner.server).__class__ = _ConnectionFactory
            stack.push_async_callback(runner.cleanup)
            await self._create_site(runner).start()
            host, port = runner.addresses[0][:2]
            self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop listening, let running answers end, then close what was opened."""
        if self._gateway is not None:
            self._gateway.is_shutting_down = True
        await self._stack.aclose()

    def _create_site(self, runner: web.AppRunner) -> web.BaseSite:
        if self._socket is not None:
            return web.SockSite(runner, self._socket, backlog=_BACKLOG)
        return web.TCPSite(runner, self._config.host, self._config.port, backlog=_BACKLOG)


def serve(config: ServerConfig, *, on_ready: Callable[[str], None] = print) -> None:
    """Serve until SIGINT or SIGTERM; then running answers end, for `shutdown_s` seconds at most.

    The workers are processes, started by `spawn` (a program that calls this needs `if __name__ == "__main__":`), and
    started again when they die. `on_ready` hears the address once one of them serves. Raises ConfigError for what keeps
    them from it.
    """
    config.check_address()
    with _open_socket(config) as sock, ExitStack() as stack, contextlib.suppress(KeyboardInterrupt):
        stack.enter_context(create_metrics_folder(config))
        ledger = UsageLedger(config.workers, len(config.keys))
        supervisor = Supervisor(
            config.workers, _run_worker_process, (config, sock, ledger), on_death=clear_worker_gauges
        )
        stack.callback(supervisor.stop, config.shutdown_s + 5.0)
        signal.signal(signal.SIGTERM, _exit)
        supervisor.start()
        host, port = sock.getsockname()[:2]
        suffix = f" with {config.workers} workers" if config.workers > 1 else ""
        on_ready(f"llm-spec serves at http://{f'[{host}]' if ':' in host else host}:{port}{suffix}")
        supervisor.watch()


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


def _run_coroutine(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine function, on uvloop where that is installed: it halves what a relayed piece costs."""
    with asyncio.Runner(loop_factory=_get_loop_factory()) as runner:
        runner.run(main())


def _get_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None

    return uvloop.new_event_loop


def _run_worker(
    config: ServerConfig, sock: socket.socket, ledger: UsageLedger, worker: int, ready: Callable[[], None]
) -> None:
    """One worker's life; it calls `ready` once it serves."""

    async def run() -> None:
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, ended.set)
        parent = multiprocessing.parent_process()
        if parent is not None:
            loop.add_reader(parent.sentinel, ended.set)  # a worker does not outlive who began it
        async with Server(config, sock=sock, ledger=ledger, worker=worker):
            gc.collect()
            gc.freeze()  # what is here by now stays: it need not be looked through again and again
            gc.set_threshold(_GC_THRESHOLD)
            ready()
            await ended.wait()

    ledger.settle_dead_worker(worker)
    _run_coroutine(run)


def _exit(*_: object) -> None:
    sys.exit(0)


def _run_worker_process(
    config: ServerConfig, sock: socket.socket, ledger: UsageLedger, worker: int, reports: Connection
) -> None:
    """A worker's process; what keeps it from serving is told to who started it."""
    share_metrics(worker)
    with reports:
        try:
            _run_worker(config, sock, ledger, worker, lambda: reports.send(READY))
        except LlmSpecError as error:
            reports.send(str(error))
            sys.exit(1)
