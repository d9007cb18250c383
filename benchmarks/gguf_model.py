"""A GGUF file through `gguf:` beside llama.cpp's own decoding, in one run: plain, and with drafts that copy.

    python benchmarks/gguf_model.py MODEL.gguf [--threads 1 2] [--temperatures 0 0.7] [--prompts 10] [--max-tokens 64]
                                    [--no-llama-class] [--max-width 16] [--cpu-time] [--only NAME ...]
                                    [--kinds copy open] [--answers FILE] [--document-tokens 2000]

`llama.cpp` is a loop over llama.cpp's functions without this library: its default cache, its own sampler. `llama-cpp`
and `llama-cpp lookup` are llama-cpp-python's class `Llama`, without and with its prompt lookup (greedily only). All
contenders answer each prompt in turn, in an order that rotates, and compute in one thread: where two threads of a
process call OpenMP, passes of either are slower. Prompts are those of `torch_chat.py`: `copy` ones ask
for text that repeats theirs (edits, quotes, JSON), `open` ones are questions. `--document-tokens` puts about so many
before each. Figures are tokens a second over whole answers, reading of prompts included, and for each prompt the ratio
of the times for a token: of whole answers, and of what follows the first piece, which no reading is part of. `same`
counts the answers that equal those of `gguf` without a draft; for llama.cpp's they say how far a cache of another type
and another sampler lead elsewhere.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import itertools
import resource
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from answer_log import Answer, AnswerLog
from chat_prompts import make_chat_prompts
from llm_spec_gguf import GgufModel, GgufOptions, GgufProvider

from llm_spec import (
    CascadeDraft,
    ChatRequest,
    DraftProvider,
    PromptLookup,
    SpeculativeDecoder,
    SpeculativeFinish,
    SuffixDraft,
    TextDelta,
)
from llm_spec.local.pass_threads import run_pass

llama: Any = importlib.import_module("llama_cpp.llama_cpp")
Llama: Any = importlib.import_module("llama_cpp").Llama
LlamaPromptLookup: Any = importlib.import_module("llama_cpp.llama_speculative").LlamaPromptLookupDecoding

KINDS: Final = ("copy", "open")
CONTEXT: Final = 2048  # beside the document
SEED: Final = 1
HAS_CPU_TIME: Final = "--cpu-time" in sys.argv


def read_clock() -> float:
    """Seconds; of this process alone where `--cpu-time` is given."""
    return time.process_time() if HAS_CPU_TIME else time.perf_counter()


Contender = Callable[[ChatRequest], Awaitable[Answer]]


class LlamaCppLoop:
    """llama.cpp's own decoding: a context with its defaults, its sampler, a token after the other."""

    def __init__(self, path: Path, threads: int, context: int) -> None:
        self._model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
        parameters = llama.llama_context_default_params()
        parameters.n_ctx = parameters.n_batch = context  # a prompt is one batch
        parameters.n_threads = parameters.n_threads_batch = threads
        self._context = llama.llama_init_from_model(self._model, parameters)
        self._vocab = llama.llama_model_get_vocab(self._model)

    def answer(
        self, prompt_ids: Sequence[int], temperature: float, max_tokens: int, stop_ids: frozenset[int]
    ) -> Iterator[int]:
        """The ids of an answer."""
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
            if token_id in stop_ids or num_tokens == max_tokens:
                break
            tokens = (llama.llama_token * 1)(token_id)
        llama.llama_sampler_free(sampler)

    def close(self) -> None:
        llama.llama_free(self._context)
        llama.llama_model_free(self._model)


def make_llama_cpp(path: Path, model: GgufModel, threads: int, context: int) -> Contender:
    loop = LlamaCppLoop(path, threads, context)

    async def answer(request: ChatRequest) -> Answer:
        started = read_clock()
        prompt_ids = model.tokenizer.encode_chat(request)
        max_tokens, temperature = request.max_tokens or 1, request.sampling.temperature or 0.0
        token_ids = loop.answer(prompt_ids, temperature, max_tokens, model.tokenizer.eos_token_ids)
        return run_pass(lambda: time_answer(token_ids, model, started), num_threads=threads)

    return answer


