"""Clients that stop reading, break off, or send what is no body: each is answered or left, none is waited for."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, Final, cast

import pytest
from aiohttp import web
from support.serving import ENDPOINTS, HANGS_S, RULES, ask, raw, remote, serving, until

from llm_spec.server import KeyConfig, Server, ServerConfig
from llm_spec.server.connections import ReaderWatch
from llm_spec.testing import run_virtual
from llm_spec.testing.server import ScriptedModelServer, ServerLatency

pytestmark = pytest.mark.virtual_clock

CHAT: Final = "/v1/chat/completions"
KEY: Final = "sk-alice-0123"
WORDS: Final = " ".join(f"word{i}" for i in range(20))
HEAD: Final = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
CHUNKED: Final = f"{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode()


def request(method: str, path: str, body: Any = None, key: str = KEY) -> bytes:
    """A request's bytes; its connection is kept."""
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Api-Key: {key}\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


# ------------------------------------------------------------------------------------------ readers who read nothing

LONG: Final = "x" * 100_000
UNREAD: Final = {
    "pages": request("GET", "/", key="") * 60,
    "one page": request("GET", "/", key=""),
    "health": request("GET", "/health", key="") * 3000,
    "preflights": request("OPTIONS", CHAT, key="") * 5000,
    "refusals of a key": request("GET", "/v1/models", key="") * 4000,
    "refusals of a path": request("GET", "/v1/nothing") * 4000,
    "refusals of a method": request("DELETE", CHAT) * 4000,
    "refusals of a body": request("POST", CHAT, []) * 4000,
    "refusals by aiohttp": b"NONSENSE\r\n\r\n",
    "models": request("GET", "/v1/models") * 3000,
    "metrics": request("GET", "/metrics") * 200,
    "answers": request("POST", CHAT, ask(CHAT, LONG)) * 10,
    "messages": request("POST", "/v1/messages", ask("/v1/messages", LONG)) * 10,
    "responses": request("POST", "/v1/responses", ask("/v1/responses", LONG)) * 10,
    "completions": request("POST", "/v1/completions", ask("/v1/completions", LONG)) * 10,
    "a stream": request("POST", CHAT, ask(CHAT, LONG, stream=True)) * 10,
}


