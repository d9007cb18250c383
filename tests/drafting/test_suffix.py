"""Suffix drafts: continuations by frequency, here and in earlier answers, which stay few, apart and safe to share."""

from __future__ import annotations

import itertools
import threading
import tracemalloc
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_spec import (
    CascadeDraft,
    ChatRequest,
    PromptLookup,
    ProviderDraft,
    SpeculativeConfig,
    SpeculativeDecoder,
    SuffixDraft,
    open_draft,
    open_provider,
)
from llm_spec.contract.token_model import DraftToken, TokenDrafter
from llm_spec.drafting.suffix_automaton import PastAnswers, SuffixMatch
from llm_spec.local.acceptance import make_acceptance_rule
from llm_spec.local.lookahead import Fixed
from llm_spec.local.loop import Generation, GenerationLimits
from llm_spec.local.sampling import FloatArray, Sampler
from llm_spec.testing import ByteTokenizer, CharTokenizer, LocalProvider, TableModel
from llm_spec.testing.clock import run_virtual

TARGET = TableModel()
STORY = "the quick brown fox jumps over the lazy dog, and that is all there is to say about it"


def choose(logits: FloatArray, context_ids: Sequence[int]) -> DraftToken:  # noqa: ARG001 - greedy
    return DraftToken(int(logits.argmax()))


def answer(drafter: TokenDrafter, text: str, prompt: str = "?", target: TableModel = TARGET) -> None:
    """Draft for an answer that turns out to be a text, without any round of its own at the end."""
    prompt_ids = list(prompt.encode())
    draft = drafter.open_token_draft(target, choose, prompt_ids)
    context_ids = list(prompt_ids)
    next(draft.propose(context_ids), None)
    context_ids += text.encode()
    draft.close()
    draft.close()


def guesses(drafter: TokenDrafter, context: str, num: int = 8, prompt: str = "") -> list[tuple[str, float]]:
    """What is proposed after a context, with confidences."""
    draft = drafter.open_token_draft(TARGET, choose, list(prompt.encode()))
    tokens = itertools.islice(draft.propose(list((prompt + context).encode())), num)
    return [(chr(token.token_id), round(token.confidence or 0.0, 3)) for token in tokens]


def proposed(drafter: TokenDrafter, context: str, num: int = 8) -> str:
    return "".join(character for character, _ in guesses(drafter, context, num))


# ----------------------------------------------------------------------------------------- proposals


def test_the_most_frequent_continuation_wins() -> None:
    """Not the latest; it is as sure as it was frequent, and surer the longer the match."""
    assert guesses(SuffixDraft(max_match=2), "ab1 ab1 ab2 ab", 2) == [("1", 0.467), (" ", 0.7)]


def test_a_repetition_goes_on() -> None:
    """A proposal may be longer than what it copies."""
    assert proposed(SuffixDraft(), "=-=-=-", 8) == "=-=-=-=-"


def test_too_short_a_match_is_none() -> None:
    """Fewer matching tokens than `min_match`."""
    assert proposed(SuffixDraft(min_match=3), "abc ab") == ""
    assert proposed(SuffixDraft(min_match=3), "abcd abc", 1) == "d"


def test_a_proposal_ends_where_it_is_not_expected_to_stand() -> None:
    """Among many continuations of one sign nothing is worth proposing."""
    assert proposed(SuffixDraft(), "a1a2a3a4a5a6a7a8a") == ""


async def test_it_drafts_text_too() -> None:
    """Pieces of the conversation, continuing the prefix, never more than asked for, with an end."""
    request = ChatRequest.create("the quick brown fox jumps", prefix="see the quick")
    async with SuffixDraft().draft(request, 2) as pieces:
        drafted = [piece async for piece in pieces]
    assert "".join(piece.text for piece in drafted) == " brown fox"
    assert drafted[-1].finish_reason is not None


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=40), st.integers(1, 6), st.integers(1, 3))
def test_its_text_is_what_its_tokens_would_be(signs: list[str], wants_more: int, min_match: int) -> None:
    """By the same rule, from the same pieces, for as long as it is expected to stand."""
    drafter = SuffixDraft(max_match=min_match + wants_more, min_match=min_match)
    text = "\n".join(signs) + "\n"  # every sign a piece
    expected = [character for character, _ in guesses(drafter, text, 12)]

    async def check() -> None:
        async with drafter.draft(ChatRequest.create("?", prefix=text), 12) as pieces:
            drafted = [piece.text async for piece in pieces]
        assert drafted[:-1] == expected

    run_virtual(check())


# ------------------------------------------------------------------------------------- earlier answers


def test_an_earlier_answer_is_proposed_again() -> None:
    """To another request of the same object, and only there; none when nothing is to be kept."""
    draft = SuffixDraft()
    answer(draft, STORY)
    assert proposed(draft, "a quick b", 10) == "rown fox j"
    assert proposed(SuffixDraft(), "a quick b", 10) == ""
    forgetful = SuffixDraft(max_stored_tokens=0)
    answer(forgetful, STORY)
    assert proposed(forgetful, "a quick b") == ""


def test_clients_know_nothing_of_each_other() -> None:
    """A draft for a client begins with no answers, keeps its own, and gives none back."""
    shared = SuffixDraft(min_match=2, max_match=16)
    one, two = shared.copy_for_new_client(), shared.copy_for_new_client()
    answer(shared, STORY)
    answer(one, "another one, of the quick brown bear")
    assert proposed(two, "the quick") == ""
    assert proposed(one, "the quick brown") == " bear"
    assert proposed(shared, "the quick brown") == " fox jum"


