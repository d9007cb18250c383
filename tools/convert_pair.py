"""Converts a Hugging Face Llama folder to an ONNX folder that `llm_spec_onnx` can open.

python tools/convert_pair.py path/to/llama path/to/onnx

It says how far the result agrees with the float32 weights, and writes that into `conversion.json` beside the model: the
share of the tokens of greedy float32 answers that it would have written at the same places.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
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
    model = OnnxModel(reference)
    questions = [list(model.tokenizer.encode_chat(ChatRequest.create(prompt))) for prompt in prompts]
    answers = [_generate_greedy(model, prompt_ids) for prompt_ids in questions]
    del model  # before the other one is loaded
    other = OnnxModel(folder)
    same = [_predict_tokens(other, q, a) == np.array(a) for q, a in zip(questions, answers, strict=True)]
    return Agreement(
        num_prompts=len(prompts),
        num_same_answers=sum(bool(row.all()) for row in same),
        num_tokens=sum(map(len, answers)),
        num_same_tokens=sum(int(row.sum()) for row in same),
    )


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
    parser.add_argument("destination", type=Path, help="folder to write")
    parser.add_argument("--cache", choices=get_args(CacheKind), default="shared")
    parser.add_argument("--weights", choices=get_args(WeightsDtype), default="q8", help="default: %(default)s")
    parser.add_argument("--prompts", type=Path, help="a file with one prompt a line, to measure the agreement by")
    options = parser.parse_args(arguments)
    prompts = PROMPTS if options.prompts is None else options.prompts.read_text(encoding="utf-8").splitlines()
    agreement = convert(
        options.source, options.destination, cache=options.cache, weights_dtype=options.weights, prompts=prompts
    )
    total_size = sum(file.stat().st_size for file in options.destination.iterdir() if file.is_file())
    print(f"{options.destination}: {total_size / 1e6:.2f} MB, {options.weights}")
    print(agreement or "agreement with float32 not measured: those weights are too large for one ONNX file")


if __name__ == "__main__":
    main()
