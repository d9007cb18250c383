"""Is the text the target's own? Every combination of prompt, temperature, seed, lookahead and draft against plain runs.

    python benchmarks/exactness.py [--prompts 20] [--max-tokens 64] [--seeds 3]

Runs the built-in pair as `llm-spec run` does, with and without speculation, and compares bytes. Prints one line per
draft and a count; exits with 1 at the first difference, which it shows.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
from pathlib import Path

from llm_spec import CostAware, DraftProvider, Fixed, SpeculativeConfig, SpeculativeDecoder, open_draft, open_provider
from llm_spec.contract.request import RequestOptions
from llm_spec.local.lookahead import LookaheadPolicy
from llm_spec.testing import RandomDraft

PROMPTS = Path(__file__).parent / "heldout_prompts.jsonl"
TEMPERATURES = (0.0, 0.7, 1.0)
LOOKAHEADS: dict[str, LookaheadPolicy] = {"1": Fixed(1), "3": Fixed(3), "8": Fixed(8), "adaptive": CostAware()}
DRAFTS = ("builtin:draft", "lookup", "lookup+builtin:draft", "suffix+builtin:draft")


async def compare_combinations(num_prompts: int, num_seeds: int, max_tokens: int) -> int:
    """The number of combinations compared; ends the program at the first difference."""
    target = open_provider("builtin:target")
    drafts: dict[str, DraftProvider] = {name: open_draft(name) for name in DRAFTS} | {"random": RandomDraft()}
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()[:num_prompts]
    compared: dict[str, int] = dict.fromkeys(drafts, 0)
    started = time.perf_counter()
    for line, temperature, seed in itertools.product(lines, TEMPERATURES, range(num_seeds)):
        messages = json.loads(line)["messages"]
        options: RequestOptions = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
        plain = await SpeculativeDecoder(target=target, draft=None).decode(messages, **options)
        for (draft_name, draft), (lookahead_name, lookahead) in itertools.product(drafts.items(), LOOKAHEADS.items()):
            decoder = SpeculativeDecoder(
                target=target, draft=draft, config=SpeculativeConfig(strategy="tokens", lookahead=lookahead)
            )
            result = await decoder.decode(messages, **options)
            if result.content.encode() != plain.content.encode() or result.stopped_by != plain.stopped_by:
                print(f"DIFFERENT: draft {draft_name}, lookahead {lookahead_name}, {options}, prompt {messages}")
                print(f"plain       {plain.content!r}\nspeculative {result.content!r}")
                sys.exit(1)
            compared[draft_name] += 1
    for name, count in compared.items():
        print(f"{name:<22} {count:>5} of {count} texts equal to plain")
    print(f"{sum(compared.values())} comparisons in {time.perf_counter() - started:.0f} s")
    return sum(compared.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=64)
    arguments = parser.parse_args()
    asyncio.run(compare_combinations(arguments.prompts, arguments.seeds, arguments.max_tokens))


if __name__ == "__main__":
    main()
