"""A draft that takes the target's time writes where that pays, and otherwise within what may be lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
from support.strategy_runs import run_strategy

from llm_spec import ChatRequest, SpeculativeConfig, SpeculativeDecoder, SpeculativeResult, StreamEvent
from llm_spec.contract.draft import DraftCapabilities, DraftPiece
from llm_spec.drafting.background_draft import BackgroundDraft
from llm_spec.measure.load_stats import DraftLoadStats
from llm_spec.measure.pair_stats import PairStats
from llm_spec.strategies.draft_gate import DraftGate
from llm_spec.strategies.race import race
from llm_spec.strategies.race.schedule import LossBudget
from llm_spec.strategies.rows import probe
from llm_spec.testing import TableModel
from llm_spec.testing.clock import run_virtual
from llm_spec.testing.simulated import SimulatedDraft, SimulatedTarget

STEP_S = 0.05
DRAFT_S = 0.01
WORDS = " ".join(f"word{n}" for n in range(96))


# ------------------------------------------------------------------------------------------ one machine


class BusyDraft(SimulatedDraft):
    """A draft that says whether it is writing."""

    num_writing = 0

    @asynccontextmanager
    async def draft(self, request: ChatRequest, max_tokens: int) -> AsyncGenerator[AsyncIterator[DraftPiece]]:
        self.num_writing += 1
        try:
            async with super().draft(request, max_tokens) as pieces:
                yield pieces
        finally:
            self.num_writing -= 1


class SharedMachine(SimulatedTarget):
    """A target whose steps take longer while its draft writes: by `slowdown` times their time."""

    def __init__(self, draft: BusyDraft, slowdown: float, **options: Any) -> None:
        self._draft, self._slowdown = draft, slowdown
        super().__init__(WORDS, **options)

    @property
    def _token_s(self) -> float:
        return self._alone_s * (1.0 + self._slowdown * (self._draft.num_writing > 0))

    @_token_s.setter
    def _token_s(self, seconds: float) -> None:
        self._alone_s = seconds


class TimedAnswer(NamedTuple):
    """How many times as fast as the target alone it was, and the answer."""

    ratio: float
    result: SpeculativeResult


async def time_answers(
    strategy: str, slowdown: float, *, row_s: float, streams: int, num_answers: int, agreement: float = 0.9
) -> list[TimedAnswer]:
    """The answers of a new decoder, one after another."""
    draft = BusyDraft(WORDS, agreement, 1, first_token_s=DRAFT_S, token_s=DRAFT_S)
    target = SharedMachine(draft, slowdown, first_token_s=0.1, token_s=STEP_S, row_s=row_s, by_ids=True)
    config = SpeculativeConfig(strategy=strategy, max_concurrent_streams=streams, baseline_every=0)
    clock, answers = asyncio.get_running_loop().time, list[TimedAnswer]()
    async with SpeculativeDecoder(target=target, draft=draft, config=config) as decoder:
        for _ in range(num_answers):
            started = clock()
            result = await decoder.decode("Go on.", temperature=0)
            assert result.content == WORDS
            answers.append(TimedAnswer((0.1 + 95 * STEP_S) / (clock() - started), result))
    return answers


def compute_total_ratio(answers: Sequence[TimedAnswer]) -> float:
    return len(answers) / sum(1 / answer.ratio for answer in answers)


# one stream at a time; a draft that is wrong half of the time; rows that cost more than a step each
NO_ROOM = [("race", 0.9, 0.0, 1), ("probe", 0.5, 0.04, 4), ("probe", 0.8, 0.06, 4)]


@pytest.mark.parametrize(("strategy", "agreement", "row_s", "streams"), NO_ROOM)
def test_a_draft_that_slows_its_target_and_wins_nothing_is_stopped(
    strategy: str, agreement: float, row_s: float, streams: int
) -> None:
    """Ten answers together are nearly as fast as without it; in the first one it is found out, before much is lost."""
    answers = run_virtual(
        time_answers(strategy, 0.5, agreement=agreement, row_s=row_s, streams=streams, num_answers=10)
    )
    assert compute_total_ratio(answers) >= 0.95
    assert answers[0].ratio >= 0.85
    assert min(answer.ratio for answer in answers[1:]) >= 0.96
    assert {answer.result.plain_reason for answer in answers[1:]} <= {None, "not_worthwhile"}  # not: nothing drafted
    for answer in answers[1:]:
        assert answer.result.plain_s is not None
        assert answer.result.plain_s / answer.result.timings.total_s == pytest.approx(answer.ratio, rel=0.01)


@pytest.mark.parametrize(("strategy", "agreement", "row_s", "streams"), NO_ROOM)
def test_a_gate_that_is_always_open_is_noticed(
    strategy: str, agreement: float, row_s: float, streams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: the same draft may always write."""

    def allow(_gate: DraftGate, num_tokens: int, *_: float, **_options: float) -> int:
        return num_tokens

    monkeypatch.setattr(DraftGate, "limit_draft_tokens", allow)
    answers = run_virtual(
        time_answers(strategy, 0.5, agreement=agreement, row_s=row_s, streams=streams, num_answers=10)
    )
    assert compute_total_ratio(answers) < 0.9


