"""Models whose tokenizer has tokens that the weights have no rows for: Gemma 3 1B, and many that were trained on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from llama_onnx import build_onnx, create_random_weights
from llm_spec_onnx import OnnxProvider
from support.tiny_models import TINY, write_tiny_model

from llm_spec import (
    InvalidRequestError,
    LlmProvider,
    PromptLookup,
    ProviderDraft,
    ReferenceDraft,
    SpeculativeDecoder,
)
from llm_spec.testing import check_token_model_conformance

NUM_ROWS = 4096


def add_token(folder: Path, *, special: bool) -> Path:
    parts = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    parts["added_tokens"].append({"id": NUM_ROWS, "content": "<image>", "special": special} | flags)
    (folder / "tokenizer.json").write_text(json.dumps(parts), encoding="utf-8")
    return folder


@pytest.fixture(scope="module", params=["onnx special", "onnx", "torch special", "torch"])
def provider(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LlmProvider:
    kind, *special = str(request.param).split()
    folder = tmp_path_factory.mktemp("rows") / "model"
    write_tiny_model(folder, "shared", "fp32", seed=1)
    add_token(folder, special=bool(special))
    if kind == "onnx":
        return OnnxProvider(folder)
    torch = pytest.importorskip("torch")
    transformers: Any = pytest.importorskip("transformers")
    from llm_spec_torch import TorchProvider

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=NUM_ROWS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=7,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return TorchProvider(folder, device="cpu", max_width=8)


async def test_it_answers(provider: LlmProvider) -> None:
    """With and without a draft, free and held to a format, though a draft or a format spells the token."""
    drafts = [None, PromptLookup(), ReferenceDraft("<image> <image> <image>"), ProviderDraft(provider)]
    pattern = {"type": "regex", "pattern": "<image>( <image>)*"}
    for draft in drafts:
        decoder = SpeculativeDecoder(target=provider, draft=draft)
        free = await decoder.decode("hello", max_tokens=8, temperature=0.9, seed=1)
        held = await decoder.decode("hello", max_tokens=30, response_format=pattern)
        assert (free.fallbacks, held.fallbacks) == ((), ())
        assert held.content.startswith("<image>")


async def test_a_prompt_that_has_it_is_one_clear_error(provider: LlmProvider) -> None:
    """It names the token; nothing is read, and the next answer comes."""
    for raw in (False, True):
        with pytest.raises(InvalidRequestError, match=f"token {NUM_ROWS}; .* has weights for tokens 0 to"):
            await SpeculativeDecoder(target=provider, draft=PromptLookup()).decode("see <image>", max_tokens=3, raw=raw)
    result = await SpeculativeDecoder(target=provider, draft=None).decode("see", max_tokens=3, prefix="<image>")
    assert result.usage is not None


def test_it_keeps_the_promises_of_a_token_model(provider: LlmProvider) -> None:
    model = provider.capabilities.token_model
    assert model is not None
    check_token_model_conformance(model, texts=("  two  spaces ", "Hello <image>"))


async def test_a_draft_with_fewer_rows_is_left_out_of_such_a_prompt(tmp_path: Path) -> None:
    """The target has the row; the draft would read beyond its table."""
    folders = [tmp_path / "target", tmp_path / "draft"]
    for folder in folders:
        write_tiny_model(folder, "shared", "fp32", seed=1)
        add_token(folder, special=True)
    wider = replace(TINY, vocab_size=NUM_ROWS + 64)
    weights = create_random_weights(wider, 1)
    onnx.save(build_onnx(wider, weights, cache="shared", weights_dtype="fp32"), folders[0] / "model.onnx")
    target, draft = map(OnnxProvider, folders)
    result = await SpeculativeDecoder(target=target, draft=ProviderDraft(draft)).decode("see <image>", max_tokens=4)
    assert result.stopped_by == "max_tokens"
    assert f"token {NUM_ROWS}" in result.fallbacks[0]
