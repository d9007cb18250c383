"""Random and mutated requests over all paths of a server with two workers, while another client reads a stream.

    python benchmarks/server_fuzz.py                      # 50,000 requests
    python benchmarks/server_fuzz.py --requests 300 --seed 7

It ends with status 1 where a request was answered with 500 or not at all, a worker died, or one had more than 300 MB;
with `--stall-ms` also where a stream through the server paused for so much longer than its source did at the same time.
What the machine itself adds is in both: the same stream is read through the server and from its source, by one process,
before the requests begin and meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import multiprocessing
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

import aiohttp
from aiohttp import web

Json: TypeAlias = dict[str, Any]

POSTED: Final = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
READ: Final = ("/v1/models", "/v1/models/fast", "/metrics", "/health/live", "/health/ready", "/", "/nowhere")
MAX_MB: Final = 300
TOKEN_S: Final = 0.01
HANGS_S: Final = 120.0
SLOW_S: Final = 0.03  # a request that takes less holds nobody up
CONFIG: Final = """
[server]
workers = 2
default_model = "fast"
[models.fast]
target = "rules:any"
max_total_tokens = 16
[models.remote]
target = "generic:short@{url}/v1"
draft = "lookup"
max_total_tokens = 16
[models.local]
target = "builtin:target"
draft = "lookup"
max_total_tokens = 4
[models.paced]
target = "generic:paced@{url}/v1"
"""

# ------------------------------------------------------------------------------------------ what is sent

TEXTS: Final = (
    "",
    "x",
    "a b c " * 20,
    "\x00",
    "\u2028",
    "é" * 50,
    "😀",
    "<|endoftext|>",
    "/etc/passwd",
    "a" * 3000,
    "-1",
)
NUMBERS: Final = (0, 1, -1, 2, 7, 1.5, -0.0, 1e300, -1e300, 10**30, 2**63, 2**31, 128, 129, 1e-320)
_FIELDS: Final = """
    model messages prompt input system stream max_tokens max_completion_tokens max_output_tokens temperature top_p top_k
    min_p n stop stop_sequences seed logprobs top_logprobs tools tool_choice response_format stream_options logit_bias
    presence_penalty frequency_penalty user metadata prediction echo best_of suffix text reasoning thinking store
    previous_response_id instructions parallel_tool_calls role content type name id tool_calls tool_call_id function
    arguments json_schema schema strict image_url input_text output_text cache_control citations