@pytest.mark.parametrize("slowdown", [0.0, 0.3])
def test_a_draft_that_pays_writes_on(slowdown: float) -> None:
    """Where rows win more than the draft costs it writes as before."""
    answers = run_virtual(time_answers("probe", slowdown, row_s=0.0, streams=4, num_answers=4))
    assert min(answer.ratio for answer in answers[1:]) > 1.5


@pytest.mark.parametrize(("prepare", "streams"), [(race.prepare_or_refuse, 1), (probe.prepare_or_refuse, 4)])
def test_how_long_the_draft_took_is_kept_for_the_next_answers(prepare: Any, streams: int) -> None:
    """Until its first piece, its prompt included, and for each token then."""
    draft = SimulatedDraft(WORDS, 0.9, 1, first_token_s=0.3, token_s=DRAFT_S)
    target = SimulatedTarget(WORDS, first_token_s=0.1, token_s=STEP_S, row_s=0.0, by_ids=True)
    request, stats = ChatRequest.create("Go on.", temperature=0), PairStats()
    run_virtual(run_strategy(prepare, draft, target, request, stats, max_concurrent_streams=streams))
    assert stats.draft_load.first_piece_s == pytest.approx(0.3)
    assert stats.draft_load.draft_token_s == pytest.approx(DRAFT_S)


