"""One answer, round by round: equal to plain decoding token by token, and countable."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.generation_checks import DevicePart, ScriptedDraft, device_generation_of, events_of, generation_of

from llm_spec import (
    CascadeDraft,
    ChatRequest,
    ConfigError,
    CostAware,
    Ewma,
    Fallback,
    Finish,
    Fixed,
    InvalidRequestError,
    PromptLookup,
    ProviderDraft,
    ReferenceDraft,
    Round,
    Sampling,
    StreamEvent,
    SuffixDraft,
    TextDelta,
    Threshold,
    ToolCallDelta,
)
from llm_spec.contract.formats import FORMATS
from llm_spec.contract.token_model import DeviceRoundResult, DraftToken, TokenDrafter
from llm_spec.local.acceptance import RejectionAcceptance, VerifyResult, make_acceptance_rule
from llm_spec.local.acceptance_name import AcceptanceName
from llm_spec.local.answer import generate_events
from llm_spec.local.lookahead import LookaheadController, LookaheadPolicy, RoundFeedback
from llm_spec.local.loop import Generation, GenerationLimits
from llm_spec.local.sampling import FloatArray, Sampler
from llm_spec.testing import ByteTokenizer, CharTokenizer, LocalProvider, RandomDraft, TableModel

LETTERS = CharTokenizer("abcdefgh")
STORY = "the cat sat on the mat; the dog sat on the log; the cat saw the dog — naïve €5 😀 ends."


class CallingTokenizer(ByteTokenizer):
    """One whose model calls tools as Hermes does."""

    message_format = next(row for row in FORMATS if row.name == "hermes")
    reasoning = None
    mark_tokens: Mapping[int, str] = MappingProxyType({})


class NoisyTable(TableModel):
    """The same table with noise on it: a good draft of it, not a perfect one."""

    def __init__(self, *args: Any, noise: float = 1.0, **options: Any) -> None:
        super().__init__(*args, **options)
        self._noise = noise

    def logits(self, context_ids: Sequence[int]) -> FloatArray:
        row = super().logits(context_ids)
        noise = np.random.default_rng([77, *context_ids[-4:]]).standard_normal(row.shape, dtype=np.float32)
        return row + np.float32(self._noise) * noise


def text_of(events: Sequence[StreamEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def rounds_of(events: Sequence[StreamEvent]) -> list[Round]:
    return [event for event in events if isinstance(event, Round)]


def finish_of(events: Sequence[StreamEvent]) -> Finish:
    assert isinstance(events[-1], Finish)
    assert sum(isinstance(event, Finish) for event in events) == 1
    return events[-1]


def summary_of(events: Sequence[StreamEvent]) -> tuple[str, str, str | None, object]:
    """All that must not depend on the draft."""
    finish = finish_of(events)
    return text_of(events), finish.finish_reason, finish.stopped_by, finish.usage


def letters_draft(model: TableModel) -> ProviderDraft:
    return ProviderDraft(LocalProvider(model))


class PartlyVerified:
    """A policy, and its own controller: drafts up to six tokens, and verifies ever others of them, from none to all."""

    def __init__(self) -> None:
        self.reports: list[RoundFeedback] = []

    def start(self) -> LookaheadController:
        self.reset()
        return self

    def limit(self) -> int:
        return 6

    def wants_more(self, confidences: Sequence[float | None]) -> bool:
        return len(confidences) < 6

    def choose_num_verified(self, confidences: Sequence[float | None]) -> int:
        return 5 * len(self.reports) % (len(confidences) + 1)

    def update(self, report: RoundFeedback) -> None:
        self.reports.append(report)

    def describe(self) -> Mapping[str, float]:
        return {}

    def reset(self) -> None:
        self.reports.clear()


DRAFTS: dict[str, Callable[[], TokenDrafter]] = {
    "same": lambda: letters_draft(TableModel(tokenizer=LETTERS, seed=3)),
    "good": lambda: letters_draft(NoisyTable(tokenizer=LETTERS, seed=3, noise=0.5)),
    "other": lambda: letters_draft(TableModel(tokenizer=LETTERS, seed=4)),
    "useless": lambda: RandomDraft(1),
    "lookup": lambda: PromptLookup(min_ngram=1),
    "suffix": SuffixDraft,
    "given": lambda: ReferenceDraft("abcdefgh" * 4),
    "joined": lambda: CascadeDraft(PromptLookup(), letters_draft(NoisyTable(tokenizer=LETTERS, seed=3))),
    "suffix joined": lambda: CascadeDraft(
        PromptLookup(), SuffixDraft(), letters_draft(NoisyTable(tokenizer=LETTERS, seed=3))
    ),
    "short window": lambda: letters_draft(TableModel(tokenizer=LETTERS, seed=3, context_length=18)),
}
POLICIES: dict[str, LookaheadPolicy] = {
    **{f"fixed {n}": Fixed(n) for n in range(1, 9)},
    "cost": CostAware(),
    "threshold": Threshold(),
    "ewma": Ewma(cooldown=0),
    "partly": PartlyVerified(),
}
OPTIONS: dict[str, Sampling] = {
    "greedy": Sampling(temperature=0),
    "default": Sampling(),
    "0.7": Sampling(temperature=0.7, seed=1),
    "1.0": Sampling(temperature=1.0, seed=2),
    "top-k": Sampling(temperature=1.0, top_k=3, seed=3),
    "top-p": Sampling(temperature=1.0, top_p=0.8, seed=4),
    "min-p": Sampling(temperature=1.5, min_p=0.1, seed=5),
    "penalties": Sampling(temperature=0.7, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4, seed=6),
    "greedy penalties": Sampling(temperature=0, repetition_penalty=1.3, frequency_penalty=1.0),
    "bias": Sampling(temperature=1.0, logit_bias={LETTERS.eos_token_id: -100.0, 2: 3.0}, seed=7),
    "greedy bias": Sampling(temperature=0, logit_bias={LETTERS.eos_token_id: -100.0}),
    "all": Sampling(
        temperature=0.9, top_k=6, top_p=0.95, min_p=0.02, repetition_penalty=1.1, logit_bias={1: 1.0}, seed=2**64 - 1
    ),
}


def letters_request(sampling: Sampling, max_tokens: int = 24, **rest: Any) -> ChatRequest:
    return ChatRequest(messages=ChatRequest.create("abcabd").messages, sampling=sampling, max_tokens=max_tokens, **rest)


# ------------------------------------------------------------------------------- exactness as equality


def choose_policies() -> dict[tuple[str, str], list[str]]:
    """For each draft and options three policies, other ones for the next; each meets every draft and every option."""
    names = list(POLICIES)
    pairs = enumerate(itertools.product(DRAFTS, OPTIONS))
    return {
        pair: [names[(number + number // len(names) + shift) % len(names)] for shift in (0, 4, 8)]
        for number, pair in pairs
    }


POLICIES_OF_PAIR = choose_policies()


def test_every_policy_meets_every_draft_and_option() -> None:
    """Also where the usual run leaves out a part."""
    for index, axis in enumerate((DRAFTS, OPTIONS)):
        for name in axis:
            met = {policy for pair, policies in POLICIES_OF_PAIR.items() if pair[index] == name for policy in policies}
            assert met == POLICIES.keys()


@pytest.mark.parametrize("policies", ["some", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("draft", DRAFTS)
def test_any_draft_any_lookahead_gives_the_plain_text(draft: str, options: str, policies: str) -> None:
    """Text, usage and ending are those of plain decoding, for every draft, lookahead policy and sampling option."""
    target = TableModel(tokenizer=LETTERS, seed=3)
    request = letters_request(OPTIONS[options])
    plain = summary_of(events_of(target, request))
    for name in POLICIES_OF_PAIR[draft, options] if policies == "some" else POLICIES:
        events = events_of(target, request, DRAFTS[draft](), lookahead=POLICIES[name])
        assert summary_of(events) == plain, name
        assert not any(isinstance(event, Fallback) for event in events), name
    assert target.num_open == 0


@settings(max_examples=60, deadline=None)
@given(
    table=st.integers(0, 2**32),
    draft_table=st.integers(0, 2**32),
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.7, 1.0, 3.0]),
    lookahead=st.integers(1, 8),
    max_tokens=st.integers(1, 30),
    extra_ids=st.integers(0, 3),
    stop=st.lists(st.text("abcdefgh", min_size=1, max_size=2), max_size=2),
)
def test_random_models_give_the_plain_text(  # noqa: PLR0917 - hypothesis gives them by name
    table: int,
    draft_table: int,
    seed: int,
    temperature: float,
    lookahead: int,
    max_tokens: int,
    extra_ids: int,
    stop: list[str],
) -> None:
    """For random tables, vocabularies with padding, seeds, caps and stop strings: the text is the plain one."""
    target = TableModel(tokenizer=LETTERS, seed=table, vocab_size=LETTERS.num_ids + extra_ids)
    request = letters_request(Sampling(temperature=temperature, seed=seed), max_tokens, stop=tuple(stop))
    plain = summary_of(events_of(target, request))
    model = NoisyTable(tokenizer=LETTERS, seed=table, vocab_size=target.vocab_size, noise=0.3)
    other = TableModel(tokenizer=LETTERS, seed=draft_table, vocab_size=target.vocab_size)
    drafts: list[TokenDrafter] = [letters_draft(model), letters_draft(other), RandomDraft(seed % 1000)]
    for draft in drafts:
        assert summary_of(events_of(target, request, draft, lookahead=Fixed(lookahead))) == plain


@pytest.mark.parametrize("lookahead", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(
    "draft",
    [
        ReferenceDraft(STORY),
        ReferenceDraft("wrong from the start"),
        ReferenceDraft(STORY[:20] + "XYZ" + STORY[23:]),
        ReferenceDraft(""),
    ],
    ids=["right", "wrong", "diverging", "empty"],
)
def test_a_given_text_right_or_wrong_gives_the_plain_text(
    draft: ReferenceDraft, temperature: float, lookahead: int
) -> None:
    """A given text of many-byte characters changes nothing, however much of it is right."""
    target = TableModel(STORY, order=24)
    request = ChatRequest.create("tell", temperature=temperature, seed=1, max_tokens=200)
    plain = events_of(target, request)
    assert text_of(plain) == STORY or temperature
    assert summary_of(events_of(target, request, draft, lookahead=Fixed(lookahead))) == summary_of(plain)


def test_rejection_sampling_is_greedy_at_temperature_zero() -> None:
    """Where there is nothing to draw, both acceptance rules give the one text."""
    target = TableModel(tokenizer=LETTERS, seed=3)
    request = letters_request(Sampling(temperature=0))
    plain = summary_of(events_of(target, request))
    for draft in DRAFTS.values():
        assert summary_of(events_of(target, request, draft(), lookahead=Fixed(4), acceptance="rejection")) == plain


def test_the_prefix_is_continued_not_repeated() -> None:
    """A prefix is read as the answer's beginning; the answer is what follows it, with and without a draft."""
    target = TableModel(STORY, order=24)
    request = ChatRequest.create("tell", prefix=STORY[:30], max_tokens=200)
    for draft in (None, ReferenceDraft(STORY), RandomDraft()):
        assert text_of(events_of(target, request, draft, lookahead=Fixed(4))) == STORY[30:]


