"""Prompt lookup, given texts and providers as drafts: by token and by piece of text."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_spec import (
    Capabilities,
    CascadeDraft,
    ChatRequest,
    ConfigError,
    DraftError,
    DraftPiece,
    DraftToken,
    PromptLookup,
    ProviderDraft,
    ReferenceDraft,
    TokenDraft,
    TokenDrafter,
    TokenModel,
    TokenSampler,
    Usage,
)
from llm_spec.contract.draft import DraftProvider
from llm_spec.drafting.text_pieces import split_pieces
from llm_spec.testing import ByteTokenizer, CharTokenizer, LocalProvider, RandomDraft, ScriptedProvider, TableModel
from llm_spec.tokens.sampling import FloatArray

TARGET = TableModel()
PROMPT = ByteTokenizer().encode_chat(ChatRequest.create("say: one two three. now: one t"))


def choose(logits: FloatArray, context_ids: Sequence[int]) -> DraftToken:  # noqa: ARG001 - greedy
    return DraftToken(int(logits.argmax()))


def proposed(drafter: TokenDrafter, answer: str, num: int = 8, prompt: Sequence[int] = PROMPT) -> str:
    """What is proposed after an answer, in one round."""
    draft = drafter.open_token_draft(TARGET, choose, prompt)
    tokens = itertools.islice(draft.propose([*prompt, *answer.encode()]), num)
    text = bytes(token.token_id for token in tokens).decode()
    draft.close()
    return text


async def pieces_of(draft: DraftProvider, request: ChatRequest, max_tokens: int = 100) -> list[DraftPiece]:
    async with draft.draft(request, max_tokens) as pieces:
        return [piece async for piece in pieces]


# ---------------------------------------------------------------------------------------------- pieces


@given(st.text())
def test_pieces_joined_are_the_text(text: str) -> None:
    """Cutting loses nothing, and no piece is empty."""
    pieces = split_pieces(text)
    assert "".join(pieces) == text
    assert all(pieces)


def test_pieces_are_about_what_tokens_are() -> None:
    """A word with its space, a newline, a sign."""
    assert split_pieces("Hello, big world!\n  x=1") == ["Hello", ",", " big", " world", "!", "\n", "  ", "x", "=", "1"]


# --------------------------------------------------------------------------------------- prompt lookup


def test_lookup_copies_what_followed_the_same_words() -> None:
    """In the prompt, behind the longest match with the answer's end."""
    prompt = ByteTokenizer().encode_chat(ChatRequest.create("one two three four"))
    assert proposed(PromptLookup(), "two th", 4, prompt) == "ree "


def test_lookup_copies_from_the_answer_too() -> None:
    """The conversation so far includes the answer."""
    assert proposed(PromptLookup(), "lorem ipsum dolor; lorem ip", 6) == "sum do"


def test_lookup_goes_on_with_a_repetition() -> None:
    """Where what is copied reaches the answer's end, it is followed by its own beginning."""
    assert proposed(PromptLookup(), "=-=-=-", 8) == "=-=-=-=-"


def test_lookup_without_a_match_proposes_nothing() -> None:
    """Fewer matching items than `min_ngram` are no match."""
    assert proposed(PromptLookup(min_ngram=3), "zq") == ""


async def test_lookup_drafts_text_too() -> None:
    """Pieces of the messages, continuing the prefix, never more than asked for, with an end."""
    request = ChatRequest.create("the quick brown fox jumps", prefix="see the quick")
    pieces = await pieces_of(PromptLookup(min_ngram=1), request, 2)
    assert "".join(piece.text for piece in pieces) == " brown fox"
    assert pieces[-1].finish_reason is not None


@pytest.mark.parametrize(
    "options", [{"min_ngram": 0}, {"max_ngram": 1}, {"min_ngram": 5, "max_ngram": 4}, {"max_ngram": 2.5}]
)
def test_lookup_refuses_bad_lengths(options: dict[str, Any]) -> None:
    """The error names the field."""
    with pytest.raises(ConfigError, match="_ngram is"):
        PromptLookup(**{"min_ngram": 2, **options})


# ------------------------------------------------------------------------------------------ given text


def test_a_given_text_goes_straight_on() -> None:
    """From its beginning, and from where the answer stands."""
    assert proposed(ReferenceDraft("naïve text"), "") == "naïve t"
    assert proposed(ReferenceDraft("naïve text"), "naïve") == " text"
    assert proposed(ReferenceDraft("naïve text"), "naïve text") == ""


def test_a_given_text_goes_on_behind_a_difference() -> None:
    """After the answer has left it, behind the longest match."""
    assert proposed(ReferenceDraft("the cat sat on the mat"), "the dog sat on", 4) == " the"


async def test_a_given_text_drafts_text_too() -> None:
    """In pieces, continuing a prefix, at most as many as asked for."""
    request = ChatRequest.create("x", prefix="one two")
    pieces = await pieces_of(ReferenceDraft("one two three four five"), request, 2)
    assert "".join(piece.text for piece in pieces) == " three four"


