"""Many streams at once through `llm-spec serve`, with clients that leave, upstreams that fail, and readers that dawdle.

    python benchmarks/server_soak.py [--streams 500] [--seconds 60]

`llm-spec bench` has no faults and no slow readers. Every piece of an answer says which it is and when the upstream
wrote it, so that a piece that is lost, doubled or in another's answer is seen, and how long each was on its way.
Everything is on 127.0.0.1. At the end nothing may be open behind the server, its memory must not have grown with the
number of requests, and a SIGTERM in the middle of streams must let them end. Exit code 1 where that is not so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.queues import Queue
from pathlib import Path

import aiohttp
import uvloop
from aiohttp import web
from server_overhead import ServerProgram, llm_spec_command, running

TOKEN_S = 0.08
BIG = 3000  # pieces of an answer for a reader that dawdles: more than sockets hold


# ---------------------------------------------------------------------------------------------- upstream


class Upstream:
    """Answers number `n` with pieces `n:0 n:1 …`; what goes wrong with it is told by its number."""

    def __init__(self) -> None:
        self.num_open = 0
        self._asked: Counter[int] = Counter()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        reading = json.loads(body["messages"][0]["content"])
        number, pieces, fault = reading["number"], reading["pieces"], reading["fault"]
        self._asked[number] += 1
        if fault == "refused" and self._asked[number] == 1:
            return web.json_response({"error": {"message": "overloaded"}}, status=503, headers={"Retry-After": "0.05"})
        self.num_open += 1
        try:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for index in range(pieces):
                if pieces < BIG:
                    await asyncio.sleep(random.uniform(0, 2 * TOKEN_S))  # noqa: S311 - no secret
                if fault == "broken" and index == pieces // 2 and request.transport is not None:
                    request.transport.abort()
                    return response
                if fault == "garbled" and index == pieces // 2:
                    await response.write(b'data: {"choices": [{"del\n\n')
                await response.write(_frame({"content": f"{number}:{index}@{time.monotonic():.6f} "}, None))
            await response.write(_frame({}, "stop") + b"data: [DONE]\n\n")
            return response
        finally:
            self.num_open -= 1

    async def count(self, _: web.Request) -> web.Response:
        return web.json_response({"open": self.num_open})


def _frame(delta: dict[str, str], finish: str | None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: " + json.dumps({"object": "chat.completion.chunk", "choices": [choice]}).encode() + b"\n\n"


def _serve(ports: Queue[int]) -> None:
    async def run() -> None:
        app, upstream = web.Application(), Upstream()
        app.router.add_post("/v1/chat/completions", upstream.answer)
        app.router.add_get("/open", upstream.count)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
        ports.put(runner.addresses[0][1])
        await asyncio.sleep(3600)  # whoever began it ends it

    uvloop.run(run())


@contextmanager
def serving() -> Generator[str]:
    """The upstream in a process of its own; its root address."""
    context = multiprocessing.get_context("spawn")
    ports: Queue[int] = context.Queue()
    process = context.Process(target=_serve, args=(ports,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ports.get(timeout=30)}"
    finally:
        process.terminate()
        process.join()


# ---------------------------------------------------------------------------------------------- clients


@dataclass(frozen=True)
class _StreamReading:
    """One stream, and how it is read."""

    number: int
    pieces: int
    fault: str
    leaves_at: int | None
    started_s: float
    is_slow: bool


class Soak:
    """What came of all the streams."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url
        self.ended: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.late_s: list[float] = []
        self.first_s: list[float] = []

    async def read_one(self, number: int, rng: random.Random, pieces: int | None = None) -> None:
        """One request of some kind, and a look at its text."""
        way = rng.choices(("reads", "leaves", "dawdles", "at once"), (75, 12, 3, 10))[0] if pieces is None else "reads"
        fault = rng.choices(("none", "refused", "broken", "garbled"), (88, 5, 5, 2))[0] if pieces is None else "none"
        if way == "dawdles":
            pieces, fault = BIG, "none"
        pieces = pieces or rng.randint(5, 60)
        reading = json.dumps({"number": number, "pieces": pieces, "fault": fault})
        body = {"model": "fast", "stream": way != "at once", "messages": [{"role": "user", "content": reading}]}
        leaves_at = rng.randint(1, pieces) if way == "leaves" else None
        started_s = time.monotonic()
        try:
            async with self._session.post(self._url, json=body) as response:
                if response.status != 200:
                    line = await response.json()
                    self.ended[f"{fault}: status {response.status} ({line['error']['code']})"] += 1
                    return
                if way == "at once":
                    text = (await response.json())["choices"][0]["message"]["content"]
                    self._check_text(number, text.split(), pieces, whole=True)
                    self.ended["whole, at once"] += 1
                    return
                read = _StreamReading(number, pieces, fault, leaves_at, started_s, is_slow=way == "dawdles")
                await self._read(response, read)
        except aiohttp.ClientError as error:
            self.wrong.append(f"{number} ({way}, {fault}): {type(error).__name__}: {error}")

    async def _read(self, response: aiohttp.ClientResponse, reading: _StreamReading) -> None:
        seen: list[str] = []
        ending = "no end"
        async for data in _events(response, is_slow=reading.is_slow):
            if data == "[DONE]":
                ending = "done" if ending == "stop" else ending
                break
            chunk = json.loads(data)
            if "error" in chunk:
                ending = "error"
                continue
            for choice in chunk["choices"]:
                content = choice["delta"].get("content")
                if content:
                    self._record_times(content, reading, is_first=not seen)
                    seen += content.split()
                ending = choice["finish_reason"] or ending
            if reading.leaves_at is not None and len(seen) >= reading.leaves_at:
                response.close()
                self._check_text(reading.number, seen, reading.pieces, whole=False)
                self.ended["left"] += 1
                return
        expected = "error" if reading.fault in ("broken", "garbled") else "done"
        self._check_text(reading.number, seen, reading.pieces, whole=ending == "done")
        self.ended[f"{'dawdled, ' if reading.is_slow else ''}{reading.fault}: {ending}"] += 1
        if ending != expected:
            self.wrong.append(f"{reading.number} ({reading.fault}) ended with {ending!r}, not {expected!r}")

    def _record_times(self, content: str, reading: _StreamReading, *, is_first: bool) -> None:
        now_s = time.monotonic()
        if is_first:
            self.first_s.append(now_s - reading.started_s)
        if not reading.is_slow:
            self.late_s.append(now_s - float(content.partition("@")[2]))

    def _check_text(self, number: int, seen: list[str], pieces: int, *, whole: bool) -> None:
        line = [word.partition("@")[0] for word in seen]
        expected = [f"{number}:{index}" for index in range(pieces)]
        if line != (expected if whole else expected[: len(line)]):
            self.wrong.append(f"{number} got another text: {line[:5]} … {len(line)} of {pieces} pieces")