def test_a_right_draft_brings_lookahead_plus_one_tokens_a_round() -> None:
    """After full acceptance the target's bonus token comes with it, from the same forward pass."""
    target = TableModel("abcdefghij", order=8)
    with generation_of(target, ReferenceDraft("abcdefghij")) as generation:
        step = next(iter(generation))
    assert target.tokenizer.decode(step.token_ids) == "abcde"
    assert step.origins == ("accepted",) * 4 + ("bonus",)
    assert (step.report.num_draft_tokens, step.report.num_accepted_tokens, step.report.num_emitted_tokens) == (4, 4, 5)
    assert step.report.rejection_index is None
    assert step.report.next_token_id == ord("e")
    assert target.widths[1:] == [5]  # after the prompt, one forward pass for the round


def test_a_rejection_brings_the_targets_own_token() -> None:
    """The step tells where the draft was rejected and what the target put there; that token was not accepted."""
    target = TableModel("abcdefghij", order=8)
    with generation_of(target, ReferenceDraft("abXdefghij")) as generation:
        step = next(iter(generation))
        assert target.tokenizer.decode(step.token_ids) == "abc"
        assert step.origins == ("accepted", "accepted", "correction")
        assert (step.report.rejection_index, step.report.next_token_id) == (2, ord("c"))
        assert step.report.num_accepted_tokens == 2
        assert generation.stats.num_accepted_draft_tokens == 2