def test_one_draft_serves_several_requests() -> None:
    """What was proposed to one request does not move another's place."""
    given_text = ReferenceDraft("abcdef")
    first = given_text.open_token_draft(TARGET, choose, PROMPT)
    second = given_text.open_token_draft(TARGET, choose, PROMPT)
    assert next(first.propose([*PROMPT, *b"abc"])).token_id == ord("d")
    assert next(second.propose([*PROMPT])).token_id == ord("a")
    assert next(first.propose([*PROMPT, *b"abcd"])).token_id == ord("e")


# -------------------------------------------------------------------------------------------- providers


async def test_a_provider_drafts_its_answer() -> None:
    """Piece by piece as it comes, with finish reason and usage at the end."""
    provider = ScriptedProvider("one two three", usage=Usage(output_tokens=3))
    pieces = await pieces_of(ProviderDraft(provider), ChatRequest.create("count"))
    assert [piece.text for piece in pieces] == ["one", " two", " three", ""]
    assert pieces[-1].finish_reason == "stop"
    assert pieces[-1].usage == Usage(output_tokens=3)
    assert provider.num_open == 0


async def test_a_draft_gets_no_tools_and_no_more_than_it_may_write() -> None:
    """Tools are the target's business; the cap is the draft's own; the conversation is unchanged."""
    provider = ScriptedProvider("one two three")
    request = ChatRequest.create("count", tools=[{"type": "function"}], tool_choice="auto", max_tokens=50)
    await pieces_of(ProviderDraft(provider), request, 2)
    asked = provider.requests[0]
    assert (asked.tools, asked.tool_choice, asked.max_tokens) == ((), None, 2)
    assert asked.messages == request.messages


@pytest.mark.parametrize("can", [True, False])
async def test_a_prefix_goes_only_to_drafts_that_can_continue_it(can: bool) -> None:
    """Others answer from the start."""
    provider = ScriptedProvider("one two", capabilities=Capabilities(continue_prefix=can))
    pieces = await pieces_of(ProviderDraft(provider), ChatRequest.create("count", prefix="one"))
    assert provider.requests[0].prefix == ("one" if can else "")
    assert "".join(piece.text for piece in pieces) == (" two" if can else "one two")


async def test_leaving_a_draft_closes_its_stream() -> None:
    """Whoever opened it closes it, also halfway."""
    provider = ScriptedProvider("one two three")
    async with ProviderDraft(provider).draft(ChatRequest.create("count"), 10) as pieces:
        await anext(pieces)
        assert provider.num_open == 1
    assert provider.num_open == 0


def test_a_drafting_model_follows_corrections() -> None:
    """Its cache keeps what the target confirmed and forgets the rest: proposals are those of a fresh cache."""
    model = TableModel(seed=5)
    draft = ProviderDraft(LocalProvider(model)).open_token_draft(TARGET, choose, PROMPT)
    for answer in ([], [65], [65, 66, 67], [65, 70], [65, 70, 71, 72]):
        context = [*PROMPT, *answer]
        expected: list[int] = []
        for _ in range(4):
            expected.append(int(model.logits([*context, *expected]).argmax()))
        assert [t.token_id for t in itertools.islice(draft.propose(context), 4)] == expected
    draft.close()
    assert model.num_open == 0


def test_a_drafting_model_reads_only_what_is_new() -> None:
    """After a fully accepted round it reads the new tokens, not the prompt again."""
    model = TableModel(seed=5)
    draft = ProviderDraft(LocalProvider(model)).open_token_draft(TARGET, choose, PROMPT)
    answer = [token.token_id for token in itertools.islice(draft.propose(PROMPT), 4)]
    model.widths.clear()
    next(draft.propose([*PROMPT, *answer, 65]))
    assert model.widths == [2]  # the last drafted token, which it had not read, and the bonus
    draft.close()


def test_a_drafting_model_of_another_vocabulary_is_refused() -> None:
    """By its refusal, and if opened all the same by an error."""
    draft = ProviderDraft(LocalProvider(TableModel(name="table:draft", tokenizer=CharTokenizer("ab"))))
    assert "table:draft" in str(draft.token_draft_refusal(TARGET))
    with pytest.raises(DraftError):
        draft.open_token_draft(TARGET, choose, PROMPT)


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
    """By the likeliest token of the law that the first one was drawn from, whichever was drawn."""
    for text in "ab":
        first = Tokens(drawn(ord(text), {ord("a"): best, ord("b"): 1 - best}))
        joined = CascadeDraft(cast("Any", first), cast("Any", Tokens(DraftToken(ord("z")))), min_confidence=0.65)
        assert proposed(joined, "") == (text if best == 0.7 else "z")


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
            proposed(CascadeDraft(cast("Any", Tokens(token)), RandomDraft()), "")


def test_joined_drafts_need_the_same_vocabulary_all() -> None:
    """One that cannot draft for the target is told, by its own reason."""
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
