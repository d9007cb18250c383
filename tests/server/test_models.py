"""Decoders of clients: what one was answered no other can find out, and what may be chosen is the operator's say."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

import pytest
from anthropic import AsyncAnthropic, NotFoundError
from support.serving import RULES, ask, serving

from llm_spec import (
    CascadeDraft,
    DraftProvider,
    Fixed,
    InvalidRequestError,
    PromptLookup,
    SpeculativeConfig,
    SuffixDraft,
)
from llm_spec.decoder.config import StrategyName
from llm_spec.server import KeyConfig, ModelConfig
from llm_spec.server.clients import ApiClient, ClientRegistry
from llm_spec.server.models import MAX_CLIENTS, ServedModel
from llm_spec.server.usage_ledger import UsageLedger
from llm_spec.testing import LocalProvider, TableModel

TEXT: Final = "the quick brown fox jumps over the lazy dog, and that is all there is to say about it"
SUFFIX: Final = SuffixDraft(min_match=16)
PROMPT: Final = "go: the quick"


def clients(number: int) -> list[ApiClient]:
    keys = {f"client{index}": KeyConfig(key=f"key-of-client-{index}") for index in range(number)}
    found = ClientRegistry(keys, UsageLedger(1, number), 0)
    return [found.authenticate({"x-api-key": key.key}) for key in keys.values()]


def served(draft: DraftProvider) -> ServedModel:
    speculative = SpeculativeConfig(strategy="tokens", lookahead=Fixed(8), baseline_every=0)
    config = ModelConfig(target="table", draft="suffix", speculative=speculative, strategies=("auto",))
    return ServedModel("fast", config, LocalProvider(TableModel(TEXT)), draft)


async def num_drafted(model: ServedModel, client: ApiClient, strategy: str | None = None) -> int:
    """Tokens drafted for an answer that repeats no 16 characters of its own."""
    result = await model.get_decoder(client, strategy).decode(PROMPT, max_tokens=40, temperature=0)
    return result.stats.num_draft_tokens


@pytest.mark.parametrize("draft", [SUFFIX, CascadeDraft(PromptLookup(max_ngram=16, min_ngram=16), SUFFIX)])
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
        model.get_decoder(client, None)
    assert await num_drafted(model, everybody[1]) > 20
    assert await num_drafted(model, everybody[0]) == 0


# ------------------------------------------------------------------------------------------ what is told of them


async def test_anthropics_sdk_lists_models() -> None:
    """With the fields of its own API; clients of the other one get theirs."""
    async with serving({"fast": RULES, "a/b:c": RULES}) as server:
        client = AsyncAnthropic(base_url=server.url, api_key="sk-any", max_retries=0)
        listed = [model async for model in await client.models.list()]
        one = await client.models.retrieve("a/b:c")
        with pytest.raises(NotFoundError) as caught:
            await client.models.retrieve("other")
        await client.close()
        openais = (await server.get("/v1/models")).json
    assert [(m.id, m.type, m.display_name) for m in [*listed, one]] == [
        ("fast", "model", "fast"),
        ("a/b:c", "model", "a/b:c"),
        ("a/b:c", "model", "a/b:c"),
    ]
    assert {m.created_at for m in listed} == {datetime(1970, 1, 1, tzinfo=UTC)}
    assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    assert [m["object"] for m in openais["data"]] == ["model", "model"]


async def test_a_key_without_models_lists_none() -> None:
    async with serving(keys={"ann": KeyConfig(key="secret-of-ann", models=())}) as server:
        reply = await server.get("/v1/models", x_api_key="secret-of-ann", anthropic_version="2023-06-01")
    assert reply.json == {"data": [], "has_more": False}


# ------------------------------------------------------------------------------------------ strategies

EXACT: Final = ("auto", "plain", "tokens", "race", "probe", "score", "predict", "regenerate")


@pytest.mark.parametrize(
    ("strategy", "strategies", "allowed"),
    [
        ("auto", None, EXACT),
        ("plain", None, ("plain",)),
        ("race", None, ("race", "plain")),
        ("judge", None, ("judge", "plain")),
        ("auto", (), ("auto",)),
        ("plain", ("race", "judge"), ("plain", "race", "judge")),
        ("auto", ("judge", "auto"), ("auto", "judge")),
    ],
)
def test_what_may_be_chosen(
    strategy: StrategyName, strategies: tuple[StrategyName, ...] | None, allowed: tuple[StrategyName, ...]
) -> None:
    """Any exact strategy where the operator lets this library choose; else what the operator chose, or lists."""
    config = ModelConfig(target="t", speculative=SpeculativeConfig(strategy=strategy), strategies=strategies)
    assert config.allowed_strategies == allowed


@pytest.mark.parametrize("chosen", ["auto", "tokens", "judge", "mystery", ""])
async def test_a_request_does_not_override_its_operator(chosen: str) -> None:
    """A model that runs plain is not made to speculate; the error says what there is."""
    plain = ModelConfig(
        target="builtin:target",
        draft="lookup",
        speculative=SpeculativeConfig(strategy="plain", max_total_tokens=2, stream_always=False),
    )
    async with serving(plain) as server:
        reply = await server.post("/v1/chat/completions", ask("/v1/chat/completions"), x_llm_spec_strategy=chosen)
        usual = await server.post("/v1/chat/completions", ask("/v1/chat/completions"), x_llm_spec_strategy="plain")
        models = (await server.get("/v1/models")).json["data"]
    assert (reply.status, usual.status) == (400, 200)
    assert reply.error["message"] == f"x-llm-spec-strategy is {chosen!r}; fast takes: plain"
    assert models[0]["llm_spec"]["strategies"] == ["plain"]


def test_judged_answers_are_for_those_whose_operator_says_so() -> None:
    """Exact ones are the default."""
    config = ModelConfig(target="table", draft="suffix")
    (ann,) = clients(1)
    target = LocalProvider(TableModel(TEXT))
    with pytest.raises(InvalidRequestError, match="x-llm-spec-strategy is 'judge'; fast takes: auto, plain, tokens"):
        ServedModel("fast", config, target, SUFFIX).get_decoder(ann, "judge")
    judged = ServedModel("fast", replace(config, strategies=("judge",)), target, SUFFIX)
    assert judged.get_decoder(ann, "judge").config.strategy == "judge"
    assert judged.get_decoder(ann, None).config.strategy == "auto"