def make_llama_class(path: Path, model: GgufModel, threads: int, context: int, *, has_lookup: bool) -> Contender:
    draft = LlamaPromptLookup(num_pred_tokens=10) if has_lookup else None
    options = {"n_ctx": context, "n_threads": threads, "n_threads_batch": threads, "verbose": False}
    llama_class = Llama(model_path=str(path), draft_model=draft, logits_all=has_lookup, **options)

    async def answer(request: ChatRequest) -> Answer:
        started = read_clock()
        prompt_ids = model.tokenizer.encode_chat(request)
        token_ids = llama_class.generate(prompt_ids, temp=0.0, reset=True, repeat_penalty=1.0)
        first_ids = itertools.islice(token_ids, request.max_tokens)
        return run_pass(lambda: time_answer(first_ids, model, started), num_threads=threads)

    return answer


def time_answer(token_ids: Iterator[int], model: GgufModel, started: float) -> Answer:
    """The answer whose tokens come one by one, up to the end of its text."""
    answer_ids = [next(token_ids)]
    first_s = read_clock() - started
    if answer_ids[0] not in model.tokenizer.eos_token_ids:
        for token_id in token_ids:
            answer_ids.append(token_id)
            if token_id in model.tokenizer.eos_token_ids:
                break
    text = model.tokenizer.decode(answer_ids)
    return Answer(len(answer_ids), read_clock() - started, text, 1, first_s)


def make_gguf(provider: GgufProvider, draft: DraftProvider | None) -> Contender:
    decoder = SpeculativeDecoder(draft, provider)
    assert provider.capabilities.token_model is not None
    tokenizer = provider.capabilities.token_model.tokenizer

    async def answer(request: ChatRequest) -> Answer:
        started = read_clock()
        first_text, first_s, result = "", 0.0, None
        async with decoder.stream(request) as events:
            async for event in events:
                if isinstance(event, TextDelta) and not first_text:
                    first_text, first_s = event.text, read_clock() - started
                if isinstance(event, SpeculativeFinish):
                    result = event.result
        seconds = read_clock() - started
        assert result is not None
        assert result.usage is not None
        num_first = len(tokenizer.encode(first_text))
        return Answer(result.usage.output_tokens, seconds, result.content, num_first, first_s)

    return answer


