"""What relaying a chunk and judging a round cost this process, in CPU time of our own.

    python benchmarks/overhead.py [--tokens 600] [--repeats 5] [--profile race|probe|plain]

In this process the target and the draft are simulated, by virtual clock. What the simulation itself takes is measured
alone, with as many streams at once, and taken off; a round is given with it, as an upper bound. Over sockets the
server is a process of its own (`relay.py`'s, and for races a `ScriptedModelServer`). A chunk is a piece of text read
from the target, of any stream; a race also reads pieces of the draft, and each counts as one. Opening a stream or
encoding a text over HTTP costs what an HTTP request costs, far more than a chunk: it is shown, without a limit. Of
several runs the fastest counts: whatever else a machine does only ever adds. Exits with 1 where a limit is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import multiprocessing
import pstats
import sys
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.queues import Queue
from typing import Any, TypeAlias

import relay
from llm_spec_http import DIALECTS, HttpProvider
from never_slower import make_answer

from llm_spec import ChatRequest, LlmProvider, SpeculativeConfig, SpeculativeDecoder, TextDelta
from llm_spec.decoder.config import StrategyName
from llm_spec.testing.clock import run_virtual
from llm_spec.testing.server import MODEL, ScriptedModelServer, ServerLatency
from llm_spec.testing.simulated import SimulatedDraft, SimulatedTarget

LIMIT_CHUNK_US = 20.0
LIMIT_ROUND_US = 2000.0
STREAMS = 12
REQUEST = ChatRequest.create("Tell me.", temperature=0.0)
FAR: dict[str, Any] = {"first_token_s": 0.45, "token_s": 1 / 60}
NEAR: dict[str, Any] = {"first_token_s": 1 / 40, "token_s": 1 / 40, "round_trip_s": 0.02}

# A run: how many things (chunks, rounds) were handled, and how many pieces a draft wrote for them
Run: TypeAlias = Callable[[], tuple[int, int]]


def measure_cpu_us(run: Run, repeats: int) -> tuple[float, int, int]:
    """Microseconds of CPU of the fastest run, and what it handled."""
    best, handled = float("inf"), (0, 0)
    for _ in range(repeats):
        gc.collect()
        started = time.process_time()
        handled_now = run()
        spent = (time.process_time() - started) * 1e6
        if spent < best:
            best, handled = spent, handled_now
    return best, *handled


# ------------------------------------------------------------------------------------- in this process


async def read_answer(provider: LlmProvider) -> int:
    """Read one answer; the number of its chunks."""
    async with provider.stream(REQUEST) as events:
        return sum([isinstance(event, TextDelta) async for event in events])


async def read_answers_together(provider: LlmProvider, num_streams: int) -> int:
    return sum(await asyncio.gather(*(read_answer(provider) for _ in range(num_streams))))


def run_simulated_target(answer: str, num_streams: int) -> tuple[int, int]:
    """The simulated target without this library."""
    return run_virtual(read_answers_together(SimulatedTarget(answer, **FAR), num_streams)), 0


def run_simulated_draft(answer: str) -> tuple[int, int]:
    """The simulated draft without this library."""

    async def read_draft() -> int:
        async with SimulatedDraft(answer, 1.0, 1).draft(REQUEST, 1 << 20) as pieces:
            return sum([bool(piece.text) async for piece in pieces])

    return run_virtual(read_draft()), 0


def run_decoder(answer: str, strategy: StrategyName, agreement: float, *, by_ids: bool) -> tuple[int, int]:
    """One answer; how many chunks were read, or rounds judged, and pieces drafted."""
    near = strategy == "probe"
    target = SimulatedTarget(answer, **(NEAR if near else FAR), by_ids=by_ids)
    draft_s = 1 / 320 if near else 0.0
    draft = SimulatedDraft(answer, agreement, 1, first_token_s=draft_s, token_s=draft_s)
    config = SpeculativeConfig(strategy=strategy, max_concurrent_streams=4 if near else STREAMS)
    result = run_virtual(SpeculativeDecoder(draft, target, config).decode(REQUEST))
    assert result.content == answer
    num_drafted = 0 if result.draft_usage is None else result.draft_usage.output_tokens
    return result.stats.num_rounds if near else target.num_generated_tokens, num_drafted


def measure_in_process(num_tokens: int, repeats: int) -> list[tuple[str, float, float]]:
    """Chunks of plain and of races, beside what the simulation takes; (what, us, limit)."""
    answer = make_answer(num_tokens, 1)
    alone, together, drafting = (
        spent / number
        for spent, number, _ in (
            measure_cpu_us(partial(run_simulated_target, answer, 1), repeats),
            measure_cpu_us(partial(run_simulated_target, answer, STREAMS), repeats),
            measure_cpu_us(partial(run_simulated_draft, answer), repeats),
        )
    )
    print(
        f"in this process, {num_tokens} tokens, us of CPU for a chunk; taken off for the simulation: {alone:.1f} for a"
    )
    print(f"chunk of one stream, {together:.1f} of {STREAMS} at once, {drafting:.1f} for a drafted piece\n")
    print(
        f"  {'':<20}{'chunks':>7}{'drafted':>9}{'with all':>10}{'our own, for a chunk':>22}{'for a chunk or piece':>22}"
    )
    told: list[tuple[str, float, float]] = []
    races: list[tuple[StrategyName, float, bool]] = [
        ("race", agreement, by_ids) for agreement in (0.0, 0.5, 0.9, 0.98, 1.0) for by_ids in (True, False)
    ]
    cases: list[tuple[StrategyName, float, bool]] = [("plain", 0.0, False), *races]
    for strategy, agreement, by_ids in cases:
        spent, number, drafted = measure_cpu_us(
            partial(run_decoder, answer, strategy, agreement, by_ids=by_ids), repeats
        )
        what = strategy if strategy == "plain" else f"race at {agreement:g} by {'ids' if by_ids else 'text'}"
        ours = spent - drafting * drafted - number * (alone if strategy == "plain" else together)
        each, each_piece = ours / number, ours / (number + drafted)
        print(f"  {what:<20}{number:>7}{drafted:>9}{spent / number:>10.1f}{each:>22.1f}{each_piece:>22.1f}")
        told.append((what, each_piece, LIMIT_CHUNK_US))
    return told


def measure_rounds(num_tokens: int, repeats: int) -> list[tuple[str, float, float]]:
    answer = make_answer(num_tokens, 1)
    print(f"\nus of CPU for a round of probe, 4 at a time, {num_tokens} tokens, simulation and all")
    told: list[tuple[str, float, float]] = []
    for agreement in (0.5, 0.8, 0.9, 1.0):
        spent, number, _ = measure_cpu_us(partial(run_decoder, answer, "probe", agreement, by_ids=True), repeats)
        print(f"  probe at {agreement:<11g}{spent / number:>17.1f} ({number} rounds)")
        told.append((f"a round at {agreement:g}", spent / number, LIMIT_ROUND_US))
    return told


# ------------------------------------------------------------------------------------------ over sockets


@contextmanager
def start_relay(num_chunks: int) -> Generator[str]:
    ports: Queue[int] = multiprocessing.Queue()
    server = multiprocessing.Process(target=relay.serve, args=(num_chunks, ports), daemon=True)
    server.start()
    try:
        yield f"http://127.0.0.1:{ports.get(timeout=30)}/v1"
    finally:
        server.terminate()
        server.join()


def serve_model(answer: str, pipe: Connection) -> None:
    """A model server, until the other end of the pipe says a word."""

    async def run() -> None:
        latency = ServerLatency(first_token_s=0.1, token_s=0.004)
        async with ScriptedModelServer(answer, latency=latency, continues_prefix="fields") as server:
            pipe.send(server.url)
            await asyncio.to_thread(pipe.recv)

    asyncio.run(run())


@contextmanager
def start_model_server(answer: str) -> Generator[str]:
    here, there = multiprocessing.Pipe()
    server = multiprocessing.Process(target=serve_model, args=(answer, there), daemon=True)
    server.start()
    try:
        yield here.recv()
    finally:
        here.send("end")
        server.join(10)


async def measure_by_turns(
    first: Callable[[], Awaitable[int]], second: Callable[[], Awaitable[int]], repeats: int
) -> list[float]:
    """Microseconds of CPU a chunk, of each in its fastest run."""
    best = [float("inf"), float("inf")]
    for _ in range(repeats):
        for at, run in enumerate((first, second)):
            started = time.process_time()
            number = await run()
            best[at] = min(best[at], (time.process_time() - started) / number * 1e6)
    return best


async def measure_over_relay(url: str, repeats: int) -> list[tuple[str, float, float]]:
    provider = HttpProvider("any", base_url=url)
    try:
        decoder = SpeculativeDecoder(None, provider)
        alone, whole = await measure_by_turns(partial(read_answer, provider), partial(read_answer, decoder), repeats)
    finally:
        await provider.aclose()
    print("\nover sockets, us of CPU for a chunk")
    print(f"  plain, fifty chunks a block: provider {alone:.1f}, with the decoder around it {whole:.1f}")
    return [("plain over HTTP, provider and decoder", whole, LIMIT_CHUNK_US)]


async def measure_over_model_server(url: str, answer: str, repeats: int) -> None:
    """Twelve streams of the provider alone against a race; each chunk is a read of its own."""
    provider = HttpProvider(MODEL, base_url=url, dialect=DIALECTS["vllm"])
    try:
        config = SpeculativeConfig(strategy="race", max_concurrent_streams=STREAMS)
        decoder = SpeculativeDecoder(SimulatedDraft(answer, 0.98, 1), provider, config)

        async def read_race() -> int:
            result = await decoder.decode(REQUEST)
            assert result.content == answer
            return 0 if result.usage is None else result.usage.output_tokens

        await decoder.discover()
        await read_race()
        alone, whole = await measure_by_turns(partial(read_answers_together, provider, STREAMS), read_race, repeats)
    finally:
        await provider.aclose()
    print(f"  a chunk a read: twelve streams of the provider {alone:.1f}, race at 0.98 {whole:.1f}, requests and all")


def measure_over_sockets(repeats: int) -> list[tuple[str, float, float]]:
    with start_relay(20_000) as url:
        told = asyncio.run(measure_over_relay(url, repeats))
    answer = make_answer(600, 1)
    with start_model_server(answer) as url:
        asyncio.run(measure_over_model_server(url, answer, repeats))
    return told


# ------------------------------------------------------------------------------------------------ main


def print_profile(strategy: StrategyName, num_tokens: int) -> None:
    """Where the time goes; a profile makes calls look dearer than they are."""
    answer = make_answer(num_tokens, 1)
    profiler = cProfile.Profile(time.process_time)
    profiler.enable()
    run_decoder(answer, strategy, 0.9 if strategy == "probe" else 0.98, by_ids=True)
    profiler.disable()
    pstats.Stats(profiler).strip_dirs().sort_stats("tottime").print_stats(28)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", choices=("plain", "race", "probe"), help="show where the time goes instead")
    arguments = parser.parse_args()
    if arguments.profile is not None:
        print_profile(arguments.profile, arguments.tokens)
        return
    told = measure_in_process(arguments.tokens, arguments.repeats)
    told += measure_rounds(600, arguments.repeats)
    told += measure_over_sockets(arguments.repeats)
    missed = [f"{what}: {us:.1f} us, more than {limit:g}" for what, us, limit in told if us > limit]
    print(f"\nlimits: {LIMIT_CHUNK_US:g} us a chunk, {LIMIT_ROUND_US:g} us a round: " + ("; ".join(missed) or "kept"))
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
