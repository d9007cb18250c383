"""Converts a Hugging Face Llama folder to an ONNX folder that `llm_spec_onnx` can open.

python tools/convert_pair.py path/to/llama path/to/onnx
python tools/convert_pair.py path/to/llama --compare      # writes nothing, and prints a table of all kinds of weights

It says how far the result agrees with the float32 weights, and writes that into `conversion.json` beside the model: the
share of the tokens of greedy float32 answers that it would have written at the same places.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

import numpy as np
import onnx
from llama_onnx import Array, CacheKind, LlamaConfig, WeightsDtype, build_onnx
from llm_spec_onnx.model import OnnxModel
from safetensors.numpy import load_file

from llm_spec import ChatRequest

_COPIED_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
_MAX_FILE_BYTES = 2_000_000_000  # bytes of an ONNX file
_NUM_TOKENS = 48  # of an answer
_TIMED_WIDTHS = (1, 8)  # tokens a pass: plain decoding, and verifying
_NUM_TIMED = 30
PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Write a Python function that reverses a linked list.",
    "Explain in three sentences why the sky is blue.",
    "List five uses of a paper clip.",
    "Translate into French: The cat sleeps on the red chair.",
    "A train leaves at 9:40 and takes 2 hours 35 minutes. When does it arrive?",
    "Summarise: The meeting was moved from Tuesday to Thursday because two members were ill.",
    "What does HTTP status 404 mean?",
    "def area(radius):",
    "import json\n\ndef read(path):",
)


@dataclass(frozen=True)
class Agreement:
    """With float32: of so many greedy tokens of its answers to so many prompts, and so many answers in whole."""

    num_prompts: int
    num_same_answers: int
    num_tokens: int
    num_same_tokens: int

    @property
    def share(self) -> float:
        return self.num_same_tokens / self.num_tokens if self.num_tokens else 1.0

    def __str__(self) -> str:
        return (
            f"{100 * self.share:.1f} % of {self.num_tokens} greedy tokens are those of float32, "
            f"{self.num_same_answers} of {self.num_prompts} answers in whole"
        )


def convert(
    source: Path, destination: Path, *, cache: CacheKind, weights_dtype: WeightsDtype, prompts: Sequence[str] = PROMPTS
) -> Agreement | None:
    """Writes `model.onnx` and `conversion.json`, and copies the tokenizer, template and config files of the source.

    Returns how far it agrees with float32; None where those weights are too large for one file.
    """
    config = LlamaConfig.from_huggingface(json.loads((source / "config.json").read_text(encoding="utf-8")))
    weights = load_file(source / "model.safetensors")
    _write_folder(source, destination, config, weights, cache=cache, weights_dtype=weights_dtype)
    agreement = None
    if 4 * sum(matrix.size for matrix in weights.values()) < _MAX_FILE_BYTES:
        with TemporaryDirectory() as folder:
            _write_folder(source, Path(folder), config, weights, cache=cache, weights_dtype="fp32")
            agreement = measure_agreement(Path(folder), destination, prompts)
    agreement_text = None if agreement is None else {"share": agreement.share, **asdict(agreement)}
    conversion = {"weights": weights_dtype, "cache": cache, "agreement_with_fp32": agreement_text}
    (destination / "conversion.json").write_text(json.dumps(conversion, indent=1) + "\n", encoding="utf-8")
    return agreement


def measure_agreement(reference: Path, folder: Path, prompts: Sequence[str] = PROMPTS) -> Agreement:
    """Compare a model's choices along the greedy answers of another one, in folders of the same tokenizer."""
    answers = answer_prompts(OnnxModel(reference), prompts)
    return compare_along_answers(OnnxModel(folder), answers)


def compare_weights(source: Path, *, cache: CacheKind, prompts: Sequence[str] = PROMPTS) -> Iterator[str]:
    """A table of all kinds of weights, line by line: size, times on this machine, agreement with float32.

    Kinds are timed one after another, each by the fastest of some passes.
    """
    config = LlamaConfig.from_huggingface(json.loads((source / "config.json").read_text(encoding="utf-8")))
    weights = load_file(source / "model.safetensors")
    yield "| weights | MB | " + " | ".join(f"{width} tokens, ms" for width in _TIMED_WIDTHS) + " | agreement |"
    yield "| --- " * (3 + len(_TIMED_WIDTHS)) + "|"
    answers = None
    for weights_dtype in ("fp32", *(kind for kind in get_args(WeightsDtype) if kind != "fp32")):
        with TemporaryDirectory() as folder:
            _write_folder(source, Path(folder), config, weights, cache=cache, weights_dtype=weights_dtype)
            if answers is None:
                answers = answer_prompts(OnnxModel(Path(folder)), prompts)
            model = OnnxModel(Path(folder))
            times = " | ".join(f"{1e3 * _time_pass(model, width):.2f}" for width in _TIMED_WIDTHS)
            agreement = compare_along_answers(model, answers)
            size = (Path(folder) / "model.onnx").stat().st_size / 1e6
            del model  # before the next one is loaded
        yield (
            f"| `{weights_dtype}` | {size:.0f} | {times} | "
            f"{100 * agreement.share:.1f} % ({agreement.num_same_answers} of {agreement.num_prompts}) |"
        )


