"""What a generation reports about its time, and what its lookahead learns from it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from support.generation_checks import (
    DRAFT_TOKEN_S,
    EOS_S,
    LEARN_S,
    OPEN_DRAFT_S,
    OPEN_S,
    PREPARE_S,
    ROW_S,
    DevicePart,
    ScriptedDraft,
    Seconds,
    SlowRule,
    device_generation_of,
    events_of,
    generation_of,
)

from llm_spec import ChatRequest, Fixed, ReferenceDraft
from llm_spec.contract.events import LocalTimings
from llm_spec.contract.token_model import DeviceRoundResult, DraftToken, TokenDraft, TokenModel, TokenSampler
from llm_spec.local.lookahead import LookaheadController, RoundFeedback
from llm_spec.local.loop import Generation
from llm_spec.local.sampling import FloatArray
from llm_spec.testing import ByteTokenizer, TableModel


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Seconds:
    """The clock that generations measure by."""
    clock = Seconds()
    for module in ("loop", "propose", "verify"):
        monkeypatch.setattr(f"llm_spec.local.{module}.time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


class SlowTable(TableModel):
    """A table each of whose rows and whose list of ends take time."""

    def __init__(self, seconds: Seconds, text: str, **options: Any) -> None:
        super().__init__(text, **options)
        self._seconds = seconds
        tokenizer = self.tokenizer

        class Slow(ByteTokenizer):
            @property
            def eos_token_ids(self) -> frozenset[int]:  # type: ignore[override] # a property that takes its time
                seconds.spend(EOS_S)
                return tokenizer.eos_token_ids

        self.tokenizer = Slow()

    def open(self, *, exact: bool = True) -> Any:
        self._seconds.spend(OPEN_S)
        return super().open(exact=exact)

    def logits(self, context_ids: Sequence[int]) -> FloatArray:
        self._seconds.spend(ROW_S)
        return super().logits(context_ids)


class SlowLearner:
    """A lookahead of 3 that takes its time to learn, and keeps what it was given."""

    def __init__(self, seconds: Seconds) -> None:
        self._seconds = seconds
        self._fixed = Fixed(3).start()
        self.limit, self.wants_more, self.reset = self._fixed.limit, self._fixed.wants_more, self._fixed.reset
        self.choose_num_verified = self._fixed.choose_num_verified
        self.reports: list[RoundFeedback] = []

    def start(self) -> LookaheadController:
        return self

    def update(self, report: RoundFeedback) -> None:
        self._seconds.spend(LEARN_S)
        self.reports.append(report)

    def describe(self) -> dict[str, float]:
        return {"rounds": len(self.reports)}


def test_a_rounds_times_are_the_whole_of_it(seconds: Seconds) -> None:
    """Preparing, drafting, verifying, committing and learning all count, so that rounds add up to the time they took.

    The prompt and the opening of the draft are measured for themselves; the lookahead steers by what drafting and
    verifying cost, without the rest.
    """
    target, learner = SlowTable(seconds, "abcdefghij", order=8), SlowLearner(seconds)

    def propose(context_ids: Sequence[int]) -> Iterator[DraftToken]:
        for token_id in b"abcdefgh"[len(context_ids) - 5 :]:
            seconds.spend(DRAFT_TOKEN_S)
            yield DraftToken(token_id)

    def open_draft() -> TokenDraft:
        seconds.spend(OPEN_DRAFT_S)
        return ScriptedDraft(propose)

    prompt_ids = target.tokenizer.encode_chat(ChatRequest.create("tell"))
    with Generation(target, prompt_ids, SlowRule(seconds, target), learner, open_draft=open_draft) as generation:
        assert (generation.prompt_s, generation.open_draft_s) == (OPEN_S + ROW_S, OPEN_DRAFT_S)
        for _ in generation:
            seconds.spend(128.0)  # what a consumer does between two rounds is no part of them
        rounds = generation.rounds
    # "abc" and d, "efg" and h, then i, j and the end by plain steps
    assert [report.num_draft_tokens for report in rounds] == [3, 3, 0, 0, 0]
    # a proposal, empty or not, asks once which tokens end the text
    expected = [(num * DRAFT_TOKEN_S + EOS_S, PREPARE_S + (num + 1) * ROW_S + LEARN_S) for num in (3, 3, 0, 0, 0)]
    assert [(report.draft_s, report.verify_s) for report in rounds] == expected
    assert [(cost.draft_s, cost.verify_s) for cost in learner.reports] == [
        (num * DRAFT_TOKEN_S + EOS_S, (num + 1) * ROW_S) for num in (3, 3, 0, 0, 0)
    ]


class SelfPacedDraft(ScriptedDraft):
    """Of its proposals a half is weighed by itself, unless it says something else."""

    reported_s: object = DRAFT_TOKEN_S / 2

    def __init__(self, propose: Any) -> None:
        super().__init__(propose)
        self.ended: list[tuple[list[int], float]] = []

    @property
    def self_paced_s(self) -> Any:
        return self.reported_s

    def end_round(self, token_ids: Sequence[int], verify_s: float) -> None:
        self.ended.append((list(token_ids), verify_s))


def test_what_a_draft_weighs_itself_is_no_price_of_its_tokens(seconds: Seconds) -> None:
    """The lookahead steers by the rest; the round's own times stay whole."""
    target, learner = SlowTable(seconds, "abcdefghij", order=8), SlowLearner(seconds)

    def propose(context_ids: Sequence[int]) -> Iterator[DraftToken]:
        seconds.spend(DRAFT_TOKEN_S)
        yield DraftToken(b"abcdefghij"[len(context_ids) - 5])

    prompt_ids = target.tokenizer.encode_chat(ChatRequest.create("tell"))
    draft = SelfPacedDraft(propose)
    with Generation(target, prompt_ids, SlowRule(seconds, target), learner, open_draft=lambda: draft) as generation:
        next(iter(generation))
    assert generation.rounds[0].draft_s == DRAFT_TOKEN_S + EOS_S
    assert learner.reports[0].draft_s == DRAFT_TOKEN_S / 2 + EOS_S
    assert draft.ended == [([*b"ab"], 2 * ROW_S)]


