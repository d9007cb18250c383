"""A toy balancer in front of replicas: calls with the same value of a header go to the same one, others take turns."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from itertools import cycle
from typing import NamedTuple

import aiohttp
from aiohttp import web

from support.wire import served

__all__ = ["SESSION_HEADER", "Balancer", "RoutedCall", "balanced"]

SESSION_HEADER = "x-session-id"


class RoutedCall(NamedTuple):
    """A call that came through: where to, in which session, and to which replica it went."""

    path: str
    session: str | None
    replica: int


class Balancer:
    """Passes calls on to replicas, given by their roots."""

    def __init__(self, replicas: Sequence[str], session: aiohttp.ClientSession) -> None:
        self.calls: list[RoutedCall] = []
        self.url = ""
        self._replicas = replicas
        self._session = session
        self._turns = cycle(range(len(replicas)))
        self._replica_by_session: dict[str, int] = {}

    @property
    def sessions(self) -> set[str | None]:
        """The ids that came."""
        return {call.session for call in self.calls}

    async def pass_on(self, request: web.Request) -> web.StreamResponse:
        session, turn = request.headers.get(SESSION_HEADER), next(self._turns)
        replica = turn if session is None else self._replica_by_session.setdefault(session, turn)
        self.calls.append(RoutedCall(request.path, session, replica))
        body, headers = await request.read(), {"Content-Type": "application/json"}
        async with self._session.post(f"{self._replicas[replica]}{request.path}", data=body, headers=headers) as reply:
            response = web.StreamResponse(status=reply.status, headers={"Content-Type": reply.headers["Content-Type"]})
            await response.prepare(request)
            async for chunk in reply.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
        return response


@asynccontextmanager
async def balanced(*replica_urls: str) -> AsyncGenerator[Balancer]:
    """A balancer before some replicas, whose addresses end in /v1; its `url` does too."""
    async with aiohttp.ClientSession() as session:
        balancer = Balancer([url.removesuffix("/v1") for url in replica_urls], session)
        async with served("/{path:.*}", balancer.pass_on) as root:
            balancer.url = f"{root}/v1"
            yield balancer
