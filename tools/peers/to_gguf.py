"""Writes a Hugging Face Llama folder with a byte-level BPE tokenizer as a GGUF file in float32, for llama-server.

python tools/peers/to_gguf.py path/to/llama path/to/model.gguf

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. A file is a header, key-value pairs, a table of
tensors and their data; all of it little-endian, texts and arrays with their length in front.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

FloatArray: TypeAlias = npt.NDArray[np.float32]
Value: TypeAlias = str | bool | int | float | Sequence[str] | Sequence[int] | Sequence[float]

_VERSION = 3
_ALIGNMENT = 32  # of every tensor's data, the format's default
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9  # types of values
_INT32_ITEM, _FLOAT32_ITEM = struct.Struct("<i"), struct.Struct("<f")  # of arrays
_TENSOR_FLOAT32 = 0  # a type of tensors
_NORMAL, _CONTROL = 1, 3  # types of tokens

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def convert(source: Path, destination: Path) -> None:
    """Writes beside `destination` first: a file of that name is always whole."""
    config = _read_json(source / "config.json")
    values = _build_model_values(config) | _build_tokenizer_values(_read_json(source / "tokenizer.json"), config)
    template = source / "chat_template.jinja"
    if template.exists():
        values["tokenizer.chat_template"] = template.read_text(encoding="utf-8")
    tensors = dict(
        _convert_tensor(name, weight, config) for name, weight in load_file(source / "model.safetensors").items()
    )
    partial = destination.with_suffix(f".{os.getpid()}")
    with partial.open("wb") as file:
        write_gguf(file, values, tensors)
    partial.replace(destination)


def write_gguf(file: BinaryIO, values: Mapping[str, Value], tensors: Mapping[str, FloatArray]) -> None:
    """Every tensor is written as float32, its dimensions innermost first."""
    file.write(b"GGUF" + struct.pack("<IQQ", _VERSION, len(tensors), len(values)))
    for key, value in values.items():
        file.write(_encode_text(key) + _encode_value(value))
    offset = 0
    for name, tensor in tensors.items():
        shape = tensor.shape[::-1]
        file.write(_encode_text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape))
        file.write(struct.pack("<IQ", _TENSOR_FLOAT32, offset))
        offset += _align(tensor.nbytes)
    for tensor in tensors.values():
        file.write(b"\0" * (_align(file.tell()) - file.tell()))
        file.write(tensor.astype("<f4").tobytes())


def _build_model_values(config: Mapping[str, Any]) -> dict[str, Value]:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or config
    return {
        "general.architecture": "llama",
        "general.file_type": 0,  # all of it is float32
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.block_count": config["num_hidden_layers"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.key_length": head_dim,
        "llama.attention.value_length": head_dim,
        "llama.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "llama.rope.freq_base": float(rope.get("rope_theta", 10000.0)),
        "llama.rope.dimension_count": head_dim,
        "llama.vocab_size": config["vocab_size"],
    }


def _build_tokenizer_values(tokenizer: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Value]:
    added = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    tokens = {token_id: token for token, token_id in tokenizer["model"]["vocab"].items()} | added
    token_ids = range(config["vocab_size"])
    merges = tokenizer["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [tokens[token_id] for token_id in token_ids],
        "tokenizer.ggml.token_type": [_CONTROL if token_id in added else _NORMAL for token_id in token_ids],
        "tokenizer.ggml.merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.ggml.padding_token_id": config["pad_token_id"],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
    }


def _convert_tensor(name: str, weight: npt.NDArray[Any], config: Mapping[str, Any]) -> tuple[str, FloatArray]:
    """A weight under llama.cpp's name, its heads in llama.cpp's order."""
    tensor = weight.astype(np.float32)
    name = name.removesuffix(".weight")
    if name in _NAMES:
        return f"{_NAMES[name]}.weight", tensor
    _, _, layer, part = name.split(".", 3)
    if part in ("self_attn.q_proj", "self_attn.k_proj"):
        query = part == "self_attn.q_proj"
        tensor = _interleave_heads(tensor, config["num_attention_heads" if query else "num_key_value_heads"])
    return f"blk.{layer}.{_NAMES[part]}.weight", tensor


def _interleave_heads(weight: FloatArray, num_heads: int) -> FloatArray:
    """Rotary pairs side by side, as llama.cpp turns them; Hugging Face keeps them half a head apart.

    weight: [num_heads * head_dim, hidden_size]
    """
    halves = weight.reshape(num_heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def _encode_value(value: Value) -> bytes:
    """A value behind its type."""
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _encode_text(value)
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _UINT32, value)
    if isinstance(value, float):
        return struct.pack("<If", _FLOAT32, value)
    kinds = {str: (_STRING, _encode_text), int: (_INT32, _INT32_ITEM.pack), float: (_FLOAT32, _FLOAT32_ITEM.pack)}
    kind, encode = kinds[type(value[0])]
    return struct.pack("<IIQ", _ARRAY, kind, len(value)) + b"".join(map(encode, value))


def _encode_text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _align(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Convert a Hugging Face Llama folder to GGUF.")
    parser.add_argument("source", type=Path, help="folder with config.json, model.safetensors and tokenizer.json")
    parser.add_argument("destination", type=Path, help="file to write")
    options = parser.parse_args(arguments)
    convert(options.source, options.destination)
    print(f"{options.destination}: {options.destination.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
