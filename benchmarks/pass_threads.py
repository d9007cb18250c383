"""What it costs where several threads of a process call OpenMP: tokens a second of a model on this machine's cores.

    python benchmarks/pass_threads.py MODEL [--at-once 1 2 4] [--tokens 64] [--repeats 3] [--answers 8]

No option lets passes run in other threads, so `llm-spec bench` cannot compare them. MODEL is a provider string, such as
gguf:FILE or torch:FOLDER. `kept`: passes run in the thread that is kept for them, and what a model computes while it is
loaded in one that ends. `everywhere`: each runs in the thread of its request, and a model is loaded by the main one.
Each of both has a process of its own, by turns; of the repeats the median counts. All texts must be the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Final

from chat_prompts import load_chat_prompts

from llm_spec import ChatRequest, SpeculativeDecoder

WAYS: Final = ("kept", "everywhere")


def run_here(function: Callable[[], Any], **_: int) -> Any:
    return function()


def let_all_threads_compute(model: str) -> None:
    """Replace the library's threads by the callers'."""
    if model.startswith("gguf:"):
        from llm_spec_gguf import library

        library.run_pass = run_here
        return
    from llm_spec_torch import device_errors
    from llm_spec_torch import model as torch_model

    device_errors.run_pass = run_here
    torch_model.call_in_own_thread = run_here


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second for each number of answers at once, and the texts."""
    prompts = load_chat_prompts(arguments.answers)["open"]
    rates: dict[int, float] = {}
    texts: list[str] = []
    async with SpeculativeDecoder(target=arguments.model, draft=None) as decoder:

        async def answer(prompt: str) -> int:
            request = ChatRequest.create(prompt, temperature=0.0, max_tokens=arguments.tokens)
            result = await decoder.decode(request)
            texts.append(result.content)
            return 0 if result.usage is None else result.usage.output_tokens

        await answer(prompts[0])
        for at_once in arguments.at_once:
            started, num_tokens = time.perf_counter(), 0
            for first in range(0, len(prompts), at_once):
                num_tokens += sum(await asyncio.gather(*map(answer, prompts[first : first + at_once])))
            rates[at_once] = num_tokens / (time.perf_counter() - started)
    return {"rates": list(rates.values()), "texts": texts}


def measure_in_new_process(way: str) -> dict[str, Any]:
    command = [sys.executable, *sys.argv, "--way", way]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)  # noqa: S603 - this program
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 2, 4], help="answers")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, at most")
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way is not None:
        if arguments.way == "everywhere":
            let_all_threads_compute(arguments.model)
        print(json.dumps(asyncio.run(measure(arguments))))
        return
    found = [{way: measure_in_new_process(way) for way in WAYS} for _ in range(arguments.repeats)]
    print("at once" + "".join(f"{way:>24}" for way in WAYS) + "   kept / everywhere")
    for index, at_once in enumerate(arguments.at_once):
        rates = {way: statistics.median(each[way]["rates"][index] for each in found) for way in WAYS}
        columns = "".join(f"{rates[way]:15.1f} tokens/s" for way in WAYS)
        print(f"{at_once:7}{columns}   {rates['kept'] / rates['everywhere']:.2f}x")
    texts = {tuple(sorted(each[way]["texts"])) for each in found for way in WAYS}
    sys.exit(0 if len(texts) == 1 else "texts differ")


if __name__ == "__main__":
    main()