def answer_prompts(model: OnnxModel, prompts: Sequence[str]) -> list[tuple[list[int], list[int]]]:
    """Each prompt's ids, and a model's greedy answer to it."""
    questions = [list(model.tokenizer.encode_chat(ChatRequest.create(prompt))) for prompt in prompts]
    return [(prompt_ids, _generate_greedy(model, prompt_ids)) for prompt_ids in questions]


def compare_along_answers(model: OnnxModel, answers: Sequence[tuple[list[int], list[int]]]) -> Agreement:
    """Compare a model's choices along the answers of another one."""
    same = [_predict_tokens(model, prompt_ids, answer) == np.array(answer) for prompt_ids, answer in answers]
    return Agreement(
        num_prompts=len(same),
        num_same_answers=sum(bool(row.all()) for row in same),
        num_tokens=sum(map(len, same)),
        num_same_tokens=sum(int(row.sum()) for row in same),
    )


def _time_pass(model: OnnxModel, width: int) -> float:
    """Seconds of a pass of so many tokens behind a short text, the fastest of some."""
    session, token_ids = model.open(), list(range(32))
    try:
        session.forward(token_ids, num_rows=1)
        times = list[float]()
        for _ in range(_NUM_TIMED):
            started = time.perf_counter()
            session.forward(token_ids[:width], num_rows=width)
            times.append(time.perf_counter() - started)
            session.truncate(len(token_ids))
        return min(times)
    finally:
        session.close()


def _generate_greedy(model: OnnxModel, prompt_ids: list[int]) -> list[int]:
    """Its greedy answer, with the token that ends it."""
    session, answer = model.open(), list[int]()
    try:
        logits = session.forward(prompt_ids, num_rows=1)
        while True:
            answer.append(int(logits[-1].argmax()))
            if answer[-1] in model.tokenizer.eos_token_ids or len(answer) == _NUM_TOKENS:
                return answer
            logits = session.forward(answer[-1:], num_rows=1)
    finally:
        session.close()


def _predict_tokens(model: OnnxModel, prompt_ids: list[int], answer: list[int]) -> Array:
    """What it would have written in place of each of an answer's tokens, behind those before."""
    session = model.open()
    try:
        return session.forward([*prompt_ids, *answer[:-1]], num_rows=len(answer)).argmax(axis=-1)
    finally:
        session.close()


def _write_folder(
    source: Path,
    destination: Path,
    config: LlamaConfig,
    weights: dict[str, Array],
    *,
    cache: CacheKind,
    weights_dtype: WeightsDtype,
) -> None:
    destination.mkdir(parents=True, exist_ok=True)
    onnx.save(build_onnx(config, weights, cache=cache, weights_dtype=weights_dtype), destination / "model.onnx")
    for name in _COPIED_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, destination / name)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Convert a Hugging Face Llama folder to ONNX.")
    parser.add_argument("source", type=Path, help="folder with config.json, model.safetensors and tokenizer files")
    parser.add_argument("destination", type=Path, nargs="?", help="folder to write")
    parser.add_argument("--compare", action="store_true", help="print a table of all kinds of weights instead")
    parser.add_argument("--cache", choices=get_args(CacheKind), default="shared")
    parser.add_argument("--weights", choices=get_args(WeightsDtype), default="q8", help="default: %(default)s")
    parser.add_argument("--prompts", type=Path, help="a file with one prompt a line, to measure the agreement by")
    options = parser.parse_args(arguments)
    prompts = PROMPTS if options.prompts is None else options.prompts.read_text(encoding="utf-8").splitlines()
    if options.compare:
        for line in compare_weights(options.source, cache=options.cache, prompts=prompts):
            print(line, flush=True)
        return
    if options.destination is None:
        parser.error("give a folder to write, or --compare")
    agreement = convert(
        options.source, options.destination, cache=options.cache, weights_dtype=options.weights, prompts=prompts
    )
    total_size = sum(file.stat().st_size for file in options.destination.iterdir() if file.is_file())
    print(f"{options.destination}: {total_size / 1e6:.2f} MB, {options.weights}")
    print(agreement or "agreement with float32 not measured: those weights are too large for one ONNX file")


if __name__ == "__main__":
    main()
