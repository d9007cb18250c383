"""How near are the rows of `probe` to the best schedule that knows all costs? By virtual clock: the same everywhere.

    python benchmarks/best_schedule.py [--cells 60] [--json FILE]

Cells are drawn evenly from a grid of a server's and a draft's costs. In each, three ways to write the same greedy
answers of 200 tokens, in tokens a second:

plain: the target's own stream.
ours: `SpeculativeDecoder` with `probe`, as it is in the package, after twelve answers of the same pair, in which it
learns the costs; `early` are these twelve together, by plain's time / the time taken. Of the answers that are judged
those count that it does not give to measuring the target alone.
best: the best of some hundred schedules that know all costs and how often the draft is right, but not where. It is
chosen on answers with other seeds than those by which all are judged, and restarts the draft as soon as it is known to
be wrong. `limit` is what no schedule can exceed, since it has a place for everything and rows are free to it.

A call takes the round trip, a step, and the cost of a row for each of its rows but the first and for each that is under
way when it is sent, a stream's included. A stream's first token takes the round trip and a step, each other a step.
Whatever is given up frees its place at once. The ids of the prompt are known.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import math
import random
import statistics
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Final, NamedTuple

from llm_spec import ChatRequest, SpeculativeConfig, SpeculativeDecoder
from llm_spec.contract.draft import DraftPiece
from llm_spec.measure.tokens import split_into_pieces
from llm_spec.testing.clock import run_virtual
from llm_spec.testing.simulated import SimulatedTarget

NUM_TOKENS: Final = 200
TUNING_SEEDS: Final = range(8)
LEARNING_SEEDS: Final = range(100, 112)
JUDGED_SEEDS: Final = range(200, 212)
NEAR: Final = 0.9  # of the best schedule
START_S: Final = 0.005  # of a draft, before its first token is begun
WORDS: Final = [f"word{i}" for i in range(NUM_TOKENS)]
GRID: Final[dict[str, tuple[float, ...]]] = {
    "trip_ms": (5, 20, 50, 100, 150),
    "step_ms": (10, 25, 60),
    "row_ms": (0, 2, 5, 15),
    "draft_ms": (3, 5, 10),
    "places": (1, 4, 8),
    "agreement": (0, 0.5, 0.8, 0.9, 0.97),
}


@dataclass(frozen=True)
class Costs:
    """Milliseconds, calls and streams that may be open at once, and how often a drafted token is the target's own."""

    trip_ms: float
    step_ms: float
    row_ms: float
    draft_ms: float
    places: int
    agreement: float

    def call_s(self, num_other_rows: int = 0) -> float:
        return (self.trip_ms + self.step_ms + num_other_rows * self.row_ms) / 1000

    def ready_s(self, num_drafted: int) -> float:
        """When a draft that was started at 0 has written so many tokens."""
        return START_S + num_drafted * self.draft_ms / 1000 if num_drafted > 0 else 0.0

    def count_drafted(self, now_s: float) -> int:
        return max(0, int((now_s - START_S) * 1000 / self.draft_ms + 1e-6))


def draw_misses(agreement: float, seed: int) -> list[int]:
    """The positions of an answer at which the draft is wrong although all before was right."""
    rng = random.Random(seed)  # noqa: S311 - a reproducible draw, no secret
    return [at for at in range(NUM_TOKENS) if rng.random() >= agreement]


# --------------------------------------------------------------------------------- schedules that know the costs


class Schedule(NamedTuple):
    """What is drafted and was not asked for goes out while a place is free, `gap_s` after the call before or later.

    has_stream: a stream runs beside the calls, and is opened anew where it is further behind than its first token
    takes. first_rows: a call waits for so many if none is under way since the draft began. max_rows: of each call.
    """

    has_stream: bool
    gap_s: float = 0.0
    first_rows: int = 1
    max_rows: int = 1
    num_calls: int = 0


PLAIN: Final = Schedule(has_stream=True)


class Call(NamedTuple):
    start: int  # the position of its first row, counted from where the draft began
    end: int
    answered_s: float


def list_schedules(costs: Costs) -> list[Schedule]:
    sizes = (1, 2, 3, 4, 5, 6, 8, 11, 16, 24, 64)
    found = [PLAIN]
    for has_stream in (False, True):
        num_calls = costs.places - has_stream
        gaps = [share * costs.call_s() / max(1, num_calls) for share in (0, 0.25, 0.5, 0.75, 1, 1.5)]
        found += [
            Schedule(has_stream, gap_s, first_rows, max_rows, num_calls)
            for gap_s, first_rows, max_rows in product(gaps[: 6 if num_calls > 1 else 1], sizes, sizes)
            if num_calls and first_rows <= max_rows
        ]
    return found


