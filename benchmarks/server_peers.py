"""The two ends of a benchmark of servers, on bare sockets: an upstream that answers at once, and clients that only ask.

Both are as small as they can be, so that what is measured is what stands between them. And the least that can stand
there: a relay that does nothing else, on the same HTTP library.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from multiprocessing.queues import Queue
from typing import cast

import aiohttp
import uvloop
from aiohttp import web

__all__ = ["Load", "ask", "make_body", "relay", "upstream"]

MODEL = "up"


def _frame(delta: dict[str, str], finish: str | None, usage: bool = False) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    chunk: dict[str, object] = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    chunk["choices"] = [choice]
    if usage:
        chunk["usage"] = {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


_ROLE = _frame({"role": "assistant", "content": ""}, None)
_WORD = _frame({"content": "hello "}, None)
_END = _frame({}, "stop", usage=True) + b"data: [DONE]\n\n"
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_PLAIN = json.dumps(
    {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello " * 8}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18},
    }
).encode()
_WHOLE = (b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(_PLAIN)) + _PLAIN


def _piece(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class _Upstream(asyncio.Protocol):
    """Answers each request at once: `max_tokens` words (8 where nothing is said), fifty in a block, or one a write."""

    def __init__(self) -> None:
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        self._data += data
        while True:
            head, found, rest = self._data.partition(b"\r\n\r\n")
            length = _content_length(head)
            if not found or len(rest) < length:
                return
            self._data = rest[length:]
            self._answer(rest[:length])

    def _answer(self, body: bytes) -> None:
        if b'"stream": true' not in body and b'"stream":true' not in body:
            self._transport.write(_WHOLE)
            return
        asked = json.loads(body)
        number, block = int(asked.get("max_tokens") or 8), 50
        parts = [_piece(_WORD * min(block, number - at)) for at in range(0, number, block)]
        self._transport.write(_STREAM_HEAD + _piece(_ROLE) + b"".join(parts) + _piece(_END) + b"0\r\n\r\n")


def _content_length(head: bytes) -> int:
    lower = head.lower()
    at = lower.find(b"content-length:")
    return 0 if at < 0 else int(lower[at + 15 :].split(b"\r\n", 1)[0])


def _serve_upstream(ports: Queue[int]) -> None:
    async def run() -> None:
        server = await asyncio.get_running_loop().create_server(_Upstream, "127.0.0.1", 0, backlog=1024)
        ports.put(server.sockets[0].getsockname()[1])
        await asyncio.sleep(3600)  # whoever began it ends it

    uvloop.run(run())


def _serve_relay(ports: Queue[int], upstream_url: str) -> None:
    async def run() -> None:
        async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session:

            async def answer(request: web.Request) -> web.Response:
                body = json.loads(await request.read()) | {"stream": True}
                sending = session.post(
                    f"{upstream_url}/chat/completions",
                    data=json.dumps(body).encode(),
                    headers={"Content-Type": "application/json"},
                    allow_redirects=False,
                )
                async with sending as response:
                    return web.Response(body=await response.read())

            app = web.Application()
            app.router.add_post("/v1/chat/completions", answer)
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            ports.put(runner.addresses[0][1])
            await asyncio.sleep(3600)

    uvloop.run(run())


@contextmanager
def upstream() -> Generator[str]:
    """An upstream in a process of its own; its address, which ends in /v1."""
    with _run_beside(_serve_upstream) as url:
        yield url


@contextmanager
def relay(upstream_url: str) -> Generator[str]:
    """A relay on aiohttp that asks for a stream and answers with its bytes as they are, in a process of its own."""
    with _run_beside(_serve_relay, upstream_url) as url:
        yield url


@contextmanager
def _run_beside(serve: Callable[..., None], *arguments: str) -> Generator[str]:
    ports: Queue[int] = multiprocessing.get_context("spawn").Queue()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(ports, *arguments), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ports.get(timeout=30)}/v1"
    finally:
        process.terminate()
        process.join()


# ------------------------------------------------------------------------------------------------ clients


def make_body(model: str, **fields: object) -> bytes:
    """The body of a small chat request."""
    return json.dumps({"model": model, "messages": [{"role": "user", "content": "Say hello."}], **fields}).encode()


class _Client(asyncio.Protocol):
    """One connection: asks again as soon as it was answered, `num_left` times; latencies go to `seconds`."""

    def __init__(self, request: bytes, load: Load, done: asyncio.Future[None]) -> None:
        self._request = request
        self._load = load
        self._done = done
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance
        self._ask()

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, found, rest = self._data.partition(b"\r\n\r\n")
        if not found:
            return
        if b"chunked" in head.lower():
            if not rest.endswith(b"0\r\n\r\n"):
                return
        elif len(rest) < _content_length(head):
            return
        self._data = b""
        self._load.seconds.append(time.perf_counter() - self._sent_s)
        self._load.num_failed += not head.startswith(b"HTTP/1.1 200")
        self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._load.num_failed += 1
            self._done.set_result(None)

    def _ask(self) -> None:
        if self._load.num_left <= 0:
            if not self._done.done():
                self._done.set_result(None)
            self._transport.close()
            return
        self._load.num_left -= 1
        self._sent_s = time.perf_counter()
        self._transport.write(self._request)


class Load:
    """What came of some requests: `seconds` of each, in the order in which they ended."""

    def __init__(self, number: int = 0) -> None:
        self.num_left = number
        self.num_failed = 0
        self.seconds: list[float] = []
        self.total_s = 0.0

    def add(self, other: Load) -> None:
        """Take in what came of others, which were asked before or after."""
        self.num_failed += other.num_failed
        self.seconds += other.seconds
        self.total_s += other.total_s

    @property
    def requests_per_s(self) -> float:
        return len(self.seconds) / self.total_s

    def quantile_ms(self, share: float) -> float:
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3


def ask(url: str, body: bytes, *, number: int, clients: int, headers: str = "") -> Load:
    """Ask `number` times over `clients` connections at once; `url` ends in /v1."""

    async def run() -> Load:
        load, loop = Load(number), asyncio.get_running_loop()
        host, _, port = url.removeprefix("http://").removesuffix("/v1").partition(":")
        request = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
            f"{headers}Content-Length: {len(body)}\r\n\r\n"
        ).encode() + body
        waiting: list[asyncio.Future[None]] = []
        started_s = time.perf_counter()
        for _ in range(clients):
            done: asyncio.Future[None] = loop.create_future()
            waiting.append(done)
            await loop.create_connection(lambda done=done: _Client(request, load, done), host, int(port))
        async with asyncio.timeout(600):
            await asyncio.gather(*waiting)
        load.total_s = time.perf_counter() - started_s
        return load

    return uvloop.run(run())
