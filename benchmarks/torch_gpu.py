"""Is decoding as fast as memory allows? Builds, checks and times on one accelerator, in one go.

    python benchmarks/torch_gpu.py [--out FOLDER] [--device cuda] [--prompts 20] [--max-tokens 192]
    python benchmarks/torch_gpu.py --device cpu --small      # the same steps on a CPU, to see that they work

The models have the shapes of a 7B target and a 0.5B draft, and the acceptance of a real pair: the trained pair of
`tests/peers/models` (`python tools/make_pair.py` writes it), dilated. Its weights fill a corner of the large matrices,
norms and rotations are set so that the corner computes what the small model computes, and the rest multiplies zeros by
random numbers: the same answers, for the memory traffic of a large model. Vocabulary 4,096, so the last layer is
smaller than a 7B model's.

Prints one table and leaves `torch_gpu.csv` and, where matplotlib is installed, `torch_gpu.png` in FOLDER.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import datetime
import importlib
import itertools
import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from llm_spec_torch import TorchModel, TorchProvider

from llm_spec import (
    ChatRequest,
    CostAware,
    Fixed,
    ProviderDraft,
    SpeculativeConfig,
    SpeculativeDecoder,
    SpeculativeResult,
)
from llm_spec.local.lookahead import LookaheadPolicy

transformers: Any = importlib.import_module("transformers")

PAIR = Path(__file__).parents[1] / "tests" / "peers" / "models"
PROMPTS = Path(__file__).parent / "heldout_prompts.jsonl"
FIXED = (1, 2, 3, 4, 5, 6, 8, 10)
# transformers' settings, of which the fastest are searched for
NUM_ASSISTANT_TOKENS = (1, 2, 3, 4, 6)
CONFIDENCES = (0.0, 0.4)
SCHEDULES = ("constant", "heuristic")
GIB = 2**30


class Size(NamedTuple):
    """The shape of a model."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    layers: int


TARGET, DRAFT = Size(4096, 32, 8, 128, 14336, 32), Size(1024, 16, 4, 128, 4096, 16)
SMALL_TARGET, SMALL_DRAFT = Size(512, 8, 4, 128, 1024, 10), Size(256, 16, 4, 64, 512, 3)


# -------------------------------------------------------------------------------------------- models


def make_dilated_model(folder: Path, size: Size, dtype: torch.dtype, device: str) -> Any:
    """A model of a larger shape that says what the one in the folder says."""
    small: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    old: Any = small.config
    config: Any = transformers.LlamaConfig(
        **{
            **old.to_dict(),
            "hidden_size": size.hidden,
            "num_attention_heads": size.heads,
            "num_key_value_heads": size.kv_heads,
            "head_dim": size.head_dim,
            "intermediate_size": size.intermediate,
            "num_hidden_layers": size.layers,
            "rms_norm_eps": old.rms_norm_eps * old.hidden_size / size.hidden,
            "tie_word_embeddings": False,
        }
    )
    with torch.device("meta"):
        large: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    large = large.to_empty(device=device).eval().requires_grad_(requires_grad=False)
    large.model.rotary_emb = type(large.model.rotary_emb)(config=config).to(device)
    for name, parameter in large.named_parameters():
        zero = "o_proj" in name or "down_proj" in name or "embed" in name or "norm" in name
        parameter.zero_() if zero else parameter.normal_(std=0.02)
    scale = (old.hidden_size / size.hidden) ** 0.5
    copy_into_corner(large.model.embed_tokens.weight, small.model.embed_tokens.weight)
    copy_into_corner(large.lm_head.weight, small.lm_head.weight)
    copy_into_corner(large.model.norm.weight, small.model.norm.weight * scale)
    for mine, theirs in zip(large.model.layers, small.model.layers, strict=False):
        fill_dilated_layer(mine, theirs, size, old, scale)
    return large