"""
FIELDS: Final = _FIELDS.split()


def make_seed_bodies() -> list[tuple[str, Json]]:
    """A body that is answered for each path, with much that it may hold."""
    tool: Json = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Good"}, {"type": "text", "text": " morning"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "42"},
    ]
    plain = [{"role": "user", "content": "Good morning"}]
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}, "strict": True}}
    chat, completions, responses, anthropic = POSTED
    return [
        (
            chat,
            {"messages": messages, "tools": [tool], "tool_choice": "auto", "stream_options": {"include_usage": True}},
        ),
        (
            chat,
            {"messages": plain, "temperature": 0.5, "top_p": 0.9, "seed": 1, "logit_bias": {"5": 1.0}, "stop": ["."]},
        ),
        (chat, {"messages": plain, "response_format": schema, "max_tokens": 3}),
        (chat, {"messages": plain, "n": 2, "logprobs": True, "top_logprobs": 2}),
        (chat, {"messages": plain, "prediction": {"type": "content", "content": "Good evening"}, "user": "me"}),
        (completions, {"prompt": ["a", "b"], "max_tokens": 2, "echo": True}),
        (completions, {"prompt": "a", "logprobs": 1, "suffix": "", "best_of": 1}),
        (responses, {"input": plain, "instructions": "Be brief.", "max_output_tokens": 5, "tools": [tool["function"]]}),
        (responses, {"input": "Good morning", "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}}),
        (anthropic, {"messages": plain, "system": [{"type": "text", "text": "Be brief."}], "max_tokens": 5}),
        (anthropic, {"messages": plain, "max_tokens": 5, "stop_sequences": ["."], "metadata": {"user_id": "me"}}),
    ]


SEEDS: Final = make_seed_bodies()


def make_chained_schema(length: int) -> Json:
    """A format whose compiler recurses."""
    rules = "".join(f"a{i}:a{i + 1}\n" for i in range(length))
    return {"type": "grammar", "grammar": f'start:a0\n{rules}a{length}:"z"'}


class RequestGenerator:
    """Requests by one seed: always the same."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - not for secrets

    def request(self) -> tuple[str, str, dict[str, str], bytes]:
        """Method, path, headers and body."""
        r = self._random
        path, body = r.choice(SEEDS)
        headers = {"Content-Type": r.choice(("application/json", "application/json", "text/plain", "x"))}
        if r.random() < 0.1:
            headers["x-llm-spec-strategy"] = r.choice(("auto", "plain", "race", "judge", "tokens", "", "x"))
        if r.random() < 0.1:
            headers["x-llm-spec-trace"] = "1"
        if r.random() < 0.04:
            return r.choice(("GET", "PUT", "OPTIONS", "DELETE", "HEAD")), r.choice((*READ, *POSTED)), headers, b""
        path = r.choice((path, path, path, path, *POSTED))
        return "POST", path.removeprefix("/v1") if r.random() < 0.1 else path, headers, self._encode_body(body)

    def _encode_body(self, body: Json) -> bytes:
        r = self._random
        body = json.loads(json.dumps(body))
        body["model"] = r.choices(("fast", "remote", "local", "nobody"), (66, 25, 4, 5))[0]
        body["stream"] = r.random() < 0.5
        kind = r.random()
        if kind < 0.002:
            return self._make_huge(body)
        if kind < 0.01:
            body["response_format"] = r.choice(
                (make_chained_schema(800), make_chained_schema(4000), {"type": "regex", "pattern": "a?" * 2000})
            )
        for _ in range(r.choice((0, 1, 1, 1, 2, 3, 8))):
            self._mutate(body)
        data = json.dumps(body, ensure_ascii=r.random() < 0.5).encode(errors="surrogatepass")
        return self._break_bytes(data) if r.random() < 0.15 else data

    def _mutate(self, body: Json) -> None:
        """Change one place, however deep."""
        r = self._random
        node: Any = body
        while True:
            if isinstance(node, dict):
                fields = cast("Json", node)
                name = r.choice([*fields, r.choice(FIELDS)])
                inner = fields.get(name)
                if not isinstance(inner, dict | list) or r.random() < 0.4:
                    if r.random() < 0.15:
                        fields.pop(name, None)
                    else:
                        fields[name] = self._make_value(3)
                    return
                node = cast("Any", inner)
            elif isinstance(node, list) and node:
                items = cast("list[Any]", node)
                index = r.randrange(len(items))
                if not isinstance(items[index], dict | list) or r.random() < 0.3:
                    items[index] = self._make_value(3)
                    return
                if r.random() < 0.1:
                    items += items * r.choice((1, 50))
                    return
                node = items[index]
            else:
                return

    def _make_value(self, depth: int) -> Any:
        r = self._random
        kind = r.randrange(9 if depth else 6)
        if kind < 5:
            return r.choice((r.choice(TEXTS), r.choice(NUMBERS), r.choice((None, True, False))))
        if kind == 5:
            return "\ud800" if r.random() < 0.1 else r.choice(FIELDS)
        if kind == 6:
            return [self._make_value(depth - 1) for _ in range(r.choice((0, 1, 2, 30)))]
        if kind == 7 and r.random() < 0.1:
            return json.loads("[" * 300 + "]" * 300)
        return {r.choice(FIELDS): self._make_value(depth - 1) for _ in range(r.choice((0, 1, 3)))}

    def _make_huge(self, body: Json) -> bytes:
        """Megabytes: of text, messages, numbers, lists, digits."""
        r = self._random
        number = r.choice((10_000, 100_000, 400_000))
        user: Json = {"role": "user", "content": ""}
        makers: list[Callable[[], bytes]] = [
            lambda: json.dumps({**body, "messages": [{**user, "content": "word " * number}]}).encode(),
            lambda: json.dumps({**body, "messages": [{**user, "content": "\n" * 10 * number}]}).encode(),
            lambda: json.dumps({**body, "messages": [user] * (number // 4)}).encode(),
            lambda: json.dumps({**body, "prompt": [1] * number, "input": [1] * number}).encode(),
            lambda: b'{"messages":' + b"[[]," * number + b"]" * number + b"}",
            lambda: b'{"seed":0.' + b"1" * 20 * number + b"}",
            lambda: json.dumps({**body, "x": {str(i): i for i in range(number)}}).encode(),
        ]
        return r.choice(makers)()

    def _break_bytes(self, data: bytes) -> bytes:
        r = self._random
        if r.random() < 0.3:
            return r.randbytes(r.choice((0, 1, 40, 3000)))
        changed = bytearray(data)
        for _ in range(r.choice((1, 3))):
            position = r.randrange(len(changed))
            if r.random() < 0.5:
                changed[position] = r.randrange(256)
            else:
                del changed[position : position + r.choice((1, 20))]
        return bytes(changed) if r.random() < 0.7 else bytes(changed[: len(changed) // 2])


# ------------------------------------------------------------------------------------------ the upstream


def upstream(port: Connection) -> None:
    """A process that answers as servers do; the model `paced` writes a word every 10 ms, for ever."""

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        kind = "delta" if "messages" in body else "text"
        if not body.get("stream"):
            said = {"message": {"role": "assistant", "content": "w w w"}, "text": "w w w"}
            choice = {"index": 0, "finish_reason": "stop", **said}
            return web.json_response({"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 3}})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        number = 5
        while number:
            choice = {"index": 0, "finish_reason": None, kind: {"content": "w "} if kind == "delta" else "w "}
            await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
            if body["model"] == "paced":
                await asyncio.sleep(TOKEN_S)
            else:
                number -= 1
        last: Json = {"index": 0, "finish_reason": "stop", kind: {} if kind == "delta" else ""}
        await response.write(b"data: " + json.dumps({"choices": [last]}).encode() + b"\n\ndata: [DONE]\n\n")
        return response

    async def main() -> None:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_post("/v1/{rest:.*}", answer)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(main())


# ------------------------------------------------------------------------------------------ the other client


@dataclass
class StreamGaps:
    """The pauses of a stream, in seconds, beyond those of its source."""

    worst_s: float = 0.0
    worst_from_s: float = 0.0  # when the worst began, by a clock that all processes share
    num_over: int = 0  # longer than 100 ms
    num: int = 0

    def add(self, from_s: float, gap_s: float) -> None:
        """One more pause."""
        self.num += 1
        if gap_s - TOKEN_S > self.worst_s:
            self.worst_s, self.worst_from_s = gap_s - TOKEN_S, from_s
        self.num_over += gap_s - TOKEN_S > 0.1

    def __str__(self) -> str:
        return f"{self.worst_s * 1e3:.0f} ms at worst, {self.num_over} of {self.num} over 100 ms"


async def read_stream(session: aiohttp.ClientSession, url: str, gaps: dict[str, StreamGaps], name: str) -> None:
    """Read a stream that has no end, and add its pauses to `gaps[name]`."""
    body = {"model": "paced", "stream": True, "messages": [{"role": "user", "content": "x"}]}
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        last_s: float | None = None
        while await response.content.readany():
            now_s = time.perf_counter()
            if last_s is not None:
                gaps[name].add(last_s, now_s - last_s)
            last_s = now_s
    raise RuntimeError("a stream ended that has no end")


def read_streams(server: str, source: str, queue: Connection) -> None:
    """A process that reads four streams through the server, and one from its source; each word gets their pauses."""
    gaps = {"server": StreamGaps(), "source": StreamGaps()}

    async def answer() -> None:
        while True:
            await asyncio.sleep(0.1)
            if queue.poll():
                word = queue.recv()
                queue.send(dict(gaps))
                gaps.update(server=StreamGaps(), source=StreamGaps())
                if word == "stop":
                    return

    async def main() -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
            streams = [read_stream(session, server, gaps, "server") for _ in range(4)]
            streams.append(read_stream(session, source, gaps, "source"))
            tasks = [asyncio.create_task(answer()), *map(asyncio.create_task, streams)]
            ended, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            for task in ended:
                task.result()

    asyncio.run(main())


# ------------------------------------------------------------------------------------------ the server


@dataclass
class FuzzOutcome:
    """What became of the requests."""

    statuses: collections.Counter[int] = field(default_factory=collections.Counter[int])
    slow: list[tuple[float, float, str]] = field(
        default_factory=list[tuple[float, float, str]]
    )  # from, to, what it was
    wrong: list[str] = field(default_factory=list[str])

    def fail(self, what: str) -> None:
        """Something that must not be."""
        if len(self.wrong) < 20:
            self.wrong.append(what)

    def add_time(self, from_s: float, what: str) -> None:
        """A request took from then to now; those that may have held up others are kept."""
        if (to_s := time.perf_counter()) - from_s > SLOW_S:
            self.slow.append((from_s, to_s, what))

    def list_slow_during(self, from_s: float, to_s: float) -> list[str]:
        """Those that were under way then."""
        return [
            f"{(began_s - from_s) * 1e3:.0f} to {(ended_s - from_s) * 1e3:.0f} ms: {what}"
            for began_s, ended_s, what in self.slow
            if began_s < to_s and ended_s > from_s
        ]


def list_children(pid: int) -> list[int]:
    """The workers of a server."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found if b"llm-spec-worker" in Path(f"/proc/{child}/cmdline").read_bytes()]


def read_peak_memory_mb(pid: int) -> float:
    """The most memory that a process has had."""
    found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


async def send(
    session: aiohttp.ClientSession, url: str, bodies: RequestGenerator, seen: FuzzOutcome, leaving: random.Random
) -> None:
    """One request; what its answer must not be is told."""
    method, path, headers, data = bodies.request()
    what = f"{method} {path} {data[:300]!r}"
    from_s = time.perf_counter()
    try:
        async with session.request(method, url + path, data=data, headers=headers) as response:
            seen.statuses[response.status] += 1
            if leaving.random() < 0.05:
                return
            text = await response.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        seen.fail(f"{type(error).__name__}: {error} after {what}")
        return
    finally:
        seen.add_time(from_s, f"{len(data)} bytes, {what}")
    if response.status == 500 or b'"code":"internal"' in text.replace(b" ", b""):
        seen.fail(f"{response.status} {text[:300]!r} after {what}")
    if response.status >= 400 and method == "POST" and b'"error"' not in text:
        seen.fail(f"{response.status} without an error object: {text[:300]!r} after {what}")


async def fuzz(url: str, num_requests: int, num_clients: int, seed: int) -> FuzzOutcome:
    """Send them all, so many at a time."""
    bodies, seen, leaving = RequestGenerator(seed), FuzzOutcome(), random.Random(seed)  # noqa: S311 - as above
    left = iter(range(num_requests))
    timeout = aiohttp.ClientTimeout(total=HANGS_S)
    connector = aiohttp.TCPConnector(limit=0)
    began_s = time.monotonic()

    async def client(session: aiohttp.ClientSession) -> None:
        for number in left:
            await send(session, url, bodies, seen, leaving)
            if number and number % 5000 == 0:
                print(f"  {number} requests, {number / (time.monotonic() - began_s):.0f}/s", flush=True)

    async with aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=False) as session:
        await asyncio.gather(*(client(session) for _ in range(num_clients)))
    return seen


DOUBLES: Final = Path(__file__).parents[1] / "tests"  # where the name `rules` is registered


def start_server(config: Path, log: Path) -> tuple[subprocess.Popen[bytes], str]:
    """`llm-spec serve`, and its address."""
    command = [sys.executable, "-c", "import sys; from llm_spec.cli.main import main; sys.exit(main())"]
    command += ["serve", "--port", "0", "--config", str(config)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(DOUBLES), os.environ.get("PYTHONPATH", "")])}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)  # noqa: S603
    until_s = time.monotonic() + HANGS_S
    while time.monotonic() < until_s and process.poll() is None:
        found = re.search(r"serves at (\S+)", log.read_text())
        if found is not None and len(list_children(process.pid)) == 2:
            return process, found[1]
        time.sleep(0.1)
    raise SystemExit(f"the server did not start: {log.read_text()}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quiet-s", type=float, default=10.0, help="how long the streams are read before the requests")
    parser.add_argument("--stall-ms", type=float, help="the longest pause that is the server's own")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    source = context.Process(target=upstream, args=(theirs,), daemon=True)
    source.start()
    source_url = f"http://127.0.0.1:{ours.recv()}"
    with tempfile.TemporaryDirectory() as folder:
        config, log = Path(folder, "server.toml"), Path(folder, "log")
        config.write_text(CONFIG.format(url=source_url))
        server, url = start_server(config, log)
        try:
            return run(options, context, server, (url, source_url), log)
        finally:
            server.terminate()
            server.wait(HANGS_S)
            source.terminate()


def request_gaps(reader: Connection, word: str) -> dict[str, StreamGaps]:
    """The pauses since the last word."""
    reader.send(word)
    return reader.recv()


def run(
    options: argparse.Namespace, context: Any, server: subprocess.Popen[bytes], urls: tuple[str, str], log: Path
) -> int:
    """Send the requests beside the streams, and print what became of both."""
    url, source_url = urls
    asyncio.run(fuzz(url, 40, 4, options.seed + 1))  # models and libraries are loaded
    workers = list_children(server.pid)
    ours, theirs = context.Pipe()
    reader = context.Process(target=read_streams, args=(url, source_url, theirs), daemon=True)
    reader.start()
    time.sleep(2.0)  # the streams begin
    request_gaps(ours, "again")
    time.sleep(options.quiet_s)
    quiet = request_gaps(ours, "again")
    began_s = time.monotonic()
    seen = asyncio.run(fuzz(url, options.requests, options.clients, options.seed))
    took_s = time.monotonic() - began_s
    busy = request_gaps(ours, "stop")
    reader.join(HANGS_S)
    memory = [read_peak_memory_mb(pid) for pid in list_children(server.pid)]
    if list_children(server.pid) != workers:
        seen.fail(f"workers died: {workers} before, {list_children(server.pid)} after")
    if "Traceback" in log.read_text(errors="replace") or "a request failed" in log.read_text(errors="replace"):
        seen.fail(f"the log tells of errors: {[line for line in log.read_text().splitlines() if 'failed' in line][:3]}")
    if max(memory) > MAX_MB:
        seen.fail(f"a worker had {max(memory):.0f} MB")
    own_ms = (busy["server"].worst_s - busy["source"].worst_s) * 1e3
    if options.stall_ms is not None and own_ms > options.stall_ms:
        worst = busy["server"]
        seen.fail(
            f"a stream paused for {own_ms:.0f} ms longer than its source; from its pause's beginning, there were:"
        )
        seen.wrong += seen.list_slow_during(worst.worst_from_s, worst.worst_from_s + worst.worst_s)
    print(f"{options.requests} requests in {took_s:.0f} s, by status: {dict(sorted(seen.statuses.items()))}")
    print(f"memory of the workers: {', '.join(f'{mb:.0f} MB' for mb in memory)}")
    print(f"pauses before, through the server: {quiet['server']}; from the source: {quiet['source']}")
    print(f"pauses meanwhile, through the server: {busy['server']}; from the source: {busy['source']}")
    print(f"the longest pause is {abs(own_ms):.0f} ms {'longer' if own_ms >= 0 else 'shorter'} than the source's own")
    for what in seen.wrong:
        print(f"WRONG: {what}")
    return 1 if seen.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
