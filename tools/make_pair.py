"""Makes a small trained pair in Hugging Face's layout, for tests and for servers that read such folders.

    python tools/make_pair.py        # writes tests/peers/models/target and draft, unless they are there

They are the built-in models, whose ONNX files hold weights in 8 and 4 bits: each weight is its level times its scale,
written in float16. `llama_onnx.py` says how the levels are stored.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["find_pair"]

Array: TypeAlias = npt.NDArray[Any]

_ROOT: Final = Path(__file__).parents[1]
_FOLDER: Final = _ROOT / "tests" / "peers" / "models"
_BUILTIN: Final = _ROOT / "providers" / "llm_spec_onnx" / "builtin"
_NAMES: Final = ("target", "draft")
_JOINED: Final = "self_attn.q_proj_self_attn.k_proj_self_attn.v_proj.weight"
_WEIGHTS: Final = "model.safetensors"


def find_pair() -> Path:
    """The folder with `target` and `draft`, which are made where they are missing. Needs onnx and safetensors."""
    for name in _NAMES:
        if not (_FOLDER / name / _WEIGHTS).exists():
            with tempfile.TemporaryDirectory(dir=_FOLDER) as folder:  # who looks meanwhile finds no half of one
                made = Path(folder) / name
                _write_model(_BUILTIN / name, made)
                _move_unless_there(made, _FOLDER / name)
    return _FOLDER


def _move_unless_there(made: Path, place: Path) -> None:
    try:
        os.rename(made, place)
    except OSError:
        if not (place / _WEIGHTS).exists():
            raise  # else another process was first


def _write_model(source: Path, folder: Path) -> None:
    import onnx
    from safetensors.numpy import save_file

    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.onnx"))
    stored = {one.name: onnx.numpy_helper.to_array(one) for one in onnx.load(source / "model.onnx").graph.initializer}
    weights = {name: weight.astype(np.float16) for name, weight in _split_attention(_read_weights(stored)).items()}
    save_file({name: np.ascontiguousarray(weight) for name, weight in weights.items()}, folder / _WEIGHTS)


def _read_weights(stored: Mapping[str, Array]) -> dict[str, Array]:
    """Matrices as [out, in], and norms, in float32. A head that is stored beside the embedding is the same matrix."""
    weights: dict[str, Array] = {}
    for name, values in stored.items():
        matrix = name.removesuffix(".levels")
        if not name.startswith("model.") or matrix.endswith(".head") or name.endswith((".scale", ".scales")):
            continue
        if name.endswith(".levels"):
            weights[matrix] = _read_blocks(values, stored[f"{matrix}.scales"])
        elif f"{name}.scale" in stored:
            scaled = values.astype(np.float32) * stored[f"{name}.scale"]
            weights[name] = scaled if name == "model.embed_tokens.weight" else scaled.T
        else:
            weights[name] = values
    return weights


def _read_blocks(levels: Array, scales: Array) -> Array:
    """A matrix from levels [out, in / 32, 32] of 8 bits, or of 4 bits with two in a byte; a scale for every 32."""
    if levels.shape[-1] == 16:
        pairs = np.stack([levels & 15, levels >> 4], axis=-1)
        centred = pairs.reshape(*levels.shape[:-1], 32).astype(np.float32) - 8
    else:
        centred = levels.astype(np.float32) - 128
    return (centred * scales[..., None]).reshape(len(levels), -1)


def _split_attention(weights: Mapping[str, Array]) -> dict[str, Array]:
    """Queries, keys and values apart: the queries have as many rows as there are columns, the others share the rest."""
    split: dict[str, Array] = {}
    for name, weight in weights.items():
        prefix, joined, _ = name.partition(_JOINED)
        if not joined:
            split[name] = weight
            continue
        num_queries = weight.shape[1]
        num_keys = (len(weight) - num_queries) // 2
        parts = np.split(weight, [num_queries, num_queries + num_keys])
        split |= {f"{prefix}self_attn.{part}_proj.weight": rows for part, rows in zip("qkv", parts, strict=True)}
    return split


if __name__ == "__main__":
    print(find_pair())