def test_tokens_that_are_not_verified_are_compared_with_the_answer() -> None:
    """So that it is known how good a draft is that is not believed; they count as drafted nowhere else."""
    target, lookahead = TableModel(STORY, order=24), PartlyVerified()
    draft = ReferenceDraft(STORY[:9] + "X" + STORY[10:])
    events = events_of(target, ChatRequest.create("tell", max_tokens=60), draft, lookahead=lookahead)
    seen = [(report.num_draft_tokens, len(report.confidences), report.num_right) for report in lookahead.reports]
    assert seen[:3] == [(0, 6, 1), (5, 6, 6), (3, 6, 2)]
    assert [report.num_draft_tokens for report in rounds_of(events)] == [num_draft for num_draft, _, _ in seen]
    assert STORY.startswith(text_of(events))


def test_a_token_that_was_drawn_is_verified_whatever_the_policy_would_rather_have() -> None:
    """To leave out what was drawn would favour what is left in: the answer's distribution would be another one."""
    target, lookahead = TableModel(tokenizer=LETTERS, seed=3), PartlyVerified()
    request = letters_request(Sampling(temperature=1.0, seed=1))
    events_of(target, request, DRAFTS["good"](), lookahead=lookahead, acceptance="rejection")
    assert {report.num_draft_tokens - len(report.confidences) for report in lookahead.reports} == {0}
    assert sum(report.num_draft_tokens for report in lookahead.reports) > 0


def test_a_plain_step_brings_one_token() -> None:
    """Without a draft every round is one plain token."""
    target = TableModel("abc", order=8)
    with generation_of(target) as generation:
        steps = list(generation)
    assert [step.origins for step in steps] == [("plain",)] * 4
    assert target.tokenizer.decode([i for step in steps for i in step.token_ids]) == "abc"
    assert generation.stopped_by == "eos"


def test_eos_inside_a_draft_ends_the_answer() -> None:
    """Nothing after it is emitted or counted, whether the draft goes on after it or not."""
    target = TableModel("ab", order=8)
    eos = next(iter(target.tokenizer.eos_token_ids))

    def propose(context_ids: Sequence[int]) -> Iterator[DraftToken]:  # noqa: ARG001 - always the same
        yield from map(DraftToken, [*b"ab", eos, *b"more"])

    with generation_of(target, ScriptedDraft(propose), lookahead=8) as generation:
        steps = list(generation)
    assert [step.token_ids for step in steps] == [(*b"ab", eos)]
    assert steps[0].stopped_by == "eos"
    report = steps[0].report
    assert (report.num_draft_tokens, report.num_accepted_tokens, report.num_emitted_tokens) == (3, 3, 3)


