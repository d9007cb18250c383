"""Is the speed line true? The range that an answer's summary prints, beside the clock of paired answers.

    python benchmarks/speed_line.py [--only local,server] [--busy N] [--processes N] [--at-once N] [--json FILE]

Each process is fresh. `local`: it answers as the ten lines of README.md do, and its first answer's line counts. Then
the same models answer five times alone and five times with the draft, alternately, by new decoders, as the first answer
was one of a new decoder. `server`: a simulated server takes 450 ms to the first token, answers have 128 tokens, and one
decoder answers by `race` five times, alternately with the target alone, after two answers in which it learns; the line
of the answer with the median time counts. A line holds if its range has the ratio of the medians of the five times.
`--busy`: so many loops that do nothing run beside them. It prints a row a process, how many print a range, how many of
those hold, and ends with status 1 where fewer than nine of ten do, or fewer than 16 of 20 print one on a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import subprocess
import sys
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from llm_spec import SpeculativeConfig, SpeculativeDecoder, SpeculativeResult
from llm_spec.decoder.entry_points import open_draft, open_provider
from llm_spec.testing.simulated import SimulatedDraft, SimulatedTarget

NUM_PAIRS: Final = 5
PROMPT: Final = "def getregentry():"
NUM_TOKENS: Final = 128
AGREEMENTS: Final = (0.5, 0.9, 0.98)
PRINTED_SHARE: Final = 16 / 20
HELD_SHARE: Final = 0.9


@dataclass(frozen=True, kw_only=True)
class Line:
    """One process's figures: the range that was printed (None: not measured), and the ratio by the clock."""

    told: tuple[float, float] | None
    by_clock: float
    plain_s: list[float]
    taken_s: list[float]

    @property
    def holds(self) -> bool:
        return self.told is not None and self.told[0] <= self.by_clock <= self.told[1]


async def time_pairs(
    decode_plain: Callable[[], Awaitable[SpeculativeResult]], decode: Callable[[], Awaitable[SpeculativeResult]]
) -> tuple[list[float], list[tuple[float, SpeculativeResult]]]:
    """The times of five answers alone, and those of five with the draft, alternately."""
    clock, plain_s, taken = asyncio.get_running_loop().time, list[float](), list[tuple[float, SpeculativeResult]]()
    for _ in range(NUM_PAIRS):
        started = clock()
        await decode_plain()
        plain_s.append(clock() - started)
        started = clock()
        result = await decode()
        taken.append((clock() - started, result))
    return plain_s, taken


def make_line(told: tuple[float, float] | None, plain_s: list[float], taken_s: list[float]) -> Line:
    ratio = statistics.median(plain_s) / statistics.median(taken_s)
    return Line(told=told, by_clock=ratio, plain_s=plain_s, taken_s=taken_s)


async def measure_local() -> Line:
    """The first answer's line, as a user of the ten lines reads it."""
    target, draft = open_provider("builtin:target"), open_draft("lookup+builtin:draft")
    async with SpeculativeDecoder(draft, target) as decoder:
        told = (await decoder.decode(PROMPT, max_tokens=64)).speedup_range
        plain_s, taken = await time_pairs(
            lambda: SpeculativeDecoder(None, target).decode(PROMPT, max_tokens=64),
            lambda: SpeculativeDecoder(draft, target).decode(PROMPT, max_tokens=64),
        )
    return make_line(told, plain_s, [seconds for seconds, _ in taken])


async def measure_server(seed: int) -> Line:
    """The line of the median answer."""
    agreement = AGREEMENTS[seed % len(AGREEMENTS)]
    rng = random.Random(seed)  # noqa: S311 - a reproducible text
    text = " ".join("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=5)) for _ in range(NUM_TOKENS))
    target = SimulatedTarget(text, first_token_s=0.45, token_s=0.01, by_ids=True)
    decoder = SpeculativeDecoder(SimulatedDraft(text, agreement, seed), target, SpeculativeConfig(strategy="race"))
    for _ in range(2):
        await decoder.decode("tell", temperature=0.0)
    plain_s, taken = await time_pairs(
        lambda: SpeculativeDecoder(None, target).decode("tell", temperature=0.0),
        lambda: decoder.decode("tell", temperature=0.0),
    )
    middle = sorted(taken, key=lambda one: one[0])[NUM_PAIRS // 2][1]
    return make_line(middle.speedup_range, plain_s, [seconds for seconds, _ in taken])


@contextmanager
def run_busy_loops(num_loops: int) -> Generator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_loops)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


async def run_processes(kind: str, num_processes: int, at_once: int) -> list[Line]:
    places = asyncio.Semaphore(at_once)

    async def run(seed: int) -> Line:
        async with places:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, __file__, "--measure", kind, "--seed", str(seed)), stdout=subprocess.PIPE
            )
            out, _ = await process.communicate()
        fields: dict[str, Any] = json.loads(out)
        told: list[float] | None = fields.pop("told")
        return Line(told=None if told is None else (told[0], told[1]), **fields)

    return await asyncio.gather(*map(run, range(num_processes)))


def print_lines(kind: str, lines: Sequence[Line]) -> None:
    for line in lines:
        told = "not measured" if line.told is None else f"{line.told[0]:.2f}x to {line.told[1]:.2f}x"
        print(
            f"  {kind:<8}{told:<18}by the clock {line.by_clock:.2f}x{'' if line.holds or not line.told else '  wrong'}"
        )
    printed = [line for line in lines if line.told is not None]
    widths = [line.told[1] / line.told[0] for line in lines if line.told is not None]
    print(
        f"{kind}: {len(printed)} of {len(lines)} print a range, {sum(line.holds for line in printed)} of those hold; "
        f"the most is {statistics.median(widths) if widths else math.nan:.2f} times the least (median)"
    )


def is_right(lines: Sequence[Line], *, is_quiet: bool) -> bool:
    printed = [line for line in lines if line.told is not None]
    if is_quiet and len(printed) < PRINTED_SHARE * len(lines):
        return False
    return sum(line.holds for line in printed) >= HELD_SHARE * len(printed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="local,server")
    parser.add_argument("--busy", type=int, default=0, metavar="N")
    parser.add_argument("--processes", type=int, default=20, metavar="N")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="processes (of `server`: they only wait)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--measure", choices=("local", "server"), help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure is not None:
        measuring = measure_local() if arguments.measure == "local" else measure_server(arguments.seed)
        print(json.dumps(asdict(asyncio.run(measuring))))
        return 0
    found: dict[str, list[Line]] = {}
    for kind in arguments.only.split(","):
        at_once = arguments.at_once if kind == "server" else 1  # those compute
        with run_busy_loops(arguments.busy):
            found[kind] = asyncio.run(run_processes(kind, arguments.processes, at_once))
        print_lines(kind, found[kind])
    if arguments.json is not None:
        rows = {kind: [asdict(line) for line in lines] for kind, lines in found.items()}
        arguments.json.write_text(json.dumps(rows), encoding="utf-8")
    return 0 if all(is_right(lines, is_quiet=not arguments.busy) for lines in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
