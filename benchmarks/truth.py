"""Is the reported speedup true? `result.speedup` beside an outside clock's plain / taken, for every strategy.

    python benchmarks/truth.py [--quick] [--only virtual,local,sockets] [--json FILE]

virtual: simulated targets and drafts by virtual clock, where times are exact. local: a model in this process whose
forward pass takes a fixed time, in real time. sockets: a server in a process of its own, in real time; plain answers
and speculative ones by turns. Each cell is one decoder that answers several requests, one after another. The table
tells by strategy how many answers had no speedup (the target alone was not measured yet), how far the others were off,
and the same for the sums of a cell: the time that its figures claim for plain, beside the time that plain took. Exits
with 1 where more than a tenth has none, or, by virtual clock, one is off by more than 5 %: in real time a bound would
judge the machine, whose hiccups fall on one answer of a pair and not on the other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from never_slower import Cell, Scene, answer_of, serving

from llm_spec import GivenText, LlmProvider, ProviderDraft, SpeculativeConfig, SpeculativeDecoder, TextDelta
from llm_spec.config import StrategyName
from llm_spec.provider import DraftProvider, TokenModel
from llm_spec.testing import LocalProvider, TableModel
from llm_spec.testing.clock import run_virtual
from llm_spec.testing.hosted import HostedModel
from llm_spec.testing.simulated import SimulatedDraft, SimulatedTarget

NUM_REQUESTS = 20
MOST_OFF = 0.05
MOST_NONE = 0.1
PROMPT = "Tell me."


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One answer: the speedup that its result tells, None where there is no figure, and times by the outside clock."""

    strategy: str
    cell: str
    told: float | None
    plain_s: float
    taken_s: float

    @property
    def true(self) -> float:
        """The speedup by the outside clock."""
        return self.plain_s / self.taken_s

    @property
    def off(self) -> float:
        """How far it is off, as a share of the truth."""
        return 0.0 if self.told is None else abs(self.told / self.true - 1.0)


@dataclass(frozen=True, kw_only=True)
class Situation:
    """A server's times, a draft that starts after `opening_s`, a consumer that takes `consumer_s` a character."""

    agreement: float
    first_token_s: float = 0.45
    token_s: float = 1 / 60
    round_trip_s: float = 0.0
    draft_token_s: float = 0.0
    opening_s: float = 0.0
    consumer_s: float = 0.0
    by_ids: bool = True

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:.3g}" for name, value in asdict(self).items())


SITUATIONS = (
    *(Situation(agreement=a) for a in (0.0, 0.5, 0.8, 0.9, 0.95, 0.99, 1.0)),
    *(Situation(agreement=a, opening_s=1.0, draft_token_s=0.002) for a in (0.0, 0.9, 1.0)),
    *(
        Situation(agreement=a, first_token_s=0.025, token_s=0.025, round_trip_s=0.02, draft_token_s=0.003)
        for a in (0.0, 0.8, 0.9, 1.0)
    ),
    *(Situation(agreement=a, by_ids=False) for a in (0.5, 0.99)),
    *(Situation(agreement=0.95, consumer_s=s) for s in (0.0005, 0.02)),
)


async def read(decoder: SpeculativeDecoder, prompt: str, consumer_s: float) -> tuple[float, Any]:
    """The whole time of an answer by the loop's clock, and its result."""
    clock = asyncio.get_running_loop().time
    started, last = clock(), None
    async with decoder.stream(prompt, temperature=0.0) as events:
        async for event in events:
            last = event
            if consumer_s and isinstance(event, TextDelta):
                await asyncio.sleep(consumer_s * len(event.text))
    return clock() - started, getattr(last, "result", None)