def test_eos_inside_a_devices_proposal_ends_the_answer() -> None:
    """Nothing after it is emitted or counted as accepted, also where a device went on drafting and verifying."""
    target = TableModel("ab", order=8)
    eos = next(iter(target.tokenizer.eos_token_ids))
    runner = DevicePart(DeviceRoundResult((*b"ab", eos, *b"m"), 4, ord("o"), 1.0, 1.0))
    with device_generation_of(target, Fixed(4).start(), runner) as generation:
        steps = list(generation)
    assert [step.token_ids for step in steps] == [(*b"ab", eos)]
    assert steps[0].origins == ("accepted",) * 3
    report = steps[0].report
    assert (report.num_draft_tokens, report.num_accepted_tokens, report.num_emitted_tokens) == (4, 3, 3)


def test_a_device_drafts_nothing_where_a_companions_proposal_is_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """That round is a plain step: it shows what such a step costs."""
    target, lookahead = TableModel("ab", order=8), Fixed(4).start()
    monkeypatch.setattr(lookahead, "choose_num_verified", lambda _: 0)
    runner = DevicePart(DeviceRoundResult((), 0, ord("a"), 0.0, 1.0))
    generation = device_generation_of(target, lookahead, runner)
    companion = ScriptedDraft(lambda _: iter([DraftToken(ord("a"))]))
    monkeypatch.setattr(generation, "_open_companion_draft", lambda: companion)
    with generation:
        next(iter(generation))
    assert runner.lookaheads == [0]


def test_the_caches_are_closed_on_every_path() -> None:
    """Target and draft sessions are closed after an answer, an error and a draft that cannot be opened."""
    target, model = TableModel(STORY, order=24), TableModel(STORY)
    draft = ProviderDraft(LocalProvider(model))
    with generation_of(target, draft) as generation:
        next(iter(generation))
        assert (target.num_open, model.num_open) == (1, 1)
    assert (target.num_open, model.num_open) == (0, 0)
    generation.close()
    assert (target.num_closed, model.num_closed) == (1, 1)
    target.fail_at = {10: RuntimeError("broken")}
    with pytest.raises(RuntimeError, match="broken"):
        events_of(target, ChatRequest.create("tell", max_tokens=50), draft, lookahead=Fixed(4))
    assert (target.num_open, model.num_open) == (0, 0)
    target.fail_at = {0: RuntimeError("broken prompt")}
    with pytest.raises(RuntimeError, match="broken prompt"):
        events_of(target, ChatRequest.create("tell", max_tokens=50), draft)
    assert (target.num_open, model.num_open) == (0, 0)


def test_cancelling_ends_the_iteration() -> None:
    """Once `cancelled` is set no further forward pass begins, also in the middle of a prompt."""
    target = TableModel(STORY, order=24)
    cancelled = threading.Event()
    batches = iter(generate_events(target, ChatRequest.create("tell"), cancelled))
    next(batches)
    num_forwards = len(target.widths)
    cancelled.set()
    for _ in batches:
        pass
    assert len(target.widths) == num_forwards
    assert target.num_open == 0
    target.widths.clear()
    long = ChatRequest.create("x" * 3000)
    list(generate_events(target, long, cancelled))
    assert len(target.widths) <= 1


def test_the_controller_is_readable_and_resettable() -> None:
    """The lookahead's state is numbers, changes with what was learned, and can be forgotten."""
    target = TableModel(STORY, order=24)
    with generation_of(target, ReferenceDraft("wrong")) as generation:
        for policy in (Threshold(), Ewma(cooldown=0), CostAware(), Fixed(4)):
            generation.lookahead = policy.start()
            fresh = dict(generation.lookahead.describe())
            assert fresh
            assert all(isinstance(value, int | float) for value in fresh.values())
            for _ in range(3):
                next(iter(generation))
            generation.lookahead.reset()
            assert dict(generation.lookahead.describe()) == fresh


def test_statistics_can_be_read_at_any_time_and_reset() -> None:
    """Clearing the rounds starts the statistics anew; the answer goes on."""
    target = TableModel("abcdefghijklmnop", order=8)
    with generation_of(target, ReferenceDraft("abcdefghijklmnop")) as generation:
        next(iter(generation))
        assert generation.stats.num_emitted_tokens == 5
        generation.rounds.clear()
        assert generation.stats.num_rounds == 0
        assert bytes(next(iter(generation)).token_ids) == b"fghij"
        assert generation.stats.num_emitted_tokens == 5


@pytest.mark.parametrize("lookahead", [0, 33, -1])
def test_lookahead_outside_1_to_32_is_refused(lookahead: int) -> None:
    """The seed's limits, with an error that names field and value."""
    with pytest.raises(ConfigError, match=f"lookahead is {lookahead}"):
        Fixed(lookahead)


