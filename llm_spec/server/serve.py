"""Running a server: its sockets, workers and signals."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Generator, MutableMapping
from contextlib import AsyncExitStack, ExitStack, contextmanager
from multiprocessing.process import BaseProcess
from typing import Any, Final, Self

from aiohttp import web

from llm_spec.errors import ConfigError
from llm_spec.server.clients import Clients, Ledger
from llm_spec.server.config import ServerConfig
from llm_spec.server.gateway import Gateway
from llm_spec.server.metrics import Metrics, forget_worker
from llm_spec.server.models import ServedModels

__all__ = ["Server", "check", "serve"]

_BACKLOG: Final = 1024
_GARBAGE: Final = 20_000  # objects more than before; at the default 700 every other request would look for cycles
_LINGERING_S: Final = 10.0  # what is left of a refused body is read for so long, or its sender would miss the answer
_AT_ONCE_S: Final = 1.0  # a worker that ends so soon is not begun again


class _TypesAlone(logging.LoggerAdapter[logging.Logger]):
    """For what aiohttp logs: of an error its type, as its message quotes headers that may hold a key."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        error = kwargs.pop("exc_info", None)
        return (f"{msg}: {type(error).__name__}" if isinstance(error, BaseException) else msg), kwargs


class Server:
    """A server inside an event loop, for `async with`: `url` is its address once it listens.

    `sock` is a listening socket that stays the caller's; without one the config's address is bound.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        sock: socket.socket | None = None,
        ledger: Ledger | None = None,
        worker: int = 0,
    ) -> None:
        config.check_address()
        self._config = config
        self._socket = sock
        self._clients = Clients(config.keys, ledger or Ledger(1, len(config.keys)), worker)
        self._models = ServedModels(config)
        self._stack = AsyncExitStack()
        self._gateway: Gateway | None = None
        self.url = ""

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._models.aclose)
            self._models.open(self._clients.all)
            self._gateway = Gateway(self._config, self._models, self._clients, Metrics())
            runner = web.AppRunner(
                self._gateway.app(),
                handler_cancellation=True,
                keepalive_timeout=self._config.idle_s,
                shutdown_timeout=max(self._config.shutdown_s, 0.001),  # aiohttp takes 0 for: as long as it takes
                access_log=None,
                lingering_time=min(_LINGERING_S, self._config.body_timeout_s),
                logger=_TypesAlone(logging.getLogger("llm_spec")),
            )
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await self._site(runner).start()
            host, port = runner.addresses[0][:2]
            self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop listening, let running answers end, then close what was opened."""
        if self._gateway is not None:
            self._gateway.is_ending = True
        await self._stack.aclose()

    def _site(self, runner: web.AppRunner) -> web.BaseSite:
        if self._socket is not None:
            return web.SockSite(runner, self._socket, backlog=_BACKLOG)
        return web.TCPSite(runner, self._config.host, self._config.port, backlog=_BACKLOG)


def check(config: ServerConfig) -> None:
    """Open all that a server would open, and close it; raises what would keep it from serving."""
    config.check_address()

    async def run() -> None:
        clients = Clients(config.keys, Ledger(1, len(config.keys)), 0)
        models = ServedModels(config)
        try:
            models.open(clients.all)
        finally:
            await models.aclose()

    _run(run)


def serve(config: ServerConfig, *, told: Callable[[str], None] = print) -> None:
    """Serve until SIGINT or SIGTERM; then running answers end, for `shutdown_s` seconds at most.

    `told` hears the address once the server listens. Raises ConfigError for an address that cannot be bound.
    """
    config.check_address()
    with _listening(config) as sock:
        if config.workers == 1:
            ledger = Ledger(1, len(config.keys))
            _work(config, sock, ledger, 0, lambda server: told(f"llm-spec serves at {server.url}"))
        else:
            _serve_with_workers(config, sock, told)


@contextmanager
def _listening(config: ServerConfig) -> Generator[socket.socket]:
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


def _run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine function, on uvloop where that is installed: it halves what a relayed piece costs."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(main())


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None

    return uvloop.new_event_loop


def _work(
    config: ServerConfig, sock: socket.socket, ledger: Ledger, worker: int, ready: Callable[[Server], None]
) -> None:
    """One worker's life."""

    async def run() -> None:
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, ended.set)
        parent = multiprocessing.parent_process()
        if parent is not None:
            loop.add_reader(parent.sentinel, ended.set)  # a worker does not outlive who began it
        async with Server(config, sock=sock, ledger=ledger, worker=worker) as server:
            gc.collect()
            gc.freeze()  # what is here by now stays: it need not be looked through again and again
            gc.set_threshold(_GARBAGE)
            ready(server)
            await ended.wait()

    ledger.forget_open(worker)
    _run(run)


# ---------------------------------------------------------------------------------------------- workers


def _serve_with_workers(config: ServerConfig, sock: socket.socket, told: Callable[[str], None]) -> None:
    """Several processes accept from one socket; one that dies is begun again."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="llm_spec-metrics-"))
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        stack.callback(os.environ.pop, "PROMETHEUS_MULTIPROC_DIR", None)
        ledger = Ledger(config.workers, len(config.keys))
        workers = _Workers(config, sock, ledger)
        stack.callback(workers.end)
        signal.signal(signal.SIGTERM, _end)
        workers.begin()
        host, port = sock.getsockname()[:2]
        told(f"llm-spec serves at http://{f'[{host}]' if ':' in host else host}:{port} with {config.workers} workers")
        with contextlib.suppress(KeyboardInterrupt):
            workers.watch()


def _end(*_: object) -> None:
    sys.exit(0)


class _Workers:
    def __init__(self, config: ServerConfig, sock: socket.socket, ledger: Ledger) -> None:
        self._config = config
        self._socket = sock
        self._ledger = ledger
        self._context = multiprocessing.get_context("spawn")  # a forked process would share the threads' locks
        self._processes: list[BaseProcess] = []
        self._begun_s: list[float] = []

    def begin(self) -> None:
        """Begin all of them; raises ConfigError where one cannot."""
        for worker in range(self._config.workers):
            self._processes.append(self._begin(worker))
            self._begun_s.append(time.monotonic())

    def watch(self) -> None:
        """Wait, and begin again what has died; raises ConfigError for one that ends as soon as it begins."""
        while True:
            multiprocessing.connection.wait([process.sentinel for process in self._processes])
            for worker, process in enumerate(self._processes):
                if process.is_alive():
                    continue
                if time.monotonic() - self._begun_s[worker] < _AT_ONCE_S:
                    raise ConfigError(f"worker {worker} ended as soon as it had begun, with code {process.exitcode}")
                if process.pid is not None:
                    forget_worker(process.pid)
                self._begun_s[worker] = time.monotonic()
                self._processes[worker] = self._begin(worker)

    def end(self) -> None:
        """End all, letting running answers end."""
        for process in self._processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGTERM)
        for process in self._processes:
            process.join(self._config.shutdown_s + 5.0)
            if process.is_alive():
                process.kill()

    def _begin(self, worker: int) -> BaseProcess:
        process = self._context.Process(
            target=_work_apart, args=(self._config, self._socket, self._ledger, worker), name=f"llm-spec-{worker}"
        )
        process.start()
        return process


def _work_apart(config: ServerConfig, sock: socket.socket, ledger: Ledger, worker: int) -> None:
    _work(config, sock, ledger, worker, lambda _: None)