async def compare(
    strategy: StrategyName,
    cell: str,
    target: LlmProvider,
    draft: DraftProvider,
    *,
    num_requests: int = NUM_REQUESTS,
    consumer_s: float = 0.0,
    plain_every_time: bool = True,
    **options: Any,
) -> list[Reading]:
    """Answers of one decoder; the target alone is timed beside each, or once."""
    plain = SpeculativeDecoder(None, target)
    decoder = SpeculativeDecoder(draft, target, SpeculativeConfig(strategy=strategy, **options))
    readings: list[Reading] = []
    plain_s = 0.0
    for index in range(num_requests):
        if plain_every_time or not index:
            plain_s, _ = await read(plain, PROMPT, consumer_s)
        taken_s, result = await read(decoder, PROMPT, consumer_s)
        readings.append(Reading(strategy=strategy, cell=cell, told=result.speedup, plain_s=plain_s, taken_s=taken_s))
    return readings


# ------------------------------------------------------------------------------------------ virtual


def virtual(*, quick: bool) -> list[Reading]:
    readings: list[Reading] = []
    for situation in SITUATIONS[:: 3 if quick else 1]:
        for strategy in ("race", "probe", "predict", "judge", "regenerate", "auto"):
            if strategy == "probe" and not situation.by_ids:
                continue
            if strategy == "judge" and situation.consumer_s:
                continue
            readings += run_virtual(in_situation(strategy, situation))
    return readings


async def in_situation(strategy: StrategyName, situation: Situation) -> list[Reading]:
    answer = answer_of(200, 1)
    latency: dict[str, Any] = {"first_token_s": situation.first_token_s, "token_s": situation.token_s}
    if strategy in ("predict", "judge"):
        hosted = HostedModel(answer, predicted_token_s=situation.token_s / 4, **latency)
        target: LlmProvider = hosted
    else:
        target = SimulatedTarget(answer, round_trip_s=situation.round_trip_s, by_ids=situation.by_ids, **latency)
    draft = SimulatedDraft(
        answer, situation.agreement, 1, first_token_s=situation.opening_s, token_s=situation.draft_token_s
    )
    return await compare(
        strategy, str(situation), target, draft, consumer_s=situation.consumer_s, plain_every_time=False
    )


# -------------------------------------------------------------------------------------------- local


class Opening(GivenText):
    """A draft whose opening takes `opening_s`, as that of a model that reads a long prompt."""

    def __init__(self, text: str, opening_s: float) -> None:
        super().__init__(text)
        self._opening_s = opening_s

    def open_token_draft(self, target: TokenModel, choose: Any, prompt_ids: Sequence[int]) -> Any:
        time.sleep(self._opening_s)
        return super().open_token_draft(target, choose, prompt_ids)


def local(*, quick: bool) -> list[Reading]:
    rng = random.Random(1)  # noqa: S311 - a reproducible text, no secret
    text = "".join(rng.choices("abcdefghijklmnop ", k=200))
    target = LocalProvider(TableModel(text, forward_s=0.005, order=12))
    wrong = "".join(c if rng.random() < 0.9 else "?" for c in text)
    drafts = {"right": GivenText(text), "wrong now and then": GivenText(wrong), "opens in 0.5 s": Opening(text, 0.5)}
    readings: list[Reading] = []
    for name, draft in drafts.items():
        readings += asyncio.run(compare("tokens", name, target, draft, num_requests=4 if quick else 10))
    return readings


# ------------------------------------------------------------------------------------------ sockets

CELLS = (
    *(
        Cell(strategy=strategy, scene=Scene(agreement=a, first_token_s=0.2, token_s=0.02), num_tokens=120)
        for strategy, a in product(("race", "auto"), (0.5, 0.98))
    ),
    *(
        Cell(
            strategy="probe",
            scene=Scene(agreement=a, first_token_s=0.025, token_s=0.025, round_trip_s=0.02, draft_speed=8.0, streams=4),
            num_tokens=120,
            over_http=True,
        )
        for a in (0.8, 0.9)
    ),
)