# ----------------------------------------------------------------------------------------------- caps


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 9, 40])
@pytest.mark.parametrize("draft", [None, ReferenceDraft(STORY), RandomDraft()], ids=["plain", "given", "random"])
def test_max_tokens_counts_tokens(draft: TokenDrafter | None, max_tokens: int) -> None:
    """Exactly so many tokens come out, with every draft, and the ending says so."""
    target = TableModel(STORY, order=24)
    events = events_of(target, ChatRequest.create("tell", max_tokens=max_tokens), draft, lookahead=Fixed(8))
    finish = finish_of(events)
    assert text_of(events) == STORY[:max_tokens]
    assert (finish.finish_reason, finish.stopped_by) == ("length", "max_tokens")
    assert finish.usage is not None
    assert finish.usage.output_tokens == max_tokens
    assert sum(report.num_emitted_tokens for report in rounds_of(events)) == max_tokens


def test_caps_count_tokens_not_bytes() -> None:
    """Five tokens of many-byte characters are five characters."""
    target = TableModel("äöü€😀" * 4, tokenizer=CharTokenizer("äöü€😀tel"), order=8)
    for draft in (None, ReferenceDraft("äöü€😀" * 4), RandomDraft()):
        events = events_of(target, ChatRequest.create("tell", max_tokens=7), draft, lookahead=Fixed(4))
        assert text_of(events) == "äöü€😀äö"


def test_a_cap_inside_a_character_shows_no_half_of_it_as_such() -> None:
    """Where a cap cuts a character, what was whole comes out and the rest is U+FFFD, as in plain decoding."""
    target = TableModel("a😀b", order=8)
    for max_tokens in range(1, 6):
        request = ChatRequest.create("tell", max_tokens=max_tokens)
        texts = {text_of(events_of(target, request, draft)) for draft in (None, ReferenceDraft("a😀b"), RandomDraft())}
        assert texts == {"a😀b".encode()[:max_tokens].decode(errors="replace")}


@pytest.mark.parametrize("max_iterations", [1, 2, 7])
def test_max_iterations_counts_rounds(max_iterations: int) -> None:
    """So many rounds, plain steps counted; what came out is a beginning of the answer."""
    target = TableModel(STORY, order=24)
    request = ChatRequest.create("tell")
    limits = GenerationLimits(max_iterations=max_iterations)
    for draft in (None, ReferenceDraft(STORY), RandomDraft()):
        events = events_of(target, request, draft, lookahead=Fixed(3), limits=limits)
        assert len(rounds_of(events)) == max_iterations
        assert STORY.startswith(text_of(events))
        assert text_of(events)
        assert (finish_of(events).finish_reason, finish_of(events).stopped_by) == ("length", "max_iterations")


@pytest.mark.parametrize("cap", [0, 1, 5, 10])
def test_max_draft_tokens_ends_drafting_not_the_answer(cap: int) -> None:
    """When they are spent the target goes on alone; the answer is unchanged."""
    target = TableModel(STORY, order=24)
    for draft in (ReferenceDraft(STORY), RandomDraft()):
        events = events_of(
            target,
            ChatRequest.create("tell"),
            draft,
            lookahead=Fixed(4),
            limits=GenerationLimits(max_draft_tokens=cap),
        )
        assert text_of(events) == STORY
        assert sum(report.num_draft_tokens for report in rounds_of(events)) == cap
        assert finish_of(events).stopped_by == "eos"


CAPS = st.none() | st.integers(1, 12)


@settings(max_examples=150, deadline=None)
@given(
    draft=st.sampled_from([None, *DRAFTS, "endless", "failing"]),
    policy=st.sampled_from([*POLICIES]),
    sampling=st.sampled_from([*OPTIONS]),
    acceptance=st.sampled_from(["coupled", "rejection", "lossy_typical"]),
    table=st.integers(0, 5),
    max_tokens=st.none() | st.integers(1, 30),
    max_iterations=CAPS,
    max_draft_tokens=st.none() | st.integers(0, 12),
    window=st.integers(8, 40),
)
def test_caps_hold_exactly(  # noqa: PLR0917 - hypothesis gives them by name
    draft: str | None,
    policy: str,
    sampling: str,
    acceptance: AcceptanceName,
    table: int,
    max_tokens: int | None,
    max_iterations: int | None,
    max_draft_tokens: int | None,
    window: int,
) -> None:
    """Tokens, rounds and drafted tokens stay within their caps, and the one that ended the answer was reached exactly.

    Whatever drafts, however many tokens it is asked for, and whichever rule accepts them.
    """

    def endless(context_ids: Sequence[int]) -> Iterator[DraftToken]:
        yield from (DraftToken((len(context_ids) + n) % LETTERS.num_ids, (n % 5) / 4) for n in itertools.count())

    def failing(context_ids: Sequence[int]) -> Iterator[DraftToken]:
        yield from itertools.islice(endless(context_ids), 3)
        if len(context_ids) > 12:
            raise RuntimeError("broken")

    drafts: dict[str | None, Callable[[], TokenDrafter | None]] = {
        **DRAFTS,
        None: lambda: None,
        "endless": lambda: ScriptedDraft(endless),
        "failing": lambda: ScriptedDraft(failing),
    }
    target = TableModel(tokenizer=LETTERS, seed=table, context_length=window)
    limits = GenerationLimits(max_iterations=max_iterations, max_draft_tokens=max_draft_tokens)
    request = replace(letters_request(OPTIONS[sampling]), max_tokens=max_tokens)
    events = events_of(
        target, request, drafts[draft](), lookahead=POLICIES[policy], acceptance=acceptance, limits=limits
    )
    rounds, finish = rounds_of(events), finish_of(events)
    assert finish.usage is not None
    counts = {
        "max_tokens": (finish.usage.output_tokens, max_tokens),
        "max_iterations": (len(rounds), max_iterations),
        "context_length": (finish.usage.input_tokens + finish.usage.output_tokens, window),
        "max_draft_tokens": (sum(report.num_draft_tokens for report in rounds), max_draft_tokens),
    }
    assert all(cap is None or count <= cap for count, cap in counts.values())
    if finish.stopped_by != "eos":
        count, cap = counts[str(finish.stopped_by)]
        assert count == cap
    assert max(target.widths[1:]) <= target.max_width
    assert sum(report.num_emitted_tokens for report in rounds) == finish.usage.output_tokens