@pytest.mark.parametrize("reported_s", [math.nan, -1.0, "long"])
def test_a_draft_that_reports_no_time_is_dropped(seconds: Seconds, reported_s: object) -> None:
    """What it proposed is verified all the same, as after any failure of a draft."""
    target, learner = SlowTable(seconds, "abcdefghij", order=8), SlowLearner(seconds)
    draft = SelfPacedDraft(lambda context_ids: iter([DraftToken(b"abcdefghij"[len(context_ids) - 5])]))
    draft.reported_s = reported_s
    prompt_ids = target.tokenizer.encode_chat(ChatRequest.create("tell"))
    with Generation(target, prompt_ids, SlowRule(seconds, target), learner, open_draft=lambda: draft) as generation:
        rounds = list(generation)
    assert [token_id for each in rounds for token_id in each.token_ids][:10] == [*b"abcdefghij"]
    assert generation.rounds[0].num_accepted_tokens == 1
    assert {each.num_draft_tokens for each in generation.rounds[1:]} == {0}
    assert "self_paced_s" in str(generation.fallback_reason)


def test_a_generation_without_a_draft_opens_none(seconds: Seconds) -> None:
    """Its time for that is 0, and every round is the target's alone."""
    target = SlowTable(seconds, "abc", order=8)
    with generation_of(target) as generation:
        list(generation)
    assert (generation.prompt_s, generation.open_draft_s) == (OPEN_S + ROW_S, 0.0)
    assert {report.draft_s for report in generation.rounds} == {0.0}


def test_a_draft_that_cannot_be_opened_has_taken_its_time(seconds: Seconds) -> None:
    """What was spent on it is its own, not the prompt's."""

    class Broken(ScriptedDraft):
        def open_token_draft(self, target: TokenModel, choose: TokenSampler, prompt_ids: Sequence[int]) -> TokenDraft:  # noqa: ARG002
            seconds.spend(OPEN_DRAFT_S)
            raise RuntimeError("broken")

    with generation_of(SlowTable(seconds, "abc", order=8), Broken(lambda _: iter(()))) as generation:
        assert (generation.prompt_s, generation.open_draft_s) == (OPEN_S + ROW_S, OPEN_DRAFT_S)


def test_rounds_on_a_device_add_up_to_this_processs_time(seconds: Seconds) -> None:
    """The device may work ahead; its own times say how to share what this process waited, and steer the lookahead."""
    target, learner = TableModel("abc", order=8), SlowLearner(seconds)
    runner = DevicePart(DeviceRoundResult((*b"ab",), 2, ord("c"), 1.0, 3.0), seconds)
    with device_generation_of(target, learner, runner) as generation:
        assert (generation.prompt_s, generation.open_draft_s) == (4.0, 6.0)
        report = next(iter(generation)).report
    assert (report.draft_s, report.verify_s) == (0.5, 1.5 + LEARN_S)
    assert (learner.reports[0].draft_s, learner.reports[0].verify_s) == (1.0, 3.0)


@pytest.mark.parametrize("has_companion", [False, True])
def test_a_device_works_ahead_unless_a_draft_here_is_asked_first(has_companion: bool) -> None:
    """A round that began ahead could not take in what a draft in this process proposes."""
    target = TableModel("abc", order=8)
    runner = DevicePart(DeviceRoundResult((*b"ab",), 2, ord("c"), 1.0, 3.0))
    companion = ScriptedDraft(lambda _: iter(()))
    prompt_ids = target.tokenizer.encode_chat(ChatRequest.create("tell"))

    def open_companion() -> TokenDraft:
        return companion.open_token_draft(target, rule.choose_draft_token, prompt_ids)

    rule = SlowRule(Seconds(), target)
    generation = Generation(
        target,
        prompt_ids,
        rule,
        Fixed(3).start(),
        open_rounds=lambda _: runner,
        open_companion_draft=open_companion if has_companion else None,
    )
    with generation:
        next(iter(generation))
    assert [room > 0 for room in runner.rooms] == [not has_companion]


def test_an_answer_tells_its_times_before_its_end(seconds: Seconds) -> None:
    """Once, with what the lookahead had learned; without a draft there is nothing to say of that."""
    target = SlowTable(seconds, "abcdefghij", order=8)
    for draft, lookahead in ((ReferenceDraft("abcdefghij"), {"rounds": 3.0}), (None, {})):
        events = events_of(target, ChatRequest.create("tell"), draft, lookahead=SlowLearner(seconds))
        assert [event for event in events if isinstance(event, LocalTimings)] == [events[-2]]
        assert events[-2] == LocalTimings(OPEN_S + ROW_S, 0.0, lookahead)
