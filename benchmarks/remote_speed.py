"""How much faster are remote strategies by an outside clock? Against servers whose prices the package does not know.

    python benchmarks/remote_speed.py [--quick] [--scenarios A,B] [--strategies race] [--agreements 0.8,0.9]
                                      [--tokens 300] [--seeds 6] [--answers 2] [--json FILE]

Target and draft are `double_server.py`, each in a process of its own, spoken to over sockets. Every answer is the
first of a fresh client process, or one of its first `--answers`: its whole time is taken around the public call, and
the target alone is timed in the same way, by turns. A cell is printed as soon as it is measured: plain's time / the
time taken (mean, least and most), what `result.speedup` says and how far that is off the clock, the share of the
answer's tokens that were drafted, calls and input tokens of an answer as the server counted them, and whether every
text equals plain's.

A   25 ms a token, calls of one token and first tokens 45 ms; a draft of 3 ms a token that starts in 5 ms: `probe`
B   first token 450 ms, 60 tokens/s, an instant draft, 12 streams: `race` by token ids, and by text
C   100 ms round trip, 60 tokens/s, a draft of 8 ms a token: `probe` and `race`
D   5 ms round trip, 15 tokens/s, the same draft: `probe` and `race`
F   a server without room: each further sequence slows all by 80 %, and every prompt is read from its beginning
E   `auto` over the requests of one decoder, at the prices of A: the first 20 together beside plain, the others beside
    each strategy by name

Exits with 1 where a text differs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Final

from remote_speed_client import Answer, ClientSetup
from remote_speed_processes import ask, read_stats, start_client, start_server

NUM_FIRST: Final = 20  # requests of E in which `auto` may still be looking


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A target's and a draft's prices (options of `double_server.py`, in ms), and what is tried there.

    draft: None for one that needs no time. streams: `max_concurrent_streams`; None: as it is by default.
    """

    name: str
    target: dict[str, float]
    draft: dict[str, float] | None
    tokens: int
    agreements: tuple[float, ...]
    strategies: tuple[str, ...]
    streams: int | None = None
    by_text: bool = False  # also without token endpoints

    def __str__(self) -> str:
        def tell(prices: dict[str, float]) -> str:
            return ", ".join(f"{name} {value:.4g}" for name, value in prices.items())

        draft = "instant" if self.draft is None else tell(self.draft)
        return f"{self.name}: {self.tokens} tokens; target {tell(self.target)}; draft {draft}"


def make_prices(*, round_trip_ms: float, tokens_per_s: float) -> dict[str, float]:
    """A server that needs one step for a first token or a call."""
    step_ms = 1000 / tokens_per_s
    return {"round_trip_ms": round_trip_ms, "token_ms": step_ms, "first_token_ms": step_ms, "call_ms": step_ms}


A_TARGET: Final[dict[str, float]] = {"token_ms": 25.0, "call_ms": 45.0, "first_token_ms": 45.0}
A_DRAFT: Final[dict[str, float]] = {"token_ms": 3.0, "first_token_ms": 5.0}
SLOW_DRAFT: Final[dict[str, float]] = {"token_ms": 8.0, "first_token_ms": 8.0}
SCENARIOS: Final = (
    Scenario(
        name="A",
        target=A_TARGET,
        draft=A_DRAFT,
        tokens=400,
        agreements=(0.0, 0.5, 0.8, 0.9),
        strategies=("probe",),
    ),
    Scenario(
        name="B",
        target={"token_ms": 1000 / 60, "call_ms": 450.0, "first_token_ms": 450.0},
        draft=None,
        tokens=600,
        agreements=(0.0, 0.8, 0.95, 0.98, 0.99, 1.0),
        strategies=("race",),
        streams=12,
        by_text=True,
    ),
    Scenario(
        name="C",
        target=make_prices(round_trip_ms=100.0, tokens_per_s=60.0),
        draft=SLOW_DRAFT,
        tokens=400,
        agreements=(0.0, 0.8, 0.9, 0.98),
        strategies=("probe", "race"),
    ),
    Scenario(
        name="D",
        target=make_prices(round_trip_ms=5.0, tokens_per_s=15.0),
        draft=SLOW_DRAFT,
        tokens=200,
        agreements=(0.0, 0.8, 0.9, 0.98),
        strategies=("probe", "race"),
    ),
    Scenario(
        name="F",
        target={
            "token_ms": 25.0,
            "first_token_ms": 60.0,
            "call_ms": 40.0,
            "prompt_token_ms": 0.5,
            "slowdown": 0.8,
            "prefix_cache": False,
        },
        draft=A_DRAFT,
        tokens=150,
        agreements=(0.0, 0.8),
        strategies=("probe", "race", "auto"),
    ),
    Scenario(
        name="E",
        target=A_TARGET,
        draft=A_DRAFT,
        tokens=100,
        agreements=(0.0, 0.8),
        strategies=("probe", "race"),
    ),
)


