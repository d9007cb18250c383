"""Is speculation ever slower than the target alone, and how much faster? `race`, `probe` and `auto` by a latency model.

    python benchmarks/never_slower.py [--quick] [--only race,headline,probe,auto] [--json FILE]
    python benchmarks/never_slower.py --sockets

A simulated target and draft that know one text, by virtual clock: times are exact, and the same on every machine. Plain
is measured in the same way. Speedups of several seeds are plain's whole time divided by the whole time taken. Exits
with 1 where a bound is missed, and says which. `--sockets`: a few cells in real time, against servers in a process of
their own, plain and speculation by turns; there a bound would judge the machine, so none is checked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Generator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from llm_spec import ChatRequest, LlmProvider, ProviderDraft, SpeculativeConfig, SpeculativeDecoder
from llm_spec.contract.draft import DraftProvider
from llm_spec.testing.clock import run_virtual
from llm_spec.testing.simulated import SimulatedDraft, SimulatedTarget

Name = Literal["plain", "race", "probe", "auto"]

AGREEMENTS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 1.0)
NUM_TOKENS = 600
STREAMS = 12
NO_DELAY = math.inf  # a draft so many times faster than the target
REQUEST = ChatRequest.create("Tell me.", temperature=0.0)

MOST_RACE = 1.02  # of plain's time, in every cell
LEAST_HEADLINE = {0.98: 1.6, 0.99: 2.2}
LEAST_PROBE = {0.8: 1.5, 0.9: 2.1}
LEAST_AUTO = 0.98  # of plain's speed
LEAST_OF_BEST = 0.95  # of the speed of the strategy that would have been best
LEAST_PAUSE = {0.0: 8, 0.5: 3}  # tokens of an answer from one draft to the next, where they are of no or little use


@dataclass(frozen=True, kw_only=True)
class ServerScenario:
    """A target's times, and a draft: `draft_speed` times faster than it, in every respect."""

    agreement: float
    first_token_s: float
    token_s: float
    round_trip_s: float = 0.0
    draft_speed: float = NO_DELAY
    by_ids: bool = True
    streams: int = STREAMS

    def best_possible_speedup(self) -> float:
        """The most that rounds one after another could gain: one new token a round, and the accepted before it."""

        def expected_gain(lookahead: int) -> float:
            tokens = sum(self.agreement**n for n in range(lookahead + 1))
            round_s = self.round_trip_s + self.first_token_s + lookahead * self.token_s / self.draft_speed
            return tokens * self.token_s / round_s

        return max(map(expected_gain, range(65)))

    def __str__(self) -> str:
        first_ms, rate = (self.first_token_s + self.round_trip_s) * 1e3, 1 / self.token_s
        draft = "at once" if self.draft_speed == NO_DELAY else f"{self.draft_speed:g}x"
        return f"first token {first_ms:3.0f} ms, {rate:3.0f} tokens/s, draft {draft}"