def iterate_calls(costs: Costs, schedule: Schedule, stream_s: float) -> Iterator[Call]:
    """The calls for what a draft writes that began at 0, as long as all of it is right.

    Positions that a stream writes before an answer could come are left out; it writes the first at `stream_s`.
    """
    places = [(0.0, 0)] * schedule.num_calls  # when each is free, and the rows until then
    asked = 0
    need, send_s = schedule.first_rows, -math.inf
    while places:
        send_s = max(places[0][0], send_s + schedule.gap_s)
        while True:
            streamed = (
                int((send_s + costs.call_s() - stream_s) * 1000 / costs.step_ms + 1) if schedule.has_stream else 0
            )
            start = max(asked, streamed)
            if start >= NUM_TOKENS:  # the draft never gets ahead of the stream
                return
            if send_s >= costs.ready_s(start + need - 1):
                break
            send_s = costs.ready_s(start + need - 1)
        asked = min(start + schedule.max_rows, costs.count_drafted(send_s) + 1)
        num_others = schedule.has_stream + sum(num_rows for until_s, num_rows in places if until_s > send_s)
        answered_s = send_s + costs.call_s(num_others + asked - start - 1)
        heapq.heapreplace(places, (answered_s, asked - start))
        yield Call(start, asked, answered_s)
        need = 1


def run_schedule(costs: Costs, schedule: Schedule, misses: Sequence[int]) -> float:
    """Seconds of an answer."""
    now_s, at = 0.0, 0
    stream_s = costs.call_s() if schedule.has_stream else math.inf  # until it writes the position `at`
    for wrong_at in [*misses, NUM_TOKENS - 1]:
        if wrong_at < at:
            continue
        last = wrong_at - at
        known_s = stream_s + last * costs.step_ms / 1000
        rows_s = 0.0
        for call in iterate_calls(costs, schedule, stream_s):
            rows_s = max(rows_s, call.answered_s)
            if call.end > last or rows_s >= known_s:
                known_s = min(known_s, rows_s)
                break
        stream_s = min(stream_s + (last + 1) * costs.step_ms / 1000 - known_s, costs.call_s())
        if not schedule.has_stream:
            stream_s = math.inf
        now_s, at = now_s + known_s, wrong_at + 1
    return now_s


def measure_schedule(costs: Costs, schedule: Schedule, seeds: Sequence[int]) -> float:
    """Tokens a second."""
    seconds = sum(run_schedule(costs, schedule, draw_misses(costs.agreement, seed)) for seed in seeds)
    return len(seeds) * NUM_TOKENS / seconds


def find_best_schedule(costs: Costs) -> Schedule:
    """By simulation: all with a few seeds, the better ones with more."""
    found = list_schedules(costs)
    for num_kept, num_seeds in ((30, 1), (6, 3), (1, len(TUNING_SEEDS))):
        seeds = TUNING_SEEDS[:num_seeds]
        found = sorted(found, key=lambda schedule: -measure_schedule(costs, schedule, seeds))[:num_kept]
    return found[0]


def limit_tokens_per_second(costs: Costs, seeds: Sequence[int]) -> float:
    """What no schedule can exceed.

    A token comes from a stream that was opened after known tokens, or from a row, behind a draft that was started after
    known tokens and has been right since. Here all of these streams, drafts and rows are under way at once.
    """
    total_s, step_s, draft_s = 0.0, costs.step_ms / 1000, costs.draft_ms / 1000
    for seed in seeds:
        misses = set(draw_misses(costs.agreement, seed))
        known_s = 0.0  # when all tokens before a position are known, …
        streamed_s = drafted_s = math.inf  # … and when the best stream, and the best draft, have the one before
        for at in range(NUM_TOKENS):
            streamed_s = min(known_s + costs.call_s(), streamed_s + step_s)
            row_s = drafted_s + costs.call_s()
            drafted_s = math.inf if at in misses else min(drafted_s, known_s + START_S) + draft_s
            known_s = max(known_s, min(streamed_s, row_s))
        total_s += known_s
    return len(seeds) * NUM_TOKENS / total_s


# ------------------------------------------------------------------------------------------ the package's own


class _Draft:
    """Is wrong at `misses`, wherever it was begun. The space after a word comes with it: the word is whole."""

    name = "draft"

    def __init__(self, costs: Costs) -> None:
        self.misses: Sequence[int] = ()
        self._costs = costs

    @asynccontextmanager
    async def draft(self, request: ChatRequest, max_tokens: int) -> AsyncGenerator[AsyncIterator[DraftPiece]]:
        start = len(split_into_pieces(request.prefix))
        async with aclosing(self._write(range(start, min(NUM_TOKENS, start + max_tokens)))) as pieces:
            yield pieces

    async def aclose(self) -> None:
        """Nothing to release."""

    async def _write(self, positions: range) -> AsyncGenerator[DraftPiece]:
        await asyncio.sleep(START_S)
        for at in positions:
            await asyncio.sleep(self._costs.draft_ms / 1000)
            word = "other" if at in self.misses else WORDS[at]
            yield DraftPiece(f" {word} " if at == positions.start else f"{word} ")
        yield DraftPiece("", finish_reason="stop")