def make_prompt(number: int) -> str:
    return f"Question {number}: what happens next, and why?"


# ------------------------------------------------------------------------------------------ cells


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One strategy at one agreement, by ids or by text."""

    scenario: Scenario
    strategy: str
    by_ids: bool
    agreement: float


@dataclass(frozen=True, kw_only=True)
class CellReport:
    """The answers of a cell: `plain[n]` and `speculative[n]` are of one prompt."""

    cell: Cell
    plain: list[Answer]
    speculative: list[Answer]
    target: dict[str, float]  # what the target counted in all

    @property
    def ratios(self) -> list[float]:
        return [p.taken_s / s.taken_s for p, s in zip(self.plain, self.speculative, strict=True)]

    @property
    def errors(self) -> list[float]:
        """How far the reported speedups are off the clock, where there are any."""
        both = zip(self.speculative, self.ratios, strict=True)
        return [s.reported_speedup / ratio - 1 for s, ratio in both if s.reported_speedup is not None]

    @property
    def same_text(self) -> bool:
        return all(p.text == s.text for p, s in zip(self.plain, self.speculative, strict=True))

    def format(self) -> str:
        """A line of the table."""
        ratios, answers, cell = self.ratios, self.speculative, self.cell
        said = [a.reported_speedup for a in answers if a.reported_speedup is not None]
        reasons = Counter(a.plain_reason for a in answers if a.plain_reason)

        def count(name: str) -> str:
            return f"{statistics.fmean(answer.server[name] for answer in answers):.0f}"

        columns = (
            f"{cell.scenario.name} {cell.strategy}",
            "ids" if cell.by_ids else "text",
            f"{cell.agreement:.2f}",
            f"{statistics.fmean(a.taken_s for a in self.plain):.2f}",
            f"{statistics.fmean(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})",
            f"{statistics.fmean(said):.2f} ({statistics.fmean(self.errors):+.0%})" if said else "-",
            f"{statistics.fmean(a.accepted_share for a in answers):.0%}",
            count("num_calls"),
            count("num_token_calls"),
            count("prompt_tokens"),
            "yes" if self.same_text else "NO",
        )
        reasons_text = " ".join(f"plain: {reason} x{num}" for reason, num in reasons.items())
        return f"{format_row(columns)}  {reasons_text}".rstrip()


_COLUMN_WIDTHS: Final = (8, 4, 9, 7, 17, 12, 7, 6, 11, 7, 9)
COLUMNS: Final = (
    *("strategy", "by", "agreement", "plain s", "ratio", "says (off)"),
    *("drafted", "calls", "token calls", "input", "same text"),
)


def format_row(columns: Iterable[str]) -> str:
    return "  ".join(text.ljust(width) for text, width in zip(columns, _COLUMN_WIDTHS, strict=True))


@contextmanager
def start_pair(cell: Cell) -> Generator[ClientSetup]:
    """Fresh servers for a cell."""
    scenario = cell.scenario
    with ExitStack() as stack:

        def start(**options: float) -> str:
            return stack.enter_context(start_server(answer_tokens=scenario.tokens, **options))

        target_url = start(**scenario.target, token_endpoints=cell.by_ids)
        yield ClientSetup(
            strategy=cell.strategy,
            target_url=target_url,
            draft_url=None if scenario.draft is None else start(**scenario.draft, agreement=cell.agreement),
            agreement=cell.agreement,
            answer_tokens=scenario.tokens,
            streams=scenario.streams,
        )


def measure_cell(cell: Cell, num_seeds: int, num_answers: int) -> CellReport:
    """A client process for the answers of each seed, and one for plain's; which goes first changes every time."""
    plain: list[Answer] = []
    speculative: list[Answer] = []
    with start_pair(cell) as setup:
        for seed in range(num_seeds):
            with start_client(replace(setup, strategy="plain")) as alone, start_client(setup) as client:
                turns = [(plain, alone), (speculative, client)]
                for number in range(num_answers):
                    for answers, process in turns if (seed + number) % 2 == 0 else reversed(turns):
                        answers.append(ask(process, setup.target_url, make_prompt(seed + 1000 * number)))
        stats = read_stats(setup.target_url)
    return CellReport(cell=cell, plain=plain, speculative=speculative, target=stats)


