"""OnnxProvider: a chat model from a folder, or from the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

from llm_spec.kit.local_provider import TokenModelProvider
from llm_spec_onnx.model import OnnxModel
from llm_spec_onnx.options import OnnxOptions

__all__ = ["OnnxProvider"]


class OnnxProvider(TokenModelProvider[OnnxModel]):
    """Answers with a local ONNX model on the CPU, in a worker thread.

    Arguments and errors are OnnxModel's.
    """

    def __init__(self, model: str | Path, *, name: str | None = None, **options: Unpack[OnnxOptions]) -> None:
        super().__init__(OnnxModel(model, name=name, **options))
