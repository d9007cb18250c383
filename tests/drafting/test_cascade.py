"""Drafts one behind the other: the first that is sure, or that writes, is used."""

from __future__ import annotations

import contextlib
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
    DraftCapabilities,
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
from llm_spec.contract.local import SelfPacedTokenDraft
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
    first = Tokens(DraftToken(1, 0.9))
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


class FreeTokens(Tokens):
    """Those of a draft that asks no model."""

    capabilities = DraftCapabilities(is_free=True)


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

    def run(self, joined: CascadeDraft, num_rounds: int, token_id: int = 7, prompt_ids: Sequence[int] = PROMPT) -> None:
        draft = joined.for_request().open_token_draft_for_request(None, TARGET, choose, prompt_ids)
        context_ids = [*prompt_ids]
        for _ in range(num_rounds):
            proposed = [token.token_id for token in itertools.islice(draft.propose(context_ids), 1)]
            self.clock[0] += 1.0
            context_ids += [token_id] * (1 + (proposed == [token_id]))
        draft.close()


def test_a_joined_draft_that_takes_more_than_it_saves_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """After three turns, and the one in which it reads, for 32; then for 64, and so on, also in the next answer."""
    rounds = Rounds(monkeypatch)
    dear = TimedTokens(7, rounds.clock, 1.5)
    joined = CascadeDraft(cast("Any", dear))
    rounds.run(joined, 20)
    assert dear.num_begun == 4
    rounds.run(joined, 200)
    assert dear.num_begun == 4 + 4 + 4


def test_a_joined_draft_that_loses_much_is_left_out_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lost 4 steps by 4 turns, 2 more than it may: at .03 a turn for 60 turns or so."""
    rounds = Rounds(monkeypatch)
    dear = TimedTokens(7, rounds.clock, 2.0)
    joined = CascadeDraft(cast("Any", dear))
    rounds.run(joined, 4 + 55)
    assert dear.num_begun == 4
    rounds.run(joined, 55)
    assert dear.num_begun > 4


def test_a_joined_draft_is_judged_across_short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three turns one counts: in the first it reads, and what became of the last nobody knows."""
    rounds = Rounds(monkeypatch)
    dear = TimedTokens(7, rounds.clock, 1.5)
    joined = CascadeDraft(cast("Any", dear))
    for _ in range(10):
        rounds.run(joined, 3)
    assert dear.num_begun == 2 * 3 + 2


def test_a_joined_draft_reads_a_long_prompt_only_for_a_long_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading 400 tokens takes 8 steps, as it is taken to be; it may lose 2, and wins .1 in a turn, or more."""
    rounds = Rounds(monkeypatch)
    draft = TimedTokens(7, rounds.clock, 0.1)
    joined = CascadeDraft(cast("Any", draft))
    rounds.run(joined, 50, prompt_ids=[1] * 400)
    assert draft.num_begun == 0
    rounds.run(joined, 100, prompt_ids=[1] * 400)
    first_turn = 100 - draft.num_begun
    assert 60 <= first_turn < 90
    draft.num_begun = 0
    rounds.run(joined, 100, prompt_ids=[1] * 400)
    assert draft.num_begun > 90, "it was quick, and its tokens are right"


def test_reading_a_long_prompt_is_not_held_against_a_joined_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not beyond its credit: its turns before were to have been worth it. What it takes, the next answer knows."""
    rounds = Rounds(monkeypatch)
    draft = TimedTokens(7, rounds.clock, 0.1)
    joined = CascadeDraft(cast("Any", draft))
    draft.seconds_of_turns = [10.0]
    rounds.run(joined, 110, prompt_ids=[1] * 400)
    assert draft.num_begun > 20
    draft.num_begun = 0
    rounds.run(joined, 5, prompt_ids=[1] * 400)
    assert draft.num_begun == 0, "8 steps and more by .9 a turn"
    rounds.run(joined, 30, prompt_ids=[1] * 400)
    assert draft.num_begun > 15


@pytest.mark.parametrize(("seconds", "most"), [(0.05, 16), (0.3, 3), (0.8, 1)])
def test_a_joined_draft_drafts_no_further_than_it_pays(
    monkeypatch: pytest.MonkeyPatch, seconds: float, most: int
) -> None:
    """All of its tokens have half a chance: a token of a third of a step may be the second or third, not the fifth."""
    rounds = Rounds(monkeypatch)

    class Half(Tokens):
        def _generate(self) -> Iterator[DraftToken]:
            for _ in range(20):
                rounds.clock[0] += seconds
                yield DraftToken(7, 0.5)

    draft = CascadeDraft(cast("Any", Half())).open_token_draft(TARGET, choose, PROMPT)
    context_ids = [*PROMPT]
    lengths: list[int] = []
    for number in range(12):
        lengths.append(len([*itertools.islice(draft.propose(context_ids), 16)]))
        rounds.clock[0] += 1.0
        context_ids += [7, 8] if number % 2 else [8]
    assert max(lengths[4:]) <= most
    assert max(lengths) >= min(2, most)


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


def test_joined_drafts_tell_what_they_weigh_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seconds of the last proposal's drafts that take time: none where a free one was sure."""
    rounds = Rounds(monkeypatch)
    free, dear = FreeTokens(DraftToken(1, 0.1)), TimedTokens(7, rounds.clock, 0.25)
    joined = CascadeDraft(cast("Any", free), cast("Any", dear)).open_token_draft(TARGET, choose, PROMPT)
    assert isinstance(joined, SelfPacedTokenDraft)
    for confidence, seconds in ((0.1, 0.25), (0.9, 0.0), (0.1, 0.25)):
        free.set_tokens(DraftToken(1, confidence))
        with contextlib.closing(cast("Any", joined.propose(PROMPT))) as tokens:
            next(tokens)
        assert joined.self_paced_s == seconds
