"""Requests with tools and with reasoning at a real vLLM: with every strategy and draft what its own chat answers.

    vllm serve FOLDER --served-model-name m --enable-auto-tool-choice --tool-call-parser hermes \\
        --chat-template benchmarks/hermes_template.jinja [--enable-scale-out] \\
        [--reasoning-parser deepseek_r1 --default-chat-template-kwargs '{"thinks": true}']
    python benchmarks/server_tools.py --url http://127.0.0.1:8000/v1 [--kind tools|reasoning] [--eager]
        [--strategies race probe score] [--drafts lookup suffix vllm:m@http://127.0.0.1:8001/v1] [--requests 50]
    python benchmarks/server_tools.py --url http://127.0.0.1:8000/v1 --samples 300 --strategies race probe

`tool_requests.py` has the requests. Text, reasoning, names, arguments and finish reason of every contender are compared
with the chat endpoint's own greedy answer, streamed. Contenders rotate, and a request is answered by all of them before
the next begins; ratios are paired, plain's seconds by the contender's, by this program's clock. `--eager` speculates
whether it pays or not, which is for comparing answers; its ratios say nothing.

`--samples` draws so many answers at temperature 1 and compares what they call, by chi-square, with as many of plain's.
It does the same with a fault that it must find: where the draft is right, that is preferred.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from tool_requests import make_tool_requests

from llm_spec import (
    ChatRequest,
    LlmProvider,
    ReferenceDraft,
    Sampling,
    SpeculativeConfig,
    SpeculativeDecoder,
    SpeculativeResult,
    open_provider,
)
from llm_spec.pair_stats import PairStats
from llm_spec.row_stats import DraftAgreementStats, RowCallStats

GREEDY = Sampling(temperature=0.0)
QUESTIONS = (
    "What is 17 plus 25?",
    "Which is the capital of France?",
    "Why is the sky blue?",
    "Name three fruits.",
    "How many days has a leap year?",
    "What is the opposite of hot?",
    "Is 7 a prime number?",
    "Who wrote Hamlet?",
    "What do bees make?",
    "How do you say thank you in German?",
    "What is the largest planet?",
    "Which colours has the flag of Italy?",
    "What is a noun?",
    "How many legs has a spider?",
    "What is water made of?",
    "Where do penguins live?",
    "What comes after Tuesday?",
    "What is half of 90?",
    "Write a sentence about größe and 東京.",
    "What is a synonym of big?",
)


class EagerRows(RowCallStats):
    """Rows that always pay."""

    def estimate_speedup(self, agreement: DraftAgreementStats, step_s: float, max_calls: int) -> float:
        return 1e9

    def estimate_allowed_loss_s(self, elapsed_s: float, step_s: float, max_tokens: int | None) -> float:
        return 1e9

    def estimate_answer_s(self, step_s: float, max_tokens: int | None) -> float:
        return 1e10


class EagerStats(PairStats):
    """Figures by which speculation always pays."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = EagerRows()
        self.rows.add_call_time(8, 0.0)
        self.first_token_s.update(0.0)
        self.token_s.update(1, 0.02)


