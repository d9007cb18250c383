"""Converts a Hugging Face Llama folder to an ONNX folder that `llm_spec_onnx` can open.

python tools/convert_pair.py path/to/llama path/to/onnx --weights int8 --cache shared
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import onnx
from llama_onnx import CacheKind, LlamaConfig, WeightsDtype, build_onnx
from safetensors.numpy import load_file

_COPIED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def convert(source: Path, destination: Path, *, cache: CacheKind, weights_dtype: WeightsDtype) -> None:
    """Writes `model.onnx` and copies the tokenizer, template and config files that the source has."""
    config = LlamaConfig.from_huggingface(json.loads((source / "config.json").read_text(encoding="utf-8")))
    model = build_onnx(config, load_file(source / "model.safetensors"), cache=cache, weights_dtype=weights_dtype)
    destination.mkdir(parents=True, exist_ok=True)
    onnx.save(model, destination / "model.onnx")
    for name in _COPIED:
        if (source / name).exists():
            shutil.copyfile(source / name, destination / name)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Convert a Hugging Face Llama folder to ONNX.")
    parser.add_argument("source", type=Path, help="folder with config.json, model.safetensors and tokenizer files")
    parser.add_argument("destination", type=Path, help="folder to write")
    parser.add_argument("--cache", choices=get_args(CacheKind), default="shared")
    parser.add_argument("--weights", choices=get_args(WeightsDtype), default="int8")
    options = parser.parse_args(arguments)
    convert(options.source, options.destination, cache=options.cache, weights_dtype=options.weights)
    total_size = sum(file.stat().st_size for file in options.destination.iterdir() if file.is_file())
    print(f"{options.destination}: {total_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
