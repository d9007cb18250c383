"""Drafts one behind the other: the first that is sure, or that writes, is used."""

from __future__ import annotations

import itertools
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
    DraftToken,
    PromptLookup,
    ProviderDraft,
    ReferenceDraft,
    SuffixDraft,
    TokenDraft,
    TokenModel,
    TokenSampler,
)
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

    def _generate(self) -> Iterator[DraftToken]:
        self.num_begun += 1
        try:
            yield from self._tokens
        finally:
            self.num_ended += 1

    def close(self) -> None:
        """Nothing to release."""


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


def test_joined_drafts_close_what_they_opened() -> None:
    """Also when a later one cannot be opened."""
    model = TableModel(seed=5)
    broken = TableModel(seed=5, fail_at={0: OSError("gone")})
    drafts = [ProviderDraft(LocalProvider(model)), ProviderDraft(LocalProvider(broken))]
    with pytest.raises(OSError, match="gone"):
        CascadeDraft(*drafts).open_token_draft(TARGET, choose, PROMPT)
    assert model.num_open == broken.num_open == 0


class TimedTokens(Tokens):
    """Drafts the same token every time, and takes its time for it; whether that is free is what it says."""

    def __init__(self, token_id: int, clock: list[float], seconds: float) -> None:
        super().__init__(DraftToken(token_id))
        self._clock, self.seconds = clock, seconds
        self.seconds_of_turns: list[float] = []  # of the next ones, if not `seconds`

    def _generate(self) -> Iterator[DraftToken]:
        self.num_begun += 1
        self._clock[0] += self.seconds_of_turns.pop(0) if self.seconds_of_turns else self.seconds
        yield from self._tokens


class Rounds:
    """Rounds of an answer that has one token only, a plain step of which takes a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = [0.0]
        monkeypatch.setattr("llm_spec.drafting.cascade.perf_counter", lambda: self.clock[0])

    def run(self, joined: CascadeDraft, num_rounds: int, token_id: int = 7) -> None:
        draft = joined.for_request().open_token_draft_for_request(None, TARGET, choose, PROMPT)
        context_ids = [*PROMPT]
        for _ in range(num_rounds):
            proposed = [token.token_id for token in itertools.islice(draft.propose(context_ids), 1)]
            self.clock[0] += 1.0
            context_ids += [token_id] * (1 + (proposed == [token_id]))
        draft.close()


def test_a_joined_draft_that_takes_more_than_it_saves_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """After three turns for 32, after four more for 64, and so on; the next answer goes on where this one has ended."""
    rounds = Rounds(monkeypatch)
    dear = TimedTokens(7, rounds.clock, 1.5)
    joined = CascadeDraft(cast("Any", dear))
    rounds.run(joined, 20)
    assert dear.num_begun == 3
    rounds.run(joined, 200)
    assert dear.num_begun == 3 + 4 + 4


def test_a_joined_draft_is_judged_across_short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What becomes of an answer's last turn nobody knows: the third that counts is in the second answer."""
    rounds = Rounds(monkeypatch)
    dear = TimedTokens(7, rounds.clock, 1.5)
    joined = CascadeDraft(cast("Any", dear))
    for _ in range(10):
        rounds.run(joined, 3)
    assert dear.num_begun == 4


def test_what_a_joined_draft_has_missed_is_not_held_against_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads that in its first turn after it was left out; then it pays, and stays."""
    rounds = Rounds(monkeypatch)
    draft = TimedTokens(7, rounds.clock, 1.5)
    joined = CascadeDraft(cast("Any", draft))
    rounds.run(joined, 3 + 1 + 32)
    assert draft.num_begun == 4
    draft.seconds_of_turns = [20.0]
    draft.seconds = 0.1
    rounds.run(joined, 50)
    assert draft.num_begun >= 4 + 49


@pytest.mark.parametrize(("seconds", "token_id"), [(0.9, 7), (0.0, 8)])
def test_a_joined_draft_that_pays_or_takes_no_time_stays(
    monkeypatch: pytest.MonkeyPatch, seconds: float, token_id: int
) -> None:
    rounds = Rounds(monkeypatch)
    draft = TimedTokens(token_id, rounds.clock, seconds)
    rounds.run(CascadeDraft(cast("Any", draft)), 50)
    assert draft.num_begun == 50


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
