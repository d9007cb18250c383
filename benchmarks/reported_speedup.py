"""Is the reported speedup true? `result.speedup` beside an outside clock's plain / taken, for every strategy.

    python benchmarks/reported_speedup.py [--quick] [--only virtual,local,sockets] [--json FILE]

virtual: simulated targets and drafts by virtual clock, where times are exact. local: a model in this process whose
forward pass takes a fixed time, in real time; answers that are written at the same time share it. sockets: a server in
a process of its own, in real time; plain answers and speculative ones by turns. Each cell is one decoder that answers
several requests, one after another unless the cell says how many at a time. The table tells by strategy how many
answers had no speedup (the target alone was not measured yet), how far the others were off, and the same for the sums
of a cell: the time that its figures claim for plain, beside the time that plain took. Exits with 1 where more than a
tenth has none, or, by virtual clock, one is off by more than 5 %: in real time a bound would judge the machine, whose
hiccups fall on one answer of a pair and not on the other.
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
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from never_slower import ServerScenario, SocketScenario, make_answer, start_servers

from llm_spec import LlmProvider, ProviderDraft, ReferenceDraft, SpeculativeConfig, SpeculativeDecoder, TextDelta
from llm_spec.contract.draft import DraftProvider
from llm_spec.contract.token_model import TokenModel
from llm_spec.decoder.config import StrategyName
from llm_spec.testing import LocalProvider, TableModel
from llm_spec.testing.clock import run_virtual
from llm_spec.testing.hosted_model import SimulatedHostedModel
from llm_spec.testing.simulated import SimulatedDraft, SimulatedTarget

NUM_REQUESTS = 20
MAX_RELATIVE_ERROR = 0.05
MAX_SHARE_WITHOUT_SPEEDUP = 0.1
PROMPT = "Tell me."


@dataclass(frozen=True, kw_only=True)
class SpeedupReading:
    """One answer: the speedup that its result tells, None where there is no figure, and times by the outside clock."""

    strategy: str
    cell: str
    reported_speedup: float | None
    plain_s: float
    taken_s: float

    @property
    def true_speedup(self) -> float:
        """The speedup by the outside clock."""
        return self.plain_s / self.taken_s

    @property
    def relative_error(self) -> float:
        """How far it is off, as a share of the truth."""
        return 0.0 if self.reported_speedup is None else abs(self.reported_speedup / self.true_speedup - 1.0)


@dataclass(frozen=True, kw_only=True)
class TimingScenario:
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
    *(TimingScenario(agreement=a) for a in (0.0, 0.5, 0.8, 0.9, 0.95, 0.99, 1.0)),
    *(TimingScenario(agreement=a, opening_s=1.0, draft_token_s=0.002) for a in (0.0, 0.9, 1.0)),
    *(
        TimingScenario(agreement=a, first_token_s=0.025, token_s=0.025, round_trip_s=0.02, draft_token_s=0.003)
        for a in (0.0, 0.8, 0.9, 1.0)
    ),
    *(TimingScenario(agreement=a, by_ids=False) for a in (0.5, 0.99)),
    *(TimingScenario(agreement=0.95, consumer_s=s) for s in (0.0005, 0.02)),
)


async def time_answer(decoder: SpeculativeDecoder, prompt: str, consumer_s: float) -> tuple[float, Any]:
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
    num_concurrent: int = 1,
    **options: Any,
) -> list[SpeedupReading]:
    """Answers of one decoder, so many at a time; the target alone is timed beside each, or once.

    The decoder begins as `llm-spec run` does: it asks a server what it can do, and times one answer of its own.
    """
    plain = SpeculativeDecoder(target=target, draft=None)
    config = SpeculativeConfig(strategy=strategy, **options)
    decoder = SpeculativeDecoder(target=target, draft=draft, config=config)
    await decoder.discover()
    await time_answer(decoder.with_config(replace(config, strategy="plain")), PROMPT, consumer_s=0.0)
    readings: list[SpeedupReading] = []
    plain_answers: list[tuple[float, Any]] = []

    async def time_answers(decoder: SpeculativeDecoder) -> list[tuple[float, Any]]:
        return await asyncio.gather(*[time_answer(decoder, PROMPT, consumer_s) for _ in range(num_concurrent)])

    for index in range(num_requests):
        if plain_every_time or not index:
            plain_answers = await time_answers(plain)
        for (plain_s, _), (taken_s, result) in zip(plain_answers, await time_answers(decoder), strict=True):
            readings.append(
                SpeedupReading(
                    strategy=strategy, cell=cell, reported_speedup=result.speedup, plain_s=plain_s, taken_s=taken_s
                )
            )
    return readings


# ------------------------------------------------------------------------------------------ virtual


def measure_virtual(*, quick: bool) -> list[SpeedupReading]:
    readings: list[SpeedupReading] = []
    for situation in SITUATIONS[:: 3 if quick else 1]:
        for strategy in ("race", "probe", "predict", "judge", "regenerate", "auto"):
            if strategy == "probe" and not situation.by_ids:
                continue
            if strategy == "judge" and situation.consumer_s:
                continue
            readings += run_virtual(measure_scenario(strategy, situation))
    return readings


async def measure_scenario(strategy: StrategyName, scenario: TimingScenario) -> list[SpeedupReading]:
    answer = make_answer(200, 1)
    latency: dict[str, Any] = {"first_token_s": scenario.first_token_s, "token_s": scenario.token_s}
    if strategy in ("predict", "judge"):
        hosted = SimulatedHostedModel(answer, predicted_token_s=scenario.token_s / 4, **latency)
        target: LlmProvider = hosted
    else:
        target = SimulatedTarget(answer, round_trip_s=scenario.round_trip_s, by_ids=scenario.by_ids, **latency)
    draft = SimulatedDraft(
        answer, scenario.agreement, 1, first_token_s=scenario.opening_s, token_s=scenario.draft_token_s
    )
    return await compare(strategy, str(scenario), target, draft, consumer_s=scenario.consumer_s, plain_every_time=False)


# -------------------------------------------------------------------------------------------- local


class SlowOpeningDraft(ReferenceDraft):
    """A draft whose opening takes `opening_s`, as that of a model that reads a long prompt."""

    def __init__(self, text: str, opening_s: float) -> None:
        super().__init__(text)
        self._opening_s = opening_s

    def open_token_draft(self, target: TokenModel, choose: Any, prompt_ids: Sequence[int]) -> Any:
        time.sleep(self._opening_s)
        return super().open_token_draft(target, choose, prompt_ids)


def measure_local(*, quick: bool) -> list[SpeedupReading]:
    rng = random.Random(1)  # noqa: S311 - a reproducible text, no secret
    text = "".join(rng.choices("abcdefghijklmnop ", k=200))
    target = LocalProvider(TableModel(text, forward_s=0.005, order=12))
    wrong = "".join(c if rng.random() < 0.9 else "?" for c in text)
    drafts = {
        "right": ReferenceDraft(text),
        "wrong now and then": ReferenceDraft(wrong),
        "opens in 0.5 s": SlowOpeningDraft(text, 0.5),
    }
    readings: list[SpeedupReading] = []
    for name, draft in drafts.items():
        readings += asyncio.run(compare("tokens", name, target, draft, num_requests=4 if quick else 10))
    busy = TableModel(
        text, forward_s=0.002, order=12, sleep=lambda seconds: time.sleep(seconds * max(1, busy.num_open))
    )
    for num_concurrent in (2, 4):
        cell, draft = f"{num_concurrent} at a time", drafts["wrong now and then"]
        readings += asyncio.run(
            compare(
                "tokens",
                cell,
                LocalProvider(busy),
                draft,
                num_requests=4 if quick else 10,
                num_concurrent=num_concurrent,
            )
        )
    return readings


# ------------------------------------------------------------------------------------------ sockets

CELLS = (
    *(
        SocketScenario(
            strategy=strategy, scenario=ServerScenario(agreement=a, first_token_s=0.2, token_s=0.02), num_tokens=120
        )
        for strategy, a in product(("race", "auto"), (0.5, 0.98))
    ),
    *(
        SocketScenario(
            strategy="probe",
            scenario=ServerScenario(
                agreement=a, first_token_s=0.025, token_s=0.025, round_trip_s=0.02, draft_speed=8.0, streams=4
            ),
            num_tokens=120,
            over_http=True,
        )
        for a in (0.8, 0.9)
    ),
)


def measure_sockets(*, quick: bool) -> list[SpeedupReading]:
    readings: list[SpeedupReading] = []
    for cell in CELLS:
        with start_servers(cell, 1) as urls:
            readings += asyncio.run(measure_cell(cell, urls, 4 if quick else 12))
    return readings


async def measure_cell(cell: SocketScenario, urls: tuple[str, str], num_requests: int) -> list[SpeedupReading]:
    from llm_spec_http import DIALECTS, HttpProvider

    from llm_spec.testing.server import MODEL

    async with AsyncExitStack() as stack:
        target, remote = (HttpProvider(MODEL, base_url=url, dialect=DIALECTS["vllm"]) for url in urls)
        stack.push_async_callback(target.aclose)
        stack.push_async_callback(remote.aclose)
        answer = make_answer(cell.num_tokens, 1)
        draft = ProviderDraft(remote) if cell.over_http else SimulatedDraft(answer, cell.scenario.agreement, 1)
        return await compare(
            cell.strategy,
            f"{cell.strategy} at {cell.scenario.agreement:g}",
            target,
            draft,
            num_requests=num_requests,
            max_concurrent_streams=cell.scenario.streams,
        )


# --------------------------------------------------------------------------------------------- main


def find_sum_errors(all_readings: Sequence[SpeedupReading]) -> list[float]:
    """By cell: how far the plain times that its figures claim, added up, are from those that plain took."""
    sums: dict[str, tuple[float, float]] = {}
    for row in all_readings:
        claimed_s, plain_s = sums.get(row.cell, (0.0, 0.0))
        sums[row.cell] = (claimed_s + (row.reported_speedup or 0.0) * row.taken_s, plain_s + row.plain_s)
    return [abs(claimed_s / plain_s - 1.0) for claimed_s, plain_s in sums.values()]


PARTS: dict[str, Callable[..., list[SpeedupReading]]] = {
    "virtual": measure_virtual,
    "local": measure_local,
    "sockets": measure_sockets,
}


def print_errors(part: str, readings: Sequence[SpeedupReading]) -> list[str]:
    """Print a line for each strategy; gives what misses a bound."""
    missed: list[str] = []
    headings = (f"{heading:>12}" for heading in ("no figure", "median off", "95 % below", "worst", "worst cell"))
    columns = f"{'answers':>8}{''.join(headings)}  the worst"
    print(f"\n{part}: {'strategy':<12}{columns}")
    for strategy in sorted({reading.strategy for reading in readings}):
        rows = [reading for reading in readings if reading.strategy == strategy]
        all_readings = sorted(
            (row for row in rows if row.reported_speedup is not None), key=lambda row: row.relative_error
        )
        share = 1.0 - len(all_readings) / len(rows)
        if not all_readings:
            missed.append(f"{part}, {strategy}: no figure at all")
            continue
        worst = all_readings[-1]
        errors = [row.relative_error for row in all_readings]
        print(
            f"{'':<{len(part) + 2}}{strategy:<12}{len(rows):>8}{share:>12.1%}"
            f"{statistics.median(errors):>12.2%}{errors[int(0.95 * (len(errors) - 1))]:>12.2%}"
            f"{worst.relative_error:>12.2%}{max(find_sum_errors(all_readings)):>12.2%}  "
            f"says {worst.reported_speedup:.3f}, is {worst.true_speedup:.3f} ({worst.cell})"
        )
        if share > MAX_SHARE_WITHOUT_SPEEDUP:
            missed.append(f"{part}, {strategy}: {share:.1%} of the answers have no figure")
        if part == "virtual" and worst.relative_error > MAX_RELATIVE_ERROR:
            missed.append(f"{part}, {strategy}: off by {worst.relative_error:.1%} ({worst.cell})")
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
        missed += print_errors(part, readings)
        every[part] = [asdict(reading) for reading in readings]
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(every, indent=2), encoding="utf-8")
    for line in missed:
        print(f"MISSED: {line}")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
