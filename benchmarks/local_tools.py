"""Requests with tools on a real model in this process: with every draft what the target alone answers, and how fast.

    python benchmarks/local_tools.py --model torch:FOLDER [--draft SPEC] [--contenders lookup suffix ...]
        [--requests 50] [--skip 0] [--temperatures 0 0.7] [--max-tokens 48] [--minutes 60]

The folder's chat template must list `tools`, show calls in Hermes form, and name `</think>` if reasoning is to be
reported apart. `llm-spec bench` has no requests with tools; `tool_requests.py` has these. Text, reasoning, names,
arguments and finish reason of every contender are compared with plain's. Where transformers is installed, so are the
calls with what its own parser reads in the raw text. `--draft` adds a draft model, alone and behind lookup. A prompt is
read before it is answered the first time. Contenders rotate. A request is answered by all of them before the next
begins: the table holds for what has run when the minutes are up. Seconds are of whole answers, by this program's clock.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from tool_requests import ToolRequest, make_tool_requests

from llm_spec import (
    CascadeDraft,
    ChatRequest,
    DraftProvider,
    LlmProvider,
    PromptLookup,
    ProviderDraft,
    Sampling,
    SpeculativeDecoder,
    SuffixDraft,
    open_provider,
)
from llm_spec.contract.token_model import DraftToken, TokenDraft, TokenModel, TokenSampler
from llm_spec.testing import RandomDraft

HERMES = {  # transformers' own notation of the format
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "content": {},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}


class Answer(NamedTuple):
    """What is compared, and what it took."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]  # name and arguments, as they were written
    finish_reason: str
    seconds: float
    num_tokens: int
    num_accepted: int  # tokens that a draft had proposed

    @property
    def message(self) -> tuple[Any, ...]:
        return self[:4]


class Contender(NamedTuple):
    """A way to answer; `predicts`: the request has its prediction."""

    decoder: SpeculativeDecoder
    predicts: bool = False

    async def answer(self, request: ChatRequest) -> Answer:
        request = request if self.predicts else replace(request, prediction=None)
        started_s = time.perf_counter()
        result = await self.decoder.decode(request)
        return Answer(
            result.content,
            result.reasoning,
            tuple((call.name, call.arguments) for call in result.tool_calls),
            result.finish_reason,
            time.perf_counter() - started_s,
            sum(report.num_emitted_tokens for report in result.rounds),
            result.stats.num_accepted_draft_tokens,
        )