def describe(name: str, answers: Sequence[Answer], plain: Sequence[Answer], reference: Sequence[Answer]) -> str:
    """A contender's line: its speed, and its ratios to ours without a draft and to llama.cpp's own loop.

    Of both the ratio of whole answers, and to ours that of what follows the first piece.
    """
    speed = sum(answer.num_tokens for answer in answers) / sum(answer.seconds for answer in answers)
    columns = [f"{name:26}{speed:8.1f} tokens/s"]
    for figure, other in (
        ("seconds_per_token", plain),
        ("later_seconds_per_token", plain),
        ("seconds_per_token", reference),
    ):
        ratios = [getattr(theirs, figure) / getattr(ours, figure) for ours, theirs in zip(answers, other, strict=True)]
        columns.append(f"{statistics.median(ratios):6.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    same = sum(ours.text == theirs.text for ours, theirs in zip(answers, plain, strict=True))
    return "  ".join([*columns, f"same {same} of {len(answers)}"])


async def compare(
    contenders: dict[str, Contender], requests: Sequence[ChatRequest], log: AnswerLog, what: str
) -> dict[str, list[Answer]]:
    """The answers of all contenders, which take turns at being the first."""
    answers: dict[str, list[Answer]] = {name: [] for name in contenders}
    names = list(contenders)
    for number, request in enumerate(requests):
        turn = number % len(names)
        key = f"{what}: {request.messages[0].text}"
        if (given := log.get(key)) is None:
            given = {name: await contenders[name](request) for name in names[turn:] + names[:turn]}
            log.add(key, given)
        for name in names:
            answers[name].append(given[name])
    return answers


def make_document(model: GgufModel, num_tokens: int) -> str:
    """About so many tokens that no prompt is about."""
    lines: list[str] = []
    while len(model.tokenizer.encode("".join(lines))) < num_tokens:
        lines += [
            f"Item {number}: shelf {number * 7 % 31}, {number * 13 % 97} pieces.\n"
            for number in range(len(lines), len(lines) + 8)
        ]
    return "".join(lines)


def read_memory_mb() -> float:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 1e6


async def measure_threads(options: argparse.Namespace, threads: int) -> None:
    how: GgufOptions = {"threads": threads}
    if options.max_width is not None:
        how["max_width"] = options.max_width
    providers: dict[str, GgufProvider] = {}

    def open_gguf(*, exact: bool = True, flash_attention: bool = True) -> GgufProvider:
        """One provider for each set of options, loaded when a contender needs it."""
        key = f"{exact} {flash_attention}"
        if key not in providers:
            providers[key] = GgufProvider(options.model, **how | {"exact": exact, "flash_attention": flash_attention})
        return providers[key]

    before_mb, started = read_memory_mb(), time.perf_counter()
    model = open_gguf().model
    load_s, memory_mb = time.perf_counter() - started, read_memory_mb() - before_mb
    print(f"\n{threads} threads: loaded in {load_s:.2f} s, {memory_mb:.0f} MB; {model.describe_passes()}")
    log = AnswerLog(options.answers)
    document, context = make_document(model, options.document_tokens), CONTEXT + 2 * options.document_tokens
    makers: dict[str, Callable[[], Contender]] = {
        "llama.cpp": lambda: make_llama_cpp(options.model, model, threads, context),
        "gguf": lambda: make_gguf(open_gguf(), None),
        "gguf lookup": lambda: make_gguf(open_gguf(), PromptLookup()),
        "gguf suffix": lambda: make_gguf(open_gguf(), SuffixDraft()),
        "gguf, exact=false": lambda: make_gguf(open_gguf(exact=False), None),
        "gguf suffix, exact=false": lambda: make_gguf(open_gguf(exact=False), SuffixDraft()),
        "gguf, flash_attention=false": lambda: make_gguf(open_gguf(flash_attention=False), None),
        "gguf suffix, both false": lambda: make_gguf(open_gguf(exact=False, flash_attention=False), SuffixDraft()),
        "gguf lookup+suffix": lambda: make_gguf(open_gguf(), CascadeDraft(PromptLookup(), SuffixDraft())),
    }
    llama_class_makers: dict[str, Callable[[], Contender]] = {
        "llama-cpp": lambda: make_llama_class(options.model, model, threads, context, has_lookup=False),
        "llama-cpp lookup": lambda: make_llama_class(options.model, model, threads, context, has_lookup=True),
    }
    for temperature in options.temperatures:
        for kind in options.kinds:
            contenders = {
                name: make()
                for name, make in (
                    makers | (llama_class_makers if options.llama_class and not temperature else {})
                ).items()
                if name in {"llama.cpp", "gguf"} or any(part in name for part in options.only)
            }
            requests = [
                ChatRequest.create(document + prompt, temperature=temperature, seed=SEED, max_tokens=options.max_tokens)
                for prompt in make_chat_prompts(options.prompts)[kind]
            ]
            for contender in contenders.values():  # nothing is loaded or allocated while it is measured
                await contender(replace(requests[0], max_tokens=2))
            what = f"{options.model.name}, {threads} threads, {temperature:g}, {options.max_tokens} tokens"
            what += f", {options.document_tokens} before" if options.document_tokens else ""
            answers = await compare(contenders, requests, log, f"{what}, {', '.join(contenders)}")
            print(
                f"{kind}, temperature {temperature}: ratio to gguf without a draft, whole and later, and to llama.cpp"
            )
            for name, given in answers.items():
                print("  " + describe(name, given, answers["gguf"], answers["llama.cpp"]), flush=True)
    print(f"resident at the end: {read_memory_mb():.0f} MB")
    for provider in providers.values():
        await provider.aclose()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--prompts", type=int, default=10, help="of each kind")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--no-llama-class", dest="llama_class", action="store_false", help="without llama-cpp-python's")
    parser.add_argument("--max-width", type=int, help="drafts even where they do not pay")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names; plain decoding is always there")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS, help="of prompts")
    parser.add_argument("--document-tokens", type=int, default=0, help="of text before each prompt")
    parser.add_argument("--answers", type=Path, help="keep answers in this file, and go on with those that it has")
    parser.add_argument("--cpu-time", action="store_true", help="of this process: with one thread, on a busy machine")
    options = parser.parse_args()
    for threads in options.threads:
        asyncio.run(measure_threads(options, threads))


if __name__ == "__main__":
    main()
