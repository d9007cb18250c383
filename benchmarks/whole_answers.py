"""What a server gains where it is asked for whole answers, not for streams.

    python benchmarks/whole_answers.py vllm:NAME@http://127.0.0.1:8000/v1 [--answers 96] [--tokens 64]

`llm-spec bench` asks for streams alone. Greedy answers, 1, 8 and 32 at a time, in turns; medians of three, and how many
texts are the same.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

from llm_spec_http import DIALECTS, HttpProvider

from llm_spec import ChatRequest
from llm_spec.contract.response import complete_from_stream

_AT_ONCE = (1, 8, 32)


async def answer_request(provider: HttpProvider, request: ChatRequest, *, is_whole: bool) -> str:
    asking = provider.complete(request) if is_whole else complete_from_stream(provider, request)
    return (await asking).content


async def time_requests(
    provider: HttpProvider, requests: Sequence[ChatRequest], at_once: int, *, is_whole: bool
) -> tuple[float, list[str]]:
    """Seconds for all of them, and their texts."""
    places = asyncio.Semaphore(at_once)

    async def answer_one(request: ChatRequest) -> str:
        async with places:
            return await answer_request(provider, request, is_whole=is_whole)

    started = time.perf_counter()
    texts = await asyncio.gather(*map(answer_one, requests))
    return time.perf_counter() - started, texts


async def measure(provider: HttpProvider, number: int, num_tokens: int) -> None:
    requests = [ChatRequest.create(f"def f{i}(", max_tokens=num_tokens, temperature=0.0) for i in range(number)]
    for is_whole in (True, False):  # warm
        await time_requests(provider, requests[:8], 4, is_whole=is_whole)
    print("at a time    whole s   stream s    stream/whole   same texts")
    for at_once in _AT_ONCE:
        some = requests[: max(8, number * at_once // max(_AT_ONCE))]
        seconds: dict[bool, list[float]] = {True: [], False: []}
        texts: dict[bool, list[str]] = {}
        for _ in range(3):
            for is_whole, taken in seconds.items():
                spent, texts[is_whole] = await time_requests(provider, some, at_once, is_whole=is_whole)
                taken.append(spent)
        whole, stream = statistics.median(seconds[True]), statistics.median(seconds[False])
        num_same = sum(answer_one == other for answer_one, other in zip(texts[True], texts[False], strict=True))
        print(f"{at_once:9}{whole:11.2f}{stream:11.2f}{stream / whole:15.2f}x{num_same:9} of {len(some)}")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="dialect:model@address")
    parser.add_argument("--answers", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    name, _, rest = arguments.target.partition(":")
    model, _, address = rest.partition("@")
    dialect = replace(DIALECTS[name], stops_whole=True)  # nobody leaves here
    provider = HttpProvider(model, base_url=address or None, dialect=dialect)
    try:
        await measure(provider, arguments.answers, arguments.tokens)
    finally:
        await provider.aclose()


if __name__ == "__main__":
    asyncio.run(main())