async def _events(response: aiohttp.ClientResponse, *, is_slow: bool) -> AsyncGenerator[str]:
    rest = b""
    async for block in response.content.iter_any():
        *whole, rest = (rest + block).split(b"\n\n")
        for event in whole:
            if event.startswith(b"data: "):
                yield event[6:].decode()
        if is_slow:
            await asyncio.sleep(0.1)


# ---------------------------------------------------------------------------------------------- the run


async def run_soak(program: ServerProgram, root: str, num_streams: int, seconds: float) -> list[str]:
    """Keep so many streams open for so long; what was wrong."""
    connector = aiohttp.TCPConnector(limit=0, socket_factory=_open_small_socket)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=60)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        soak = Soak(session, program.url + "/chat/completions")
        until_s = time.monotonic() + seconds
        numbers = iter(range(1 << 40))
        memory: list[float] = []

        async def streams(seed: int) -> None:
            rng = random.Random(seed)  # noqa: S311 - repeatable
            while time.monotonic() < until_s:
                await soak.read_one(next(numbers), rng)

        async def watch() -> None:
            while True:
                memory.append(program.resident_mb)
                await asyncio.sleep(seconds / 12)

        watching = asyncio.create_task(watch())
        await asyncio.gather(*(streams(seed) for seed in range(num_streams)))
        watching.cancel()
        num_open = await _wait_until_settled(session, root)
        async with session.get(program.url.removesuffix("/v1") + "/metrics") as response:
            metrics = await response.text()
    print(f"{next(numbers)} requests over {num_streams} streams in {seconds:g} s")
    for what, number in sorted(soak.ended.items()):
        print(f"  {number:>7}  {what}")
    print(f"  from the upstream's write to the client's read: {_format_quantiles(soak.late_s)}")
    print(f"  first text: {_format_quantiles(soak.first_s)}")
    print(f"  memory, MB resident: {', '.join(f'{m:.0f}' for m in memory)}")
    wrong = list(soak.wrong)
    third = len(memory) // 3
    if max(memory[2 * third :]) > 1.15 * max(memory[third : 2 * third]):
        wrong.append(f"memory grew: {memory}")
    if num_open:
        wrong.append(f"{num_open} streams are open behind the server")
    if "llm_spec_open_requests 0.0" not in metrics:
        wrong.append("the server counts open requests, and there are none")
    return wrong