@dataclass(frozen=True, kw_only=True)
class BenchmarkJob:
    """Requests of one decoder, one after another."""

    scenario: ServerScenario
    strategy: Name
    seed: int
    num_requests: int = 1
    num_tokens: int = NUM_TOKENS


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What each request took, how many drafts were asked for, and which strategy was used."""

    seconds: list[float]
    drafts: list[int]
    strategies: list[str]


def make_answer(num_tokens: int, seed: int) -> str:
    """Random words, each one token."""
    rng = random.Random(seed)  # noqa: S311 - a reproducible text, no secret
    letters = "abcdefghijklmnopqrstuvwxyz"
    return " ".join("".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(num_tokens))


async def answer_requests(job: BenchmarkJob) -> Outcome:
    scenario, answer = job.scenario, make_answer(job.num_tokens, job.seed)
    target = SimulatedTarget(
        answer,
        first_token_s=scenario.first_token_s,
        token_s=scenario.token_s,
        round_trip_s=scenario.round_trip_s,
        by_ids=scenario.by_ids,
    )
    draft = SimulatedDraft(
        answer,
        scenario.agreement,
        job.seed,
        first_token_s=scenario.first_token_s / scenario.draft_speed,
        token_s=scenario.token_s / scenario.draft_speed,
    )
    config = SpeculativeConfig(
        strategy=job.strategy,
        max_concurrent_streams=scenario.streams,
        baseline_every=64 if job.strategy == "auto" else 0,  # the strategies themselves are timed
    )
    decoder = SpeculativeDecoder(target=target, draft=draft, config=config)
    outcome = Outcome(seconds=[], drafts=[], strategies=[])
    for _ in range(job.num_requests):
        num_drafts, started = draft.num_calls, asyncio.get_running_loop().time()
        result = await decoder.decode(REQUEST)
        assert result.content == answer, f"not the target's own text: {job}"
        outcome.seconds.append(asyncio.get_running_loop().time() - started)
        outcome.drafts.append(draft.num_calls - num_drafts)
        outcome.strategies.append(result.strategy)
    return outcome


def run_job(job: BenchmarkJob) -> Outcome:
    return run_virtual(answer_requests(job))


def run_jobs(jobs: Sequence[BenchmarkJob], pool: Executor) -> dict[BenchmarkJob, Outcome]:
    """All jobs, on all cores."""
    return dict(zip(jobs, pool.map(run_job, jobs, chunksize=4), strict=True))


def measure_plain_s(scenario: ServerScenario, num_tokens: int) -> float:
    """What plain takes, measured by the same clock; draft and seed do not change it."""
    time_answer = replace(scenario, agreement=0.0, draft_speed=NO_DELAY, by_ids=True, streams=1)
    key = (time_answer, num_tokens)
    if key not in _PLAIN:
        _PLAIN[key] = run_job(
            BenchmarkJob(scenario=time_answer, strategy="plain", seed=0, num_tokens=num_tokens)
        ).seconds[0]
    return _PLAIN[key]


_PLAIN: dict[tuple[ServerScenario, int], float] = {}


# ------------------------------------------------------------------------------------------ drawing


def draw_bar(value: float, scale: float, width: int = 30) -> str:
    """A bar of eighths of a character; `scale` fills it."""
    eighths = round(min(max(value / scale, 0.0), 1.0) * width * 8)
    return "█" * (eighths // 8) + (" ▏▎▍▌▋▊▉"[eighths % 8] if eighths % 8 else "")


def draw_shade(speedup: float) -> str:
    """A speedup as a column; ▽ is slower than plain."""
    return "▽" if speedup < 0.995 else " ▁▂▃▄▅▆▇█"[min(8, round(8 * math.log(max(speedup, 1.0)) / math.log(8)))]


class BoundChecks:
    """What must hold, and what does not."""

    def __init__(self) -> None:
        self.missed: list[str] = []

    def check(self, what: str, *, holds: bool) -> str:
        if not holds:
            self.missed.append(what)
        return f"{what}: {'holds' if holds else 'MISSED'}"


# --------------------------------------------------------------------------------------------- race


def measure_race_grid(pool: Executor, *, quick: bool, bounds: BoundChecks) -> dict[str, Any]:
    """Agreement by latency: the first request of a decoder, and a later one."""
    num_seeds, num_requests, num_tokens = (1, 2, 200) if quick else (2, 4, NUM_TOKENS)
    firsts = (0.02, 0.45) if quick else (0.02, 0.1, 0.45)
    rates = (15, 100) if quick else (15, 60, 100)
    latencies = list(product(firsts, rates, (4.0, NO_DELAY)))

    def scenario(agreement: float, latency: tuple[float, int, float], *, by_ids: bool) -> ServerScenario:
        first_s, rate, speed = latency
        return ServerScenario(
            agreement=agreement, first_token_s=first_s, token_s=1 / rate, draft_speed=speed, by_ids=by_ids
        )

    scenes = [scenario(a, each, by_ids=by_ids) for by_ids in (True, False) for each in latencies for a in AGREEMENTS]
    jobs = {
        (s, seed): BenchmarkJob(
            scenario=s, strategy="race", seed=seed, num_requests=num_requests, num_tokens=num_tokens
        )
        for s in scenes
        for seed in range(num_seeds)
    }
    outcomes = run_jobs(list(jobs.values()), pool)
    cells: list[dict[str, Any]] = []
    for s, at in product(scenes, (0, num_requests - 1)):
        took = [outcomes[jobs[s, seed]].seconds[at] for seed in range(num_seeds)]
        drafts = [outcomes[jobs[s, seed]].drafts[at] for seed in range(num_seeds)]
        alone_s = measure_plain_s(s, num_tokens)
        cells.append(
            {
                "scene": s,
                "request": at + 1,
                "speedup": alone_s * num_seeds / sum(took),
                "worst_run": max(took) / alone_s,
                "pause": num_tokens / max(drafts),
            }
        )
    print_grid(cells)
    return summarize_grid(cells, bounds)


def print_grid(cells: Sequence[dict[str, Any]]) -> None:
    requests = sorted({cell["request"] for cell in cells})
    for by_ids, request in product((True, False), requests):
        how = "by ids" if by_ids else "by text"
        print(f"\nrace {how}, request {request} of a decoder: times as fast as plain, by agreement")
        print(f"{'':<47}" + "".join(f"{agreement:>8g}" for agreement in AGREEMENTS))
        shown = [cell for cell in cells if cell["scene"].by_ids == by_ids and cell["request"] == request]
        for start in range(0, len(shown), len(AGREEMENTS)):
            row = shown[start : start + len(AGREEMENTS)]
            print(f"{row[0]['scene']!s:<47}" + "".join(f"{c['speedup']:>7.2f}{draw_shade(c['speedup'])}" for c in row))


def summarize_grid(cells: Sequence[dict[str, Any]], bounds: BoundChecks) -> dict[str, Any]:
    worst = max(cells, key=lambda cell: cell["worst_run"])
    pauses = {
        agreement: min(c["pause"] for c in cells if c["scene"].agreement == agreement) for agreement in LEAST_PAUSE
    }
    how = f"agreement {worst['scene'].agreement:g}, {worst['scene']}, {'ids' if worst['scene'].by_ids else 'text'}"
    print(f"\nworst single answer of {len(cells)} cells: {worst['worst_run']:.4f} of plain's time ({how})")
    print(bounds.check(f"race takes at most {MOST_RACE}x plain's time", holds=worst["worst_run"] <= MOST_RACE))
    for agreement, pause in pauses.items():
        least = LEAST_PAUSE[agreement]
        line = f"race at agreement {agreement:g} drafts every {pause:.1f} tokens, no sooner than every {least}"
        print(bounds.check(line, holds=pause >= least))
    return {"worst": worst["worst_run"], "worst_cell": how, "pauses": pauses}


def measure_headline(pool: Executor, *, quick: bool, bounds: BoundChecks) -> dict[str, Any]:
    """A first token worth 27 tokens and a draft that takes no time."""
    num_seeds, num_requests = (12, 1) if quick else (40, 4)
    agreements = (0.98, 0.99) if quick else (0.9, 0.95, 0.98, 0.99, 1.0)
    scenes = [
        ServerScenario(agreement=agreement, first_token_s=0.45, token_s=1 / 60, by_ids=by_ids)
        for agreement, by_ids in product(agreements, (True, False))
    ]
    jobs = {
        s: [
            BenchmarkJob(scenario=s, strategy="race", seed=seed, num_requests=num_requests) for seed in range(num_seeds)
        ]
        for s in scenes
    }
    outcomes = run_jobs([job for each in jobs.values() for job in each], pool)
    print(f"\nrace, {scenes[0]}: {num_seeds} seeds, times as fast as plain")
    rows: list[dict[str, Any]] = []
    for s, at in product(scenes, sorted({0, num_requests - 1})):
        took = [outcomes[job].seconds[at] for job in jobs[s]]
        alone_s = measure_plain_s(s, NUM_TOKENS)
        speedup, low, high = alone_s * num_seeds / sum(took), alone_s / max(took), alone_s / min(took)
        how = f"{s.agreement:g} {'by ids' if s.by_ids else 'by text'}, request {at + 1}"
        print(f"{how:<26}{speedup:>6.2f} {draw_bar(speedup, 8.0)}  ({low:.2f} to {high:.2f})")
        rows.append({"agreement": s.agreement, "by_ids": s.by_ids, "request": at + 1, "speedup": speedup})
    for agreement, least in LEAST_HEADLINE.items():
        reached = min(row["speedup"] for row in rows if row["agreement"] == agreement)
        print(bounds.check(f"race at agreement {agreement:g}: {reached:.2f} >= {least}", holds=reached >= least))
    return {"rows": rows}


# -------------------------------------------------------------------------------------------- probe


def measure_probe(pool: Executor, *, quick: bool, bounds: BoundChecks) -> dict[str, Any]:
    """A cached first token costs the round trip and one step."""
    num_seeds, num_requests = (3, 1) if quick else (8, 2)
    agreements = tuple(LEAST_PROBE) if quick else AGREEMENTS
    scenes = [
        ServerScenario(
            agreement=agreement,
            first_token_s=1 / 40,
            token_s=1 / 40,
            round_trip_s=0.02,
            draft_speed=8.0,
            streams=streams,
        )
        for agreement, streams in product(agreements, (1, 4))
    ]
    jobs = {
        s: [
            BenchmarkJob(scenario=s, strategy="probe", seed=seed, num_requests=num_requests)
            for seed in range(num_seeds)
        ]
        for s in scenes
    }
    outcomes = run_jobs([job for each in jobs.values() for job in each], pool)
    print(f"\nprobe, {scenes[0]}, round trip 20 ms: {num_seeds} seeds, times as fast as plain")
    rows: list[dict[str, Any]] = []
    for s, at in product(scenes, sorted({0, num_requests - 1})):
        took = [outcomes[job].seconds[at] for job in jobs[s]]
        speedup = measure_plain_s(s, NUM_TOKENS) * num_seeds / sum(took)
        how = f"{s.agreement:g}, {s.streams} at a time, request {at + 1}"
        print(
            f"{how:<30}{speedup:>6.2f} {draw_bar(speedup, 8.0)}  "
            f"(one after another, at best {s.best_possible_speedup():.2f})"
        )
        rows.append({"agreement": s.agreement, "streams": s.streams, "request": at + 1, "speedup": speedup})
    for agreement, least in LEAST_PROBE.items():
        for streams in (1, 4):
            reached = min(r["speedup"] for r in rows if (r["agreement"], r["streams"]) == (agreement, streams))
            what = f"probe at agreement {agreement:g}, {streams} at a time: {reached:.2f} >= {least}"
            if streams == 1:  # what is asked is what overlapping rounds reach
                print(what if reached >= least else f"{what} is not reached, and need not be")
            else:
                print(bounds.check(what, holds=reached >= least))
    return {"rows": rows}


# --------------------------------------------------------------------------------------------- auto

_NEAR: dict[str, Any] = {"first_token_s": 1 / 40, "token_s": 1 / 40, "round_trip_s": 0.02}
_FAR: dict[str, Any] = {"first_token_s": 0.45, "token_s": 1 / 60}
LATENCIES: dict[str, dict[str, Any]] = {
    "probe: a near server, one at a time": {**_NEAR, "draft_speed": 8.0, "streams": 1},
    "race: a far server, 12 at a time": {**_FAR, "draft_speed": NO_DELAY, "streams": 12},
    "both: a near server, 4 at a time": {**_NEAR, "draft_speed": 8.0, "streams": 4},
    "neither: a far server, one at a time": {**_FAR, "draft_speed": 4.0, "streams": 1},
}
WARM = 20  # requests before it must know


def measure_auto(pool: Executor, *, quick: bool, bounds: BoundChecks) -> dict[str, Any]:
    """60 requests of one decoder, the first 20 of which are for learning; the other strategies with the same seeds."""
    num_seeds, num_requests, num_tokens = (1, 30, 150) if quick else (2, 60, 200)
    agreements = (0.0, 0.9) if quick else (0.0, 0.5, 0.8, 0.9, 0.98, 1.0)
    names: tuple[Name, ...] = ("race", "probe", "auto")
    scenes = {
        (kind, agreement): ServerScenario(agreement=agreement, **latency)
        for (kind, latency), agreement in product(LATENCIES.items(), agreements)
    }
    jobs = {
        (key, name): [
            BenchmarkJob(scenario=s, strategy=name, seed=seed, num_requests=num_requests, num_tokens=num_tokens)
            for seed in range(num_seeds)
        ]
        for (key, s), name in product(scenes.items(), names)
    }
    outcomes = run_jobs([job for each in jobs.values() for job in each], pool)
    print(
        f"\nauto, requests {WARM + 1} to {num_requests}, {num_seeds} seeds, {num_tokens} tokens: times as fast as plain"
    )
    print(f"{'good for':<38}{'agreement':>9}{'race':>7}{'probe':>7}{'auto':>7}  of the best, settled on")
    rows: list[dict[str, Any]] = []
    for key, s in scenes.items():
        alone_s = measure_plain_s(s, num_tokens) * num_seeds * (num_requests - WARM)
        speedups: dict[str, float] = {
            name: alone_s / sum(sum(outcomes[job].seconds[WARM:]) for job in jobs[key, name]) for name in names
        }
        used = Counter(name for job in jobs[key, "auto"] for name in outcomes[job].strategies[WARM:])
        best = max(1.0, speedups["race"], speedups["probe"])
        of_best = speedups["auto"] / best
        print(
            f"{key[0]:<38}{key[1]:>9g}{speedups['race']:>7.2f}{speedups['probe']:>7.2f}{speedups['auto']:>7.2f}"
            f"{of_best:>9.1%} {draw_bar(of_best, 1.0, 10)} " + ", ".join(f"{n} {c}" for n, c in used.most_common())
        )
        rows.append({"kind": key[0], "agreement": key[1], **speedups, "of_best": of_best, "used": dict(used)})
    if not quick:
        slowest, furthest = min(rows, key=lambda r: r["auto"]), min(rows, key=lambda r: r["of_best"])
        for what, row, value, least in (
            ("of plain's speed", slowest, slowest["auto"], LEAST_AUTO),
            ("of the best strategy's speed", furthest, furthest["of_best"], LEAST_OF_BEST),
        ):
            line = f"auto has at least {least} {what} ({value:.3f}: {row['kind']}, {row['agreement']:g})"
            print(bounds.check(line, holds=value >= least))
    return {"rows": rows}


# ------------------------------------------------------------------------------------------ sockets


@dataclass(frozen=True, kw_only=True)
class SocketScenario:
    """What is measured in real time; `over_http`: the draft is a server too."""

    strategy: Name
    scenario: ServerScenario
    num_tokens: int
    over_http: bool = False


CELLS = (
    SocketScenario(
        strategy="race",
        scenario=ServerScenario(agreement=0.98, first_token_s=0.45, token_s=1 / 60),
        num_tokens=NUM_TOKENS,
    ),
    SocketScenario(
        strategy="race",
        scenario=ServerScenario(agreement=0.99, first_token_s=0.45, token_s=1 / 60),
        num_tokens=NUM_TOKENS,
    ),
    SocketScenario(
        strategy="race",
        scenario=ServerScenario(agreement=0.5, first_token_s=0.45, token_s=1 / 60),
        num_tokens=NUM_TOKENS,
    ),
    SocketScenario(
        strategy="probe",
        scenario=ServerScenario(
            agreement=0.9, first_token_s=1 / 40, token_s=1 / 40, round_trip_s=0.02, draft_speed=8.0, streams=4
        ),
        num_tokens=300,
        over_http=True,
    ),
)


def serve_cell(cell: SocketScenario, seed: int, pipe: Connection) -> None:
    """Target and draft, until the other end of the pipe says a word."""
    from llm_spec.testing.server import ScriptedModelServer, ServerLatency, make_disagreeing_draft

    scenario, answer = cell.scenario, make_answer(cell.num_tokens, seed)
    latency = ServerLatency(
        first_token_s=scenario.first_token_s, token_s=scenario.token_s, round_trip_s=scenario.round_trip_s
    )
    faster = ServerLatency(
        first_token_s=scenario.token_s / scenario.draft_speed, token_s=scenario.token_s / scenario.draft_speed
    )
    script = make_disagreeing_draft(answer, scenario.agreement, seed)

    async def serve_both() -> None:
        async with (
            ScriptedModelServer(answer, latency=latency, continues_prefix="fields") as target,
            ScriptedModelServer(script, latency=faster, continues_prefix="fields") as draft,
        ):
            pipe.send((target.url, draft.url))
            await asyncio.to_thread(pipe.recv)

    asyncio.run(serve_both())


@contextmanager
def start_servers(cell: SocketScenario, seed: int) -> Generator[tuple[str, str]]:
    here, there = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve_cell, args=(cell, seed, there), daemon=True)
    server.start()
    try:
        yield here.recv()
    finally:
        here.send("end")
        server.join(10)


async def time_answer(decoder: SpeculativeDecoder, answer: str) -> float:
    started = time.perf_counter()
    result = await decoder.decode(REQUEST)
    assert result.content == answer, "not the target's own text"
    return time.perf_counter() - started


async def time_by_turns(
    cell: SocketScenario, seed: int, urls: tuple[str, str], num_turns: int
) -> tuple[list[float], list[float]]:
    """Plain and speculation, once each, several times over; the first turn finds out what the server can do."""
    from llm_spec_http import DIALECTS, HttpProvider

    from llm_spec.testing.server import MODEL

    answer, scenario = make_answer(cell.num_tokens, seed), cell.scenario
    target = HttpProvider(MODEL, base_url=urls[0], dialect=DIALECTS["vllm"])
    remote = HttpProvider(MODEL, base_url=urls[1], dialect=DIALECTS["vllm"])
    draft: DraftProvider = ProviderDraft(remote) if cell.over_http else SimulatedDraft(answer, scenario.agreement, seed)
    config = SpeculativeConfig(strategy=cell.strategy, max_concurrent_streams=scenario.streams, baseline_every=0)
    try:
        plain, speculative = make_decoder(target), SpeculativeDecoder(target=target, draft=draft, config=config)
        alone: list[float] = []
        together: list[float] = []
        for _ in range(num_turns):
            alone.append(await time_answer(plain, answer))
            together.append(await time_answer(speculative, answer))
        return alone, together
    finally:
        await target.aclose()
        await remote.aclose()


def make_decoder(target: LlmProvider) -> SpeculativeDecoder:
    return SpeculativeDecoder(target=target, draft=None, config=SpeculativeConfig(strategy="plain"))


def measure_over_sockets(num_seeds: int) -> dict[str, Any]:
    print("in real time, over sockets: times as fast as plain, by turn (the first asks the server what it can do)")
    rows: list[dict[str, Any]] = []
    for cell in CELLS:
        machine, ours, started = read_machine_busy_s(), time.process_time(), time.perf_counter()
        turns: list[tuple[list[float], list[float]]] = []
        for seed in range(num_seeds):
            with start_servers(cell, seed) as urls:
                turns.append(asyncio.run(time_by_turns(cell, seed, urls, 2)))
        wall = time.perf_counter() - started
        ratios = [sum(alone[at] for alone, _ in turns) / sum(together[at] for _, together in turns) for at in range(2)]
        busy = (read_machine_busy_s() - machine) / (wall * (os.cpu_count() or 1))
        print(
            f"{cell.strategy} at {cell.scenario.agreement:g}, {cell.scenario}: {ratios[0]:.2f}, {ratios[1]:.2f} "
            f"{draw_bar(ratios[1], 8.0)} (CPU: this process {(time.process_time() - ours) / wall:.0%} of a core, "
            f"the machine {busy:.0%} busy; {wall:.0f} s)"
        )
        rows.append({"strategy": cell.strategy, "agreement": cell.scenario.agreement, "speedups": ratios, "busy": busy})
    return {"rows": rows}


def read_machine_busy_s() -> float:
    """Seconds that all cores together have worked since the machine started; 0 where that is not told."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    fields = [int(field) for field in stat.read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


# --------------------------------------------------------------------------------------------- main

PARTS = {"race": measure_race_grid, "headline": measure_headline, "probe": measure_probe, "auto": measure_auto}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer cells, seeds and tokens")
    parser.add_argument("--only", help=f"which parts, with commas between: {','.join(PARTS)} (--quick: not auto)")
    parser.add_argument("--sockets", action="store_true", help="a few cells in real time instead")
    parser.add_argument("--seeds", type=int, default=3, help="with --sockets")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    arguments = parser.parse_args()
    bounds = BoundChecks()
    report: dict[str, Any] = {}
    if arguments.sockets:
        report["sockets"] = measure_over_sockets(arguments.seeds)
    else:
        with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
            for name in (arguments.only or ("race,headline,probe" if arguments.quick else ",".join(PARTS))).split(","):
                started = time.perf_counter()
                report[name] = PARTS[name](pool, quick=arguments.quick, bounds=bounds)
                print(f"({name}: {time.perf_counter() - started:.0f} s)", flush=True)
    report["missed"] = bounds.missed
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2), encoding="utf-8")
    for missed in bounds.missed:
        print(f"MISSED: {missed}")
    sys.exit(1 if bounds.missed else 0)


if __name__ == "__main__":
    main()