@pytest.mark.parametrize("draft", [None, ReferenceDraft(STORY), RandomDraft()], ids=["plain", "given", "random"])
@pytest.mark.parametrize("window", [6, 7, 12, 20])
def test_a_full_context_ends_the_answer(draft: TokenDrafter | None, window: int) -> None:
    """The answer ends where the window is full, with and without a draft at the same token."""
    target = TableModel(STORY, order=24, context_length=window)
    events = events_of(target, ChatRequest.create("tell"), draft, lookahead=Fixed(8))
    finish = finish_of(events)
    assert (finish.finish_reason, finish.stopped_by) == ("length", "context_length")
    assert finish.usage is not None
    assert finish.usage.input_tokens + finish.usage.output_tokens == window
    assert text_of(events) == STORY[: finish.usage.output_tokens]


def test_a_prompt_that_does_not_fit_is_refused() -> None:
    """The error names both numbers, in one line; nothing was opened."""
    target = TableModel(context_length=8)
    with pytest.raises(InvalidRequestError, match=r"21 tokens.*8") as caught:
        events_of(target, ChatRequest.create("x" * 20))
    assert "\n" not in str(caught.value)
    assert caught.value.code == "context_length_exceeded"
    for messages in (["x" * 2000], ["x"] * 9):  # refused before they are encoded
        with pytest.raises(InvalidRequestError) as caught:
            events_of(target, ChatRequest.create([{"role": "user", "content": text} for text in messages]))
        assert caught.value.code == "context_length_exceeded"
    assert target.num_closed == target.num_open == 0


def test_a_part_that_is_not_text_is_named() -> None:
    """A model in this process sees no images, and says so rather than leave one out."""
    parts = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    messages = [{"role": "user", "content": "hi"}, {"role": "user", "content": parts}]
    with pytest.raises(InvalidRequestError, match=r"messages\[1\]\.content\[1\] is of type 'image_url'; .* text alone"):
        events_of(TableModel(), ChatRequest.create(messages))


@pytest.mark.parametrize("max_tokens", [*range(60, 66), 200])
@pytest.mark.parametrize("draft", [None, RandomDraft()])
def test_a_call_without_its_last_mark_is_one_only_where_the_model_ended(
    max_tokens: int, draft: TokenDrafter | None
) -> None:
    """An answer that a limit cut off has no call, however whole it looks."""
    answer = '<tool_call>\n{"name": "f", "arguments": {"a": 1, "bc": "defg"}}'
    target = TableModel(answer, tokenizer=CallingTokenizer(), order=16)
    request = ChatRequest.create(
        "go", temperature=0, max_tokens=max_tokens, tools=[{"type": "function", "function": {"name": "f"}}]
    )
    events = events_of(target, request, draft)
    finish = events[-1]
    assert isinstance(finish, Finish)
    calls = [event for event in events if isinstance(event, ToolCallDelta)]
    is_ended = max_tokens > len(answer)
    assert (finish.finish_reason, len(calls)) == (("tool_calls", 1) if is_ended else ("length", 0))
    assert text_of(events) == ("" if is_ended else answer[:max_tokens])


def test_a_narrow_model_is_not_asked_for_more() -> None:
    """No verifying forward is wider than the model allows; a model of width 1 is decoded plainly."""
    for max_width in (1, 2, 5):
        target = TableModel(STORY, order=24, max_width=max_width)
        events = events_of(target, ChatRequest.create("tell"), ReferenceDraft(STORY), lookahead=Fixed(8))
        assert text_of(events) == STORY
        assert max(target.widths[1:]) == max_width


# --------------------------------------------------------------------------------------- stop strings