class Target(SimulatedTarget):
    """Its prompts are encoded at once."""

    async def encode_chat(self, request: ChatRequest) -> list[int]:
        return [1, *await self.encode(request.prefix)]


def make_target(costs: Costs) -> Target:
    """One that writes `WORDS`."""
    return Target(
        "".join(f" {word}" for word in WORDS),
        by_ids=True,
        round_trip_s=costs.trip_ms / 1000,
        first_token_s=costs.step_ms / 1000,
        token_s=costs.step_ms / 1000,
        row_s=costs.row_ms / 1000,
    )


class Judged(NamedTuple):
    """Answers of the package: seconds of the learning ones together, and of each that is judged, by its seed."""

    learning_s: float
    seconds: dict[int, float]


async def measure_package(costs: Costs) -> Judged:
    """Answer after answer of one decoder; those that measure the target alone are not judged."""
    target, draft = make_target(costs), _Draft(costs)
    config = SpeculativeConfig(strategy="probe", max_concurrent_streams=costs.places)
    taken: dict[int, float] = {}
    async with SpeculativeDecoder(target=target, draft=draft, config=config) as decoder:
        clock = asyncio.get_running_loop().time
        for seed in (*LEARNING_SEEDS, *JUDGED_SEEDS):
            began_s = clock()
            draft.misses = draw_misses(costs.agreement, seed)
            result = await decoder.decode("Tell me.", temperature=0.0)
            if seed in LEARNING_SEEDS or result.plain_reason != "baseline":
                taken[seed] = clock() - began_s
    assert target.max_open <= costs.places, f"{target.max_open} calls and streams were open at once"
    learning_s = sum(taken.pop(seed) for seed in LEARNING_SEEDS)
    return Judged(learning_s, taken)


# -------------------------------------------------------------------------------------------------- reporting


@dataclass(frozen=True)
class Cell:
    """Tokens a second, and how many times as fast as plain the answers were in which the costs were learnt."""

    costs: Costs
    plain: float
    ours: float
    best: float
    limit: float
    early: float
    schedule: Schedule

    @property
    def ratio(self) -> float:
        return self.ours / self.best

    def __str__(self) -> str:
        costs = " ".join(f"{value:6g}" for value in asdict(self.costs).values())
        speeds = f"{self.plain:6.1f} {self.ours:6.1f} {self.best:6.1f} {self.limit:6.1f}"
        return f"{costs}  {speeds}  {self.ratio:5.2f}  {self.early:5.2f}"


def measure_cell(costs: Costs) -> Cell:
    schedule, judged = find_best_schedule(costs), run_virtual(measure_package(costs))
    seeds = list(judged.seconds)
    return Cell(
        costs=costs,
        plain=measure_schedule(costs, PLAIN, seeds),
        ours=len(seeds) * NUM_TOKENS / sum(judged.seconds.values()),
        best=measure_schedule(costs, schedule, seeds),
        limit=limit_tokens_per_second(costs, seeds),
        early=len(LEARNING_SEEDS) * NUM_TOKENS / judged.learning_s / measure_schedule(costs, PLAIN, LEARNING_SEEDS),
        schedule=schedule,
    )


def draw_cells(number: int, seed: int = 1) -> list[Costs]:
    """Each value of each axis as often as any other, combined at random."""
    rng = random.Random(seed)  # noqa: S311 - a reproducible draw, no secret
    axes = {name: [values[i % len(values)] for i in range(number)] for name, values in GRID.items()}
    for values in axes.values():
        rng.shuffle(values)
    drawn = [dict(zip(axes, values, strict=True)) for values in zip(*axes.values(), strict=True)]
    return [Costs(**{**at, "places": int(at["places"])}) for at in drawn]


def print_ratios(title: str, cells: Sequence[Cell]) -> None:
    ratios, early = [cell.ratio for cell in cells], [cell.early for cell in cells]
    if ratios:
        near = sum(ratio >= NEAR for ratio in ratios)
        figures = f"median {statistics.median(ratios):.2f} worst {min(ratios):.2f}, {near} of {len(cells)} near"
        print(f"{title:20} {figures}, early median {statistics.median(early):.2f} worst {min(early):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=60)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(" ".join(f"{name.removesuffix('_ms')[:6]:>6}" for name in GRID), "  plain   ours   best  limit  ratio  early")
    cells: list[Cell] = []
    with ProcessPoolExecutor() as processes:
        for cell in processes.map(measure_cell, draw_cells(options.cells)):
            cells.append(cell)
            print(cell, flush=True)
    print_ratios("all", cells)
    for name in GRID:
        for value in GRID[name]:
            print_ratios(f"{name} {value:g}", [cell for cell in cells if getattr(cell.costs, name) == value])
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(cell) for cell in cells], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
