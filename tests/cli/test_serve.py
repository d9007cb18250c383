"""`llm-spec serve` as a process: it says where it is, ends when it is told to, and loses no answer on the way."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import aiohttp
import pytest
from aiohttp import web
from support.serving import HANGS_S, RULES, Asking, Reply, ask, remote, serving, until

from llm_spec.server import Server, ServerConfig
from llm_spec.testing.server import ScriptedModelServer, ServerLatency

CHAT: Final = "/v1/chat/completions"
LLM_SPEC: Final = str(Path(sys.executable).parent / "llm-spec")
TEXT: Final = " ".join(f"word{i}" for i in range(20))


class Process:
    """A running server."""

    def __init__(self, process: asyncio.subprocess.Process, asking: Asking) -> None:
        self.process = process
        self.asking = asking

    async def end(self, number: int = signal.SIGTERM) -> int:
        """Tell it to end; its status."""
        self.process.send_signal(number)
        async with asyncio.timeout(HANGS_S):
            return await self.process.wait()

    @property
    def children(self) -> list[str]:
        """The ids of the processes that it has started."""
        pid = self.process.pid
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()

    @property
    def workers(self) -> list[int]:
        """The ids of its worker processes."""
        return [int(child) for child in self.children if b"llm-spec-worker" in command_of(child)]


def command_of(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has just ended
        return b""


@asynccontextmanager
async def served(
    *arguments: str, config: str = "", folder: Path | None = None, program: Path | None = None
) -> AsyncGenerator[Process]:
    """A process of its own on a free port, or this program; each request has a connection of its own."""
    command = [LLM_SPEC, "serve", "--port", "0", *arguments]
    if folder is not None:
        (folder / "server.toml").write_text(config)
        command += ["--config", str(folder / "server.toml")]
    if program is not None:
        command = [sys.executable, "-u", str(program)]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(HANGS_S):
            line = (await process.stdout.readline()).decode()
        found = re.search(r"http://[\d.]+:\d+", line)
        assert found is not None, line
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=HANGS_S)) as session:
            yield Process(process, Asking(found[0], session))
    finally:
        if process.returncode is None:
            process.kill()
        async with asyncio.timeout(HANGS_S):
            await process.wait()  # until nobody writes to its output any more: its workers have ended, too


def upstream_config(upstream: ScriptedModelServer, *, server: str = "", keys: str = "") -> str:
    return f"""
[server]
{server}
[models.fast]
target = "vllm:tiny@{upstream.url}"
{keys}
"""


async def begun(asking: Asking, number: int) -> Sequence[asyncio.Task[Reply]]:
    return [asyncio.create_task(asking.post(CHAT, ask(CHAT, stream=True))) for _ in range(number)]


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_signal_loses_no_answer(workers: int, tmp_path: Path) -> None:
    """SIGTERM in the middle of streams lets all of them end; then the process ends well."""
    async with (
        ScriptedModelServer(TEXT, latency=ServerLatency(token_s=0.04)) as upstream,
        served("--workers", str(workers), config=upstream_config(upstream), folder=tmp_path) as server,
    ):
        streams = await begun(server.asking, 6)
        await until(lambda: len(upstream.requests) == 6)
        await asyncio.sleep(0.1)
        status = await server.end()
        replies = await asyncio.gather(*streams)
    assert status == 0
    for reply in replies:
        assert reply.text == TEXT
        assert reply.data.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("number", "workers", "is_program"),
    [(signal.SIGTERM, 1, False), (signal.SIGTERM, 1, True), (signal.SIGTERM, 2, False), (signal.SIGINT, 2, True)],
)
async def test_new_connections_are_refused_while_streams_end(
    number: signal.Signals, workers: int, is_program: bool, tmp_path: Path
) -> None:
    """At once, and not taken for nobody to answer them: a client or a balancer goes elsewhere."""
    may_end = asyncio.Event()
    program = None
    async with upstream_that_waits(may_end) as url:
        if is_program:
            program = tmp_path / "program.py"
            program.write_text(PROGRAM.format(url=url, workers=workers))
        config = f'[models.fast]\ntarget = "vllm:tiny@{url}"\n'
        async with served("--workers", str(workers), config=config, folder=tmp_path, program=program) as server:
            async with server.asking.open(CHAT, ask(CHAT, stream=True)) as response:
                first = await response.content.readuntil(b"one")
                ending = asyncio.create_task(server.end(number))
                await until_refused(server.asking.url)
                may_end.set()
                rest = await response.read()
            assert await ending == 0
    assert b" two" in first + rest
    assert rest.endswith(b"data: [DONE]\n\n")


PROGRAM: Final = """
from llm_spec.server import ModelConfig, ServerConfig, serve

