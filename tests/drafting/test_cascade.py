"""Drafts one behind the other: the first that is sure, or that writes, is used."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest
from support.draft_checks import PROMPT, TARGET, choose, pieces_of, proposed

from llm_spec import (
    CascadeDraft,
    ChatRequest,
    ConfigError,
    DraftError,
    PromptLookup,
    ProviderDraft,
    ReferenceDraft,
    SuffixDraft,
)
from llm_spec.contract.draft import DraftCapabilities
from llm_spec.contract.token_model import DraftToken, TokenDraft, TokenModel, TokenSampler
from llm_spec.testing import ByteTokenizer, LocalProvider, RandomDraft, ScriptedProvider, TableModel

# ----------------------------------------------------------------------------------------------- joined


def test_joined_drafts_ask_the_first_that_is_sure() -> None:
    """Lookup where it finds something, else the next."""
    prompt = ByteTokenizer().encode_chat(ChatRequest.create("one two three four"))
    joined = CascadeDraft(PromptLookup(), ReferenceDraft("given"))
    assert proposed(joined, "two th", 4, prompt) in {"ree ", ""}
    assert proposed(joined, "", 5, prompt) == "given"


class Tokens:
    """Drafts the same tokens every time; counts generators that were begun and those that have ended."""

    name = "tokens"

    def __init__(self, *tokens: DraftToken) -> None:
        self._tokens = tokens
        self._kept: list[Iterator[DraftToken]] = []  # so that none ends by being forgotten
        self.num_begun = self.num_ended = 0

    def token_draft_refusal(self, target: TokenModel) -> str | None:  # noqa: ARG002 - any target
        return None

    def open_token_draft(self, target: TokenModel, choose: TokenSampler, prompt_ids: Sequence[int]) -> TokenDraft:  # noqa: ARG002
        return self

    def propose(self, context_ids: Sequence[int]) -> Iterator[DraftToken]:  # noqa: ARG002 - always the same
        self._kept.append(self._generate())
        return self._kept[-1]

    def set_tokens(self, *tokens: DraftToken) -> None:
        """What it drafts from now on."""
        self._tokens = tokens

    def _generate(self) -> Iterator[DraftToken]:
        self.num_begun += 1
        try:
            yield from self._tokens
        finally:
            self.num_ended += 1

    def close(self) -> None:
        """Nothing to release."""


class FreeTokens(Tokens):
    """Those of a draft that asks no model."""

    capabilities = DraftCapabilities(is_free=True)


def drawn(token_id: int, probabilities: dict[int, float]) -> DraftToken:
    probs = np.zeros(TARGET.vocab_size)
    probs[[*probabilities]] = [*probabilities.values()]
    return DraftToken(token_id, probabilities[token_id], probs)


@pytest.mark.parametrize("best", [0.7, 0.6])
def test_joined_drafts_choose_before_they_draw(best: float) -> None:
    """By the likeliest token of the distribution that the first one was drawn from, whichever was drawn."""
    for text in "ab":
        first = Tokens(drawn(ord(text), {ord("a"): best, ord("b"): 1 - best}))
        joined = CascadeDraft(cast("Any", first), cast("Any", Tokens(DraftToken(ord("z")))), min_confidence=0.65)
        assert proposed(joined, "") == (text if best == 0.7 else "z")


def test_drafts_that_ask_no_model_come_first() -> None:
    """However they are joined: a model need not draft where a copy is sure. Else the given order holds."""
    model, other = (ProviderDraft(LocalProvider(TableModel(seed=seed))) for seed in (1, 2))
    suffix, lookup = SuffixDraft(), PromptLookup()
    assert CascadeDraft(model, suffix, other, lookup).capabilities.drafts == (suffix, lookup, model, other)


def test_joined_drafts_close_every_proposal() -> None:
    """Those that were looked at and those that were used, when the round has ended."""
    drafts = [Tokens(DraftToken(1, 0.1)), Tokens(DraftToken(2, 0.9), DraftToken(3)), Tokens(DraftToken(4))]
    tokens = CascadeDraft(*cast("Any", drafts)).open_token_draft(TARGET, choose, PROMPT).propose(PROMPT)
    assert next(tokens).token_id == 2
    tokens.close()  # type: ignore[attr-defined]
    assert [(draft.num_begun, draft.num_ended) for draft in drafts] == [(1, 1), (1, 1), (0, 0)]


def test_joined_drafts_refuse_what_they_cannot_judge() -> None:
    """With the reason that a draft alone would have."""
    for token, reason in ((DraftToken(1, cast("Any", "sure")), "of type str"), (cast("Any", 5), "of type int")):
        with pytest.raises(DraftError, match=reason):
            proposed(CascadeDraft(cast("Any", Tokens(token)), cast("Any", Tokens())), "")


def test_joined_drafts_need_the_same_vocabulary_all() -> None:
    """One that cannot draft for the target is reported, by its own reason."""
    joined = CascadeDraft(PromptLookup(), ProviderDraft(ScriptedProvider("x", name="scripted:text")))
    assert "scripted:text" in str(joined.token_draft_refusal(TARGET))
    assert CascadeDraft(PromptLookup(), RandomDraft()).token_draft_refusal(TARGET) is None


def test_a_joined_model_is_opened_when_its_turn_comes() -> None:
    """Where the draft before it is sure, it reads nothing. When the answer ends, both are closed."""
    model = TableModel(seed=5)
    first = FreeTokens(DraftToken(1, 0.9))
    draft = CascadeDraft(cast("Any", first), ProviderDraft(LocalProvider(model))).open_token_draft(
        TARGET, choose, PROMPT
    )
    for confidence, num_open in ((0.9, 0), (0.1, 1), (0.9, 1)):
        first.set_tokens(DraftToken(1, confidence))
        with contextlib.closing(cast("Any", draft.propose(PROMPT))) as tokens:
            next(tokens)
        assert model.num_open == num_open
    draft.close()
    assert model.num_open == 0


def test_joined_drafts_close_what_they_opened() -> None:
    """Also one that could not read the prompt."""
    broken = TableModel(seed=5, fail_at={0: OSError("gone")})
    joined = CascadeDraft(cast("Any", Tokens()), ProviderDraft(LocalProvider(broken)))
    draft = joined.open_token_draft(TARGET, choose, PROMPT)
    with pytest.raises(OSError, match="gone"):
        list(draft.propose(PROMPT))
    draft.close()
    assert broken.num_open == 0


async def test_joined_text_drafts_take_the_first_that_writes() -> None:
    """The one after it is not even asked."""
    second, third = ScriptedProvider("two"), ScriptedProvider("three")
    joined = CascadeDraft(ReferenceDraft(""), ProviderDraft(second), ProviderDraft(third))
    pieces = await pieces_of(joined, ChatRequest.create("x"))
    assert "".join(piece.text for piece in pieces) == "two"
    assert third.requests == []


def test_joining_nothing_is_refused() -> None:
    """There must be a draft, and confidences are between 0 and 1."""
    with pytest.raises(ConfigError):
        CascadeDraft()
    with pytest.raises(ConfigError, match="min_confidence"):
        CascadeDraft(PromptLookup(), min_confidence=1.5)
