"""Small model folders made on the spot."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import llm_spec_onnx
import onnx
from llama_onnx import CacheKind, LlamaConfig, WeightsDtype, build_onnx, create_random_weights

__all__ = ["BUILTIN", "TINY", "MakeFolder", "write_tiny_model"]

BUILTIN = Path(str(llm_spec_onnx.__file__)).parent / "builtin"
TINY = LlamaConfig(
    vocab_size=4096,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_positions=2048,
)

MakeFolder = Callable[..., Path]


def write_tiny_model(folder: Path, cache: CacheKind, weights_dtype: WeightsDtype, seed: int) -> None:
    """A folder with a tiny random Llama and the built-in tokenizer."""
    shutil.copytree(BUILTIN / "draft", folder, ignore=shutil.ignore_patterns("model.onnx"))
    config = asdict(TINY) | {"max_position_embeddings": TINY.max_positions, "eos_token_id": 7}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model = build_onnx(TINY, create_random_weights(TINY, seed), cache=cache, weights_dtype=weights_dtype)
    onnx.save(model, folder / "model.onnx")