def test_prompts_are_not_kept() -> None:
    """What one user asks is never proposed to another."""
    draft = SuffixDraft()
    answer(draft, "yes", prompt="the password is swordfish")
    assert proposed(draft, "the password is ") == proposed(SuffixDraft(), "the password is ")


def test_answers_of_other_vocabularies_are_apart() -> None:
    """Ids mean something only to their own tokenizer."""
    draft = SuffixDraft()
    answer(draft, STORY, target=TableModel(tokenizer=CharTokenizer("abc"), vocab_size=258))
    assert proposed(draft, "a quick b") == ""


def test_the_surest_source_drafts() -> None:
    """A long match with an earlier answer counts more than a short one here."""
    draft = SuffixDraft()
    answer(draft, STORY)
    assert proposed(draft, "x!x!. the lazy d", 2) == "og"
    assert proposed(draft, "at the lazy dodo at the lazy d", 4) == "odo "


def test_the_answers_end_is_learned_without_a_last_proposal() -> None:
    """The context that a draft gets at its end includes rounds that it had no part in, also within a cascade."""
    draft = SuffixDraft()
    answer(CascadeDraft(PromptLookup(), draft), STORY)
    assert proposed(draft, "all there is to say", 9) == " about it"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 3), max_size=12)), max_size=20))
def test_the_oldest_answers_are_forgotten(answers: list[tuple[str, list[int]]]) -> None:
    """Never more than the maximum, all vocabularies together; the latest that fit into half of it are there."""
    outputs = PastAnswers(16, 4)
    for fingerprint, token_ids in answers:
        outputs.add_answer(fingerprint, token_ids)
        assert outputs.num_tokens <= 16
        tail = token_ids[-4:]
        matches = [
            shelf.advance_match(SuffixMatch(), tail).length for shelf in outputs.get_suffix_automata(fingerprint)
        ]
        assert len(tail) == max(matches, default=0)


def test_a_thousand_answers_take_bounded_memory() -> None:
    """Half a kilobyte for each token that is kept, at most, whatever is answered."""
    draft = SuffixDraft(max_stored_tokens=2000)
    tracemalloc.start()
    try:
        for number in range(1000):
            answer(draft, f"answer {number} is {number * 7919 % 1009} and {number * number}")
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_bytes <= 2000 * 512


def test_requests_may_run_at_once() -> None:
    """Threads that draft and remember at the same time get continuations of what was answered, and lose nothing."""
    draft, start = SuffixDraft(max_match=6), threading.Barrier(8)
    texts = [f"<{name}> {STORY} </{name}>" for name in "abcdefgh"]

    def work(number: int) -> None:
        start.wait()
        for _ in range(10):
            answer(draft, texts[number])
            guess = proposed(draft, f"<{texts[number][1]}> the quick", 30)
            assert f"<{texts[number][1]}> the quick{guess}" in texts[number]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert [proposed(draft, f"<{name}> the quick", 6) for name in "abcdefgh"] == [" brown"] * 8


# ------------------------------------------------------------------------------------------- answers


def tokens_a_round(draft: TokenDrafter, request: ChatRequest, target: TableModel) -> float:
    prompt_ids = target.tokenizer.encode_chat(request)
    sampler = Sampler(request.sampling, vocab_size=target.vocab_size, num_prompt_tokens=len(prompt_ids), seed=1)
    rule = make_acceptance_rule("coupled", sampler)
    generation = Generation(
        target,
        prompt_ids,
        rule,
        Fixed(8).start(),
        limits=GenerationLimits(max_tokens=100),
        open_draft=lambda: draft.open_token_draft(target, rule.choose_draft_token, prompt_ids),
    )
    with generation:
        num_rounds = sum(1 for _ in generation)
        assert ByteTokenizer().decode(generation.context_ids[len(prompt_ids) :]) == STORY
        return generation.num_output_tokens / num_rounds


def test_the_second_identical_request_takes_longer_runs() -> None:
    """The first answer is proposed again, its end included."""
    target, draft = TableModel(STORY), SuffixDraft()
    request = ChatRequest.create("tell it", temperature=0.0)
    first, second = (tokens_a_round(draft, request, target) for _ in range(2))
    assert second > 2 * first
    assert tokens_a_round(SuffixDraft(), request, target) == first


@pytest.mark.parametrize("name", ["suffix", "suffix+builtin:draft", "lookup+suffix+builtin:draft"])
async def test_the_text_is_the_targets(name: str) -> None:
    """Greedy and sampled, the first time and when it has been answered before."""
    draft, target = open_draft(name), open_provider("builtin:target")
    for temperature, _ in itertools.product((0.0, 0.8), range(2)):
        options = {"max_tokens": 40, "temperature": temperature, "seed": 5}
        plain = await SpeculativeDecoder(target=target, draft=None).decode("def read_lines(path):", **options)  # type: ignore[arg-type]
        decoder = SpeculativeDecoder(target=target, draft=draft, config=SpeculativeConfig(strategy="tokens"))
        result = await decoder.decode("def read_lines(path):", **options)  # type: ignore[arg-type]
        assert result.content == plain.content
        assert result.fallbacks == ()


def test_joined_drafts_take_the_first_that_is_sure_enough() -> None:
    """By confidence: a short match here is not enough, a long one in an earlier answer is."""
    suffix, model = SuffixDraft(), TableModel("#" * 40)
    joined = CascadeDraft(PromptLookup(), suffix, ProviderDraft(LocalProvider(model)))
    answer(suffix, STORY)
    assert proposed(joined, "a quick b", 3) == "row"
    assert not model.widths
    proposed(joined, "#a#", 1)  # "#" was followed by "a" once: 0.4
    assert model.widths
