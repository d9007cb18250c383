"""What a pass of llama.cpp takes by its rows and by the tokens before it, with flash attention and without.

    python benchmarks/gguf_passes.py MODEL.gguf [--threads 1] [--before 32 480 992 2000] [--rows 1 4 16] [--repeats 15]

`llm-spec bench` times answers, not passes. Passes take turns: each repeat reads each number of rows behind each kind of
cache. Figures are milliseconds: the median of the repeats, and the fastest.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Final

import numpy as np
from llm_spec_gguf.library import LlamaContext, LlamaModel

from llm_spec.local.caches import PREFILL_CHUNK_TOKENS

STEP: Final = 256  # llama.cpp rounds a cache to it


def make_contexts(model: LlamaModel, capacity: int, threads: int) -> dict[str, LlamaContext]:
    """The kinds of caches, each with room for `capacity` tokens."""
    return {
        "flash attention": LlamaContext(model, capacity=capacity, threads=threads),
        "flash attention, bfloat16 keys": LlamaContext(model, capacity=capacity, threads=threads, key_type="bfloat16"),
        "matrix products": LlamaContext(model, capacity=capacity, threads=threads, flash_attention=False),
    }


def time_pass(context: LlamaContext, before: int, token_ids: list[int]) -> float:
    """Milliseconds of a pass behind the first `before` tokens."""
    context.forget_from(before)
    started = time.perf_counter()
    context.read(token_ids, num_rows=len(token_ids))
    return 1e3 * (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--before", type=int, nargs="+", default=[32, 480, 992, 2000], help="tokens in the cache")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    model = LlamaModel(options.model)
    capacity: int = -(-(max(options.before) + max(options.rows)) // STEP) * STEP
    contexts = make_contexts(model, capacity, options.threads)
    token_ids = [int(token_id) for token_id in np.random.default_rng(0).integers(0, model.vocab_size, capacity)]
    for before in options.before:
        for context in contexts.values():
            context.clear()
            for start in range(0, before, PREFILL_CHUNK_TOKENS):
                context.read(token_ids[start : min(start + PREFILL_CHUNK_TOKENS, before)], num_rows=1)
        times: dict[tuple[str, int], list[float]] = {(name, rows): [] for name in contexts for rows in options.rows}
        for _ in range(options.repeats):
            for (name, rows), taken_ms in times.items():
                taken_ms.append(time_pass(contexts[name], before, token_ids[before : before + rows]))
        print(f"after {before} tokens, {options.threads} threads, ms:")
        for name in contexts:
            columns = [
                f"{rows:2} rows{statistics.median(times[name, rows]):7.1f} (at best {min(times[name, rows]):.1f})"
                for rows in options.rows
            ]
            print(f"  {name:32}" + "   ".join(columns), flush=True)


if __name__ == "__main__":
    main()
