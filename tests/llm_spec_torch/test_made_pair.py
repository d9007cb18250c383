"""The pair that `tools/make_pair.py` writes computes what the built-in pair does, up to rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from llm_spec_onnx.model import OnnxModel
from support.tiny_models import BUILTIN

TEXT = "def getregentry():\n    return codecs.CodecInfo(\n        name='utf-8',\n        encode=encode,\n    )\n"


@pytest.mark.parametrize(("index", "name"), [(0, "target"), (1, "draft")])
def test_the_same_tokens_are_likely(pair: tuple[Any, Any], index: int, name: str) -> None:
    """Two roundings apart: weights in float16 here, and the draft's activations in 8 bits there."""
    made, stored = pair[index].model, OnnxModel(BUILTIN / name)
    token_ids = stored.tokenizer.encode(TEXT)
    logits = [np.array(model.open().forward(token_ids, num_rows=len(token_ids))) for model in (made, stored)]
    ours, theirs = (values.astype(np.float64).ravel() for values in logits)
    assert np.corrcoef(ours, theirs)[0, 1] > 0.999
    assert np.mean(logits[0].argmax(axis=1) == logits[1].argmax(axis=1)) > 0.9
