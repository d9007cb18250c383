"""Requests with tools and with reasoning at a real vLLM: with every strategy and draft what its own chat answers.

    vllm serve FOLDER --served-model-name m --enable-auto-tool-choice --tool-call-parser hermes \\
        --chat-template benchmarks/hermes_template.jinja [--enable-scale-out] \\
        [--reasoning-parser olmo3 --default-chat-template-kwargs '{"thinks": true}']
    python benchmarks/server_tools.py --url http://127.0.0.1:8000/v1 [--kind tools|reasoning] [--eager]
        [--strategies race] [--drafts lookup suffix prediction vllm:m@http://127.0.0.1:8001/v1]
        [--constrained]

`llm-spec bench` has no requests with tools. `tool_requests.py` has the requests. Text, reasoning, names, arguments and
finish reason of every contender are compared with the chat endpoint's own greedy answer, streamed. Contenders rotate,
and a request is answered by all of them before the next begins; ratios are paired, plain's seconds by the contender's,
by this program's clock. `--eager` speculates in every request, whether it pays or not, with all contenders at once;
that is for comparing answers, and its ratios say nothing. A draft named `prediction` is the request's own guess at its
answer.

vLLM takes reasoning for ended where its mark is in the prompt. In `--example`, an answer before the question, it has to
be written in other tokens than those of the mark: OLMo's parser knows it by its text, others by a token of its own.

`--constrained` makes the tools strict, and has the answers that reason be JSON of a schema; only `race` takes these.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from tool_requests import TEXT, make_tool_requests

from llm_spec import (
    ChatRequest,
    ChatResponse,
    Fixed,
    LlmProvider,
    Sampling,
    SpeculativeConfig,
    SpeculativeDecoder,
    SpeculativeFinish,
    SpeculativeResult,
    open_provider,
)
from llm_spec.contract.response import ChatResponseBuilder
from llm_spec.measure.load_stats import ExtraStreamStats
from llm_spec.measure.pair_stats import PairStats
from llm_spec.measure.row_stats import DraftAgreementStats, RowCallStats
from llm_spec.measure.run_stats import DraftRunStats

GREEDY = Sampling(temperature=0.0)
EAGER_ROWS = 4  # drafted tokens in a call
EXAMPLE = "<think><p>The user asks what 2 plus 3 is. It is 5.</p></think>\n2 plus 3 is 5."
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


class EagerStreams(ExtraStreamStats):
    """Streams that cost nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.num_extra = 8

    @property
    def opening_cost(self) -> float:
        return 0.0

    @property
    def slowdown(self) -> float:
        return 0.0


class EagerRuns(DraftRunStats):
    """A draft that is trusted, however often it was wrong."""

    def estimate_rate(self, run_length: int) -> float:
        return 0.9


class EagerStats(PairStats):
    """Figures by which speculation always pays."""

    def __init__(self) -> None:
        super().__init__()
        self.streams, self.runs = EagerStreams(), EagerRuns()
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
    takes_prediction: bool = False
    answers: list[Answer] = field(default_factory=list[Answer])

    def make_own_request(self, request: ChatRequest) -> ChatRequest:
        return request if self.takes_prediction else replace(request, prediction=None)

    async def answer(self, request: ChatRequest) -> None:
        """Streamed; what came piece by piece has to be what the result says."""
        request = self.make_own_request(request)
        started_s, builder = time.perf_counter(), ChatResponseBuilder()
        response: ChatResponse | None = None
        result: SpeculativeResult | None = None
        async with self.decoder.stream(request) as events:
            async for event in events:
                response = builder.add_event(event)
                result = event.result if isinstance(event, SpeculativeFinish) else None
        seconds = time.perf_counter() - started_s
        if response is None or result is None:
            raise SystemExit(f"{self.name} ended without a result")
        answer = make_answer(result, seconds)
        calls = tuple((call.name, call.arguments) for call in response.message.tool_calls)
        if answer.message != (response.message.text, response.reasoning, calls, response.finish_reason):
            raise SystemExit(f"{self.name} streamed something else than its result: {response} {answer}")
        self.answers.append(answer)


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


def list_requests(kind: str, max_tokens: int, example: str, *, is_constrained: bool) -> list[ChatRequest]:
    if kind == "tools":
        requests = [made.request for made in make_tool_requests(max_tokens)]
    else:
        requests = [make_reasoning_request(question, max_tokens, example) for question in QUESTIONS]
    return [replace(constrain(request) if is_constrained else request, sampling=GREEDY) for request in requests]


