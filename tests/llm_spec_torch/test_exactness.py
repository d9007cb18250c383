"""One seed, one text: with any draft, any lookahead, every sampling option, in float32."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from llm_spec_torch import TorchModel, TorchProvider
from support.text_checks import check_greedy_text, check_one_text, check_rows, check_texts

from llm_spec import (
    CascadeDraft,
    ChatRequest,
    CostAware,
    Fixed,
    PromptLookup,
    ProviderDraft,
    ReferenceDraft,
    SpeculativeConfig,
    SpeculativeDecoder,
)
from llm_spec.local.lookahead import LookaheadPolicy
from llm_spec.testing import RandomDraft

from .conftest import PAIR

pytestmark = pytest.mark.slow

PROMPT = "def test_fd_close(self):"
POLICIES: dict[str, LookaheadPolicy] = {**{str(n): Fixed(n) for n in range(1, 9)}, "adaptive": CostAware()}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy penalised": {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    "sampled": {"temperature": 1.0, "seed": 11},
    "top-k": {"temperature": 0.8, "seed": 12, "top_k": 20},
    "top-p, min-p": {"temperature": 0.9, "seed": 13, "top_p": 0.9, "min_p": 0.01},
    "penalised, biased": {
        "temperature": 0.9,
        "seed": 14,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "logit_bias": {70: 2.0, 57: -3.0},
    },
    "grammar": {"temperature": 0.9, "seed": 16, "top_p": 0.95, "response_format": {"type": "json_object"}},
    "greedy grammar": {
        "temperature": 0,
        "response_format": {"type": "regex", "pattern": r"(self\.[a-z_]{1,12}\n ){2,6}"},
    },
    "stop": {"temperature": 0.7, "seed": 15, "stop": ["self", "\n\n"]},
}


def drafts_for(target: TorchProvider, draft: TorchProvider) -> dict[str, Any]:
    return {
        "model": ProviderDraft(draft),
        "early exit": ProviderDraft(TorchProvider(target.model.make_early_exit_draft(2))),
        "useless": RandomDraft(3),
        "lookup": PromptLookup(),
        "joined": CascadeDraft(PromptLookup(), ProviderDraft(draft)),
        "given": ReferenceDraft("    self.assertEqual(fd.close(), None)\n"),
    }


async def check_same_text(target: TorchProvider, draft: Any, options: dict[str, Any]) -> None:
    plain = await SpeculativeDecoder(target=target, draft=None).decode(PROMPT, **options)
    for lookahead in POLICIES.values():
        decoder = SpeculativeDecoder(
            target=target, draft=draft, config=SpeculativeConfig(strategy="tokens", lookahead=lookahead)
        )
        result = await decoder.decode(PROMPT, **options)
        check_one_text(result, plain, target.model)


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("draft", ["model", "early exit", "useless", "lookup", "joined", "given"])
async def test_the_trained_pair_writes_the_plain_text(pair: tuple[Any, Any], draft: str, sampling: str) -> None:
    """The pair: drafts good, useless and none, lookahead 0 to 8 and adaptive."""
    await check_same_text(pair[0], drafts_for(*pair)[draft], {"max_tokens": 24, **SAMPLING[sampling]})


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("draft", ["same", "early exit", "useless", "lookup"])
async def test_a_random_model_writes_the_plain_text(tiny_model: TorchModel, draft: str, sampling: str) -> None:
    """A tiny random Llama, whose text no draft can guess but its own."""
    target = TorchProvider(tiny_model)
    drafts = drafts_for(target, target) | {"same": ProviderDraft(target)}
    await check_same_text(target, drafts[draft], {"max_tokens": 24, **SAMPLING[sampling]})


async def test_greedy_text_is_that_of_generate(pair: tuple[Any, Any]) -> None:
    """Speculative greedy answers are transformers' own, token by token, on ten prompts of the held-out files."""
    module: Any = transformers.AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32).eval()
    target, draft = pair
    decoder = SpeculativeDecoder(target=target, draft=ProviderDraft(draft))
    lines = (PAIR / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:10]
    for line in lines:
        messages = json.loads(line)["messages"]
        result = await decoder.decode(messages, max_tokens=64, temperature=0)
        prompt_ids = target.model.tokenizer.encode_chat(ChatRequest.create(messages))
        expected = module.generate(torch.tensor([prompt_ids]), max_new_tokens=64, do_sample=False)[0, len(prompt_ids) :]

        def logits_after(token_ids: Sequence[int], prompt_ids: Sequence[int] = prompt_ids) -> np.ndarray:
            return module(torch.tensor([[*prompt_ids, *token_ids]])).logits[0, -1].detach().numpy()

        check_greedy_text(result.content, expected.tolist(), target.model.tokenizer, logits_after)


async def test_a_text_does_not_depend_on_what_was_asked_before(tiny_folder: Path) -> None:
    """Taking over an earlier cache, whole chunks of a long prompt, changes no bit of what follows."""
    model = TorchModel(tiny_folder, max_requests=1)
    long = "x = 1\n" * 120
    options: dict[str, Any] = {"max_tokens": 20, "temperature": 1.0, "seed": 5}
    first = await SpeculativeDecoder(target=TorchProvider(model), draft=None).decode(long + "a", **options)
    await SpeculativeDecoder(target=TorchProvider(model), draft=PromptLookup()).decode(long + "b", **options)
    again = await SpeculativeDecoder(target=TorchProvider(model), draft=PromptLookup()).decode(long + "a", **options)
    check_texts([again.content], [first.content], model)


def test_a_fault_in_the_mask_is_caught(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: rows that see what is drafted behind them. The check at load finds it."""
    from llm_spec_torch.network import TransformerNetwork

    right = TransformerNetwork._make_attention_mask

    def wrong(self: TransformerNetwork, positions: Any, num_keys: int, window: int | None) -> Any:
        shift = 0 if positions.shape[1] > 20 else 1
        return right(self, positions + shift, num_keys, window)

    monkeypatch.setattr(TransformerNetwork, "_make_attention_mask", wrong)
    assert not TorchModel(tiny_folder).same_text


def test_bits_of_a_row_do_not_depend_on_the_number_of_keys(tiny_model: TorchModel) -> None:
    """A round that reaches over a border of attention's steps gives the logits of single steps."""
    ids = [int(t) for t in np.random.default_rng(2).integers(8, 4096, 270)]
    session, single = tiny_model.open(), tiny_model.open()
    for opened in (session, single):
        opened.forward(ids[:250], num_rows=1)
    rows = session.forward(ids[250:262], num_rows=12)
    alone = np.concatenate([single.forward([token_id], num_rows=1).copy() for token_id in ids[250:262]])
    check_rows(rows, alone, tiny_model)
    session.close()
    single.close()