def list_cells(scenario: Scenario) -> Iterator[Cell]:
    for by_ids in (True, False) if scenario.by_text else (True,):
        for strategy, agreement in product(scenario.strategies, scenario.agreements):
            yield Cell(scenario=scenario, strategy=strategy, by_ids=by_ids, agreement=agreement)


def measure_scenario(scenario: Scenario, num_seeds: int, num_answers: int) -> list[CellReport]:
    """Measure cell by cell, and print each."""
    print(f"\n{scenario}; load {os.getloadavg()[0]:.1f}\n{format_row(COLUMNS)}", flush=True)
    reports: list[CellReport] = []
    for cell in list_cells(scenario):
        reports.append(measure_cell(cell, num_seeds, num_answers))
        print(reports[-1].format(), flush=True)
    totals = [report.target for report in reports]
    late_ms = 1e3 * sum(t["late_s"] for t in totals) / max(1, sum(t["num_sleeps"] for t in totals))
    most_ms = 1e3 * max(t["most_late_s"] for t in totals)
    print(f"the target's tokens were {late_ms:.1f} ms late in the mean, {most_ms:.0f} at most", flush=True)
    return reports


# ------------------------------------------------------------------------------------------ auto


def measure_auto(scenario: Scenario, agreement: float, num_requests: int) -> dict[str, list[Answer]]:
    """Requests of one decoder for each contender, by turns; each has servers of its own."""
    names = ("plain", "auto", *scenario.strategies)
    answers: dict[str, list[Answer]] = {name: [] for name in names}
    with ExitStack() as stack:
        clients: dict[str, tuple[subprocess.Popen[str], str]] = {}
        for name in names:
            cell = Cell(scenario=scenario, strategy=name, by_ids=True, agreement=agreement)
            setup = stack.enter_context(start_pair(cell))
            clients[name] = stack.enter_context(start_client(setup)), setup.target_url
        for number in range(num_requests):
            for turn in range(len(names)):
                name = names[(turn + number) % len(names)]
                answers[name].append(ask(*clients[name], make_prompt(number)))
    return answers