def constrain(request: ChatRequest) -> ChatRequest:
    """With strict tools; without tools, with an answer that is JSON of a schema."""
    if request.tools:
        functions = [{**tool["function"], "strict": True} for tool in request.tools]
        return replace(request, tools=[{"type": "function", "function": function} for function in functions])
    schema = {"type": "object", "properties": {"answer": TEXT}, "required": ["answer"], "additionalProperties": False}
    return replace(
        request, response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    )


def make_reasoning_request(question: str, max_tokens: int, example: str) -> ChatRequest:
    """With an example: small models reason in the form that they have seen."""
    messages = [
        {"role": "user", "content": "What is 2 plus 3?"},
        {"role": "assistant", "content": example},
        {"role": "user", "content": question},
    ]
    return ChatRequest.create(messages, max_tokens=max_tokens)


def open_decoder(target: LlmProvider, draft: Any, strategy: str, *, is_eager: bool) -> SpeculativeDecoder:
    config = SpeculativeConfig(strategy=strategy, stream_always=True)
    if is_eager:
        config = replace(config, baseline_every=0, lookahead=Fixed(EAGER_ROWS))
    decoder = SpeculativeDecoder(target=target, draft=draft, config=config)
    if is_eager:
        planner: Any = decoder._planner  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] - nobody should want it
        planner.pair_stats = EagerStats()
    return decoder


def open_contender(target: LlmProvider, strategy: str, draft: str, *, is_eager: bool) -> Contender:
    """`prediction` stands for the request's own guess at its answer."""
    takes_prediction = draft == "prediction"
    decoder = open_decoder(target, None if takes_prediction else draft, strategy, is_eager=is_eager)
    return Contender(f"{strategy}+{draft.partition('@')[0]}", decoder, takes_prediction)


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
    requests = list_requests(
        arguments.kind, arguments.max_tokens, arguments.example, is_constrained=arguments.constrained
    )[arguments.first : arguments.first + arguments.requests]
    plain = Contender("plain", open_decoder(target, None, "plain", is_eager=False))
    unstreamed = SpeculativeDecoder(target=target, draft=None, config=SpeculativeConfig(strategy="plain"))
    num_unstreamed = 0  # of the server's own answers, that are the same without streaming
    others = [
        open_contender(target, strategy, draft, is_eager=arguments.eager)
        for strategy in arguments.strategies
        for draft in arguments.drafts
    ]
    for request in requests[: arguments.warm_up]:  # on these it is found out what the server can do
        for contender in others:
            await contender.decoder.decode(contender.make_own_request(request))
    await asyncio.sleep(arguments.settle_s)
    turns = [plain, *others]
    ends_s = time.monotonic() + 60 * arguments.minutes
    for index, request in enumerate(requests):
        turns = [*turns[1:], turns[0]]
        if arguments.eager:
            await asyncio.gather(*(contender.answer(request) for contender in turns))
        else:
            for contender in turns:
                await contender.answer(request)
        whole = make_answer(await unstreamed.decode(replace(request, prediction=None)), 0.0)
        num_unstreamed += whole.message == plain.answers[-1].message
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
    print(f"the server's own answers are the same without streaming in {num_unstreamed}")
    print(*(describe(contender, plain) for contender in others), sep="\n")
    for contender in turns:
        await contender.decoder.aclose()
    await target.aclose()
    return all(
        one.message == other.message
        for contender in others
        for one, other in zip(contender.answers, plain.answers, strict=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", required=True, help="ends in /v1")
    parser.add_argument("--model", default="m")
    parser.add_argument("--kind", choices=("tools", "reasoning"), default="tools")
    parser.add_argument("--strategies", nargs="+", default=["race"])
    parser.add_argument("--drafts", nargs="+", default=["lookup", "suffix"])
    parser.add_argument("--example", default=EXAMPLE, help="an answer with reasoning, as the model is to write them")
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--first", type=int, default=0, help="the first of the requests")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--settle-s", type=float, default=0.0, help="seconds for what is still being found out")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--constrained", action="store_true")
    arguments = parser.parse_args()
    if not asyncio.run(compare(arguments)):
        raise SystemExit("the answers differ")


if __name__ == "__main__":
    main()