if __name__ == "__main__":
    models = {{"fast": ModelConfig(target="vllm:tiny@{url}")}}
    serve(ServerConfig(port=0, models=models, workers={workers}))
"""


@asynccontextmanager
async def upstream_that_waits(may_end: asyncio.Event) -> AsyncGenerator[str]:
    """The address of a server whose answers go on once they may."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for text, reason in (("one", None), (" two", "stop")):
            choice = {"index": 0, "delta": {"content": text}, "finish_reason": reason}
            await response.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
            await may_end.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        may_end.set()
        await runner.cleanup()


async def until_refused(url: str) -> None:
    """Wait until no process takes connections any more."""
    host, port = url.removeprefix("http://").split(":")
    async with asyncio.timeout(HANGS_S):
        with suppress(ConnectionRefusedError):
            while True:
                _, writer = await asyncio.open_connection(host, int(port))
                writer.close()
                await asyncio.sleep(0.005)


async def test_an_answer_that_does_not_end_is_cut(tmp_path: Path) -> None:
    """Running answers have `shutdown_s` seconds; then the process ends all the same, and the upstream's work."""
    async with ScriptedModelServer(TEXT, latency=ServerLatency(token_s=1000.0)) as upstream:
        config = upstream_config(upstream, server="shutdown_s = 0.2")
        async with served(config=config, folder=tmp_path) as server:
            streams = await begun(server.asking, 1)
            await until(lambda: upstream.num_open_streams > 0)
            assert await server.end(signal.SIGINT) == 0
            await asyncio.gather(*streams, return_exceptions=True)
        await until(lambda: upstream.num_open_streams == 0)


async def test_keys_count_over_all_workers(tmp_path: Path) -> None:
    """Budget and requests at once are the key's, whichever worker is asked; so are the metrics."""
    keys = """
[keys.poor]
key = "secret-of-poor"
max_tokens = 100
[keys.one]
key = "secret-of-one"
max_concurrent = 2
"""
    async with ScriptedModelServer("one two three four", latency=ServerLatency(token_s=0.0)) as upstream:
        config = upstream_config(upstream, keys=keys)
        async with served("--workers", "2", config=config, folder=tmp_path) as server:
            asking = server.asking
            used = [(await asking.post(CHAT, ask(CHAT), x_api_key="secret-of-poor")).status for _ in range(40)]
            num_answered = used.count(200)
            assert used == [200] * num_answered + [429] * (40 - num_answered)
            assert 1 <= num_answered < 30

            counted = 'llm_spec_requests_total{endpoint="chat.completions",model="fast"} 40.0'
            async with asyncio.timeout(HANGS_S):  # the other worker counts behind its answer
                while counted not in (await asking.get("/metrics", x_api_key="secret-of-one")).data.decode():
                    pass

            upstream.latency = ServerLatency(token_s=1000.0)
            body = ask(CHAT, stream=True)
            held: list[asyncio.Task[Reply]] = [
                asyncio.create_task(asking.post(CHAT, body, x_api_key="secret-of-one")) for _ in range(2)
            ]
            await until(lambda: upstream.num_open_streams == 2)
            for _ in range(10):
                assert (await asking.post(CHAT, body, x_api_key="secret-of-one")).status == 429
            for task in held:
                task.cancel()
            await asyncio.gather(*held, return_exceptions=True)


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_worker_that_died_is_started_again(workers: int, tmp_path: Path) -> None:
    """Also one that dies soon after its start, and again; requests are answered meanwhile if there is another."""
    config = '[models.fast]\ntarget = "rules:any"\n'
    async with served("--workers", str(workers), config=config, folder=tmp_path) as server:
        await until(lambda: len(server.workers) == workers)
        assert len(server.children) == workers  # no process beside them
        first, *others = server.workers
        for _ in range(2):
            subprocess.run(["kill", "-KILL", str(first)], check=True)  # noqa: ASYNC221 - takes no time
            async with asyncio.timeout(HANGS_S):
                while not (started := set(server.workers) - {first, *others}):
                    if others:
                        assert (await server.asking.chat()).status == 200
                    await asyncio.sleep(0.05)
            (first,) = started
        assert (await server.asking.chat()).status == 200
        assert set(others) <= set(server.workers)
        assert await server.end() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_that_comes_with_the_address_ends_it_well(number: signal.Signals, tmp_path: Path) -> None:
    """Just then another program takes the place of the first."""
    async with served(config='[models.fast]\ntarget = "rules:any"\n', folder=tmp_path) as server:
        assert await server.end(number) == 0


