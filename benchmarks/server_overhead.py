"""What the server adds to a request, beside the upstream alone and beside LiteLLM's proxy, all in one run.

    python benchmarks/server_overhead.py [--requests 3000] [--growth 100000] [--litellm PATH]

Upstream and clients are bare sockets in processes of their own (`server_peers.py`), everything on 127.0.0.1, without
speculation. `--litellm` is the program of an environment in which `litellm[proxy]` is installed; without it that part
is left out. Memory is what its processes and nobody else hold (USS), CPU is their user and system time. Limits that are
not kept are named in the last line, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

from server_peers import MODEL, Load, ask, make_body, relay, upstream

_NUM_SLICES = 10
_WITHOUT_KEYS = {"LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true"}  # as ours, on a loopback address
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


ServerAddress = tuple[str, str]  # an address, and the name of a model there


class ServerProgram:
    """A server: a process, and the workers that it started. Figures are their sums."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url

    @property
    def memory_mb(self) -> float:
        texts = self._read("smaps_rollup")
        lines = [line for text in texts for line in text.splitlines()]
        return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty"))) / 1024

    @property
    def resident_mb(self) -> float:
        return sum(int(text.split("VmRSS:")[1].split()[0]) for text in self._read("status")) / 1024

    @property
    def cpu_s(self) -> float:
        fields = [text.rpartition(")")[2].split() for text in self._read("stat")]
        return sum(int(values[11]) + int(values[12]) for values in fields) / CLOCK_TICKS

    def _read(self, name: str) -> list[str]:
        """A file of /proc of each process; workers are children, and have none themselves."""
        pid = self.process.pid
        children = (path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
        pids = [str(pid), *(child for text in children for child in text.split())]
        return [Path("/proc", each, name).read_text() for each in pids]


@contextlib.contextmanager
def running(command: Sequence[str], url: str | None = None) -> Generator[ServerProgram]:
    """A program that serves; without a url it prints its own."""
    out = subprocess.PIPE if url is None else subprocess.DEVNULL
    process = subprocess.Popen(  # noqa: S603 - our own
        command, stdout=out, stderr=subprocess.DEVNULL, text=True, env={**os.environ, **_WITHOUT_KEYS}
    )
    try:
        if process.stdout is not None:
            at = process.stdout.readline().split()[-1] + "/v1"
        else:
            at = url or ""
            wait_for(at.removesuffix("/v1") + "/health/liveliness", process)
        yield ServerProgram(process, at)
    finally:
        process.terminate()
        process.wait(30)


def wait_for(url: str, process: subprocess.Popen[str]) -> None:
    for _ in range(240):
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=1):  # noqa: S310 - our own
            return
        if process.poll() is not None:
            break
        time.sleep(0.5)
    raise SystemExit(f"{url} did not come up")


def llm_spec_command(folder: Path, upstream_url: str) -> list[str]:
    config = folder / "llm-spec.toml"
    config.write_text(f'[models.fast]\ntarget = "vllm:{MODEL}@{upstream_url}"\n')
    return [str(Path(sys.executable).with_name("llm-spec")), "serve", "--config", str(config), "--port", "0"]