class Answer(NamedTuple):
    """What is compared, and what it took."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]
    finish_reason: str
    seconds: float
    num_tokens: int
    num_drafted: int
    strategy: str
    plain_reason: str | None
    fallbacks: tuple[str, ...]

    @property
    def message(self) -> tuple[Any, ...]:
        return self[:4]


@dataclass
class Contender:
    name: str
    decoder: SpeculativeDecoder
    answers: list[Answer] = field(default_factory=list[Answer])

    async def answer(self, request: ChatRequest) -> None:
        started_s = time.perf_counter()
        result = await self.decoder.decode(request)
        self.answers.append(make_answer(result, time.perf_counter() - started_s))


def make_answer(result: SpeculativeResult, seconds: float) -> Answer:
    return Answer(
        result.content,
        result.reasoning,
        tuple((call.name, call.arguments) for call in result.tool_calls),
        result.finish_reason,
        seconds,
        0 if result.usage is None else result.usage.answer_tokens,
        result.stats.num_accepted_draft_tokens,
        result.strategy,
        result.plain_reason,
        result.fallbacks,
    )


def list_requests(kind: str, num_requests: int, max_tokens: int) -> list[ChatRequest]:
    if kind == "tools":
        requests = [replace(made.request, prediction=None) for made in make_tool_requests(max_tokens)]
    else:
        requests = [make_reasoning_request(question, max_tokens) for question in QUESTIONS]
    return [replace(request, sampling=GREEDY) for request in requests[:num_requests]]


def make_reasoning_request(question: str, max_tokens: int) -> ChatRequest:
    """With an example: small models reason in the form that they have seen."""
    thought = "<think>The user asks what 2 plus 3 is. That is easy: it is 5.\n</think>\n2 plus 3 is 5."
    messages = [
        {"role": "user", "content": "What is 2 plus 3?"},
        {"role": "assistant", "content": thought},
        {"role": "user", "content": question},
    ]
    return ChatRequest.create(messages, max_tokens=max_tokens)


def open_decoder(target: LlmProvider, draft: Any, strategy: str, *, is_eager: bool) -> SpeculativeDecoder:
    decoder = SpeculativeDecoder(draft, target, SpeculativeConfig(strategy=strategy, stream_always=True))
    if is_eager:
        planner: Any = decoder._planner  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] - nobody should want it
        planner.pair_stats = EagerStats()
    return decoder


def describe(contender: Contender, plain: Contender) -> str:
    pairs = list(zip(contender.answers, plain.answers, strict=True))
    own = contender.answers
    speculated = [(one, other) for one, other in pairs if one.num_drafted]
    ratios = [other.seconds / one.seconds for one, other in pairs]
    fast = [other.seconds / one.seconds for one, other in speculated]
    reasons = Counter(one.plain_reason for one in own if one.plain_reason)
    num_tokens = sum(one.num_tokens for one in own)
    return (
        f"{contender.name:16} same {sum(a.message == b.message for a, b in pairs)}/{len(pairs)}; "
        f"{len(speculated)} with drafted tokens, {sum(a.num_drafted for a in own)} of {num_tokens} tokens; "
        f"median {statistics.median(ratios):.2f}x"
        + (f" ({statistics.median(fast):.2f}x of those)" if fast else "")
        + f", worst {min(ratios):.2f}x, together "
        f"{sum(b.seconds for b in plain.answers) / sum(a.seconds for a in own):.2f}x; "
        f"fallbacks {sum(len(one.fallbacks) for one in own)}; plain {dict(reasons)}"
    )


async def compare(arguments: argparse.Namespace) -> bool:
    target = open_provider(f"vllm:{arguments.model}@{arguments.url}")
    requests = list_requests(arguments.kind, arguments.requests, arguments.max_tokens)
    plain = Contender("plain", open_decoder(target, None, "plain", is_eager=False))
    others = [
        Contender(
            f"{strategy}+{draft.partition('@')[0]}", open_decoder(target, draft, strategy, is_eager=arguments.eager)
        )
        for strategy in arguments.strategies
        for draft in arguments.drafts
    ]
    for request in requests[: arguments.warm_up]:  # on these it is found out what the server can do
        for contender in others:
            await contender.decoder.decode(request)
    await asyncio.sleep(arguments.settle_s)
    turns = [plain, *others]
    ends_s = time.monotonic() + 60 * arguments.minutes
    for index, request in enumerate(requests):
        turns = [*turns[1:], turns[0]]
        for contender in turns:
            await contender.answer(request)
        for contender in others:
            if contender.answers[-1].message != plain.answers[-1].message:
                print(f"  DIFFERS: {contender.name}, request {index}", flush=True)
                print(f"    {plain.answers[-1].message}\n    {contender.answers[-1].message}", flush=True)
        if time.monotonic() > ends_s:
            print(f"stopped after {index + 1} of {len(requests)} requests: {arguments.minutes} minutes are up")
            break
    calls = Counter(min(2, len(one.calls)) for one in plain.answers)
    num_unicode = sum(not "".join(map(str, one.message)).isascii() for one in plain.answers)
    print(
        f"{arguments.kind}: {len(plain.answers)} requests, {sum(one.num_tokens for one in plain.answers)} tokens; "
        f"{calls[1]} with one call, {calls[2]} with several, {calls[0]} with none, {num_unicode} with unicode, "
        f"{sum(bool(one.reasoning) for one in plain.answers)} with reasoning; ended by "
        f"{dict(Counter(one.finish_reason for one in plain.answers))}"
    )
    print(*(describe(contender, plain) for contender in others), sep="\n")
    for contender in turns:
        await contender.decoder.aclose()
    await target.aclose()
    return all(
        one.message == other.message
        for contender in others
        for one, other in zip(contender.answers, plain.answers, strict=True)
    )


# ------------------------------------------------------------------------------------------ sampling


async def sample(arguments: argparse.Namespace) -> bool:
    """Draws of one request's calls, by plain and by each strategy, whose draft is plain's most frequent answer."""
    target = open_provider(f"vllm:{arguments.model}@{arguments.url}")
    base = list_requests("tools", 10, 24)[5]
    request = replace(base, sampling=Sampling(temperature=1.0, top_k=3))
    plain = open_decoder(target, None, "plain", is_eager=False)
    own = await draw(plain, request, arguments.samples)
    (favourite, _), *_ = own.most_common(1)
    written = "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {given}}}\n</tool_call>' for name, given in favourite
    )
    is_right = True
    for strategy in arguments.strategies:
        decoder = open_decoder(target, ReferenceDraft(written), strategy, is_eager=True)
        for _ in range(arguments.warm_up):
            await decoder.decode(base)
        drawn = await draw(decoder, request, arguments.samples)
        other = await draw(plain, request, arguments.samples)
        faulty = prefer(favourite, drawn)
        figures = [compare_draws(own + other, counts) for counts in (drawn, faulty)]
        print(
            f"{strategy}: {len(own | drawn)} different answers; chi-square {figures[0][0]:.1f} of {figures[0][1]} "
            f"degrees of freedom; with the planted fault {figures[1][0]:.1f}"
        )
        is_right = is_right and is_likely(*figures[0]) and not is_likely(*figures[1])
    await target.aclose()
    return is_right


def write_call(name: str, given: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {given}}}\n</tool_call>'


async def draw(decoder: SpeculativeDecoder, request: ChatRequest, num_draws: int) -> Counter[Any]:
    counts: Counter[Any] = Counter()
    gate = asyncio.Semaphore(4)

    async def draw_one() -> None:
        async with gate:
            result = await decoder.decode(request)
            counts[tuple((call.name, call.arguments) for call in result.tool_calls)] += 1

    await asyncio.gather(*(draw_one() for _ in range(num_draws)))
    return counts


def prefer(favourite: Any, counts: Counter[Any]) -> Counter[Any]:
    """The same draws, where a third of what the draft does not say became what it says."""
    faulty = Counter({value: count - count // 3 for value, count in counts.items() if value != favourite})
    faulty[favourite] = counts.total() - faulty.total()
    return faulty


def compare_draws(expected: Counter[Any], counts: Counter[Any]) -> tuple[float, int]:
    """Chi-square of two samples, rare values together, and its degrees of freedom."""
    common = [value for value, count in expected.items() if count >= 12]
    rest = [sample.total() - sum(sample[value] for value in common) for sample in (expected, counts)]
    pairs = [(expected[value], counts[value]) for value in common] + [(rest[0], rest[1])]
    a, b = expected.total(), counts.total()
    total = sum((x * (b / a) ** 0.5 - y * (a / b) ** 0.5) ** 2 / (x + y) for x, y in pairs if x + y)
    return total, max(1, len(pairs) - 1)


def is_likely(chi_square: float, degrees: int) -> bool:
    """Whether it is below what one in about 100,000 exceeds (Wilson and Hilferty)."""
    return chi_square < degrees * (1 - 2 / (9 * degrees) + 4.27 * (2 / (9 * degrees)) ** 0.5) ** 3


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", required=True, help="ends in /v1")
    parser.add_argument("--model", default="m")
    parser.add_argument("--kind", choices=("tools", "reasoning"), default="tools")
    parser.add_argument("--strategies", nargs="+", default=["race", "probe", "score"])
    parser.add_argument("--drafts", nargs="+", default=["lookup", "suffix"])
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--settle-s", type=float, default=0.0, help="seconds for what is still being found out")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--samples", type=int, default=0)
    arguments = parser.parse_args()
    if not asyncio.run(sample(arguments) if arguments.samples else compare(arguments)):
        raise SystemExit("the answers differ")


if __name__ == "__main__":
    main()
