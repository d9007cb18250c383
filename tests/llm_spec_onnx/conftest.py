"""Small model folders made on the spot, and the built-in target loaded once."""

from __future__ import annotations

from pathlib import Path

import pytest
from llama_onnx import CacheKind, WeightsDtype
from llm_spec_onnx.model import OnnxModel
from support.tiny_models import BUILTIN, MakeFolder, write_tiny_model


@pytest.fixture
def make_folder(tmp_path: Path) -> MakeFolder:
    """Make a folder with a tiny random Llama and the built-in tokenizer."""

    def make(cache: CacheKind = "shared", weights_dtype: WeightsDtype = "fp32", seed: int = 0) -> Path:
        folder = tmp_path / f"{cache}-{weights_dtype}-{seed}"
        write_tiny_model(folder, cache, weights_dtype, seed)
        return folder

    return make


@pytest.fixture(scope="session")
def builtin_target() -> OnnxModel:
    """The built-in target's token model."""
    return OnnxModel(BUILTIN / "target", name="builtin:target")