def report_auto(scenario: Scenario, num_requests: int) -> list[dict[str, Any]]:
    """`auto` beside plain at first, and beside the best strategy by name later."""
    print(f"\n{scenario}; {num_requests} requests of one decoder; load {os.getloadavg()[0]:.1f}", flush=True)
    reports: list[dict[str, Any]] = []
    for agreement in scenario.agreements:
        answers = measure_auto(scenario, agreement, num_requests)

        def sum_times(name: str, part: slice, answers: dict[str, list[Answer]] = answers) -> float:
            return sum(answer.taken_s for answer in answers[name][part])

        first, later = slice(NUM_FIRST), slice(NUM_FIRST, None)
        parts = {"first": first, "later": later}
        ratios = {
            name: {part: sum_times("plain", which) / (sum_times(name, which) or 1.0) for part, which in parts.items()}
            for name in answers
        }
        same = all(a.text == p.text for name in answers for a, p in zip(answers[name], answers["plain"], strict=True))
        used = Counter(a.plain_reason or a.strategy for a in answers["auto"])
        best = max(ratio["later"] for name, ratio in ratios.items() if name != "auto")
        print(f"agreement {agreement:.2f}: ratio of the first {NUM_FIRST} together, and of the others")
        for name, ratio in ratios.items():
            print(f"  {name:6} {ratio['first']:5.2f} {ratio['later']:5.2f}")
        print(
            f"  auto is at {ratios['auto']['later'] / best:.0%} of the best; same texts: {same}; it used {dict(used)}"
        )
        sys.stdout.flush()
        reports.append({"agreement": agreement, "ratios": ratios, "same_text": same, "used": dict(used)})
    return reports


# ------------------------------------------------------------------------------------------ the program


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenarios", default="A,B", help="of A, B, C, D, E and F, with commas")
    parser.add_argument("--strategies", help="with commas; else those of the scenario")
    parser.add_argument("--agreements", help="with commas; else those of the scenario")
    parser.add_argument("--tokens", type=int, help="of an answer; else those of the scenario")
    parser.add_argument("--streams", type=int, help="max_concurrent_streams; else those of the scenario")
    parser.add_argument("--seeds", type=int, default=3, help="client processes of a cell")
    parser.add_argument("--answers", type=int, default=1, help="of a client process, one after another")
    parser.add_argument("--requests", type=int, default=60, help="of E")
    parser.add_argument("--quick", action="store_true", help="one seed, 100 tokens, three agreements; E: 24 requests")
    parser.add_argument("--json", type=Path, help="write every answer to this file")
    return parser.parse_args()


def choose_scenarios(arguments: argparse.Namespace) -> list[Scenario]:
    """The scenarios that were asked for, with the options of the command line."""
    selected = arguments.scenarios.upper().split(",")
    unknown = set(selected) - {scenario.name for scenario in SCENARIOS}
    if unknown:
        raise SystemExit(f"--scenarios: there is no {sorted(unknown)[0]!r}; there are A, B, C, D, E and F")
    options: dict[str, Any] = {
        "tokens": arguments.tokens or (100 if arguments.quick else None),
        "streams": arguments.streams,
        "strategies": tuple(arguments.strategies.split(",")) if arguments.strategies else None,
        "agreements": tuple(map(float, arguments.agreements.split(","))) if arguments.agreements else None,
    }
    given = {name: value for name, value in options.items() if value}
    chosen = [replace(scenario, **given) for scenario in SCENARIOS if scenario.name in selected]
    if arguments.quick and not arguments.agreements:
        chosen = [replace(s, agreements=(s.agreements[0], *s.agreements[-2:])) for s in chosen]
    return chosen


def main() -> int:
    arguments = parse_arguments()
    cells: list[CellReport] = []
    autos: list[dict[str, Any]] = []
    for scenario in choose_scenarios(arguments):
        if scenario.name == "E":
            autos += report_auto(scenario, 24 if arguments.quick else arguments.requests)
        else:
            cells += measure_scenario(scenario, 1 if arguments.quick else arguments.seeds, arguments.answers)
    if arguments.json:
        report = {"cells": [asdict(cell) for cell in cells], "auto": autos}
        arguments.json.write_text(json.dumps(report, indent=1))
    return 0 if all(c.same_text for c in cells) and all(a["same_text"] for a in autos) else 1


if __name__ == "__main__":
    sys.exit(main())