def copy_into_corner(large: Any, small: Any) -> None:
    """Put a small tensor into the first corner of a large one."""
    large[tuple(slice(0, n) for n in small.shape)] = small.to(large.dtype).to(large.device)


def fill_dilated_layer(large: Any, small: Any, size: Size, old: Any, scale: float) -> None:
    copy_into_corner(large.input_layernorm.weight, small.input_layernorm.weight * scale)
    copy_into_corner(large.post_attention_layernorm.weight, small.post_attention_layernorm.weight * scale)
    for name in ("gate_proj", "up_proj"):
        rows = getattr(large.mlp, name).weight
        rows[:, : old.hidden_size] = 0
        copy_into_corner(rows, getattr(small.mlp, name).weight)
    copy_into_corner(large.mlp.down_proj.weight, small.mlp.down_proj.weight)
    group, old_group = size.heads // size.kv_heads, old.num_attention_heads // old.num_key_value_heads
    step, half = size.head_dim // old.head_dim, old.head_dim // 2
    # pair i of the small head turns as fast as pair step * i of the large one
    turned = [*(step * i for i in range(half)), *(step * i + size.head_dim // 2 for i in range(half))]
    plain = list(range(old.head_dim))
    louder = (size.head_dim / old.head_dim) ** 0.5  # attention divides by the root of the head's size
    heads = [(h // old_group) * group + h % old_group for h in range(old.num_attention_heads)]
    kv_heads = range(old.num_key_value_heads)

    def rows_of(heads: Iterable[int], dims: Sequence[int]) -> torch.Tensor:
        rows = [h * size.head_dim + d for h in heads for d in dims]
        return torch.tensor(rows, device=large.mlp.down_proj.weight.device)

    mine, theirs = large.self_attn, small.self_attn
    copy_into_rows(mine.q_proj.weight, theirs.q_proj.weight * louder, rows_of(heads, turned))
    copy_into_rows(mine.k_proj.weight, theirs.k_proj.weight, rows_of(kv_heads, turned))
    copy_into_rows(mine.v_proj.weight, theirs.v_proj.weight, rows_of(kv_heads, plain))
    mine.o_proj.weight[: old.hidden_size, rows_of(heads, plain)] = theirs.o_proj.weight.to(mine.o_proj.weight)


def copy_into_rows(large: Any, small: Any, rows: torch.Tensor) -> None:
    """Put a small matrix into rows of a large one; its other rows do not read what those read."""
    large[:, : small.shape[1]] = 0
    large[rows, : small.shape[1]] = small.to(large)


# ------------------------------------------------------------------------------------------- figures


def measure_copy_bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy reads and writes, the best of ten."""
    source = torch.empty(GIB if device.type == "cuda" else GIB // 16, dtype=torch.uint8, device=device)
    out = torch.empty_like(source)
    times = [time_work(lambda: out.copy_(source), device) for _ in range(10)]
    return 2 * source.numel() / min(times)


def time_work(work: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    make: Any = torch.cuda.Event
    start, end = make(enable_timing=True), make(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def count_weight_bytes(module: Any) -> int:
    """Of all that one pass reads: every matrix but the embedding."""
    return sum(p.numel() * p.element_size() for name, p in module.named_parameters() if "embed" not in name)


class AssistedGenerator:
    """transformers' assisted generation; an answer is its number of tokens and its seconds."""

    def __init__(self, folder: Path, model: Any, assistant: Any) -> None:
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self._model, self._assistant = model, assistant

    def use_settings(self, num_tokens: int, confidence: float, schedule: str) -> None:
        config = self._assistant.generation_config
        config.num_assistant_tokens = num_tokens
        config.num_assistant_tokens_schedule = schedule
        config.assistant_confidence_threshold = confidence

    def __call__(self, request: ChatRequest) -> tuple[int, float]:
        messages = [message.to_openai() for message in request.messages]
        started = time.perf_counter()
        inputs = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(self._model.device)
        temperature = request.sampling.temperature
        sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
        with torch.inference_mode():
            out = self._model.generate(
                **inputs, assistant_model=self._assistant, max_new_tokens=request.max_tokens, **sampling
            )
        new_ids = out[0, inputs["input_ids"].shape[1] :]
        self._tokenizer.decode(new_ids, skip_special_tokens=True)
        return len(new_ids), time.perf_counter() - started

    def measure_tokens_per_s(self, requests: Sequence[ChatRequest]) -> float:
        answers = [self(request) for request in requests]
        return sum(num_tokens for num_tokens, _ in answers) / sum(seconds for _, seconds in answers)

    def use_best_settings(self, requests: Sequence[ChatRequest]) -> None:
        """Those that answer the requests fastest."""
        speeds: dict[tuple[int, float, str], float] = {}
        for settings in itertools.product(NUM_ASSISTANT_TOKENS, CONFIDENCES, SCHEDULES):
            self.use_settings(*settings)
            speeds[settings] = self.measure_tokens_per_s(requests)
        self.use_settings(*max(speeds, key=lambda settings: speeds[settings]))


class Row(NamedTuple):
    """One contender over all prompts."""

    name: str
    tokens_per_s: float
    tokens_per_round: float
    model_share: float
    overhead_ms: float
    same_text: int


def measure(
    name: str, decoder: SpeculativeDecoder, requests: list[ChatRequest], expected: list[str]
) -> tuple[Row, list[str]]:
    asyncio.run(decoder.decode(requests[0]))  # kernels are compiled and graphs recorded
    asyncio.run(decoder.decode(requests[0]))
    results: list[SpeculativeResult] = []
    seconds: list[float] = []
    for request in requests:
        started = time.perf_counter()
        results.append(asyncio.run(decoder.decode(request)))
        seconds.append(time.perf_counter() - started)
    texts = [result.content for result in results]
    tokens = sum(result.stats.num_emitted_tokens for result in results)
    rounds = sum(result.stats.num_rounds for result in results)
    model_s = sum(r.stats.draft_s + r.stats.verify_s for r in results)
    # from the first text on, and all rounds but the first: reading the prompt is no round
    wall_s = sum(result.timings.total_s - (result.timings.first_text_s or 0.0) for result in results)
    later = (rounds - len(results)) / rounds
    row = Row(
        name=name,
        tokens_per_s=tokens / sum(seconds),
        tokens_per_round=tokens / rounds,
        model_share=model_s * later / wall_s,
        overhead_ms=1e3 * (wall_s - model_s * later) / (rounds * later),
        same_text=sum(a == b for a, b in zip(texts, expected or texts, strict=True)),
    )
    return row, texts


def run(arguments: argparse.Namespace) -> None:
    device = torch.device(arguments.device)
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target_size, draft_size = (SMALL_TARGET, SMALL_DRAFT) if arguments.small else (TARGET, DRAFT)
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()[: arguments.prompts]
    what = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    today = datetime.datetime.now(tz=datetime.UTC).date()
    head = f"{what}, torch {torch.__version__}, transformers {transformers.__version__}, {today}, {dtype}"
    bandwidth = measure_copy_bandwidth(device)
    print(f"{head}\ncopy bandwidth {bandwidth / 1e9:.0f} GB/s", flush=True)
    modules = [
        make_dilated_model(PAIR / n, s, dtype, arguments.device)
        for n, s in (("target", target_size), ("draft", draft_size))
    ]
    num_bytes = count_weight_bytes(modules[0])
    assisted = AssistedGenerator(PAIR / "target", *modules)
    rows: list[list[Any]] = []
    for temperature in (0.0, 1.0):
        requests = [
            ChatRequest.create(
                json.loads(line)["messages"], max_tokens=arguments.max_tokens, temperature=temperature, seed=1
            )
            for line in lines
        ]
        assisted.use_best_settings(requests[:2])
        speed = assisted.measure_tokens_per_s(requests[:8])
        rows.append([temperature, "transformers assisted", speed, "", "", "", ""])
        print(f"temperature {temperature:g}, transformers assisted: {speed:.1f} tokens/s", flush=True)
    target = TorchProvider(TorchModel(PAIR / "target", module=modules[0], device_rounds=True))
    draft = TorchProvider(TorchModel(PAIR / "draft", module=modules[1], device_rounds=True))
    del modules, assisted
    for provider in (target, draft):
        fused = provider.model.has_fused_kernels
        print(f"{provider.name}: layers by {'fused kernels' if fused else 'torch operations'}", flush=True)
    for temperature in (0.0, 1.0):
        requests = [
            ChatRequest.create(
                json.loads(line)["messages"], max_tokens=arguments.max_tokens, temperature=temperature, seed=1
            )
            for line in lines
        ]
        plain, texts = measure("plain", SpeculativeDecoder(target=target, draft=None), requests, [])
        rows.append([temperature, *plain])
        policies: dict[str, LookaheadPolicy] = {f"fixed {n}": Fixed(n) for n in FIXED}
        policies["adaptive"] = CostAware()
        for name, lookahead in policies.items():
            config = SpeculativeConfig(strategy="tokens", lookahead=lookahead)
            row, _ = measure(
                name, SpeculativeDecoder(target=target, draft=ProviderDraft(draft), config=config), requests, texts
            )
            rows.append([temperature, *row])
            print(f"temperature {temperature:g}, {name}: {row.tokens_per_s:.1f} tokens/s", flush=True)
    print_table(rows, num_bytes / bandwidth, len(lines))
    write_report(rows, arguments.out, head)


def print_table(rows: list[list[Any]], step_floor_s: float, num_prompts: int) -> None:
    """The table, and the figures that are promised."""
    columns = ("t", "", "tokens/s", "a round", "model time", "host ms", "same text")
    print("{:>4} {:<24}{:>9}{:>9}{:>12}{:>9}{:>11}".format(*columns))
    for t, name, speed, per_round, share, overhead, same in rows:
        rest = f"{per_round:>9.2f}{share:>12.1%}{overhead:>9.3f}{same:>6} of {num_prompts}" if per_round else ""
        print(f"{t:>4.1f} {name:<24}{speed:>9.1f}{rest}")
    for temperature in (0.0, 1.0):
        speeds: dict[str, float] = {row[1]: row[2] for row in rows if row[0] == temperature}
        fixed = max(v for k, v in speeds.items() if k.startswith("fixed"))
        adaptive, plain = speeds["adaptive"], speeds["plain"]
        print(
            f"temperature {temperature:g}: plain {plain * step_floor_s:.0%} of what reading the weights once a token "
            f"allows; adaptive {adaptive / plain:.2f}x plain, {adaptive / fixed:.1%} of the best fixed, "
            f"{adaptive / speeds['transformers assisted']:.2f}x transformers' assisted"
        )


def write_report(rows: list[list[Any]], folder: Path, head: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "torch_gpu.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([f"# {head}"])
        writer.writerow(["temperature", "name", "tokens_per_s", "tokens_per_round", "model_share", "host_ms", "same"])
        writer.writerows(rows)
    try:
        plot: Any = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    figure, axes = plot.subplots(figsize=(8, 4))
    for temperature in (0.0, 1.0):
        points = [(row[1], row[2]) for row in rows if row[0] == temperature]
        axes.plot(
            [name for name, _ in points], [speed for _, speed in points], "o-", label=f"temperature {temperature:g}"
        )
    axes.set_ylabel("tokens/s")
    axes.set_title(head, fontsize=7)
    axes.tick_params(axis="x", rotation=60)
    axes.legend()
    figure.tight_layout()
    figure.savefig(folder / "torch_gpu.png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/torch_gpu"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=192)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
