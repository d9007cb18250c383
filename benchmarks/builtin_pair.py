"""How much faster is the built-in pair than its target alone? Whole generations, both sides in one run.

    python benchmarks/builtin_pair.py [--prompts 40] [--max-tokens 96] [--temperature 0] [--threads 1] [--json FILE]

`--threads` is the target's option of that name, with and without speculation.

For each held-out prompt every contender answers once, in an order that rotates from prompt to prompt, so that whatever
else the machine does falls on all of them alike. The baseline is the target at its fastest: plain decoding without the
padding row that the same-text promise costs. Ratios are taken prompt by prompt; absolute times of a busy machine
mean little. Model time is what onnxruntime spent inside both models. Suffix drafts remember the earlier answers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llm_spec import (
    CascadeDraft,
    ChatRequest,
    ChatResponse,
    CostAware,
    DraftProvider,
    Fixed,
    PromptLookup,
    ProviderDraft,
    SpeculativeConfig,
    SpeculativeDecoder,
    SuffixDraft,
    open_provider,
)
from llm_spec.contract.provider import Capabilities
from llm_spec.contract.response import complete_from_stream
from llm_spec.contract.token_model import TokenModel, TokenSession
from llm_spec.local.answer import stream_token_model
from llm_spec.local.lookahead import LookaheadPolicy

PROMPTS = Path(__file__).parent / "heldout_prompts.jsonl"
FIXED = (1, 2, 3, 4, 5, 6, 8, 12)


class Stopwatch:
    """Seconds spent inside models since the last reset."""

    seconds = 0.0


class TimedSession:
    """A session that adds the time of its forwards to a stopwatch."""

    def __init__(self, session: TokenSession, watch: Stopwatch) -> None:
        self._session = session
        self._watch = watch
        self.truncate = session.truncate
        self.close = session.close

    @property
    def length(self) -> int:
        return self._session.length

    def forward(self, token_ids: Sequence[int], *, num_rows: int) -> Any:
        started = time.perf_counter()
        try:
            return self._session.forward(token_ids, num_rows=num_rows)
        finally:
            self._watch.seconds += time.perf_counter() - started


class TimedModel:
    """A token model whose sessions are timed."""

    def __init__(self, model: TokenModel, watch: Stopwatch) -> None:
        self._model = model
        self._watch = watch
        self.name = model.name
        self.tokenizer = model.tokenizer
        self.vocab_size = model.vocab_size
        self.context_length = model.context_length
        self.max_width = model.max_width
        self.same_text = model.same_text

    def open(self, *, exact: bool = True) -> TokenSession:
        return TimedSession(self._model.open(exact=exact), self._watch)


class TimedProvider:
    """A provider around a timed model."""

    def __init__(self, model: TokenModel | None, watch: Stopwatch) -> None:
        assert model is not None
        self._model = TimedModel(model, watch)
        self.name = model.name
        self.capabilities = Capabilities(token_model=self._model, continue_prefix=True)

    def stream(self, request: ChatRequest) -> Any:
        return stream_token_model(self._model, request)

    async def complete(self, request: ChatRequest) -> ChatResponse:
        return await complete_from_stream(self, request)

    async def aclose(self) -> None: ...


def make_contenders(watch: Stopwatch, threads: int) -> tuple[dict[str, SpeculativeDecoder], float]:
    """Everyone who answers, and the memory (MB) that the pair alone takes."""
    spec = f"builtin:target?threads={threads}"
    target = TimedProvider(open_provider(spec).capabilities.token_model, watch)
    model = ProviderDraft(TimedProvider(open_provider("builtin:draft").capabilities.token_model, watch))
    at_rest_mb = measure_resident_mb()
    fastest = TimedProvider(open_provider(f"{spec}&exact=false").capabilities.token_model, watch)

    def make_speculative(lookahead: LookaheadPolicy, draft: DraftProvider | None = None) -> SpeculativeDecoder:
        draft = draft or CascadeDraft(PromptLookup(), model)  # one each, since it learns; as `lookup+builtin:draft` is
        return SpeculativeDecoder(
            target=target, draft=draft, config=SpeculativeConfig(strategy="tokens", lookahead=lookahead)
        )

    decoders = {
        "plain, unpadded": SpeculativeDecoder(target=fastest, draft=None),
        "plain, same text": SpeculativeDecoder(target=target, draft=None),
        **{f"fixed {n}": make_speculative(Fixed(n)) for n in FIXED},
        "adaptive": make_speculative(CostAware()),
        "adaptive, model": make_speculative(CostAware(), model),
        "adaptive, lookup": make_speculative(CostAware(), PromptLookup()),
        "adaptive, suffix": make_speculative(CostAware(), SuffixDraft()),
        "suffix + model": make_speculative(CostAware(), CascadeDraft(SuffixDraft(), model)),
        "all three": make_speculative(CostAware(), CascadeDraft(PromptLookup(), SuffixDraft(), model)),
    }
    return decoders, at_rest_mb


async def measure_contenders(arguments: argparse.Namespace) -> dict[str, Any]:
    watch = Stopwatch()
    decoders, at_rest_mb = make_contenders(watch, arguments.threads)
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()[: arguments.prompts]
    requests = [
        ChatRequest.create(
            json.loads(line)["messages"], max_tokens=arguments.max_tokens, temperature=arguments.temperature, seed=1
        )
        for line in lines
    ]
    for decoder in decoders.values():  # buffers, threads and templates are there from now on
        await decoder.decode("def warm_up():", max_tokens=arguments.max_tokens)  # no answer to be asked for later
    times: dict[str, list[float]] = defaultdict(list)
    model_times: dict[str, float] = defaultdict(float)
    accepted: dict[str, list[float]] = defaultdict(list)
    same = 0
    for number, request in enumerate(requests):
        names = list(decoders)
        texts: dict[str, str] = {}
        for name in names[number % len(names) :] + names[: number % len(names)]:
            watch.seconds = 0.0
            started = time.perf_counter()
            result = await decoders[name].decode(request)
            times[name].append(time.perf_counter() - started)
            model_times[name] += watch.seconds
            texts[name] = result.content
            accepted[name].append(result.stats.mean_acceptance_length or 1.0)
        same += len({text for name, text in texts.items() if name != "plain, unpadded"}) == 1
    baseline = times["plain, unpadded"]
    rows = {
        name: {
            "speedup_median": statistics.median(b / t for b, t in zip(baseline, times[name], strict=True)),
            "speedup_total": sum(baseline) / sum(times[name]),
            "tokens_per_round": statistics.mean(accepted[name]),
            "model_time_share": model_times[name] / sum(times[name]),
            "total_s": sum(times[name]),
        }
        for name in decoders
    }
    best = max((f"fixed {n}" for n in FIXED), key=lambda name: rows[name]["speedup_total"])
    return {
        "num_prompts": len(requests),
        "temperature": arguments.temperature,
        "threads": arguments.threads,
        "rows": rows,
        "best_fixed": best,
        "adaptive_to_best_fixed": rows["adaptive"]["speedup_total"] / rows[best]["speedup_total"],
        "num_same_text": same,
        "resident_at_rest_mb": at_rest_mb,
    }


def measure_resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def print_report(report: dict[str, Any]) -> None:
    threads = report["threads"] or "the fastest number of"
    print(f"{report['num_prompts']} held-out prompts, temperature {report['temperature']}, {threads} threads\n")
    print(f"{'':<18} {'median':>8} {'total':>8} {'tokens a round':>15} {'model time':>11} {'seconds':>8}")
    for name, row in report["rows"].items():
        print(
            f"{name:<18} {row['speedup_median']:>7.2f}x {row['speedup_total']:>7.2f}x {row['tokens_per_round']:>15.2f}"
            f" {row['model_time_share']:>10.0%} {row['total_s']:>8.2f}"
        )
    print(
        f"\nadaptive reaches {report['adaptive_to_best_fixed']:.1%} of the best fixed one ({report['best_fixed']}); "
        f"the same text from all: {report['num_same_text']} of {report['num_prompts']}; "
        f"resident memory at rest {report['resident_at_rest_mb']:.0f} MB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=1, help="of the target; 0: as many as are fastest")
    parser.add_argument("--json", type=Path, help="also write the report there")
    arguments = parser.parse_args()
    report = asyncio.run(measure_contenders(arguments))
    print_report(report)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
