"""A draft that takes the target's time writes where that pays, and otherwise within what may be lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest

from llm_spec import ChatRequest, DraftPiece, SpeculativeConfig, SpeculativeDecoder, SpeculativeResult
from llm_spec.contract.draft import DraftCapabilities
from llm_spec.draft_load_stats import DraftLoadStats
from llm_spec.pair_stats import PairStats
from llm_spec.simulation import SimulatedDraft, SimulatedTarget, run_virtual
from llm_spec.strategies.draft_gate import DraftGate
from llm_spec.strategies.loss_budget import LossBudget

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
    async with SpeculativeDecoder(draft, target, config) as decoder:
        for _ in range(num_answers):
            started = clock()
            result = await decoder.decode("Go on.", temperature=0)
            assert result.content == WORDS
            answers.append(TimedAnswer((0.1 + 95 * STEP_S) / (clock() - started), result))
    return answers


def compute_total_ratio(answers: Sequence[TimedAnswer]) -> float:
    return len(answers) / sum(1 / answer.ratio for answer in answers)


# one stream at a time; a draft that is wrong half of the time, and rows that cost almost a step each
NO_ROOM = [("race", 0.9, 0.0, 1), ("probe", 0.5, 0.04, 4)]


@pytest.mark.parametrize(("strategy", "agreement", "row_s", "streams"), NO_ROOM)
def test_a_draft_that_slows_its_target_and_wins_nothing_is_stopped(
    strategy: str, agreement: float, row_s: float, streams: int
) -> None:
    """Ten answers together are nearly as fast as without it; in the first one it is found out."""
    answers = run_virtual(
        time_answers(strategy, 0.5, agreement=agreement, row_s=row_s, streams=streams, num_answers=10)
    )
    assert compute_total_ratio(answers) >= 0.93
    assert min(answer.ratio for answer in answers[1:]) >= 0.96
    assert {answer.result.plain_reason for answer in answers[1:]} <= {None, "not_worthwhile"}  # not: nothing drafted
    for answer in answers[1:]:
        assert answer.result.speedup == pytest.approx(answer.ratio, rel=0.01)


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


# --------------------------------------------------------------------------------------------- the parts


def make_gate(stats: PairStats, *, is_free: bool = False) -> DraftGate:
    class Draft(SimulatedDraft):
        capabilities = DraftCapabilities(is_free=is_free)

    return DraftGate(Draft("", 1.0, 0), stats, LossBudget(stats, 0.0), lambda: 0.0, None)


def limit(gate: DraftGate, **options: Any) -> int:
    return gate.limit_draft_tokens(64, DRAFT_S, 1.0, **{"can_pause": True, "is_paying": False, **options})


def time_stream(gate: DraftGate, num_tokens: int, *, late: float, drafting: float) -> None:
    for _ in range(num_tokens):
        gate.add_streamed(1, STEP_S * (1.0 + late), drafting * STEP_S)


def test_a_stream_that_never_was_alone_is_left_alone_for_some_tokens() -> None:
    """Sixteen tokens beside the draft, four without it; then it is known to be harmless."""
    gate = make_gate(PairStats())
    time_stream(gate, 16, late=0.0, drafting=1.0)
    assert limit(gate) == 64  # the first token does not count
    time_stream(gate, 1, late=0.0, drafting=1.0)
    assert limit(gate) == limit(gate, is_paying=True) == 0  # what it wins was judged beside it
    assert limit(gate, can_pause=False) == 64
    time_stream(gate, 4, late=0.0, drafting=0.0)
    assert limit(gate) == 64
    assert not gate.slows_target
    assert not gate.may_disturb(STEP_S, STEP_S)


def test_a_harmful_draft_writes_as_long_as_the_loss_is_small() -> None:
    """What was timed beside it is forgotten; each token that it makes later is charged."""
    stats = PairStats()
    stats.token_s.update(20, 20 * 1.5 * STEP_S)
    gate = make_gate(stats)
    time_stream(gate, 5, late=0.0, drafting=0.0)
    time_stream(gate, 8, late=0.5, drafting=1.0)
    assert gate.slows_target
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


def test_a_free_draft_is_never_held() -> None:
    """Nor is a stream beside it disturbed."""
    gate = make_gate(PairStats(), is_free=True)
    time_stream(gate, 30, late=0.5, drafting=1.0)
    assert limit(gate) == 64
    assert not gate.slows_target


def test_a_hiccup_does_not_tell_the_cost_of_a_draft() -> None:
    """One long gap among many usual ones counts as three steps at most."""
    stats = PairStats()
    gate = make_gate(stats)
    time_stream(gate, 9, late=0.0, drafting=0.0)
    time_stream(gate, 30, late=0.0, drafting=1.0)
    time_stream(gate, 1, late=100.0, drafting=1.0)
    assert not gate.slows_target


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
