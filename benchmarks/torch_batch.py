"""Throughput of concurrent requests to a torch model: each with its own passes, joined by load, or in one shape.

    python benchmarks/torch_batch.py --target FOLDER --prompts FILE.jsonl [--drafts none lookup FOLDER]
                                     [--sharing own load] [--num-prompts 24] [--max-tokens 48] [--max-width 16]
                                     [--temperature 1] [--threads 2] [--repeats 3]

Each line of the prompt file has `messages`. Every prompt is answered once per cell, so many at a time as the column
says; the cells take turns, so that whatever else the machine does falls on all alike, and the median of the repeats
counts. Figures are ratios of tokens a second to the first cell: own passes, no draft, one at a time. With `one-shape`
a shared pass of exact sessions has `max_requests` times `max_width` rows, so a CPU, which is not idle beside one row as
a GPU is, wants a small `max_width` then; both models get the same options.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import torch
from llm_spec_torch import TorchProvider
from llm_spec_torch.options import TorchOptions

from llm_spec import ChatRequest, DraftProvider, ProviderDraft, SpeculativeDecoder, open_draft

AT_ONCE: Final = (1, 2, 4, 8)
SHARING: Final[dict[str, bool | None]] = {"own": False, "load": None, "one-shape": True}


class Contender(NamedTuple):
    """A decoder; those of one kind give one text."""

    name: str
    decoder: SpeculativeDecoder
    kind: str


def make_contenders(arguments: argparse.Namespace) -> list[Contender]:
    made: list[Contender] = []
    for sharing in arguments.sharing:
        options = TorchOptions(device=arguments.device, max_width=arguments.max_width)
        is_batched = SHARING[sharing]
        if is_batched is not None:
            options["batched"] = is_batched
        target = TorchProvider(arguments.target, **options)
        assert target.model.same_text
        kind = "one shape" if sharing == "one-shape" else "as alone"
        for name in arguments.drafts:
            decoder = SpeculativeDecoder(open_draft_named(name, options), target)
            made.append(Contender(f"{sharing}, {Path(name).name}", decoder, kind))
    return made


def open_draft_named(name: str, options: TorchOptions) -> DraftProvider | None:
    if name == "none":
        return None
    return ProviderDraft(TorchProvider(name, **options)) if Path(name).is_dir() else open_draft(name)


async def answer_all(
    decoder: SpeculativeDecoder, requests: Sequence[ChatRequest], num_at_once: int
) -> tuple[float, list[str]]:
    """Tokens a second, and the texts."""
    places = asyncio.Semaphore(num_at_once)
    num_tokens = 0

    async def answer(request: ChatRequest) -> str:
        nonlocal num_tokens
        async with places:
            result = await decoder.decode(request)
        num_tokens += result.usage.output_tokens if result.usage else 0
        return result.content

    started = time.perf_counter()
    texts = await asyncio.gather(*(answer(request) for request in requests))
    return num_tokens / (time.perf_counter() - started), texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafts", nargs="+", default=["none", "lookup"])
    parser.add_argument("--sharing", nargs="+", choices=SHARING, default=["own", "load"])
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--num-prompts", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--max-width", type=int, default=16)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    lines = arguments.prompts.read_text(encoding="utf-8").splitlines()[: arguments.num_prompts]
    conversations = [ChatRequest.create(json.loads(line)["messages"]).messages for line in lines]
    requests = [
        ChatRequest.create(messages, max_tokens=arguments.max_tokens, temperature=arguments.temperature, seed=seed)
        for seed, messages in enumerate(conversations)
    ]
    print(
        f"torch {torch.__version__}, {arguments.device}, {arguments.threads} threads, max_width {arguments.max_width}"
    )
    asyncio.run(measure(make_contenders(arguments), requests, arguments.repeats))


async def measure(decoders: Sequence[Contender], requests: Sequence[ChatRequest], repeats: int) -> None:
    """All cells in turn, and their table."""
    expected = {each.kind: (await answer_all(each.decoder, requests, 1))[1] for each in decoders}
    speeds: dict[tuple[str, int], list[float]] = {}
    for _, num_at_once, each in itertools.product(range(repeats), AT_ONCE, decoders):
        speed, texts = await answer_all(each.decoder, requests, num_at_once)
        assert texts == expected[each.kind], f"{each.name}, {num_at_once} at once: another text"
        speeds.setdefault((each.name, num_at_once), []).append(speed)
    base = statistics.median(speeds[decoders[0].name, AT_ONCE[0]])
    print(f"{'requests at once':<24}" + "".join(f"{n:>8}" for n in AT_ONCE))
    for each in decoders:
        ratios = (statistics.median(speeds[each.name, n]) / base for n in AT_ONCE)
        print(f"{each.name:<24}" + "".join(f"{ratio:>7.2f}x" for ratio in ratios))
    print(f"same text in every cell of a kind: {len(requests)} prompts, {repeats} times")


if __name__ == "__main__":
    main()