async def test_nothing_is_left_of_the_workers_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder that workers share lasts as long as the server."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    config = '[models.fast]\ntarget = "rules:any"\n'
    async with served("--workers", "2", config=config, folder=tmp_path) as server:
        assert len(list(folder.glob("llm_spec-metrics-*/*.db"))) > 0
        assert (await server.asking.get("/metrics")).status == 200
        assert await server.end() == 0
    assert list(folder.iterdir()) == []


async def test_a_program_that_serves_goes_on_when_it_ends(tmp_path: Path) -> None:
    """`serve` keeps the caller's program, unless it may replace it."""
    program = tmp_path / "program.py"
    program.write_text("""if True:
        from llm_spec.server import ModelConfig, ServerConfig, serve

        if __name__ == "__main__":
            try:
                serve(ServerConfig(port=0, models={"fast": ModelConfig(target="rules:any")}))
            finally:
                print("ended")
        """)
    process = await asyncio.create_subprocess_exec(sys.executable, "-u", str(program), stdout=subprocess.PIPE)
    assert process.stdout is not None
    async with asyncio.timeout(HANGS_S):
        assert b"llm-spec serves at http://" in await process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert await process.stdout.read() == b"ended\n"
        assert await process.wait() == 0


async def test_without_a_config_the_builtin_pair_answers() -> None:
    """`llm-spec serve` alone is a server of one model."""
    async with served() as server:
        listed = (await server.asking.get("/v1/models")).json["data"]
        reply = await server.asking.chat("def test_spawnl(self):", model="builtin", max_tokens=4)
        assert await server.end() == 0
    assert [model["id"] for model in listed] == ["builtin"]
    assert reply.headers["x-llm-spec-strategy"] == "tokens"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([LLM_SPEC, "serve", *arguments], capture_output=True, text=True, timeout=HANGS_S, check=False)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_port_that_is_taken_is_told(workers: str) -> None:
    """One line that names address and port, and a status that scripts can see."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        done = run("--port", str(port), "--workers", workers)
    assert done.returncode != 0
    assert str(port) in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_model_that_cannot_be_opened_is_told(workers: str, tmp_path: Path) -> None:
    """One line, although it is a worker that opens it."""
    (tmp_path / "server.toml").write_text('[models.fast]\ntarget = "onnx:/nowhere"\n')
    done = run("--config", str(tmp_path / "server.toml"), "--port", "0", "--workers", workers)
    assert done.returncode != 0
    assert done.stderr.startswith("llm-spec loads fast (onnx:/nowhere)\n")  # before that takes its time
    assert "models.fast: model folder /nowhere does not exist" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_open_address_without_keys_is_refused() -> None:
    """Nothing is bound that anybody could ask."""
    done = run("--host", "0.0.0.0", "--port", "0")  # noqa: S104 - what is refused
    assert done.returncode != 0
    assert "no keys" in done.stderr


async def test_a_server_lets_answers_end_when_it_is_left() -> None:
    """In a program of one's own, too: leaving the context waits for running streams."""
    async with (
        ScriptedModelServer(TEXT, latency=ServerLatency(token_s=0.01)) as upstream,
        aiohttp.ClientSession() as session,
    ):
        async with Server(ServerConfig(models={"fast": remote(upstream.url)}, port=0)) as server:
            (stream,) = await begun(Asking(server.url, session), 1)
            await until(lambda: len(upstream.requests) == 1)
        reply = await stream
    assert reply.text == TEXT


@pytest.mark.parametrize("shutdown_s", [0.0, 0.05])
async def test_a_server_that_is_left_does_not_wait_for_ever(shutdown_s: float) -> None:
    """Running answers have `shutdown_s` seconds, and none where that is 0."""
    async with (
        ScriptedModelServer(TEXT, latency=ServerLatency(token_s=1000.0)) as upstream,
        aiohttp.ClientSession() as session,
    ):
        config = ServerConfig(models={"fast": remote(upstream.url)}, port=0, shutdown_s=shutdown_s)
        server = await Server(config).__aenter__()
        (stream,) = await begun(Asking(server.url, session), 1)
        await until(lambda: upstream.num_open_streams == 1)
        async with asyncio.timeout(HANGS_S):
            await server.__aexit__()
        await until(lambda: upstream.num_open_streams == 0)
        await asyncio.gather(stream, return_exceptions=True)


async def test_a_server_that_is_left_is_gone() -> None:
    """Its port is free, and it holds nothing open."""
    async with serving(RULES) as server:
        host, port = server.url.removeprefix("http://").split(":")
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(host, int(port))
