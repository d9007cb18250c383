"""Every family of models says what transformers' own modules say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from llm_spec_torch import TorchModel
from support.text_checks import check_greedy_ids

from llm_spec.contract.errors import ModelLoadError

from .conftest import FAMILIES, MakeCheckpoint

pytestmark = pytest.mark.slow

PROMPT_IDS = [int(t) for t in np.random.default_rng(1).integers(8, 4096, 40)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_logits_are_those_of_transformers(family: str, attention: Any, make_checkpoint: MakeCheckpoint) -> None:
    """Position by position, however the tokens are cut into passes, sliding windows and position scaling included."""
    folder = make_checkpoint(family)
    module: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = module(torch.tensor([PROMPT_IDS])).logits[0].numpy()
    session = TorchModel(folder, attention=attention).open()
    rows: list[Any] = []
    for start, end in ((0, 1), (1, 14), (14, 30), (30, 40)):
        rows.append(session.forward(PROMPT_IDS[start:end], num_rows=end - start).copy())
    np.testing.assert_allclose(np.concatenate(rows), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_transformers(family: str, make_checkpoint: MakeCheckpoint) -> None:
    """Sixty greedy tokens, one after the other, are the likeliest by transformers' own logits."""
    folder = make_checkpoint(family)
    module: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    session = TorchModel(folder).open()
    session.forward(PROMPT_IDS[:-1], num_rows=1)
    found, token_id = [], PROMPT_IDS[-1]
    for _ in range(60):
        token_id = int(session.forward([token_id], num_rows=1)[0].argmax())
        found.append(token_id)
    check_greedy_ids(module, PROMPT_IDS, found)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ("GPT2Config", "not built like Llama"),
        ("Phi3Config", "not built like Llama"),
        ("GraniteConfig", "logits differ from transformers' own"),
    ],
)
def test_other_architectures_are_refused(config: str, what: str, make_checkpoint: MakeCheckpoint) -> None:
    """What is built otherwise, or only looks the same, is refused with a way out."""
    folder = make_checkpoint()
    for name in ("model.safetensors", "config.json"):
        (folder / name).unlink()
    extra = {"embedding_multiplier": 3.0, "residual_multiplier": 0.2} if config == "GraniteConfig" else {}
    made: Any = getattr(transformers, config)(
        vocab_size=4096,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        **extra,
    )
    transformers.AutoModelForCausalLM.from_config(made).save_pretrained(folder)
    with pytest.raises(ModelLoadError, match=what) as error:
        TorchModel(folder)
    assert "vllm:" in str(error.value)


def test_the_text_part_of_a_model_that_sees_is_read(make_checkpoint: MakeCheckpoint) -> None:
    """Gemma 3 from 4B on comes with a vision tower; layers and logits are those of its language model."""
    folder = make_checkpoint("gemma3")
    text: Any = transformers.AutoConfig.from_pretrained(folder)
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config: Any = transformers.Gemma3Config(
        text_config=text.to_dict(), vision_config=vision | {"image_size": 28, "patch_size": 14}, mm_tokens_per_image=1
    )
    torch.manual_seed(0)
    module: Any = transformers.Gemma3ForConditionalGeneration(config).eval()
    module.save_pretrained(folder)
    model = TorchModel(folder)
    with torch.inference_mode():
        expected = module(torch.tensor([PROMPT_IDS])).logits[0].numpy()
    found = model.open().forward(PROMPT_IDS[:16], num_rows=16)
    np.testing.assert_allclose(found, expected[:16], rtol=2e-3, atol=2e-3)
    assert TorchModel(folder, layers=1).max_width > 1


class PackedLinear(torch.nn.Linear):
    """What libraries of quantised weights put in the place of a linear module."""


@pytest.mark.parametrize(
    ("fault", "message"), [("packed", r"q_proj are quantised \(PackedLinear\)"), ("no rope", "does not rotate")]
)
def test_modules_that_compute_otherwise_are_refused(fault: str, message: str, tiny_folder: Path) -> None:
    """Although their names are the right ones."""
    module: Any = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    attention = module.model.layers[1].self_attn
    if fault == "packed":
        attention.q_proj = PackedLinear(32, 64, bias=False)
    else:
        attention.use_rope = 0
    with pytest.raises(ModelLoadError, match=message):
        TorchModel(tiny_folder, module=module)


def test_a_loaded_module_is_taken_as_it_is(tiny_folder: Path) -> None:
    """Its weights count, not the folder's."""
    module: Any = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        module.model.layers[0].mlp.up_proj.weight.mul_(2.0)
        expected = module(torch.tensor([PROMPT_IDS[:12]])).logits[0].numpy()
    found = TorchModel(tiny_folder, module=module).open().forward(PROMPT_IDS[:12], num_rows=12)
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3)
