"""A server inside an event loop."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import MutableMapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Final, Self, cast

from aiohttp import web

from llm_spec.server.clients import ClientRegistry
from llm_spec.server.config import ServerConfig
from llm_spec.server.connections import adopt_connections
from llm_spec.server.gateway import Gateway
from llm_spec.server.metrics import ServerMetrics
from llm_spec.server.models import ServedModels
from llm_spec.server.usage_ledger import UsageLedger

__all__ = ["Server"]

_BACKLOG: Final = 1024
# The rest of a refused body is read for this long; otherwise its sender would miss the answer
_LINGERING_S: Final = 10.0
# Turns of the event loop; half as many lie between accepting a connection and reading its request
_NUM_LAST_TURNS: Final = 10
# For bodies that are arriving at shutdown, in addition to `shutdown_s` for answers
_LAST_BODIES_S: Final = 3.0


class _ErrorTypeLogger(logging.LoggerAdapter[logging.Logger]):
    """Logs only the types of aiohttp's errors, whose messages quote headers that may hold a key."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        error = kwargs.pop("exc_info", None)
        return (f"{msg}: {type(error).__name__}" if isinstance(error, BaseException) else msg), kwargs


class Server:
    """A server for `async with`, inside a running event loop.

    `url`: its address, once it listens.
    `sock`: a listening socket, which the caller closes; by default the config's address is bound.

    Raises ConfigError if other machines can reach the config's address and there are no keys.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        sock: socket.socket | None = None,
        ledger: UsageLedger | None = None,
        worker: int = 0,
    ) -> None:
        config.check_address_is_protected()
        ledger = ledger or UsageLedger(1, len(config.keys))
        self._config = config
        self._socket = sock
        self._clients = ClientRegistry(config.keys, ledger, worker)
        self._metrics = partial(ServerMetrics, num_workers=ledger.num_workers)
        self._models = ServedModels(config)
        self._stack = AsyncExitStack()
        self.url = ""

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._models.aclose)
            self._models.open_providers(self._clients.all_clients)
            gateway = Gateway(self._config, self._models, self._clients, self._metrics())
            runner = web.AppRunner(
                gateway.build_app(),
                handler_cancellation=True,
                keepalive_timeout=self._config.idle_s,
                # aiohttp reads 0 as no limit
                shutdown_timeout=max(self._config.shutdown_s, 0.001),
                access_log=None,
                # aiohttp would unpack in this event loop, also what nobody reads
                auto_decompress=False,
                lingering_time=min(_LINGERING_S, self._config.body_timeout_s),
                logger=_ErrorTypeLogger(logging.getLogger("llm_spec")),
            )
            await runner.setup()
            adopt_connections(cast("web.Server", runner.server), write_timeout_s=self._config.body_timeout_s)
            stack.push_async_callback(runner.cleanup)
            await self._create_site(runner).start()
            stack.push_async_callback(self._end_new_requests, gateway, runner)
            host, port = runner.addresses[0][:2]
            self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop listening, let running answers end, then close what was opened."""
        await self._stack.aclose()

    async def _end_new_requests(self, gateway: Gateway, runner: web.AppRunner) -> None:
        """Refuse new connections, and read the requests that are arriving.

        After this, aiohttp drops what arrives.
        """
        gateway.is_shutting_down = True
        await _run_loop_turns()  # accept what waits in the system's queue
        for site in runner.sites:
            await site.stop()
        await _run_loop_turns()
        await gateway.wait_for_last_bodies(min(_LAST_BODIES_S, self._config.shutdown_s))

    def _create_site(self, runner: web.AppRunner) -> web.BaseSite:
        if self._socket is not None:
            return web.SockSite(runner, self._socket, backlog=_BACKLOG)
        return web.TCPSite(runner, self._config.host, self._config.port, backlog=_BACKLOG)


async def _run_loop_turns() -> None:
    """Let the event loop read what has arrived, without waiting for more."""
    for _ in range(_NUM_LAST_TURNS):
        await asyncio.sleep(0)
