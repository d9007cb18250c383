"""What does `race` give at a server on which each stream costs the others time? By virtual clock: the same everywhere.

    python benchmarks/race_costs.py [--pairs 16] [--json FILE]

The server writes a token of every stream in each of its steps, as vLLM does. A step is longer by a share for each
further stream, and by some steps' time for each prompt that begins to be read in it. The draft copies: it is right for
long in one part of a text, and mostly wrong in another. Each decoder answers 16 requests (half of them mostly copied, a
quarter half so, a quarter not) of 96 tokens, with four streams, and begins without experience.

Ratios are the time of a server with one stream / the time taken. `first ten` is the least of all decoders, of their
first ten requests together; `worst` the least of all answers. `says` is the mean of the reported speedup / the clock's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Final, Literal

from never_slower import make_answer

from llm_spec import ChatRequest, Sampling, SpeculativeConfig, SpeculativeDecoder
from llm_spec.contract.draft import DraftPiece
from llm_spec.contract.endpoint import SampledToken
from llm_spec.contract.events import Finish, StreamEvent, TextDelta, Usage
from llm_spec.measure.tokens import split_into_pieces
from llm_spec.testing.clock import run_virtual
from llm_spec.testing.simulated import SimulatedTarget

Kind = Literal["copy", "mixed", "open"]

STEP_S: Final = 0.025
STEP_NOISE: Final = 0.05  # standard deviation, as a share of a step
NUM_TOKENS: Final = 96
NUM_STREAMS: Final = 4
KINDS: Final[tuple[Kind, ...]] = ("copy", "open", "mixed", "copy") * 4
NUM_FIRST: Final = 10
COPIED_TOKENS: Final = {"copy": 40, "mixed": 25, "open": 8}  # in a row, on average
OTHER_TOKENS: Final = {"copy": 4, "mixed": 15, "open": 60}
RIGHT_IN_COPY: Final = 0.97
RIGHT_ELSEWHERE: Final = 0.25


@dataclass(frozen=True)
class StreamCosts:
    """In steps: what a prompt takes that begins to be read, and what each further stream adds to every step."""

    opening: float
    beside: float


COSTS: Final = (
    StreamCosts(0.0, 0.0),
    StreamCosts(0.3, 0.02),
    StreamCosts(0.8, 0.05),
    StreamCosts(1.5, 0.05),
    StreamCosts(3.0, 0.1),
    StreamCosts(3.0, 0.5),
)


class BatchTarget(SimulatedTarget):
    """A target that writes a token of each of its streams in every step."""

    def __init__(self, costs: StreamCosts, seed: int) -> None:
        super().__init__("", by_ids=True, num_prompt_tokens=100)
        self.capabilities = replace(self.capabilities, shares_prompt_cache=True)
        self._costs = costs
        self._noise = random.Random(seed)  # noqa: S311 - a reproducible simulation, no secret
        self._beginning: list[asyncio.Queue[None]] = []
        self._running: list[asyncio.Queue[None]] = []
        self._stepping: asyncio.Task[None] | None = None

    def set_answer(self, answer: str) -> None:
        self._pieces = split_into_pieces(answer)

    async def sample_next(self, prefixes: Sequence[Sequence[int]], sampling: Sampling) -> list[SampledToken]:
        async with self._join_batch() as tokens:
            await tokens.get()
        return [self._get_answer_token_after(prefix) for prefix in prefixes]

    async def _stream_rest_of_answer(
        self, written: Sequence[str], max_tokens: int | None, *, with_ids: bool
    ) -> AsyncGenerator[StreamEvent]:
        rest = self._pieces[len(written) :][:max_tokens]
        async with self._join_batch() as tokens:
            for piece in rest:
                await tokens.get()
                yield TextDelta(piece, token_ids=tuple(self._encode_pieces([piece])) if with_ids else None)
        yield Finish("stop", Usage(input_tokens=100 + len(written), output_tokens=len(rest)), "eos")

    @asynccontextmanager
    async def _join_batch(self) -> AsyncGenerator[asyncio.Queue[None]]:
        tokens: asyncio.Queue[None] = asyncio.Queue()
        self._beginning.append(tokens)
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._run_steps())
        try:
            yield tokens
        finally:
            for streams in (self._beginning, self._running):
                if tokens in streams:
                    streams.remove(tokens)

    async def _run_steps(self) -> None:
        while self._beginning or self._running:
            num_beginning, num_others = len(self._beginning), len(self._beginning) + len(self._running) - 1
            self._running += self._beginning
            self._beginning.clear()
            read_steps = self._costs.opening * num_beginning if num_others else 0.0
            num_steps = 1.0 + self._costs.beside * num_others + read_steps
            await asyncio.sleep(STEP_S * num_steps * max(0.5, self._noise.gauss(1.0, STEP_NOISE)))
            for tokens in list(self._running):
                tokens.put_nowait(None)


class CopyingDraft:
    """A draft that needs no time, and is right where a text was copied."""

    name = "copying"

    def set_answer(self, answer: str, kind: Kind, seed: int) -> None:
        rng = random.Random(seed)  # noqa: S311 - a reproducible draft, no secret
        self._pieces, self._is_right = split_into_pieces(answer), list[bool]()
        is_copied = kind == "copy" or (kind == "mixed" and rng.random() < 0.5)
        while len(self._is_right) < len(self._pieces):
            mean = (COPIED_TOKENS if is_copied else OTHER_TOKENS)[kind]
            rate = RIGHT_IN_COPY if is_copied else RIGHT_ELSEWHERE
            self._is_right += [rng.random() < rate for _ in range(1 + int(rng.expovariate(1 / mean)))]
            is_copied = not is_copied

    @asynccontextmanager
    async def draft(self, request: ChatRequest, max_tokens: int) -> AsyncGenerator[AsyncIterator[DraftPiece]]:
        async with aclosing(self._write(len(split_into_pieces(request.prefix)), max_tokens)) as pieces:
            yield pieces

    async def aclose(self) -> None:
        """Nothing to release."""

    async def _write(self, start: int, max_tokens: int) -> AsyncGenerator[DraftPiece]:
        end = min(start + max_tokens, len(self._pieces))
        for at in range(start, end):
            await asyncio.sleep(0)
            yield DraftPiece(self._pieces[at] if self._is_right[at] else " other")
        yield DraftPiece("", finish_reason="stop" if end == len(self._pieces) else "length")


@dataclass(frozen=True)
class Answer:
    kind: Kind
    ratio: float
    reported_speedup: float | None


async def answer_requests(costs: StreamCosts, seed: int) -> list[Answer]:
    """All requests of one decoder."""
    target, draft = BatchTarget(costs, seed), CopyingDraft()
    config = SpeculativeConfig(strategy="race", max_concurrent_streams=NUM_STREAMS, baseline_every=0)
    request = ChatRequest.create("Tell me.", temperature=0.0, max_tokens=NUM_TOKENS + 8)
    answers: list[Answer] = []
    async with SpeculativeDecoder(target=target, draft=draft, config=config) as decoder:
        for number, kind in enumerate(KINDS):
            text = make_answer(NUM_TOKENS, 1000 * seed + number)
            target.set_answer(text)
            draft.set_answer(text, kind, 1000 * seed + number)
            began_s = asyncio.get_running_loop().time()
            result = await decoder.decode(request)
            taken_s = asyncio.get_running_loop().time() - began_s
            if result.content != text:
                raise SystemExit(f"not the target's own text: {costs}, decoder {seed}, answer {number}")
            answers.append(Answer(kind, NUM_TOKENS * STEP_S / taken_s, result.speedup))
    return answers


def run_decoder(costs: StreamCosts, seed: int) -> list[Answer]:
    return run_virtual(answer_requests(costs, seed))


@dataclass(frozen=True)
class Report:
    """Of one server's costs."""

    costs: StreamCosts
    total: float
    first_ten: float
    worst: float
    by_kind: dict[Kind, float]
    says: float


