"""Is a local model's text the same with drafts and without, where it says so? At prompts across the borders of tiles.

    python benchmarks/bfloat_same_text.py FOLDER [--dtypes bfloat16 float32] [--lengths 31 32 33 900] [--seeds 13]
                                          [--max-tokens 24] [--threads 1]

`llm-spec bench` compares texts, too, but its prompts cannot have an exact number of tokens. Here each seed draws a
prompt of so many tokens and a temperature. It is answered without a draft, and with four: lookup, suffix, the model's
own first layers, and random tokens. So thirteen seeds at four lengths are 208 answers with a draft. Prints how many
were the plain text's bytes, and how many of them were promised to be. Ends with 1 if one that was is not. Run it with
`ONEDNN_MAX_CPU_ISA` and `ATEN_CPU_CAPABILITY` lowered to see other kernels than this CPU's own.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

import numpy as np
import torch
from llm_spec_torch import TorchModel, TorchProvider

from llm_spec import (
    ChatRequest,
    DraftProvider,
    Fixed,
    PromptLookup,
    ProviderDraft,
    SpeculativeConfig,
    SpeculativeDecoder,
    SuffixDraft,
)
from llm_spec.contract.request import RequestOptions
from llm_spec.kit.model_folder.tokenizer import FolderTokenizer
from llm_spec.testing import RandomDraft

LOOKAHEAD = 7
TEMPERATURES = (0.0, 0.7)


class NumberedPrompts(FolderTokenizer):
    """Makes of a request's text, `LENGTH SEED`, a prompt of so many random tokens, in which some come again."""

    def encode_chat(self, request: ChatRequest) -> list[int]:
        length, seed = map(int, (request.messages[-1].text or "").split())
        rng = np.random.default_rng([length, seed])
        words = rng.integers(max(self.eos_token_ids, default=0) + 1, self.vocab_size, 24)
        return [int(token_id) for token_id in rng.choice(words, length)]


def load(folder: Path, dtype: str) -> TorchProvider:
    model = TorchModel(folder, dtype=dtype, device="cpu", max_requests=2)
    model.tokenizer = NumberedPrompts(folder)
    promise = "the same text" if model.same_text else "nothing"
    print(f"{folder.name}, {dtype}: promises {promise}, reads {[*model.pass_widths]} rows", flush=True)
    return TorchProvider(model)


def make_drafts(target: TorchProvider) -> list[DraftProvider]:
    first_layers = TorchProvider(target.model.make_early_exit_draft(1))
    return [PromptLookup(), SuffixDraft(), ProviderDraft(first_layers), RandomDraft()]


async def count_broken_promises(target: TorchProvider, lengths: list[int], num_seeds: int, max_tokens: int) -> int:
    config = SpeculativeConfig(strategy="tokens", lookahead=Fixed(LOOKAHEAD), baseline_every=0)
    decoders = [SpeculativeDecoder(target=target, draft=draft, config=config) for draft in make_drafts(target)]
    num_broken = 0
    for length in lengths:
        num_equal, num_promised, num_accepted = 0, 0, 0
        for seed in range(num_seeds):
            temperature = TEMPERATURES[seed % len(TEMPERATURES)]
            options: RequestOptions = {"max_tokens": max_tokens, "seed": seed, "temperature": temperature}
            plain = await SpeculativeDecoder(target=target, draft=None).decode(f"{length} {seed}", **options)
            for decoder in decoders:
                result = await decoder.decode(f"{length} {seed}", **options)
                is_equal = (result.content, result.stopped_by) == (plain.content, plain.stopped_by)
                num_equal += is_equal
                num_promised += result.same_text
                num_broken += result.same_text and not is_equal
                num_accepted += result.stats.num_accepted_draft_tokens
        total = num_seeds * len(decoders)
        print(
            f"  after {length:>4} tokens: {num_equal} of {total} equal, {num_promised} promised, "
            f"{num_accepted} drafted tokens accepted",
            flush=True,
        )
    return num_broken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[31, 32, 33, 900])
    parser.add_argument("--seeds", type=int, default=13)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    kernels = {name: os.environ.get(name) for name in ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")}
    print(
        f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {kernels}, {arguments.threads} threads"
    )
    num_broken = 0
    for dtype in arguments.dtypes:
        target = load(arguments.folder, dtype)
        num_broken += asyncio.run(
            count_broken_promises(target, arguments.lengths, arguments.seeds, arguments.max_tokens)
        )
    print(f"{num_broken} broken promises")
    sys.exit(num_broken > 0)


if __name__ == "__main__":
    main()
