"""Log-probabilities of torch models: the same bits with every draft, and those of transformers' own pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from llm_spec_torch import TorchProvider
from support.logprob_checks import EVERY_REQUEST, build_logprob_request, check_logprobs
from support.text_checks import ROUNDING

from llm_spec import DraftProvider, Fixed, PromptLookup, ProviderDraft, SpeculativeConfig, SpeculativeDecoder
from llm_spec.contract.token_model import TokenModel
from llm_spec.kit.model_folder.tokenizer import FolderTokenizer
from llm_spec.testing import RandomDraft


@pytest.fixture(scope="module")
def target(tiny_folder: Path) -> TorchProvider:
    return TorchProvider(tiny_folder)


def get_model(provider: TorchProvider) -> TokenModel:
    model = provider.capabilities.token_model
    assert model is not None
    return model


def decoder_with(draft: str, target: TorchProvider, **config: Any) -> SpeculativeDecoder:
    drafts: dict[str, DraftProvider] = {
        "lookup": PromptLookup(),
        "model": ProviderDraft(target),
        "random": RandomDraft(3),
    }
    return SpeculativeDecoder(
        target=target, draft=drafts[draft], config=SpeculativeConfig(strategy="tokens", lookahead=Fixed(4), **config)
    )


@EVERY_REQUEST
async def test_the_bits_are_those_without_a_draft(
    draft: str, temperature: str, form: str, prompt: str, target: TorchProvider
) -> None:
    """Greedy and sampled, cut by stop strings and caps, held by a grammar, penalised; half characters among them."""
    request = build_logprob_request(temperature, form, prompt, raw=True)
    plain = await SpeculativeDecoder(target=target, draft=None).decode(request)
    check_logprobs(await decoder_with(draft, target).decode(request), plain, get_model(target))


async def test_rounds_on_the_device_are_left_for_rounds_that_tell(tiny_folder: Path) -> None:
    """A model that samples where it lives gives its logits to such a request, and the same text."""
    on_device = TorchProvider(tiny_folder, device_rounds=True)
    request = build_logprob_request("0", "as it comes", "method", raw=True)
    plain = await SpeculativeDecoder(target=on_device, draft=None).decode(request)
    check_logprobs(await decoder_with("model", on_device).decode(request), plain, get_model(on_device))


async def test_each_is_that_of_one_pass_over_the_finished_text(target: TorchProvider, tiny_folder: Path) -> None:
    """transformers reads prompt and answer at once; other widths round differently, and no more than that."""
    request = build_logprob_request("0.7", "as it comes", "list", raw=True)
    result = await decoder_with("model", target).decode(request)
    tokenizer = get_model(target).tokenizer
    assert isinstance(tokenizer, FolderTokenizer)
    assert result.logprobs is not None
    assert result.stats.num_accepted_draft_tokens
    ids_by_bytes = {tokenizer.token_bytes(token_id): token_id for token_id in range(tokenizer.vocab_size)}
    prompt_ids = tokenizer.encode_chat(request)
    answer_ids = [ids_by_bytes[logprob.token_bytes or b""] for logprob in result.logprobs]
    module = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder)
    with torch.inference_mode():
        logits = module(torch.tensor([[*prompt_ids, *answer_ids]])).logits[0, len(prompt_ids) - 1 : -1].double()
    expected = logits.log_softmax(-1)
    tolerance = 2 * ROUNDING * float(logits.std())
    for row, token_id, told in zip(expected, answer_ids, result.logprobs, strict=True):
        assert abs(told.logprob - float(row[token_id])) < tolerance
        likeliest = row.topk(3).values.tolist()
        assert max(abs(a.logprob - b) for a, b in zip(told.top, likeliest, strict=True)) < tolerance
