"""How near is `probe` to the best that a real server's own costs allow? For each prompt, both sides in one run.

    python benchmarks/best_rows.py --url http://127.0.0.1:8000/v1 [--model m] [--draft suffix] [--max-tokens 96]
        [--categories edit quote json] [--strategies probe race auto] [--repeats 3] [--json FILE]

The server's costs are measured by calls of this program's own, on the answers themselves: a token of a stream, and a
call of 1, 2, 4 … rows at several places of each answer. A row is a token after a prefix of the answer; what it costs
holds what the server reads again of the prefix (a cache by blocks has none of its last block).

`best` is the shortest time in which rounds one after another could write the answer, if it were known how many of the
draft's next tokens are right at each place: from each place the stream's next token, or a call of as many rows as are
of use. To go on with the stream after a call costs nothing there. So no scheduler of such rounds exceeds it, and one
that has to find out what pays stays below.

Strategies answer in decoders that have answered all prompts once before, by turns with the target alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, NamedTuple

from llm_spec import (
    ChatRequest,
    DraftProvider,
    Sampling,
    SpeculativeConfig,
    SpeculativeDecoder,
    TextDelta,
    open_draft,
    open_provider,
)
from llm_spec.cli.bench.prompts import get_default_prompts
from llm_spec.contract.endpoint import Discoverable, TokenEndpoint

WIDTHS: Final = (1, 2, 4, 8, 16, 32)
NUM_PLACES: Final = 3  # of an answer, at which calls of each width are timed
NEAR: Final = 0.9  # of the best
GREEDY: Final = Sampling(temperature=0.0)


@dataclass(frozen=True)
class ServerCosts:
    """Seconds of a stream's token, and of a call of so many rows."""

    token_s: float
    call_s: dict[int, float]

    def estimate_call_s(self, num_rows: int) -> float:
        """That of the widths between which it lies, along a line."""
        below = max(width for width in self.call_s if width <= num_rows)
        above = min((width for width in self.call_s if width >= num_rows), default=below)
        if below == above:
            return self.call_s[below]
        share = (num_rows - below) / (above - below)
        return self.call_s[below] + share * (self.call_s[above] - self.call_s[below])


class Contenders(NamedTuple):
    """The decoders by the names of their strategies, `plain` among them, and what they all have."""

    endpoint: TokenEndpoint
    draft: DraftProvider
    decoders: dict[str, SpeculativeDecoder]


@dataclass(frozen=True)
class StreamedAnswer:
    """What the target wrote, and the seconds from its first token to its last one."""

    token_ids: list[int]
    texts: list[str]
    rest_s: float


@dataclass(frozen=True)
class Report:
    """Of one prompt: seconds, medians of the repeats."""

    name: str
    num_tokens: int
    plain_s: float
    best_s: float
    taken_s: dict[str, float]
    costs: ServerCosts


async def stream_answer(endpoint: TokenEndpoint, request: ChatRequest) -> StreamedAnswer:
    times, token_ids, texts = list[float](), list[int](), list[str]()
    async with endpoint.stream_chat(request) as events:
        async for event in events:
            if isinstance(event, TextDelta) and event.token_ids:
                times.append(time.perf_counter())
                token_ids += event.token_ids
                texts += [event.text, *("" for _ in event.token_ids[1:])]
    return StreamedAnswer(token_ids, texts, times[-1] - times[0])


