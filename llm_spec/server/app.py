"""A server inside an event loop."""

from __future__ import annotations

import logging
import socket
from collections.abc import MutableMapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Final, Self, cast

from aiohttp import hdrs, web

from llm_spec.server.clients import ClientRegistry
from llm_spec.server.config import ServerConfig
from llm_spec.server.gateway import SERVER_NAME, Gateway
from llm_spec.server.metrics import ServerMetrics
from llm_spec.server.models import ServedModels
from llm_spec.server.usage_ledger import UsageLedger

__all__ = ["Server"]

_BACKLOG: Final = 1024
_LINGERING_S: Final = 10.0  # what is left of a refused body is read for so long, or its sender would miss the answer


class _ErrorTypeLogger(logging.LoggerAdapter[logging.Logger]):
    """For what aiohttp logs: of an error its type, as its message quotes headers that may hold a key."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        error = kwargs.pop("exc_info", None)
        return (f"{msg}: {type(error).__name__}" if isinstance(error, BaseException) else msg), kwargs


class _VersionHidingConnection(web.RequestHandler):
    """A connection whose own answers, to what is not valid HTTP, do not name the server's software and version."""

    __slots__ = ()

    def handle_error(self, *args: Any, **kwargs: Any) -> web.StreamResponse:
        response = super().handle_error(*args, **kwargs)
        response.headers[hdrs.SERVER] = SERVER_NAME
        return response


class _VersionHidingConnectionFactory(web.Server):
    """aiohttp's maker of connections, which takes no class for them."""

    def __call__(self) -> _VersionHidingConnection:
        connection = super().__call__()
        connection.__class__ = _VersionHidingConnection
        return cast("_VersionHidingConnection", connection)


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
        config.check_address_is_protected()
        ledger = ledger or UsageLedger(1, len(config.keys))
        self._config = config
        self._socket = sock
        self._clients = ClientRegistry(config.keys, ledger, worker)
        self._metrics = partial(ServerMetrics, num_workers=ledger.num_workers)
        self._models = ServedModels(config)
        self._stack = AsyncExitStack()
        self._gateway: Gateway | None = None
        self.url = ""

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._models.aclose)
            self._models.open_providers(self._clients.all_clients)
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
            cast("web.Server", runner.server).__class__ = _VersionHidingConnectionFactory
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
