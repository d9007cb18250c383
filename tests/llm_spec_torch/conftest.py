"""Tiny random checkpoints of every supported family, made on the spot, and models loaded from them."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from make_pair import find_pair
from support.tiny_models import BUILTIN

torch: Any = pytest.importorskip("torch")
transformers: Any = pytest.importorskip("transformers")

torch.set_num_threads(1)  # two that wait for each other are slower, where other work goes on

PAIR = find_pair()
SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "eos_token_id": 7,
    "bos_token_id": 0,
    "pad_token_id": 0,
}
# transformers' configuration class, and what makes the family different; windows and ropes that short prompts notice
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-rope3": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "mistral": ("MistralConfig", {"sliding_window": 12}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-window": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {}),
    "gemma": ("GemmaConfig", {}),
    "gemma2": ("Gemma2Config", {"sliding_window": 9, "query_pre_attn_scalar": 20}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 11, "query_pre_attn_scalar": 24}),
}

MakeCheckpoint = Callable[..., Path]


def write_checkpoint(folder: Path, family: str = "llama", *, seed: int = 0, **changes: Any) -> Path:
    """A folder with a tiny random model and the built-in tokenizer; `changes` go into its configuration."""
    shutil.copytree(BUILTIN / "draft", folder, ignore=shutil.ignore_patterns("model.onnx", "config.json"))
    name, differences = FAMILIES[family]
    config = getattr(importlib.import_module("transformers"), name)(**(SIZES | differences | changes))
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # the usual beginning is so even that all tokens come out alike
        parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}), encoding="utf-8")
    return folder


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> MakeCheckpoint:
    """Write a tiny random checkpoint of a family and give its folder."""

    def make(family: str = "llama", **changes: Any) -> Path:
        return write_checkpoint(tmp_path / f"{family}-{len(list(tmp_path.iterdir()))}", family, **changes)

    return make


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama that all tests may read and none may change."""
    return write_checkpoint(tmp_path_factory.mktemp("torch") / "tiny")


@pytest.fixture(scope="session")
def tiny_model(tiny_folder: Path) -> Any:
    """The tiny random Llama, loaded."""
    return importlib.import_module("llm_spec_torch").TorchModel(tiny_folder, max_requests=4)


@pytest.fixture(scope="session")
def pair() -> tuple[Any, Any]:
    """Providers of the trained pair: target and draft."""
    provider = importlib.import_module("llm_spec_torch").TorchProvider
    return provider(PAIR / "target"), provider(PAIR / "draft")