@pytest.mark.parametrize(("strategy", "streams"), [("race", 4), ("probe", 4)])
def test_the_gate_is_shown_when_the_server_has_other_work(
    strategy: str, streams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows, and further streams."""
    shown: set[bool] = set()
    limit_draft_tokens = DraftGate.limit_draft_tokens

    def note(gate: DraftGate, num_tokens: int, now_s: float, *, has_calls: bool, **options: Any) -> int:
        shown.add(has_calls)
        return limit_draft_tokens(gate, num_tokens, now_s, has_calls=has_calls, **options)

    monkeypatch.setattr(DraftGate, "limit_draft_tokens", note)
    run_virtual(time_answers(strategy, 0.0, row_s=0.0, streams=streams, num_answers=2, agreement=1.0))
    assert shown == {False, True}


class HaltedMachine(SharedMachine):
    """A target that does nothing while its draft, a model in its process, reads or writes."""

    async def _stream_rest_of_answer(
        self, written: Sequence[str], max_tokens: int | None, *, with_ids: bool
    ) -> AsyncGenerator[StreamEvent]:
        loop = asyncio.get_running_loop()
        due_s, last_s = loop.time() + self._first_token_s, loop.time()
        events = super()._stream_rest_of_answer(written, max_tokens, with_ids=with_ids)
        async with aclosing(events):
            async for event in events:
                while due_s > loop.time() or self._draft.num_writing:
                    due_s += (loop.time() - last_s) * (self._draft.num_writing > 0)
                    last_s = loop.time()
                    await asyncio.sleep(0.001)
                last_s = loop.time()
                due_s += self._token_s
                yield event


async def time_halted_answers(strategy: str, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Of twelve answers, how many times as fast as the target alone each was, where a draft reads for two seconds."""
    monkeypatch.setattr(DraftGate, "_is_in_process", property(lambda _: True, lambda *_: None), raising=False)
    draft = BusyDraft(WORDS, 0.9, 1, first_token_s=2.0, token_s=DRAFT_S)
    target = HaltedMachine(draft, 0.0, first_token_s=0.1, token_s=STEP_S, row_s=0.04, by_ids=True)
    config = SpeculativeConfig(strategy=strategy, max_concurrent_streams=4, baseline_every=0)
    clock, ratios = asyncio.get_running_loop().time, list[float]()
    async with SpeculativeDecoder(target=target, draft=draft, config=config) as decoder:
        for _ in range(12):
            started = clock()
            result = await decoder.decode("Go on.", temperature=0)
            assert result.content == WORDS
            ratios.append((0.1 + 95 * STEP_S) / (clock() - started))
    return ratios


@pytest.mark.parametrize("strategy", ["race", "probe"])
def test_a_draft_in_this_process_that_halts_the_stream_is_ended_in_time(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although nothing comes of the stream meanwhile, nor of the draft."""
    ratios = run_virtual(time_halted_answers(strategy, monkeypatch))
    assert min(ratios) >= 0.9
    assert len(ratios) / sum(1 / ratio for ratio in ratios) >= 0.97


@pytest.mark.parametrize("strategy", ["race", "probe"])
def test_a_halted_stream_without_an_alarm_is_noticed(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: only what comes of a stream ends its draft."""
    monkeypatch.setattr(BackgroundDraft, "set_alarm", lambda *_: None)
    assert min(run_virtual(time_halted_answers(strategy, monkeypatch))) < 0.8


# --------------------------------------------------------------------------------------------- the parts


def make_gate(
    stats: PairStats,
    *,
    is_free: bool = False,
    is_in_process: bool = False,
    drafting_s: float = 0.0,
    first_piece_s: float | None = 0.0,
) -> DraftGate:
    class Draft(SimulatedDraft):
        capabilities = DraftCapabilities(is_free=is_free, token_model=TableModel() if is_in_process else None)

    @dataclass
    class Background:
        token_s: float = DRAFT_S
        first_piece_s: float | None = None
        alarm_s: float | None = None

        def measure_drafting_s(self) -> float:
            return drafting_s

        def set_alarm(self, drafting_s: float, _: Any) -> None:
            self.alarm_s = drafting_s

    background: Any = Background(first_piece_s=first_piece_s)
    budget = LossBudget(stats, 0.0)
    return DraftGate(Draft("", 1.0, 0), stats, budget, background, max_tokens=None, changed=lambda: None)


def limit(gate: DraftGate, **options: Any) -> int:
    given = {"is_streaming": True, "has_calls": False, "can_pause": True, "is_paying": False, **options}
    return gate.limit_draft_tokens(64, 1.0, **given)


def time_stream(gate: DraftGate, num_tokens: int, *, late: float, drafting: float) -> None:
    for _ in range(num_tokens):
        gate.add_streamed(1, STEP_S * (1.0 + late), drafting * STEP_S)


def test_a_stream_that_never_was_alone_is_left_alone_for_some_tokens() -> None:
    """Sixteen tokens beside the draft, which writes little at a time, four without it; then it is known harmless."""
    gate = make_gate(PairStats())
    time_stream(gate, 16, late=0.0, drafting=1.0)
    assert limit(gate) == 16  # the first token does not count
    assert limit(gate, can_pause=False) == 16  # rows that seem to pay may be judged by a stream that is slowed
    assert limit(gate, can_pause=False, is_streaming=False) == 64
    time_stream(gate, 1, late=0.0, drafting=1.0)
    assert limit(gate) == limit(gate, is_paying=True) == 0  # what it wins was judged beside it
    time_stream(gate, 4, late=0.0, drafting=0.0)
    assert limit(gate) == 64
    assert not gate.may_disturb(STEP_S, STEP_S)
    assert not gate.may_disturb(STEP_S, STEP_S)


def test_a_draft_in_this_process_waits_until_the_stream_was_alone() -> None:
    """And while the server has other work, beside which its own cost cannot be measured."""
    gate = make_gate(PairStats(), is_in_process=True)
    assert limit(gate) == 0
    assert limit(gate, is_streaming=False) > 0
    time_stream(gate, 5, late=0.0, drafting=0.0)
    assert 0 < limit(gate) < 16
    assert limit(gate, has_calls=True) == 0
    time_stream(gate, 2, late=0.0, drafting=1.0)
    assert 0 < limit(gate) == limit(gate, has_calls=True) < 64


def test_a_draft_in_this_process_leaves_first_tokens_alone_until_it_is_known_to_be_harmless() -> None:
    """In each answer, since nobody can tell how late a first token is."""
    stats = PairStats()
    time_stream(make_gate(stats, is_in_process=True), 12, late=0.0, drafting=0.0)
    gate = make_gate(stats, is_in_process=True)
    assert limit(gate) == 0
    assert limit(gate, is_streaming=False) > 0
    time_stream(gate, 5, late=0.0, drafting=0.0)
    assert limit(gate) > 0
    time_stream(gate, 40, late=0.0, drafting=1.0)
    assert limit(make_gate(stats, is_in_process=True)) == 64


def test_what_a_draft_that_was_ended_had_taken_is_its_least_for_a_first_piece() -> None:
    """So that the next answer does not begin what it cannot end."""
    stats = PairStats()
    time_stream(make_gate(stats, is_in_process=True), 12, late=0.0, drafting=0.0)
    gate = make_gate(stats, is_in_process=True, drafting_s=1.5, first_piece_s=None)
    gate.record_answer_end()
    assert stats.draft_load.first_piece_s == pytest.approx(1.5)
    gate = make_gate(stats, is_in_process=True, first_piece_s=None)
    time_stream(gate, 5, late=0.0, drafting=0.0)
    assert limit(gate) == 0
    assert limit(gate, gained_s=3.0) == 64


def test_a_draft_in_this_process_is_bounded_until_it_is_known_to_be_harmless() -> None:
    """Until then it may cost as much as it was measured to, and more: the fewer the tokens that were timed."""
    stats = PairStats()
    gate = make_gate(stats, is_in_process=True)
    time_stream(gate, 12, late=0.0, drafting=0.0)
    limits: list[int] = []
    for _ in range(10):
        time_stream(gate, 1, late=0.0, drafting=1.0)
        limits.append(limit(gate))
    assert limits == sorted(limits)
    assert limits[0] < 16
    assert limits[-1] == 64  # no bound
    assert limit(make_gate(stats, is_in_process=True)) == 64


def test_a_stream_that_was_hardly_timed_alone_does_not_tell_that_a_draft_is_harmless() -> None:
    """However often it was timed beside it: its few tokens alone may have been slow ones."""
    for num_alone, expected in ((4, False), (12, True)):
        stats = DraftLoadStats()
        stats.add_alone(num_alone, num_alone * STEP_S)
        for _ in range(100):
            stats.add_beside(1, STEP_S, STEP_S)
        assert stats.is_harmless is expected


def test_a_token_after_the_drafts_last_is_not_timed() -> None:
    """Its step may have begun while the draft wrote."""
    stats = PairStats()
    gate = make_gate(stats)
    time_stream(gate, 5, late=0.0, drafting=0.0)
    for _ in range(8):
        time_stream(gate, 1, late=0.5, drafting=1.0)
        time_stream(gate, 1, late=0.5, drafting=0.0)
    assert stats.draft_load.alone_token_s == pytest.approx(STEP_S)
    time_stream(gate, 1, late=0.5, drafting=0.0)
    assert stats.draft_load.alone_token_s == pytest.approx(STEP_S * (8 + 1.5) / 9, rel=0.1)
    assert stats.draft_load.alone_token_s != pytest.approx(STEP_S)


def test_a_draft_in_this_process_is_charged_from_its_first_token_on() -> None:
    """What it takes of the stream's time ends it, before it is known to do so."""
    stats = PairStats()
    gate = make_gate(stats, is_in_process=True)
    time_stream(gate, 5, late=0.0, drafting=0.0)
    time_stream(gate, 4, late=0.3, drafting=1.0)
    assert not gate.may_disturb(STEP_S, STEP_S)  # it is not known
    left_s = stats.rows.estimate_allowed_loss_s(0.0, STEP_S, None)
    time_stream(gate, 1, late=0.3, drafting=1.0)
    assert left_s - stats.rows.estimate_allowed_loss_s(0.0, STEP_S, None) == pytest.approx(0.3 * STEP_S)


def test_a_harmful_draft_writes_as_long_as_the_loss_is_small() -> None:
    """What was timed beside it is forgotten; each token that it makes later is charged."""
    stats = PairStats()
    stats.token_s.update(20, 20 * 1.5 * STEP_S)
    gate = make_gate(stats)
    time_stream(gate, 5, late=0.0, drafting=0.0)
    time_stream(gate, 8, late=0.5, drafting=1.0)
    assert gate.may_disturb(STEP_S, STEP_S)
    assert not gate.may_disturb(0.0, STEP_S)
    assert stats.target_token_s == pytest.approx(STEP_S)
    before = limit(gate)
    assert 4 <= before < 64
    time_stream(gate, 4, late=0.5, drafting=1.0)
    assert limit(gate) < before
    time_stream(gate, 40, late=0.5, drafting=1.0)
    assert limit(gate) == 0
    assert limit(gate, gained_s=10.0) > 0
    assert limit(gate, is_paying=True) == 64


def test_a_harmful_draft_leaves_the_first_token_alone() -> None:
    """Its prompt is read without the draft beside it."""
    stats = PairStats()
    gate = make_gate(stats)
    time_stream(gate, 5, late=0.0, drafting=0.0)
    time_stream(gate, 8, late=0.5, drafting=1.0)
    assert limit(make_gate(stats)) == 0


def test_the_prompt_of_a_harmful_draft_counts() -> None:
    """It takes as long as in earlier answers, and what was read of it before a token came counts as well."""
    stats = PairStats()
    gate = make_gate(stats)
    time_stream(gate, 5, late=0.0, drafting=0.0)
    time_stream(gate, 8, late=0.5, drafting=1.0)
    allowed = limit(gate)
    earlier = make_gate(stats, first_piece_s=4 * DRAFT_S)
    earlier.record_answer_end()
    for drafting_s, expected in ((0.0, allowed - 4), (3 * DRAFT_S, allowed - 4), (9 * DRAFT_S, allowed - 9)):
        gate = make_gate(stats, first_piece_s=None, drafting_s=drafting_s)
        gate.add_streamed(5, STEP_S, 0.0)
        assert limit(gate) == expected
    make_gate(stats, first_piece_s=640 * DRAFT_S).record_answer_end()
    for number in range(17):  # answers: that one may have been in a bad moment
        gate = make_gate(stats, first_piece_s=None)
        gate.add_streamed(5, STEP_S, 0.0)
        assert (limit(gate) > 0) == (number == 16)
        gate.record_answer_end()


def test_a_free_draft_is_never_held() -> None:
    """Nor is a stream beside it disturbed."""
    gate = make_gate(PairStats(), is_free=True)
    time_stream(gate, 30, late=0.5, drafting=1.0)
    assert limit(gate) == 64
    assert not gate.may_disturb(STEP_S, STEP_S)


def test_a_hiccup_does_not_tell_the_cost_of_a_draft() -> None:
    """One long gap among many usual ones counts as three steps at most."""
    stats = PairStats()
    gate = make_gate(stats)
    time_stream(gate, 9, late=0.0, drafting=0.0)
    time_stream(gate, 30, late=0.0, drafting=1.0)
    time_stream(gate, 1, late=100.0, drafting=1.0)
    assert not gate.may_disturb(STEP_S, STEP_S)


@pytest.mark.parametrize("late", [0.0, 0.3])
def test_tokens_that_come_at_once_have_waited_together(late: float) -> None:
    """Where a busy machine holds ten tokens back, neither the long gap nor those that follow at once tell alone."""
    stats = PairStats()
    gate = make_gate(stats)
    time_stream(gate, 13, late=0.0, drafting=0.0)
    for _ in range(4):
        gate.add_streamed(1, 10 * STEP_S * (1.0 + late), 10 * STEP_S)
        for _ in range(9):
            gate.add_streamed(1, 0.0, 0.0)
    time_stream(gate, 2, late=0.0, drafting=0.0)
    assert stats.draft_load.alone_token_s == pytest.approx(STEP_S)
    assert stats.draft_load.late_s_per_s == pytest.approx(late)


def test_stretches_beside_other_work_are_only_counted() -> None:
    """Whoever made the stream late then, it was not alone."""
    stats = PairStats()
    gate = make_gate(stats)
    gate.add_streamed(1, STEP_S, 0.0)
    for _ in range(16):
        gate.add_streamed(1, 9 * STEP_S, STEP_S, has_calls=True)
    assert limit(gate) == 0
    time_stream(gate, 4, late=0.0, drafting=0.0)
    time_stream(gate, 8, late=0.0, drafting=1.0)
    assert limit(gate) == 64


def test_load_is_not_known_before_both_sides_were_measured() -> None:
    """Seconds late for a second of drafting, whatever share of the time the draft wrote."""
    stats = DraftLoadStats()
    for _ in range(16):
        assert not stats.lacks_comparison
        stats.add_beside(1, 0.06, 0.025)
    assert stats.lacks_comparison
    assert (stats.is_measured, stats.late_s_per_s, stats.is_harmful) == (False, 0.0, False)
    stats.add_alone(4, 0.2)
    assert stats.is_measured
    assert stats.late_s_per_s == pytest.approx(0.4)
    assert stats.is_harmful


def test_a_harmful_draft_is_charged_beside_other_work_as_well() -> None:
    """With as much as it is known to cost; the rest is that work's."""
    lost: list[float] = []
    for late in (0.2, 0.5, 9.0):
        stats = PairStats()
        gate = make_gate(stats)
        time_stream(gate, 5, late=0.0, drafting=0.0)
        time_stream(gate, 8, late=0.5, drafting=1.0)
        before_s = stats.rows.estimate_allowed_loss_s(0.0, STEP_S, None)
        gate.add_streamed(1, STEP_S * (1.0 + late), STEP_S, has_calls=True)
        time_stream(gate, 1, late=0.0, drafting=0.0)  # no more came with it
        lost.append(before_s - stats.rows.estimate_allowed_loss_s(0.0, STEP_S, None))
    assert lost == pytest.approx([0.2 * STEP_S, 0.5 * STEP_S, 0.5 * STEP_S])


def test_a_few_stretches_tell_of_a_large_loss_alone() -> None:
    """The fewer there are, the more may be noise."""
    few, many, large = DraftLoadStats(), DraftLoadStats(), DraftLoadStats()
    for stats, num_stretches, late in ((few, 4, 0.25), (many, 12, 0.25), (large, 2, 0.7)):
        stats.add_alone(4, 4 * STEP_S)
        for _ in range(num_stretches):
            assert not stats.is_harmful or stats is many
            stats.add_beside(1, STEP_S * (1.0 + late), STEP_S)
    assert (few.is_harmful, many.is_harmful, large.is_harmful) == (False, True, True)