def _open_small_socket(address: tuple[object, ...]) -> socket.socket:
    """A socket that holds little, so that a reader that dawdles is felt."""
    sock = socket.socket(socket.AddressFamily(address[0]), socket.SOCK_STREAM)  # type: ignore[arg-type]
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    return sock


async def _wait_until_settled(session: aiohttp.ClientSession, root: str) -> int:
    """Streams open at the upstream, once they had some time to end."""
    num_open = -1
    for _ in range(50):
        async with session.get(f"{root}/open") as response:
            num_open = (await response.json())["open"]
        if not num_open:
            break
        await asyncio.sleep(0.1)
    return num_open


def _format_quantiles(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    at = {name: ordered[min(len(ordered) - 1, int(q * len(ordered)))] for name, q in (("p50", 0.5), ("p99", 0.99))}
    return ", ".join(f"{name} {value * 1e3:.1f} ms" for name, value in at.items())


async def end_amid_streams(program: ServerProgram, num_streams: int) -> list[str]:
    """SIGTERM while streams run: they end whole, nobody new is let in, and the process ends."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        soak = Soak(session, program.url + "/chat/completions")
        rng = random.Random(1)  # noqa: S311 - repeatable
        tasks = [asyncio.create_task(soak.read_one(number, rng, 40)) for number in range(num_streams)]
        await asyncio.sleep(1.5)
        program.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.3)
        refused = False
        with suppress(aiohttp.ClientConnectorError):
            async with aiohttp.ClientSession() as other, other.get(program.url + "/models"):
                pass
            refused = True
        await asyncio.gather(*tasks)
        code = await asyncio.to_thread(program.process.wait, 30)
    print(f"SIGTERM amid {num_streams} streams: {dict(soak.ended)}, exit code {code}")
    wrong = list(soak.wrong)
    if soak.ended["none: done"] != num_streams:
        wrong.append("a stream did not end whole")
    if refused:
        wrong.append("a new connection was let in after SIGTERM")
    if code != 0:
        wrong.append(f"exit code {code}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, serving() as root:
        command = llm_spec_command(Path(folder), f"{root}/v1")
        with running(command) as program:
            wrong = uvloop.run(run_soak(program, root, arguments.streams, arguments.seconds))
            wrong += uvloop.run(end_amid_streams(program, arguments.streams // 2))
    print("\n" + ("all texts whole, nothing left open" if not wrong else "WRONG:\n  " + "\n  ".join(wrong[:20])))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