def summarize(costs: StreamCosts, decoders: Sequence[Sequence[Answer]]) -> Report:
    def total_ratio(answers: Sequence[Answer]) -> float:
        return len(answers) / sum(1 / answer.ratio for answer in answers)

    answers = [answer for decoder in decoders for answer in decoder]
    reported = [answer.reported_speedup / answer.ratio for answer in answers if answer.reported_speedup is not None]
    return Report(
        costs=costs,
        total=total_ratio(answers),
        first_ten=min(total_ratio(decoder[:NUM_FIRST]) for decoder in decoders),
        worst=min(answer.ratio for answer in answers),
        by_kind={kind: statistics.median(a.ratio for a in answers if a.kind == kind) for kind in dict.fromkeys(KINDS)},
        says=statistics.fmean(reported) if reported else 1.0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=16, help="decoders for each server")
    parser.add_argument("--json", type=Path, help="write the reports to this file")
    arguments = parser.parse_args()
    print("opening  beside  total  first ten  worst   copy  mixed   open   says")
    reports: list[Report] = []
    with ProcessPoolExecutor() as processes:
        for costs in COSTS:
            pairs = list(product([costs], range(arguments.pairs)))
            report = summarize(costs, list(processes.map(run_decoder, *zip(*pairs, strict=True))))
            reports.append(report)
            kinds = "  ".join(f"{report.by_kind[kind]:5.2f}" for kind in ("copy", "mixed", "open"))
            print(
                f"{costs.opening:7.1f}  {costs.beside:6.2f}  {report.total:5.2f}  {report.first_ten:9.2f}  "
                f"{report.worst:5.2f}  {kinds}  {report.says:5.2f}",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(report) for report in reports], indent=1))


if __name__ == "__main__":
    main()
