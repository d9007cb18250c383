"""Which strategy serves a pair and a request."""

from __future__ import annotations

import pytest

from llm_spec import (
    ChatRequest,
    ProviderDraft,
    ReferenceDraft,
    SpeculativeConfig,
    SpeculativeDecoder,
    UnsupportedError,
)
from llm_spec.contract.draft import DraftProvider
from llm_spec.contract.provider import LlmProvider
from llm_spec.decoder.choice import StrategyPlanner, choose_strategy
from llm_spec.decoder.config import StrategyName
from llm_spec.decoder.feature_discovery import FeatureDiscovery
from llm_spec.strategies.base import StrategyContext
from llm_spec.testing import CharTokenizer, LocalProvider, RandomDraft, ScriptedProvider, TableModel

REQUEST = ChatRequest.create("tell")
LOCAL = LocalProvider(TableModel("story", name="table:target"))
REMOTE = ScriptedProvider("story", name="scripted:target")


async def name_of(strategy: StrategyName, draft: DraftProvider | None, target: LlmProvider) -> str:
    planner, config = StrategyPlanner(), SpeculativeConfig(strategy=strategy)
    context = StrategyContext(
        draft=draft,
        target=target,
        request=REQUEST,
        limits=config,
        pair_stats=planner.pair_stats,
    )
    choice = await choose_strategy(context, config.strategy, planner, discovery=FeatureDiscovery(target))
    return choice.strategy.name


@pytest.mark.parametrize(
    ("draft", "target", "expected"),
    [
        (ProviderDraft(LocalProvider(TableModel())), LOCAL, "tokens"),
        (ReferenceDraft("x"), LOCAL, "tokens"),
        (RandomDraft(), LOCAL, "tokens"),
        (None, LOCAL, "plain"),
        (ProviderDraft(REMOTE), LOCAL, "plain"),
        (ProviderDraft(LocalProvider(TableModel(tokenizer=CharTokenizer("ab")))), LOCAL, "plain"),
        (ProviderDraft(LocalProvider(TableModel())), REMOTE, "plain"),
        (ReferenceDraft("x"), REMOTE, "plain"),
        (None, REMOTE, "plain"),
    ],
)
async def test_auto_takes_tokens_where_it_can_and_plain_elsewhere(
    draft: DraftProvider | None, target: LlmProvider, expected: str
) -> None:
    """Token ids of one vocabulary on a local target are speculated with; nothing else is, and nothing is refused."""
    assert await name_of("auto", draft, target) == expected


@pytest.mark.parametrize(
    ("strategy", "draft", "target", "reason"),
    [
        ("tokens", None, LOCAL, "no draft"),
        ("tokens", ProviderDraft(REMOTE), LOCAL, "text, not token ids"),
        ("tokens", ReferenceDraft("x"), REMOTE, "scripted:target"),
        (
            "tokens",
            ProviderDraft(LocalProvider(TableModel(tokenizer=CharTokenizer("ab")))),
            LOCAL,
            "different tokenizers",
        ),
        ("regenerate", None, REMOTE, "no draft"),
    ],
)
async def test_a_strategy_asked_for_by_name_is_refused_with_the_reason(
    strategy: StrategyName, draft: DraftProvider | None, target: LlmProvider, reason: str
) -> None:
    """What cannot be done is not done differently: the error names the strategy and says why, in one line."""
    decoder = SpeculativeDecoder(target=target, draft=draft, config=SpeculativeConfig(strategy=strategy))
    with pytest.raises(UnsupportedError) as caught:
        await decoder.decode("tell")
    text = str(caught.value)
    assert reason in text
    assert f"'{strategy}'" in text
    assert "\n" not in text


@pytest.mark.parametrize("target", [LOCAL, REMOTE], ids=["local", "remote"])
async def test_plain_and_regenerate_serve_any_target(target: LlmProvider) -> None:
    """Plain needs nothing, regenerate a draft."""
    for draft in (ReferenceDraft("x"), ProviderDraft(REMOTE)):
        assert await name_of("plain", draft, target) == "plain"
        assert await name_of("regenerate", draft, target) == "regenerate"


async def test_plain_leaves_a_draft_alone() -> None:
    """With `plain` the draft is neither asked nor named in the result."""
    draft = ScriptedProvider("draft")
    result = await SpeculativeDecoder(target=REMOTE, draft=draft, config=SpeculativeConfig(strategy="plain")).decode(
        "tell"
    )
    assert draft.requests == []
    assert (result.strategy, result.draft, result.guarantee, result.same_text) == ("plain", None, "exact", True)
