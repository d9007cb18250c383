"""A GGUF file through `gguf:` beside llama.cpp's own decoding, both without a draft, in one run.

    python benchmarks/gguf_model.py MODEL.gguf [--threads 1 2] [--temperatures 0 0.7] [--prompts 10] [--max-tokens 64]

`llm-spec bench` compares drafts at `gguf:`, but has no contender for a loop over llama.cpp's functions without this
library: llama.cpp's default cache, and its own sampler. The two take turns at being the first, and compute in one
thread: where two threads of a process call OpenMP, passes of either are slower. A ratio is that of the seconds for a
token, over whole answers, prompt by prompt. `same` counts equal texts: a cache of another type and another sampler may
lead elsewhere.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from chat_prompts import load_chat_prompts
from llm_spec_gguf import GgufModel, GgufProvider

from llm_spec import ChatRequest, SpeculativeDecoder
from llm_spec.local.pass_threads import run_pass

llama: Any = importlib.import_module("llama_cpp.llama_cpp")

CONTEXT: Final = 2048
SEED: Final = 1


class Answer(NamedTuple):
    text: str
    num_tokens: int
    seconds: float

    @property
    def seconds_per_token(self) -> float:
        """An answer without tokens counts as one of one."""
        return self.seconds / max(1, self.num_tokens)


class LlamaCppLoop:
    """llama.cpp's own decoding: a context with its defaults, its sampler, a token after the other."""

    def __init__(self, path: Path, model: GgufModel, threads: int) -> None:
        self._tokenizer = model.tokenizer
        self._threads = threads
        self._model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
        parameters = llama.llama_context_default_params()
        parameters.n_ctx = parameters.n_batch = CONTEXT  # a prompt is one batch
        parameters.n_threads = parameters.n_threads_batch = threads
        self._context = llama.llama_init_from_model(self._model, parameters)

    def answer(self, request: ChatRequest) -> Answer:
        started = time.perf_counter()
        prompt_ids = self._tokenizer.encode_chat(request)
        max_tokens, temperature = request.max_tokens or 1, request.sampling.temperature or 0.0
        answer_ids = run_pass(
            lambda: list(self._generate(prompt_ids, temperature, max_tokens)), num_threads=self._threads
        )
        text = self._tokenizer.decode(answer_ids)
        return Answer(text, len(answer_ids), time.perf_counter() - started)

    def _generate(self, prompt_ids: Sequence[int], temperature: float, max_tokens: int) -> Iterator[int]:
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        sampler = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
        if temperature:
            llama.llama_sampler_chain_add(sampler, llama.llama_sampler_init_temp(temperature))
            llama.llama_sampler_chain_add(sampler, llama.llama_sampler_init_dist(SEED))
        else:
            llama.llama_sampler_chain_add(sampler, llama.llama_sampler_init_greedy())
        tokens = (llama.llama_token * len(prompt_ids))(*prompt_ids)
        for num_tokens in itertools.count(1):
            if llama.llama_decode(self._context, llama.llama_batch_get_one(tokens, len(tokens))):
                raise RuntimeError("llama_decode failed")
            token_id = llama.llama_sampler_sample(sampler, self._context, -1)
            yield token_id
            if token_id in self._tokenizer.eos_token_ids or num_tokens == max_tokens:
                break
            tokens = (llama.llama_token * 1)(token_id)
        llama.llama_sampler_free(sampler)

    def close(self) -> None:
        llama.llama_free(self._context)
        llama.llama_model_free(self._model)


async def answer_by_gguf(decoder: SpeculativeDecoder, request: ChatRequest) -> Answer:
    started = time.perf_counter()
    result = await decoder.decode(request)
    num_tokens = 0 if result.usage is None else result.usage.output_tokens
    return Answer(result.content, num_tokens, time.perf_counter() - started)


async def compare(
    decoder: SpeculativeDecoder, loop: LlamaCppLoop, requests: Sequence[ChatRequest]
) -> list[tuple[Answer, Answer]]:
    """Of each request the answer through `gguf:`, and llama.cpp's own."""
    pairs: list[tuple[Answer, Answer]] = []
    for number, request in enumerate(requests):
        if number % 2:
            theirs = loop.answer(request)
            pairs.append((await answer_by_gguf(decoder, request), theirs))
        else:
            pairs.append((await answer_by_gguf(decoder, request), loop.answer(request)))
    return pairs


def describe(pairs: Sequence[tuple[Answer, Answer]]) -> str:
    speeds = (
        sum(one.num_tokens for one in side) / sum(one.seconds for one in side) for side in zip(*pairs, strict=True)
    )
    ratios = [theirs.seconds_per_token / ours.seconds_per_token for ours, theirs in pairs]
    num_same = sum(ours.text == theirs.text for ours, theirs in pairs)
    return (
        "gguf {:.1f} tokens/s, llama.cpp {:.1f} tokens/s; ".format(*speeds)
        + f"ratio {statistics.median(ratios):.2f}x ({min(ratios):.2f}x to {max(ratios):.2f}x); "
        f"same {num_same} of {len(pairs)}"
    )


async def measure_threads(options: argparse.Namespace, threads: int) -> None:
    provider = GgufProvider(options.model, threads=threads)
    loop = LlamaCppLoop(options.model, provider.model, threads)
    decoder = SpeculativeDecoder(target=provider, draft=None)
    print(f"\n{threads} threads: {provider.model.describe_passes()}")
    for temperature, (kind, prompts) in itertools.product(
        options.temperatures, load_chat_prompts(options.prompts).items()
    ):
        requests = [
            ChatRequest.create(prompt, temperature=temperature, seed=SEED, max_tokens=options.max_tokens)
            for prompt in prompts
        ]
        await compare(decoder, loop, [ChatRequest.create("Say hello.", max_tokens=2)])  # what is slow once
        pairs = await compare(decoder, loop, requests)
        print(f"{kind}, temperature {temperature:g}: {describe(pairs)}", flush=True)
    loop.close()
    await decoder.aclose()
    await provider.aclose()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--prompts", type=int, default=10, help="of each kind")
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args()
    for threads in options.threads:
        asyncio.run(measure_threads(options, threads))


if __name__ == "__main__":
    main()