async def measure_call_s(endpoint: TokenEndpoint, prompt_ids: list[int], answer: StreamedAnswer) -> dict[int, float]:
    """Of each width, the mean over places of the answer: the time of the second call, so that all before is cached."""
    num_tokens, call_s = len(answer.token_ids), dict[int, float]()
    for width in (width for width in WIDTHS if width < num_tokens):
        starts = [(num_tokens - width) * place // NUM_PLACES for place in range(NUM_PLACES)]
        times = list[float]()
        for start in starts:
            ends = range(len(prompt_ids) + start, len(prompt_ids) + start + width)
            rows = [(prompt_ids + answer.token_ids)[:end] for end in ends]
            await endpoint.sample_next([rows[0]], GREEDY)
            began_s = time.perf_counter()
            await endpoint.sample_next(rows, GREEDY)
            times.append(time.perf_counter() - began_s)
        call_s[width] = statistics.fmean(times)
    return call_s


async def count_right_tokens(draft: DraftProvider, request: ChatRequest, texts: Sequence[str]) -> list[int]:
    """At each place of an answer, how many of the draft's next tokens are the target's."""
    answer, numbers = "".join(texts), list[int]()
    for place in range(len(texts)):
        start = len("".join(texts[:place]))
        drafted = ""
        continued = ChatRequest.create(request.messages, max_tokens=request.max_tokens, prefix=answer[:start])
        async with draft.draft(continued, max(WIDTHS)) as pieces:
            async for piece in pieces:
                drafted += piece.text
        num_right, end = 0, start
        for text in texts[place:]:
            end += len(text)
            if not drafted.startswith(answer[start:end]):
                break
            num_right += 1
        numbers.append(num_right)
    return numbers


def find_best_s(num_right: Sequence[int], costs: ServerCosts) -> float:
    """The shortest time from the first token on, by dynamic programming from the answer's end."""
    left_s = [0.0] * (len(num_right) + 1)
    for place in reversed(range(1, len(num_right))):
        most_accepted = min(num_right[place], max(WIDTHS) - 1, len(num_right) - place - 1)
        calls = (costs.estimate_call_s(1 + num) + left_s[place + 1 + num] for num in range(1, most_accepted + 1))
        left_s[place] = min([costs.token_s + left_s[place + 1], *calls])
    return left_s[1]


async def time_answer(decoder: SpeculativeDecoder, request: ChatRequest, text: str, name: str) -> float:
    began_s = time.perf_counter()
    result = await decoder.decode(request)
    taken_s = time.perf_counter() - began_s
    if result.content != text:
        print(f"  another text: {name}: {result.content!r} for {text!r}", flush=True)
    return taken_s


async def measure_prompt(
    name: str,
    request: ChatRequest,
    contenders: Contenders,
    num_repeats: int,
) -> Report:
    endpoint, decoders = contenders.endpoint, contenders.decoders
    answer = await stream_answer(endpoint, request)
    call_s = await measure_call_s(endpoint, await endpoint.encode_chat(request), answer)
    costs = ServerCosts(answer.rest_s / max(1, len(answer.token_ids) - 1), call_s)
    taken_s: dict[str, list[float]] = {strategy: [] for strategy in decoders}
    for turn in range(num_repeats):
        names = list(decoders)
        for strategy in names[turn % len(names) :] + names[: turn % len(names)]:
            taken_s[strategy].append(await time_answer(decoders[strategy], request, "".join(answer.texts), strategy))
    num_right = await count_right_tokens(contenders.draft, request, answer.texts)
    medians = {strategy: statistics.median(times) for strategy, times in taken_s.items()}
    plain_s = medians.pop("plain")
    # the first token, and what is not the stream's own steps, is the same for all
    best_s = plain_s - answer.rest_s + find_best_s(num_right, costs)
    return Report(name, len(answer.token_ids), plain_s, best_s, medians, costs)


def format_report(report: Report) -> str:
    taken = ", ".join(f"{name} {report.plain_s / seconds:.2f}x" for name, seconds in report.taken_s.items())
    calls = " ".join(f"{width}:{seconds * 1e3:.0f}" for width, seconds in report.costs.call_s.items())
    return (
        f"{report.name:8} {report.num_tokens:3} tokens, {report.plain_s:.2f} s; best "
        f"{report.plain_s / report.best_s:.2f}x; {taken}; a token {report.costs.token_s * 1e3:.0f} ms, "
        f"a call by rows, ms: {calls}"
    )


async def measure_prompts(arguments: argparse.Namespace) -> list[Report]:
    target, draft = open_provider(f"vllm:{arguments.model}@{arguments.url}"), open_draft(arguments.draft)
    decoders = {
        name: SpeculativeDecoder(draft, target, SpeculativeConfig(strategy=name))
        for name in ("plain", *arguments.strategies)
    }
    if isinstance(target, Discoverable):
        await target.discover("token_endpoint")
    if target.capabilities.token_endpoint is None:
        raise SystemExit(f"{arguments.url} takes no token ids")
    contenders = Contenders(target.capabilities.token_endpoint, draft, decoders)
    prompts = [prompt for prompt in get_default_prompts("vllm:m") if prompt.category in arguments.categories]
    reports = list[Report]()
    requests = [
        ChatRequest.create(prompt.turns[0], max_tokens=arguments.max_tokens, temperature=0.0) for prompt in prompts
    ]
    for request in requests:  # what pays is found out on these
        for decoder in decoders.values():
            await decoder.decode(request)
    for prompt, request in zip(prompts, requests, strict=True):
        report = await measure_prompt(prompt.id, request, contenders, arguments.repeats)
        print(format_report(report), flush=True)
        reports.append(report)
    for decoder in decoders.values():
        await decoder.aclose()
    await target.aclose()
    return reports


def print_summary(reports: Sequence[Report]) -> None:
    ratios = {"best": [report.plain_s / report.best_s for report in reports], "plain": [1.0] * len(reports)}
    for strategy in reports[0].taken_s:
        ratios[strategy] = [report.plain_s / report.taken_s[strategy] for report in reports]
    print("               median  total  worst  of the best: median  prompts with at least .9")
    for name, values in ratios.items():
        taken_s = sum(report.plain_s / value for report, value in zip(reports, values, strict=True))
        shares = [value / best for value, best in zip(values, ratios["best"], strict=True)]
        print(
            f"{name:14} {statistics.median(values):6.2f} {sum(report.plain_s for report in reports) / taken_s:6.2f}"
            f" {min(values):6.2f} {statistics.median(shares):20.2f} "
            f"{sum(share >= NEAR for share in shares):10} of {len(shares)}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="ends in /v1")
    parser.add_argument("--model", default="m")
    parser.add_argument("--draft", default="suffix")
    parser.add_argument("--strategies", nargs="+", default=["probe", "race", "auto"])
    parser.add_argument("--categories", nargs="+", default=["edit", "quote", "json"])
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the reports to this file")
    arguments = parser.parse_args()
    reports = asyncio.run(measure_prompts(arguments))
    print_summary(reports)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(report) for report in reports], indent=1))


if __name__ == "__main__":
    main()
