"""Decoders of clients: what one was answered no other can find out."""

from __future__ import annotations

from typing import Final

import pytest

from llm_spec import DraftProvider, JoinedDraft, PromptLookup, SpeculativeConfig, SuffixDraft
from llm_spec.server import KeyConfig, ModelConfig
from llm_spec.server.clients import Client, Clients, Ledger
from llm_spec.server.models import MAX_CLIENTS, ServedModel
from llm_spec.testing import LocalProvider, TableModel

TEXT: Final = "the quick brown fox jumps over the lazy dog, and that is all there is to say about it"
SUFFIX: Final = SuffixDraft(min_match=16)
PROMPT: Final = "go: the quick"


def clients(number: int) -> list[Client]:
    keys = {f"client{index}": KeyConfig(key=f"key-of-client-{index}") for index in range(number)}
    found = Clients(keys, Ledger(1, number), 0)
    return [found.find({"x-api-key": key.key}) for key in keys.values()]


def served(draft: DraftProvider) -> ServedModel:
    config = ModelConfig(
        target="table", draft="suffix", speculative=SpeculativeConfig(strategy="tokens", baseline_every=0)
    )
    return ServedModel("fast", config, LocalProvider(TableModel(TEXT)), draft)


async def num_drafted(model: ServedModel, client: Client, strategy: str | None = None) -> int:
    """Tokens drafted for an answer that repeats no 16 characters of its own."""
    result = await model.decoder_for(client, strategy).decode(PROMPT, max_tokens=40, temperature=0)
    return result.stats.num_draft_tokens


@pytest.mark.parametrize("draft", [SUFFIX, JoinedDraft(PromptLookup(max_ngram=16, min_ngram=16), SUFFIX)])
async def test_a_history_belongs_to_one_client(draft: DraftProvider) -> None:
    """Who asks again gets drafts out of the own answer, by whichever strategy; nobody else does."""
    model, (ann, bob) = served(draft), clients(2)
    assert await num_drafted(model, ann) == 0
    assert await num_drafted(model, ann) > 20
    assert await num_drafted(model, bob) == 0
    assert await num_drafted(model, ann, "auto") > 20


async def test_so_many_histories_are_kept() -> None:
    """That of the client who asked longest ago is forgotten."""
    model, everybody = served(SUFFIX), clients(MAX_CLIENTS + 1)
    assert [await num_drafted(model, client) for client in everybody[:2]] == [0, 0]
    for client in everybody[2:]:
        model.decoder_for(client, None)
    assert await num_drafted(model, everybody[1]) > 20
    assert await num_drafted(model, everybody[0]) == 0