def litellm_command(program: str, folder: Path, upstream_url: str, port: int) -> list[str]:
    config = folder / "litellm.yaml"
    config.write_text(
        "model_list:\n  - model_name: fast\n    litellm_params:\n"
        f"      model: openai/{MODEL}\n      api_base: {upstream_url}\n      api_key: none\n"
        "litellm_settings:\n  telemetry: false\n"
    )
    return [program, "--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]


def print_load(name: str, load: Load) -> None:
    failed = f", {load.num_failed} FAILED" if load.num_failed else ""
    print(
        f"  {name:<34}{load.quantile_ms(0.5):>9.3f}{load.quantile_ms(0.9):>9.3f}{load.quantile_ms(0.99):>9.3f}"
        f"{load.requests_per_s:>11.0f}{failed}"
    )


def free_port() -> int:
    import socket

    with contextlib.closing(socket.socket()) as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def measure_in_turns(
    places: Mapping[str, ServerAddress], number: int, *, clients: int = 1, stream: bool = False
) -> list[Load]:
    """The same load on each place, in slices by turns: what the machine does meanwhile meets all of them alike."""
    loads = [Load() for _ in places]
    for _ in range(_NUM_SLICES):
        for load, (url, model) in zip(loads, places.values(), strict=True):
            body = make_body(model, **({"stream": True} if stream else {}))
            ask(url, body, number=20 * clients, clients=clients)  # warm
            load.add(ask(url, body, number=number // _NUM_SLICES, clients=clients))
    for name, load in zip(places, loads, strict=True):
        print_load(
            f"{name}, {'one client' if clients == 1 else f'{clients} clients'}{', streamed' if stream else ''}", load
        )
    return loads


def measure_chunk_us(program: ServerProgram, num_chunks: int) -> float:
    """Microseconds of the server's CPU for each chunk that it passes on."""
    body = make_body("fast", stream=True, max_tokens=num_chunks)
    ask(program.url, body, number=1, clients=1)
    before = program.cpu_s
    ask(program.url, body, number=5, clients=1)
    return (program.cpu_s - before) / (5 * num_chunks) * 1e6


def growth(program: ServerProgram, number: int) -> tuple[float, float]:
    """Memory after a tenth of the requests, and after all of them."""
    ask(program.url, make_body("fast"), number=number // 10, clients=64)
    first = program.memory_mb
    ask(program.url, make_body("fast"), number=number - number // 10, clients=64)
    return first, program.memory_mb


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument(
        "--growth", type=int, default=100_000, help="requests for the growth of memory; 0: not measured"
    )
    parser.add_argument("--litellm", metavar="PROGRAM")
    arguments = parser.parse_args()
    limits: list[tuple[str, bool]] = []
    with tempfile.TemporaryDirectory() as name, upstream() as upstream_url:
        folder = Path(name)
        print(f"  {'milliseconds a request':<34}{'median':>9}{'p90':>9}{'p99':>9}{'a second':>11}")
        with relay(upstream_url) as bare, running(llm_spec_command(folder, upstream_url)) as ours:
            time.sleep(1.0)  # its first process becomes a smaller one as soon as it serves
            rest = ours.resident_mb
            number = arguments.requests
            places = {
                "upstream alone": (upstream_url, MODEL),
                "bare relay": (bare, MODEL),
                "llm-spec serve": (ours.url, "fast"),
            }
            direct, relayed, one = measure_in_turns(places, number)
            del places["bare relay"]
            direct_stream, stream = measure_in_turns(places, number, stream=True)
            _, many = measure_in_turns(places, 2 * number, clients=64)
            added, added_stream, added_relay = (
                load.quantile_ms(0.5) - alone.quantile_ms(0.5)
                for load, alone in ((one, direct), (stream, direct_stream), (relayed, direct))
            )
            added_p99 = one.quantile_ms(0.99) - direct.quantile_ms(0.99)
            us = measure_chunk_us(ours, 20_000)
            print(
                f"\n  added, one client: median {added:.3f} ms (streamed {added_stream:.3f}), p99 {added_p99:.3f} ms; ",
                end="",
            )
            print(f"a relay that does nothing else: {added_relay:.3f} ms")
            print(f"  64 clients: {many.requests_per_s:.0f} requests/s; CPU for a relayed chunk: {us:.1f} us; ", end="")
            print(f"at rest {rest:.0f} MB resident")
            limits += [
                ("0.6 ms at the median", added <= 0.6),
                ("5 ms at p99", added_p99 <= 5.0),
                ("1,000 requests/s", many.requests_per_s >= 1000),
                ("20 us a chunk", us <= 20.0),
                ("100 MB at rest", rest <= 100.0),
                ("no failures", not (one.num_failed or stream.num_failed or many.num_failed)),
            ]
            if arguments.growth:
                first, last = growth(ours, arguments.growth)
                print(f"  memory: {first:.1f} MB after {arguments.growth // 10} requests, {last:.1f} MB after all")
                limits.append(("no growth", last - first < 2.0))
        if arguments.litellm:
            port = free_port()
            command = litellm_command(arguments.litellm, folder, upstream_url, port)
            with running(command, f"http://127.0.0.1:{port}/v1") as theirs:
                number = max(100, arguments.requests // 10)
                place = {"LiteLLM's proxy": (theirs.url, "fast")}
                (their_one,) = measure_in_turns(place, number)
                (their_many,) = measure_in_turns(place, 2 * number, clients=64)
                their_added = their_one.quantile_ms(0.5) - direct.quantile_ms(0.5)
                ratio = many.requests_per_s / their_many.requests_per_s
                print(
                    f"\n  beside LiteLLM: {ratio:.1f}x its requests/s, {added / their_added:.3f} of its added latency"
                )
                limits += [
                    ("7x LiteLLM's requests/s", ratio >= 7.0),
                    ("a tenth of its latency", added <= their_added / 10),
                ]
    missed = [what for what, kept in limits if not kept]
    print("\nlimits: " + (f"NOT kept: {'; '.join(missed)}" if missed else "all kept"))
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