class RecordingLookup(PromptLookup):
    """Prompt lookup that keeps what the model wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.answer_ids: list[int] = []  # of the latest answer; shared with the copies that requests get

    def open_token_draft_for_request(
        self, request: ChatRequest | None, target: TokenModel, choose: TokenSampler, prompt_ids: Sequence[int]
    ) -> TokenDraft:
        self.answer_ids.clear()
        draft = super().open_token_draft_for_request(request, target, choose, prompt_ids)
        return RecordingTokenDraft(draft, self.answer_ids, prompt_ids)


class RecordingTokenDraft:
    def __init__(self, draft: TokenDraft, answer_ids: list[int], prompt_ids: Sequence[int]) -> None:
        self._draft = draft
        self._answer_ids = answer_ids
        self._context_ids = prompt_ids
        self._num_prompt_tokens = len(prompt_ids)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._draft, name)

    def propose(self, context_ids: Sequence[int]) -> Iterator[DraftToken]:
        self._context_ids = context_ids
        return self._draft.propose(context_ids)

    def close(self) -> None:
        self._answer_ids.extend(self._context_ids[self._num_prompt_tokens :])
        self._draft.close()


def read_by_transformers(text: str) -> list[tuple[str, Any]] | None:
    """The calls that transformers reads in a text; None: some of it is not valid to it, or it is not installed."""
    try:
        parsing: Any = importlib.import_module("transformers.utils.chat_parsing")
        message = parsing.parse_response(text, HERMES, prefix="")
        return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    except (ImportError, ValueError, KeyError, TypeError):
        return None


@dataclass
class Table:
    """The answers at one temperature."""

    temperature: float
    answers: dict[str, list[Answer]]
    parsings: Counter[str] = field(default_factory=Counter[str])

    def compare_parsers(self, request: ChatRequest, answer: Answer, raw: str) -> None:
        """Count how our calls in an answer compare with those that transformers reads in its raw text.

        Calls of tools that the request does not have, and one that the answer's end has cut off, are text here.
        """
        offered = {tool["function"]["name"] for tool in request.tools}
        ours = [(name, json.loads(arguments)) for name, arguments in answer.calls]
        theirs = read_by_transformers(raw)
        if theirs is None:
            outcome = "not read by transformers"
        elif ours == theirs:
            outcome = "equal"
        elif ours == [call for call in theirs[: raw.count("</tool_call>")] if call[0] in offered]:
            outcome = "equal but for tools that are not there and a cut end"
        else:
            outcome = "different"
            print(f"  PARSED OTHERWISE: {raw!r}: {ours} here, {theirs} by transformers", flush=True)
        self.parsings[outcome] += 1

    def print_rows(self) -> None:
        plain = self.answers["plain"]
        messages = {one.message for one in plain}
        calls = Counter(min(2, len(one.calls)) for one in plain)
        num_unicode = sum(not json.dumps(one.message, ensure_ascii=False).isascii() for one in plain)
        print(
            f"temperature {self.temperature}: {len(plain)} requests, {len(messages)} different answers of "
            f"{sum(one.num_tokens for one in plain)} tokens: {calls[1]} with one call, {calls[2]} with several, "
            f"{calls[0]} with none; {sum(bool(one.reasoning) for one in plain)} with reasoning, {num_unicode} with "
            f"unicode; ended by {dict(Counter(one.finish_reason for one in plain))}"
        )
        print(f"  calls here and by transformers: {dict(self.parsings)}")
        for name, answers in self.answers.items():
            same = sum(one.message == other.message for one, other in zip(answers, plain, strict=True))
            ratio = statistics.median(other.seconds / one.seconds for one, other in zip(answers, plain, strict=True))
            share = sum(one.num_accepted for one in answers) / sum(one.num_tokens for one in answers)
            print(f"  {name:16} same {same}/{len(plain)}  tokens drafted {share:4.0%}  {ratio:.2f}x", flush=True)


def make_contenders(
    target: LlmProvider, recording: RecordingLookup, model: DraftProvider | None, chosen: Sequence[str]
) -> dict[str, Contender]:
    """All, or those that are chosen; plain and lookup, which keeps the raw text, are always there."""
    drafts: dict[str, DraftProvider | None] = {
        "plain": None,
        "lookup": recording,
        "suffix": SuffixDraft(),
        "lookup+suffix": CascadeDraft(PromptLookup(), SuffixDraft()),
        "random": RandomDraft(),
    }
    if model is not None:
        drafts |= {"model": model, "lookup+model": CascadeDraft(PromptLookup(), model)}
    contenders = {name: Contender(SpeculativeDecoder(target=target, draft=draft)) for name, draft in drafts.items()}
    predicting = {"prediction": None, "lookup+prediction": PromptLookup()}
    contenders |= {
        n: Contender(SpeculativeDecoder(target=target, draft=d), predicts=True) for n, d in predicting.items()
    }
    selected = {"plain", "lookup", *(chosen or contenders)}
    assert selected <= contenders.keys(), f"contenders are {', '.join(contenders)}"
    return {name: contender for name, contender in contenders.items() if name in selected}


async def run(
    target: LlmProvider,
    contenders: dict[str, Contender],
    recording: RecordingLookup,
    requests: Sequence[ToolRequest],
    temperatures: Sequence[float],
) -> AsyncIterator[list[Table]]:
    """The tables after each request."""
    token_model = target.capabilities.token_model
    assert token_model is not None, f"{target.name} is not a model in this process"
    tables = [Table(temperature, {name: [] for name in contenders}) for temperature in temperatures]
    names = list(contenders)
    for kind, request, seed in requests:
        for table in tables:
            seeded = replace(request, sampling=Sampling(temperature=table.temperature, seed=seed))
            names = [*names[1:], names[0]]
            if table is tables[0]:
                await contenders["plain"].answer(replace(seeded, max_tokens=1))  # reads the prompt
            for name in names:
                table.answers[name].append(await contenders[name].answer(seeded))
            plain = table.answers["plain"][-1]
            table.compare_parsers(request, plain, token_model.tokenizer.decode(recording.answer_ids))
            for name, answers in table.answers.items():
                if answers[-1].message != plain.message:
                    print(f"  DIFFERS: {name}, request {seed} ({kind}), {table.temperature}", flush=True)
                    print(f"    {plain.message}\n    {answers[-1].message}", flush=True)
        yield tables


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True, help="a local model: torch:FOLDER or onnx:FOLDER")
    parser.add_argument("--draft", help="a draft model, such as torch:FOLDER?layers=8")
    parser.add_argument("--contenders", nargs="+", default=[], help="by default all")
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--skip", type=int, default=0, help="requests, to share them among processes")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--minutes", type=float, default=60.0)
    arguments = parser.parse_args()
    ends_s = time.monotonic() + 60 * arguments.minutes
    model = None if arguments.draft is None else ProviderDraft(open_provider(arguments.draft))
    requests = make_tool_requests(arguments.max_tokens)[arguments.skip :][: arguments.requests]
    target, recording = open_provider(arguments.model), RecordingLookup()
    contenders = make_contenders(target, recording, model, arguments.contenders)
    tables: list[Table] = []
    async for tables in run(target, contenders, recording, requests, arguments.temperatures):
        num_done = len(tables[0].answers["plain"])
        print(f"{num_done}/{len(requests)}", end=" ", flush=True)
        if time.monotonic() > ends_s:
            print(f"stopped after {num_done} of {len(requests)} requests: {arguments.minutes} minutes are up", end="")
            break
    print()
    for table in tables:
        table.print_rows()


if __name__ == "__main__":
    asyncio.run(main())