@pytest.mark.parametrize("lookahead", range(1, 9))
@pytest.mark.parametrize("stop", ["sat", "the mat;", " on", "€5", "t", "😀"])
def test_a_stop_string_ends_the_answer_wherever_rounds_end(stop: str, lookahead: int) -> None:
    """Across rounds or inside one, the text ends before it, no part of it is shown, and the ending says so."""
    target = TableModel(STORY, order=24)
    request = ChatRequest.create("tell", stop=stop)
    plain = events_of(target, request)
    for draft in (ReferenceDraft(STORY), RandomDraft(), ReferenceDraft(STORY[5:])):
        events = events_of(target, request, draft, lookahead=Fixed(lookahead))
        assert text_of(events) == STORY.split(stop, maxsplit=1)[0]
        assert summary_of(events) == summary_of(plain)
        assert (finish_of(events).finish_reason, finish_of(events).stopped_by) == ("stop", "stop_string")
        shown = ""
        for event in events:
            shown += event.text if isinstance(event, TextDelta) else ""
            assert STORY.split(stop, maxsplit=1)[0].startswith(shown)


def test_tokens_after_a_stop_string_are_not_counted() -> None:
    """A round that drafted past a stop string reports only what it emitted."""
    target = TableModel("abcdefghij", order=8)
    events = events_of(target, ChatRequest.create("tell", stop="c"), ReferenceDraft("abcdefghij"), lookahead=Fixed(8))
    assert [report.num_emitted_tokens for report in rounds_of(events)] == [3]
    usage = finish_of(events).usage
    assert usage is not None
    assert usage.output_tokens == 3


def test_the_beginning_of_a_stop_string_at_the_end_is_shown() -> None:
    """An answer that ends with what might have become a stop string is complete."""
    target = TableModel("one two", order=8)
    for draft in (None, ReferenceDraft("one two")):
        events = events_of(target, ChatRequest.create("tell", stop="two three"), draft, lookahead=Fixed(4))
        assert text_of(events) == "one two"
        assert finish_of(events).stopped_by == "eos"


# ------------------------------------------------------------------------------- what the seeds got wrong


def test_text_accepted_so_far_is_not_appended_twice_after_a_divergence() -> None:
    """A draft that is right, wrong and right again leaves each character once."""
    draft = ReferenceDraft(STORY[:17] + "~~" + STORY[19:40] + "~" + STORY[41:])
    for lookahead in range(1, 9):
        target = TableModel(STORY, order=24)
        events = events_of(target, ChatRequest.create("tell"), draft, lookahead=Fixed(lookahead))
        assert text_of(events) == STORY
        assert any(report.rejection_index is not None for report in rounds_of(events))


def test_there_is_one_row_of_logits_for_every_position() -> None:
    """The rule gets the target's logits after each drafted token, each its own."""
    target = TableModel("abcdefghij", order=8)
    seen: list[FloatArray] = []

    class Watching:
        lossy = False

        def __init__(self) -> None:
            sampler = Sampler(Sampling(), vocab_size=target.vocab_size, num_prompt_tokens=5, seed=0)
            self._rule = make_acceptance_rule("coupled", sampler)
            self.choose_draft_token = self._rule.choose_draft_token
            self.prepare_noise = self._rule.prepare_noise

        def verify_proposal(
            self, logits: FloatArray, context_ids: Sequence[int], proposal: Sequence[DraftToken]
        ) -> VerifyResult:
            seen.append(logits.copy())
            return self._rule.verify_proposal(logits, context_ids, proposal)

    prompt_ids = target.tokenizer.encode_chat(ChatRequest.create("tell"))
    rule = Watching()
    open_draft = partial(ReferenceDraft("abcdefghij").open_token_draft, target, rule.choose_draft_token, prompt_ids)
    with Generation(target, prompt_ids, rule, Fixed(4).start(), open_draft=open_draft) as generation:
        context = list(generation.context_ids)
        next(iter(generation))
    assert seen[0].shape == (5, target.vocab_size)
    for i in range(5):
        assert (seen[0][i] == target.logits([*context, *b"abcd"[:i]])).all()


def rejection_verdicts(p_target: Sequence[float], token: DraftToken, num: int) -> list[VerifyResult]:
    """One drafted token judged `num` times by rejection sampling, with a seed each."""
    with np.errstate(divide="ignore"):
        row = np.log(np.array(p_target, dtype=np.float32))
    logits = np.stack([row, row])
    verdicts: list[VerifyResult] = []
    for seed in range(num):
        sampler = Sampler(Sampling(temperature=1.0), vocab_size=len(p_target), num_prompt_tokens=1, seed=seed)
        verdicts.append(RejectionAcceptance(sampler).verify_proposal(logits, [0], [token]))
    return verdicts


def test_no_threshold_decides_on_the_ratio() -> None:
    """A token whose ratio is 0.6 is accepted six times in ten: above 0.5 is not enough."""
    token = DraftToken(0, probs=np.array([0.9, 0.1, 0.0]))
    verdicts = rejection_verdicts([0.54, 0.26, 0.2], token, 4000)
    rate = sum(verify_result.num_accepted for verify_result in verdicts) / len(verdicts)
    assert rate == pytest.approx(0.6, abs=0.04)  # five standard deviations


