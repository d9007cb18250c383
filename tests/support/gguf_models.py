"""GGUF files made on the spot: the trained pair of tests/peers, and tiny random models of several kinds."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llm_spec_gguf import GgufModel, GgufProvider
from make_pair import find_pair

__all__ = [
    "PAIR",
    "WriteModel",
    "byte_level_vocabulary",
    "gguf_draft",
    "pair",
    "sentencepiece_vocabulary",
    "target",
    "tiny",
    "write_mamba",
    "write_model",
]

ROOT = Path(__file__).parents[2]
PAIR = find_pair()
_SPEC = importlib.util.spec_from_file_location("to_gguf", ROOT / "tools" / "peers" / "to_gguf.py")
assert _SPEC is not None
assert _SPEC.loader is not None
to_gguf: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(to_gguf)

WriteModel = Callable[..., Path]

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 128, 2, 4, 2, 16
SHAPE: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.context_length": 2048,
    "llama.embedding_length": HIDDEN,
    "llama.block_count": LAYERS,
    "llama.feed_forward_length": FFN,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-6,
    "llama.rope.dimension_count": HEAD_DIM,
}
TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}<|assistant|>"


def byte_level_vocabulary(words: Sequence[str] = ("the", "he", "in")) -> dict[str, Any]:
    """Three control tokens, one token for each byte, and some words; two merges make each word's parts."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    names = [chr(value if value in visible else next(others)) for value in range(256)]
    merges = ["h e", "t he", "i n"]
    control = ["<|end|>", "<tool_call>", "</tool_call>"]
    tokens = [*control, *names, *words]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(control) + [1] * (len(tokens) - len(control)),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }


def sentencepiece_vocabulary() -> dict[str, Any]:
    """As Llama 2's: a space is put before a text, and bytes that are no character have tokens of their own."""
    letters = [*"▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;!?<>|/"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), *letters, "he", "▁he", "ll"]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(index) for index in range(len(tokens))],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": True,
    }


def random_weights(vocab_size: int, seed: int = 0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return generator.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)

    tensors = {"token_embd.weight": draw(vocab_size, HIDDEN) * 4, "output_norm.weight": np.ones(HIDDEN, np.float32)}
    for layer in range(LAYERS):
        tensors |= {
            f"blk.{layer}.attn_norm.weight": np.ones(HIDDEN, np.float32),
            f"blk.{layer}.ffn_norm.weight": np.ones(HIDDEN, np.float32),
            f"blk.{layer}.attn_q.weight": draw(HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_k.weight": draw(KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_v.weight": draw(KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_output.weight": draw(HIDDEN, HEADS * HEAD_DIM),
            f"blk.{layer}.ffn_gate.weight": draw(FFN, HIDDEN),
            f"blk.{layer}.ffn_up.weight": draw(FFN, HIDDEN),
            f"blk.{layer}.ffn_down.weight": draw(HIDDEN, FFN),
        }
    return tensors


def write_mamba(path: Path) -> Path:
    """A tiny model that keeps a state in place of a cache."""
    vocabulary = byte_level_vocabulary()
    inner, state, rank, conv = 2 * HIDDEN, 16, 4, 4
    metadata = {
        **vocabulary,
        "general.architecture": "mamba",
        "mamba.context_length": 256,
        "mamba.embedding_length": HIDDEN,
        "mamba.feed_forward_length": 0,
        "mamba.attention.head_count": 0,
        "mamba.attention.layer_norm_rms_epsilon": 1e-6,
        "mamba.block_count": 1,
        "mamba.ssm.conv_kernel": conv,
        "mamba.ssm.inner_size": inner,
        "mamba.ssm.state_size": state,
        "mamba.ssm.time_step_rank": rank,
    }
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(vocabulary["tokenizer.ggml.tokens"]), HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.ssm_in.weight": (2 * inner, HIDDEN),
        "blk.0.ssm_conv1d.weight": (inner, conv),
        "blk.0.ssm_conv1d.bias": (inner,),
        "blk.0.ssm_x.weight": (rank + 2 * state, inner),
        "blk.0.ssm_dt.weight": (inner, rank),
        "blk.0.ssm_dt.bias": (inner,),
        "blk.0.ssm_a": (inner, state),
        "blk.0.ssm_d": (inner,),
        "blk.0.ssm_out.weight": (HIDDEN, inner),
    }
    with path.open("wb") as file:
        to_gguf.write_gguf(file, metadata, {name: np.ones(shape, np.float32) for name, shape in shapes.items()})
    return path


@pytest.fixture
def write_model(tmp_path: Path) -> WriteModel:
    """Write a tiny random model; `values` are added to its metadata, and None takes a value out."""

    def write(
        values: Mapping[str, Any] | None = None, *, vocabulary: Mapping[str, Any] | None = None, name: str = "tiny"
    ) -> Path:
        vocabulary = byte_level_vocabulary() if vocabulary is None else vocabulary
        metadata = {**SHAPE, **vocabulary, "tokenizer.chat_template": TEMPLATE, **(values or {})}
        metadata = {key: value for key, value in metadata.items() if value is not None}
        path = tmp_path / f"{name}.gguf"
        with path.open("wb") as file:
            to_gguf.write_gguf(file, metadata, random_weights(len(vocabulary["tokenizer.ggml.tokens"])))
        return path

    return write


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The files of the trained pair."""
    folder = tmp_path_factory.mktemp("gguf")
    for name in ("target", "draft"):
        to_gguf.convert(PAIR / name, folder / f"{name}.gguf")
    return {name: folder / f"{name}.gguf" for name in ("target", "draft")}


@pytest.fixture(scope="session")
def target(pair: dict[str, Path]) -> GgufProvider:
    return GgufProvider(pair["target"], threads=1, max_width=16)


@pytest.fixture(scope="session")
def gguf_draft(pair: dict[str, Path]) -> GgufProvider:
    return GgufProvider(pair["draft"], threads=1)


@pytest.fixture
def tiny(write_model: WriteModel) -> GgufModel:
    return GgufModel(write_model(), threads=1, max_width=16)