@pytest.mark.parametrize("name", UNREAD)
async def test_who_reads_nothing_is_left(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was asked, and whether all of it was written or not: the connection ends, within seconds."""
    has_ended = watch_for_an_end(monkeypatch)
    config = ServerConfig(
        models={"fast": RULES},
        keys={"alice": KeyConfig(key=KEY)},
        body_timeout_s=5.0,
        idle_s=7.0,
        keep_alive_s=1.0,
        shutdown_s=0.2,
    )
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)  # or the system would take megabytes
        async with Server(config, sock=listening) as server, asking_without_reading(server.url, UNREAD[name]):
            async with asyncio.timeout(HANGS_S):
                await has_ended.wait()


@asynccontextmanager
async def asking_without_reading(url: str, data: bytes) -> AsyncGenerator[None]:
    """A connection by which all of this is sent as far as the server takes it, and nothing is read."""
    host, port = url.removeprefix("http://").split(":")
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await loop.sock_connect(sock, (host, int(port)))
        sending = asyncio.create_task(loop.sock_sendall(sock, data))
        try:
            yield
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)


def watch_for_an_end(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Is set when a connection to a server has ended."""
    has_ended = asyncio.Event()
    original = web.RequestHandler.connection_lost

    def watched(connection: web.RequestHandler, error: BaseException | None) -> None:
        has_ended.set()
        original(connection, error)

    monkeypatch.setattr(web.RequestHandler, "connection_lost", watched)
    return has_ended


class Buffer:
    """A transport of which only what is unsent matters."""

    def __init__(self, num_unsent: int) -> None:
        self.num_unsent = num_unsent
        self.is_aborted = False

    def get_write_buffer_size(self) -> int:
        return self.num_unsent

    def abort(self) -> None:
        self.is_aborted = True


@pytest.mark.parametrize(
    ("num_taken", "is_left_after_s"),
    [
        ([], 10.0),
        ([16 * 1024 - 1], 10.0),
        ([16 * 1024], 20.0),
        ([30_000] * 3, 40.0),
        ([30_000, 1, 30_000], 20.0),
        ([100_000], None),
        ([50_000, 50_000], None),
    ],
)
def test_a_slow_reader_is_no_stopped_one(num_taken: list[int], is_left_after_s: float | None) -> None:
    """Who takes 16 KiB in each `timeout_s` may go on; `num_taken`: what is taken in each."""

    async def run() -> float | None:
        watch, buffer = ReaderWatch(10.0), Buffer(100_000)
        watch.watch(cast("Any", buffer))
        for seconds in range(1, 100):
            if seconds % 10 == 5:
                buffer.num_unsent -= num_taken[seconds // 10] if seconds // 10 < len(num_taken) else 0
            await asyncio.sleep(1.0)
            await asyncio.sleep(0.0)
            if buffer.is_aborted:
                return float(seconds)
        return None

    assert run_virtual(run()) == is_left_after_s


def test_a_reader_who_goes_on_is_not_watched_any_more() -> None:
    """A connection that was full a moment ago, and is again, had a reader meanwhile."""

    async def run() -> bool:
        watch, buffer = ReaderWatch(10.0), Buffer(70_000)
        for _ in range(10):
            watch.watch(cast("Any", buffer))
            await asyncio.sleep(6.0)
            watch.unwatch(cast("Any", buffer))
        watch.unwatch(cast("Any", buffer))  # harmless
        await asyncio.sleep(60.0)
        return buffer.is_aborted

    assert not run_virtual(run())


# ------------------------------------------------------------------------------------------ bodies that are none

BROKEN: Final = {
    "a size that is no number": b"zz\r\n{}\r\n0\r\n\r\n",
    "a size that is negative": b"-1\r\n{}\r\n0\r\n\r\n",
    "a chunk that goes on": b"2\r\n{}XX\r\n0\r\n\r\n",
    "a second size that is no number": b'2\r\n{"\r\nzz\r\n',
    "a last line that is none": b"2\r\n{}\r\n0\r\nX: a\x00\r\n\r\n",
}


@pytest.mark.parametrize("num_first", [0, 1, 4, 9])
@pytest.mark.parametrize("name", BROKEN)
async def test_a_body_with_broken_chunks_is_refused(
    name: str, num_first: int, caplog: pytest.LogCaptureFixture
) -> None:
    """At once, however much of it has come before, and the connection ends: `num_first` bytes come apart."""
    async with serving() as server:
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        loop = asyncio.get_running_loop()
        writer.write(CHUNKED + BROKEN[name][:num_first])
        await asyncio.sleep(0.01)
        began_s = loop.time()
        writer.write(BROKEN[name][num_first:])
        data = await reader.read()
        writer.close()
        assert loop.time() - began_s < 5.0
        assert (await server.chat()).status == 200
    assert data.partition(b" ")[2].startswith(b"400 ")
    assert data.count(b"HTTP/1.") == 1
    assert "Traceback" not in caplog.text
    assert "Unhandled" not in caplog.text


@pytest.mark.parametrize(
    ("data", "statuses"),
    [
        (b"Content-Length: 100\r\n\r\n{}", [408]),  # shorter than it says
        (b"Content-Length: 2\r\n\r\n{}xxxx\r\n\r\n", [400]),  # longer: what follows is no request
        (b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", [400]),
        (b"Content-Length: two\r\n\r\n{}", [400]),
        (b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}", [400]),
        (b"Transfer-Encoding: nonsense\r\n\r\n{}", [400]),
        (b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n{}", [408]),
        (b'Content-Length: 4\r\nConnection: close\r\n\r\n"\xff\xfe"', [400]),  # not UTF-8
        (b"Content-Length: 3\r\nConnection: close\r\n\r\n{}\x00", [400]),
        (b"Connection: close\r\n\r\n", [400]),
    ],
)
async def test_a_body_that_is_not_what_its_headers_say(
    data: bytes, statuses: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """Each gets an answer, in time, and no traceback is logged."""
    async with serving(body_timeout_s=2.0) as server:
        reply = await raw(server.url, HEAD.encode() + data)
        assert (await server.chat()).status == 200
    assert [int(part[2:5]) for part in reply.split(b"HTTP/1.")[1:]] == statuses
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_client_that_leaves_inside_its_body(
    path: str, is_chunked: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is answered, and nothing is logged but that."""
    has_ended = watch_for_an_end(monkeypatch)
    framing = "Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n" if is_chunked else "Content-Length: 100\r\n\r\n{}"
    async with serving() as server:
        host, port = server.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{framing}".encode())
        await asyncio.sleep(0.01)
        writer.close()
        async with asyncio.timeout(HANGS_S):
            await has_ended.wait()
        assert "llm_spec_open_requests 0.0" in (await server.get("/metrics")).data.decode()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


# ------------------------------------------------------------------------------------------ the server's end


@pytest.mark.parametrize("num_late", [0, 10, 300])
async def test_what_is_being_asked_is_answered_at_the_end(num_late: int) -> None:
    """New connections are refused at once, what is kept is closed; running streams, and bodies on their way, end well.

    `num_late`: bytes of a body that come after the end has begun.
    """
    latency = ServerLatency(token_s=0.05)
    async with ScriptedModelServer(WORDS, latency=latency) as upstream:
        models = {"fast": remote(upstream.url)}
        server = Server(ServerConfig(models=models, port=0, shutdown_s=30.0))
        await server.__aenter__()
        stream = asyncio.create_task(raw(server.url, closing_request(ask(CHAT, stream=True))))
        kept_reader, kept_writer = await open_kept_connection(server.url)
        await until(lambda: upstream.num_open_streams == 1)
        late = closing_request(ask(CHAT, "x" * 300, stream=True))
        late_reader, late_writer = await open_connection(server.url)
        late_writer.write(late[: len(late) - num_late])
        ending = asyncio.create_task(server.__aexit__())
        await asyncio.sleep(0.01)
        with pytest.raises(ConnectionRefusedError):
            await open_connection(server.url)
        late_writer.write(late[len(late) - num_late :])
        async with asyncio.timeout(HANGS_S):
            assert await kept_reader.read() == b""
            late_reply = await late_reader.read()
            reply = await stream
            await ending
        for writer in (kept_writer, late_writer):
            writer.close()
    assert reply.count(b"word") == late_reply.count(b"word") == 20
    assert b"data: [DONE]" in reply
    assert b"data: [DONE]" in late_reply


@pytest.mark.parametrize(("shutdown_s", "longest_s"), [(30.0, 4.0), (1.0, 2.0), (0.0, 1.0)])
async def test_a_body_that_does_not_come_holds_up_no_end(shutdown_s: float, longest_s: float) -> None:
    """It gets 408 within 3 seconds, or within `shutdown_s`."""
    server = Server(ServerConfig(models={"fast": remote("http://127.0.0.1:9/v1")}, port=0, shutdown_s=shutdown_s))
    await server.__aenter__()
    reader, writer = await open_connection(server.url)
    writer.write(f"{HEAD}Content-Length: 1000\r\n\r\n{{".encode())
    await asyncio.sleep(0.01)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await server.__aexit__()
    took_s = loop.time() - began_s
    reply = await reader.read()
    writer.close()
    assert reply.startswith(b"HTTP/1.1 408 ")
    assert took_s < longest_s


async def open_connection(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def open_kept_connection(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that has been answered, and could ask again."""
    reader, writer = await open_connection(url)
    writer.write(request("GET", "/health/live"))
    assert b" 200 " in await reader.readline()
    await reader.readuntil(b"\r\n\r\n")
    await reader.readexactly(len(b'{"status":"ok"}'))
    return reader, writer


def closing_request(body: Any) -> bytes:
    """A chat request's bytes, whose connection ends with the answer."""
    data = json.dumps(body).encode()
    return f"{HEAD}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