def test_after_a_rejection_the_residual_is_drawn() -> None:
    """What the draft proposes too often is never the correction; the whole distribution comes out right."""
    token = DraftToken(0, probs=np.array([0.9, 0.1, 0.0]))
    verdicts = rejection_verdicts([0.54, 0.26, 0.2], token, 4000)
    corrections = [verify_result.next_token_id for verify_result in verdicts if not verify_result.num_accepted]
    assert 0 not in corrections
    assert corrections.count(2) / len(corrections) == pytest.approx(0.2 / 0.36, abs=0.07)


def test_a_token_of_zero_probability_is_never_drawn() -> None:
    """Neither accepted, nor drawn as correction, bonus or plain token, whatever the noise."""
    for probs in (None, np.array([0.0, 1.0, 0.0])):
        for verify_result in rejection_verdicts([0.5, 0.0, 0.5], DraftToken(1, probs=probs), 2000):
            assert verify_result.num_accepted == 0
            assert verify_result.next_token_id != 1
    target = TableModel(tokenizer=LETTERS, seed=3)
    for acceptance, seed in itertools.product(("coupled", "rejection"), range(20)):
        sampling = Sampling(temperature=5.0, top_k=2, seed=seed)
        prompt = target.tokenizer.encode_chat(letters_request(sampling))
        sampler = Sampler(sampling, vocab_size=target.vocab_size, num_prompt_tokens=len(prompt), seed=seed)
        rule = make_acceptance_rule(acceptance, sampler)
        draft = RandomDraft(seed).open_token_draft(target, rule.choose_draft_token, prompt)
        with Generation(
            target, prompt, rule, Fixed(4).start(), limits=GenerationLimits(max_tokens=20), open_draft=lambda d=draft: d
        ) as generation:
            list(generation)
            ids = generation.context_ids
        for position in range(len(prompt), len(ids)):
            assert ids[position] in np.argsort(target.logits(ids[:position]))[-2:]


def test_the_drafts_probability_is_the_one_it_was_drawn_with() -> None:
    """Under rejection sampling a drafting model reports the law it drew from, filters included; nothing is made up."""
    sampling = Sampling(temperature=0.7, top_k=3)
    sampler = Sampler(sampling, vocab_size=LETTERS.num_ids, num_prompt_tokens=1, seed=0)
    logits = TableModel(tokenizer=LETTERS, seed=9).logits([1])
    token = make_acceptance_rule("rejection", sampler).choose_draft_token(logits, [1])
    kept = np.argsort(logits)[-3:]
    expected = np.zeros(LETTERS.num_ids)
    expected[kept] = np.exp(logits[kept].astype(np.float64) / 0.7)
    expected /= expected.sum()
    assert token.probs is not None
    assert token.probs == pytest.approx(expected, abs=1e-6)
    assert token.confidence == pytest.approx(expected[token.token_id], abs=1e-6)


def test_a_seeded_step_can_be_repeated() -> None:
    """The same seed gives the same rounds, by both rules."""
    target = TableModel(tokenizer=LETTERS, seed=3)
    request = letters_request(Sampling(temperature=1.0, seed=11))
    for acceptance in ("coupled", "rejection"):
        runs: list[list[tuple[int, int]]] = []
        for _ in range(2):
            draft = letters_draft(NoisyTable(tokenizer=LETTERS, seed=3))
            events = events_of(target, request, draft, lookahead=Fixed(3), acceptance=acceptance)
            runs.append([(r.num_draft_tokens, r.num_accepted_tokens) for r in rounds_of(events)])
        assert runs[0] == runs[1]


def test_no_delta_is_cut_inside_a_character() -> None:
    """Every event of text is whole characters, however rounds cut the bytes."""
    story = "😀é€ aé😀 €b😀é ñ"
    target = TableModel(story, order=8)
    for lookahead in range(1, 9):
        events = events_of(target, ChatRequest.create("tell"), ReferenceDraft(story), lookahead=Fixed(lookahead))
        assert text_of(events) == story
        assert all("\N{REPLACEMENT CHARACTER}" not in e.text for e in events if isinstance(e, TextDelta))


def test_counts_agree_with_each_other() -> None:
    """Emitted tokens are accepted ones plus one a round, but for the ending; usage and rounds say the same."""
    target = TableModel(STORY, order=24)
    draft = ProviderDraft(LocalProvider(TableModel(STORY, order=2, seed=5)))
    events = events_of(target, ChatRequest.create("tell"), draft, lookahead=Fixed(4))
    reports, finish = rounds_of(events), finish_of(events)
    assert [report.index for report in reports] == list(range(len(reports)))
    assert all(r.num_emitted_tokens == r.num_accepted_tokens + 1 for r in reports[:-1])
    assert finish.usage is not None
    assert finish.draft_usage is not None
    assert finish.usage.output_tokens == sum(r.num_emitted_tokens for r in reports) == len(STORY.encode()) + 1
    assert finish.draft_usage.output_tokens == sum(r.num_draft_tokens for r in reports)
    assert finish.usage.input_tokens == len(ByteTokenizer().encode_chat(ChatRequest.create("tell")))