def sockets(*, quick: bool) -> list[Reading]:
    readings: list[Reading] = []
    for cell in CELLS:
        with serving(cell, 1) as urls:
            readings += asyncio.run(over_sockets(cell, urls, 4 if quick else 12))
    return readings


async def over_sockets(cell: Cell, urls: tuple[str, str], num_requests: int) -> list[Reading]:
    from llm_spec_http import DIALECTS, HttpProvider

    from llm_spec.testing.server import MODEL

    async with AsyncExitStack() as stack:
        target, remote = (HttpProvider(MODEL, base_url=url, dialect=DIALECTS["vllm"]) for url in urls)
        stack.push_async_callback(target.aclose)
        stack.push_async_callback(remote.aclose)
        answer = answer_of(cell.num_tokens, 1)
        draft = ProviderDraft(remote) if cell.over_http else SimulatedDraft(answer, cell.scene.agreement, 1)
        return await compare(
            cell.strategy,
            f"{cell.strategy} at {cell.scene.agreement:g}",
            target,
            draft,
            num_requests=num_requests,
            max_concurrent_streams=cell.scene.streams,
        )


# --------------------------------------------------------------------------------------------- main


def sums_off(told: Sequence[Reading]) -> list[float]:
    """By cell: how far the plain times that its figures claim, added up, are from those that plain took."""
    sums: dict[str, tuple[float, float]] = {}
    for row in told:
        claimed_s, plain_s = sums.get(row.cell, (0.0, 0.0))
        sums[row.cell] = (claimed_s + (row.told or 0.0) * row.taken_s, plain_s + row.plain_s)
    return [abs(claimed_s / plain_s - 1.0) for claimed_s, plain_s in sums.values()]


PARTS: dict[str, Callable[..., list[Reading]]] = {"virtual": virtual, "local": local, "sockets": sockets}


def report(part: str, readings: Sequence[Reading]) -> list[str]:
    """Print a line for each strategy; gives what misses a bound."""
    missed: list[str] = []
    headings = (f"{heading:>12}" for heading in ("no figure", "median off", "95 % below", "worst", "worst cell"))
    columns = f"{'answers':>8}{''.join(headings)}  the worst"
    print(f"\n{part}: {'strategy':<12}{columns}")
    for strategy in sorted({reading.strategy for reading in readings}):
        rows = [reading for reading in readings if reading.strategy == strategy]
        told = sorted((row for row in rows if row.told is not None), key=lambda row: row.off)
        share = 1.0 - len(told) / len(rows)
        if not told:
            missed.append(f"{part}, {strategy}: no figure at all")
            continue
        worst = told[-1]
        print(
            f"{'':<{len(part) + 2}}{strategy:<12}{len(rows):>8}{share:>12.1%}"
            f"{statistics.median(row.off for row in told):>12.2%}{told[int(0.95 * (len(told) - 1))].off:>12.2%}"
            f"{worst.off:>12.2%}{max(sums_off(told)):>12.2%}  says {worst.told:.3f}, is {worst.true:.3f} ({worst.cell})"
        )
        if share > MOST_NONE:
            missed.append(f"{part}, {strategy}: {share:.1%} of the answers have no figure")
        if part == "virtual" and worst.off > MOST_OFF:
            missed.append(f"{part}, {strategy}: off by {worst.off:.1%} ({worst.cell})")
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer cells and requests")
    parser.add_argument("--only", default=",".join(PARTS), help="which parts, with commas between")
    parser.add_argument("--json", type=Path, help="also write every reading there")
    arguments = parser.parse_args()
    missed: list[str] = []
    every: dict[str, list[dict[str, Any]]] = {}
    for part in arguments.only.split(","):
        readings = PARTS[part](quick=arguments.quick)
        missed += report(part, readings)
        every[part] = [asdict(reading) for reading in readings]
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(every, indent=2), encoding="utf-8")
    for line in missed:
        print(f"MISSED: {line}")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
