"""A request's own prediction drafts: for a model in this process and for servers, before any draft, and without one."""

from __future__ import annotations

import random

import pytest

from llm_spec import (
    ChatRequest,
    DraftProvider,
    Fixed,
    PromptLookup,
    SpeculativeConfig,
    SpeculativeDecoder,
)
from llm_spec.contract.response import complete_from_stream
from llm_spec.measure.clock import now
from llm_spec.testing import LocalProvider, RandomDraft, TableModel
from llm_spec.testing.clock import run_virtual
from llm_spec.testing.simulated import SimulatedTarget

TEXT = "".join(f"def function_{index}(value):\n    return value * {index * 7 + 3}\n\n" for index in range(12))
WORDS = ["alpha", "beta", "gamma", "delta"]


def edit(text: str, num_edits: int, seed: int) -> str:
    """A text with lines changed, inserted, left out and moved."""
    rng = random.Random(seed)  # noqa: S311 - a reproducible case, no secret
    lines = text.splitlines(keepends=True)
    for _ in range(num_edits):
        at = rng.randrange(len(lines) - 3)
        kind = rng.randrange(4)
        if kind == 0:
            lines[at] = f"{rng.choice(WORDS)} = {rng.randrange(99)}\n"
        elif kind == 1:
            lines.insert(at, f"# {rng.choice(WORDS)}\n")
        elif kind == 2:
            del lines[at]
        else:
            lines.insert(rng.randrange(len(lines)), lines.pop(at))
    return "".join(lines)


def ask(**options: object) -> ChatRequest:
    return ChatRequest.create("Edit it.", **{"max_tokens": 2000, **options})  # type: ignore[typeddict-item]


@pytest.mark.parametrize("draft", [None, PromptLookup(), RandomDraft()], ids=["alone", "lookup", "random"])
@pytest.mark.parametrize("num_edits", [0, 3, 20])
async def test_a_prediction_drafts_for_a_model_in_this_process(draft: DraftProvider | None, num_edits: int) -> None:
    """The text is the target's; the more of it was predicted, the fewer passes it takes."""
    provider = LocalProvider(TableModel(TEXT, order=64))
    plain = await provider.complete(ask())
    assert plain.content == TEXT
    decoder = SpeculativeDecoder(target=provider, draft=draft, config=SpeculativeConfig(lookahead=Fixed(8)))
    result = await decoder.decode(ask(prediction=edit(TEXT, num_edits, seed=num_edits)))
    assert (result.content, result.finish_reason) == (TEXT, plain.finish_reason)
    assert result.strategy == "tokens"
    assert result.draft == ("prediction" if draft is None else f"prediction+{draft.name}")
    assert result.cost.draft in (0.0, None)
    tokens_per_round = len(TEXT) / len(result.rounds)
    assert tokens_per_round > {0: 7, 3: 5, 20: 2}[num_edits]
    usage, stats = result.usage, result.stats
    assert usage is not None
    counted = (usage.accepted_prediction_tokens, usage.rejected_prediction_tokens)
    assert counted == (stats.num_accepted_draft_tokens, stats.num_wasted_draft_tokens)
    assert counted[0] > 0
    assert (usage.output_tokens, result.num_tokens) == (len(TEXT) + 1, len(TEXT) + 1)  # as without one


async def test_a_prediction_that_is_wrong_is_given_up() -> None:
    """Another text: hardly any of it is drafted after the first rounds."""
    provider = LocalProvider(TableModel(TEXT, order=64))
    wrong = "@|~" * 300
    result = await SpeculativeDecoder(target=provider, draft=None, config=SpeculativeConfig()).decode(
        ask(prediction=wrong)
    )
    assert result.content == TEXT
    assert result.stats.num_draft_tokens < 100


async def test_without_a_prediction_nothing_changes() -> None:
    """No draft: plain, and a target that takes predictions itself is given them."""
    provider = LocalProvider(TableModel(TEXT, order=64))
    result = await SpeculativeDecoder(target=provider, draft=None).decode(ask())
    assert (result.strategy, result.plain_reason, result.draft) == ("plain", "no_draft", None)
    drafted = await SpeculativeDecoder(target=provider, draft=PromptLookup()).decode(TEXT)
    assert drafted.usage is not None
    assert drafted.usage.accepted_prediction_tokens == drafted.usage.rejected_prediction_tokens == 0
    result = await SpeculativeDecoder(target=provider, draft=None, config=SpeculativeConfig(strategy="plain")).decode(
        ask(prediction=TEXT)
    )
    assert (result.strategy, result.plain_reason, result.draft) == ("plain", "configured", None)


@pytest.mark.parametrize("strategy", ["race", "probe"])
def test_a_prediction_drafts_for_a_server(strategy: str) -> None:
    """Without any draft; sooner than the target alone by the clock, and the same text."""
    words = " ".join(f"word{index}" for index in range(200))
    predicted = words.replace("word20 ", "other ").replace("word90 ", "").replace("word150 ", "word150 and more ")

    async def compare() -> None:
        target = SimulatedTarget(words, first_token_s=0.03, token_s=0.02, by_ids=True)
        started_s = now()
        plain = await complete_from_stream(target, ChatRequest.create("Edit it."))
        plain_s, started_s = now() - started_s, now()
        decoder = SpeculativeDecoder(
            target=target, draft=None, config=SpeculativeConfig(strategy=strategy, baseline_every=0)
        )
        result = await decoder.decode(ChatRequest.create("Edit it.", prediction=predicted))
        assert result.content == plain.content == words
        assert (result.strategy, result.draft) == (strategy, "prediction")
        assert now() - started_s < 0.8 * plain_s

    run_virtual(compare())
