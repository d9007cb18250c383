"""Requests with tools on a real model in this process: with every draft what the target alone answers, and how fast.

    python benchmarks/local_tools.py --model torch:FOLDER [--requests 50] [--temperatures 0 0.7] [--max-tokens 96]

The folder's chat template must list `tools` and show calls in Hermes form. The requests have one example of a call in
the conversation; some are to be answered by a call (of one tool or two, with unicode or nested arguments), some by
text. Text, reasoning, names, arguments and finish reason are compared; where transformers is installed, so are the
calls with what its own parser reads. Contenders rotate; seconds are of whole answers, by this program's clock.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import itertools
import json
import statistics
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any, NamedTuple

from llm_spec import (
    CascadeDraft,
    ChatRequest,
    DraftCapabilities,
    DraftPiece,
    DraftProvider,
    DraftToken,
    LlmProvider,
    PromptLookup,
    ReferenceDraft,
    Sampling,
    SpeculativeDecoder,
    SuffixDraft,
    TokenDraft,
    TokenModel,
    TokenSampler,
    open_provider,
)
from llm_spec.testing import RandomDraft

CITIES = ("Paris", "Oslo", "Zürich", "São Paulo", "東京", "Kraków", "Rome", "Cairo", "Αθήνα", "Lima")
HERMES = {  # transformers' own notation of the format
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
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


def make_tool(name: str, description: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TEXT, NUMBER = {"type": "string"}, {"type": "number"}
WEATHER = make_tool("get_weather", "The weather of a city", city=TEXT)
ADD = make_tool("add", "The sum of two numbers", a=NUMBER, b=NUMBER)
ORDER = make_tool(
    "order", "Order dishes", items={"type": "array", "items": {"type": "array"}}, address={"type": "object"}
)


def make_example(question: str, *calls: tuple[str, Any]) -> list[dict[str, Any]]:
    """A question that was answered by calls, and their results."""
    made: list[dict[str, Any]] = []
    for index, (name, given) in enumerate(calls):
        function = {"name": name, "arguments": json.dumps(given, ensure_ascii=False)}
        made.append({"id": f"call_{index}", "type": "function", "function": function})
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in made]
    return [{"role": "user", "content": question}, {"role": "assistant", "content": None, "tool_calls": made}, *results]


def make_requests(num_requests: int, max_tokens: int) -> list[ChatRequest]:
    requests: list[ChatRequest] = []
    for index in range(num_requests):
        city, other = CITIES[index % len(CITIES)], CITIES[(index + 3) % len(CITIES)]
        kind = index % 5
        if kind == 0:
            messages = make_example("What is the weather in Berlin?", ("get_weather", {"city": "Berlin"}))
            messages.append({"role": "user", "content": f"What is the weather in {city}?"})
        elif kind == 1:
            messages = make_example("Add 2 and 3.", ("add", {"a": 2, "b": 3}))
            messages.append({"role": "user", "content": f"Add {index + 7} and {index * 3}."})
        elif kind == 2:
            weather = [("get_weather", {"city": name}) for name in ("Berlin", "Bern")]
            messages = make_example("What is the weather in Berlin and in Bern?", *weather)
            messages.append({"role": "user", "content": f"What is the weather in {city} and in {other}?"})
        elif kind == 3:
            order = {"items": [["soup", 2], ["tea", 1]], "address": {"city": "Berlin", "no": [7]}}
            messages = make_example("Order 2 soup and 1 tea to Berlin 7.", ("order", order))
            messages.append({"role": "user", "content": f"Order 3 rice and {index} tea to {city} 9."})
        else:
            messages = make_example("What is the weather in Berlin?", ("get_weather", {"city": "Berlin"}))
            messages.append({"role": "user", "content": f"Write one sentence about {city}."})
        tools = [[WEATHER], [ADD, WEATHER], [WEATHER, ADD], [ORDER], [WEATHER, ADD, ORDER]][kind]
        requests.append(ChatRequest.create(messages, tools=tools, max_tokens=max_tokens))
    return requests


class Answer(NamedTuple):
    """What is compared, and what it took."""

    message: tuple[Any, ...]
    seconds: float
    share: float  # of its tokens that were drafted


async def answer(decoder: SpeculativeDecoder, request: ChatRequest) -> Answer:
    started_s = time.perf_counter()
    result = await decoder.decode(request)
    seconds = time.perf_counter() - started_s
    calls = tuple((call.name, call.arguments) for call in result.tool_calls)
    num_tokens = sum(report.num_emitted_tokens for report in result.rounds)
    share = result.stats.num_accepted_draft_tokens / max(1, num_tokens)
    return Answer((result.content, result.reasoning, calls, result.finish_reason), seconds, share)


def read_calls_by_transformers(text: str) -> list[tuple[str, Any]] | None:
    """The calls that transformers reads in a text; None: it reads none there, or is not installed."""
    try:
        parsing: Any = importlib.import_module("transformers.utils.chat_parsing")
        message = parsing.parse_response(text, HERMES, prefix="")
    except (ImportError, ValueError):
        return None
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]


class RecordingDraft:
    """Proposes nothing, and keeps what the answer was."""

    name = "recording"
    capabilities = DraftCapabilities(is_free=True)
    answer_ids: Sequence[int] = ()

    def draft(self, request: ChatRequest, max_tokens: int) -> AbstractAsyncContextManager[AsyncIterator[DraftPiece]]:
        raise NotImplementedError("it drafts for models in this process alone")

    async def aclose(self) -> None:
        """Nothing to release."""

    def token_draft_refusal(self, target: TokenModel) -> None:
        return None

    def open_token_draft(self, target: TokenModel, choose: TokenSampler, prompt_ids: Sequence[int]) -> TokenDraft:
        self._num_prompt_tokens = len(prompt_ids)
        return self

    def propose(self, context_ids: Sequence[int]) -> Iterator[DraftToken]:
        self._context_ids = context_ids
        return iter(())

    def close(self) -> None:
        self.answer_ids = list(self._context_ids[self._num_prompt_tokens :])


async def find_parser_differences(target: LlmProvider, requests: list[ChatRequest]) -> tuple[int, int]:
    """How many answers with calls there are, and in how many transformers reads other calls in the raw text."""
    num_with_calls = num_different = 0
    model = target.capabilities.token_model
    for request in requests:
        draft = RecordingDraft()
        calls = (await SpeculativeDecoder(draft, target).decode(request)).tool_calls
        if model is not None and calls:
            num_with_calls += 1
            ours = [(call.name, json.loads(call.arguments)) for call in calls]
            num_different += read_calls_by_transformers(model.tokenizer.decode(draft.answer_ids)) != ours
    return num_with_calls, num_different


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True, help="a local model: torch:FOLDER or onnx:FOLDER")
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--max-tokens", type=int, default=96)
    arguments = parser.parse_args()
    target = open_provider(arguments.model)
    drafts: dict[str, DraftProvider | None] = {
        "plain": None,
        "lookup": PromptLookup(),
        "suffix": SuffixDraft(),
        "random": RandomDraft(),
        "lookup+suffix": CascadeDraft(PromptLookup(), SuffixDraft()),
        "given text": ReferenceDraft(
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
        ),
    }
    decoders = {name: SpeculativeDecoder(draft, target) for name, draft in drafts.items()}
    requests = make_requests(arguments.requests, arguments.max_tokens)
    names = itertools.cycle([list(drafts)[i:] + list(drafts)[:i] for i in range(len(drafts))])
    for temperature in arguments.temperatures:
        answers: dict[str, list[Answer]] = {name: [] for name in drafts}
        for index, request in enumerate(requests):
            seeded = replace(request, sampling=Sampling(temperature=temperature, seed=index))
            for name in next(names):
                answers[name].append(await answer(decoders[name], seeded))
        plain = answers["plain"]
        with_calls = sum(bool(one.message[2]) for one in plain)
        two = sum(len(one.message[2]) > 1 for one in plain)
        print(f"temperature {temperature}: {len(plain)} requests, {with_calls} answered by calls, {two} by several")
        for name, found in answers.items():
            same = sum(one.message == other.message for one, other in zip(found, plain, strict=True))
            ratios = [other.seconds / one.seconds for one, other in zip(found, plain, strict=True)]
            share = statistics.mean(one.share for one in found)
            print(
                f"  {name:14} same {same}/{len(found)}  tokens drafted {share:4.0%}  {statistics.median(ratios):.2f}x",
                flush=True,
            )
    num_with_calls, num_different = await find_parser_differences(target, requests)
    print(f"transformers reads other calls in {num_different} of {num_with_calls} answers")


if __name__ == "__main__":
    asyncio.run(main())
