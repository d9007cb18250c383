"""When a race asks its draft and begins streams, by events alone: no task and no I/O."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Final

import pytest

from llm_spec import TextDelta
from llm_spec.measure.pair_stats import PairStats
from llm_spec.strategies.race.chain import RaceStream, StreamChain
from llm_spec.strategies.race.schedule import MAX_DRAFT_REACH, PromptTokenCosts, StreamScheduler
from llm_spec.testing.clock import run_virtual

STEP_S: Final = 0.02
FIRST_TOKENS: Final = 20
WORDS: Final = [f" w{index}" for index in range(400)]


class Answer:
    """A scheduler whose first stream writes a word each step, by hand; the draft says all words."""

    def __init__(self, pair_stats: PairStats, *, max_streams: int = 12) -> None:
        self.closed: list[RaceStream] = []
        self.pair_stats = pair_stats
        self.root = self.make_stream("")
        self.chain = StreamChain(
            self.root, pair_stats, greedy=True, max_tokens=None, max_rounds=None, close=self.closed.append
        )
        self.scheduler = StreamScheduler(
            self.chain,
            pair_stats,
            PromptTokenCosts(10),
            make_stream=self.make_stream,
            max_streams=max_streams,
            max_extra_cost=None,
            max_tokens=None,
            now_s=self.now_s,
        )
        self.scheduler.can_begin = True
        self.opened: list[RaceStream] = []

    def make_stream(self, prefix: str) -> RaceStream:
        return RaceStream(prefix, self.pair_stats.start_stream_timer())

    def draft(self, *, words: list[str] = WORDS) -> None:
        self.chain.extend_expected_text("".join(words))

    @property
    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    @property
    def num_open(self) -> int:
        return 1 + len(self.opened) - len(self.closed)

    async def write(self, *words: str, after_s: float = STEP_S) -> None:
        """Words of the first stream, one after another."""
        for word in words:
            await asyncio.sleep(after_s)
            is_disturbed = self.num_open > 1
            self.chain.add_delta(self.chain.streams[0], TextDelta(word), self.now_s, is_disturbed=is_disturbed)
            self.scheduler.record_progress(self.num_open, self.now_s)

    def open_all(self) -> list[RaceStream]:
        """All streams that are to be opened now."""
        new: list[RaceStream] = []
        while True:
            stream = self.scheduler.choose_stream_to_open(self.num_open, self.now_s, is_draft_whole=False)
            if stream is None:
                return new
            self.opened.append(stream)
            new.append(stream)


def known_pair(*, num_extra: int = 0) -> PairStats:
    """A target of which first token and pace were measured."""
    pair_stats = PairStats()
    pair_stats.first_token_s.update(FIRST_TOKENS * STEP_S)
    pair_stats.token_s.update(100, 100 * STEP_S)
    pair_stats.streams.num_extra = num_extra
    return pair_stats


def test_no_stream_is_opened_before_the_draft_was_judged() -> None:
    """The first stream judges it for nothing; then one is opened beside it, and where there is room several more."""

    async def check() -> None:
        answer = Answer(known_pair())
        answer.draft()
        assert answer.open_all() == []
        await answer.write(*WORDS[:3])
        assert answer.open_all() == []
        await answer.write(*WORDS[3:5])
        assert len(answer.open_all()) == 1
        await answer.write(*WORDS[5:9])
        assert len(answer.open_all()) == 3
        await answer.write(*WORDS[9:14])
        assert len(answer.open_all()) == 7
        assert answer.closed == []

    run_virtual(check())


def test_a_draft_that_is_no_good_opens_none() -> None:
    """However long the answer is."""

    async def check() -> None:
        answer = Answer(known_pair())
        for word in WORDS:
            request = answer.scheduler.choose_draft_request(MAX_DRAFT_REACH, has_ended=True, is_cut=False)
            if request is not None:
                answer.draft(words=[" other"])
            await answer.write(word)
            assert answer.open_all() == []

    run_virtual(check())


@pytest.mark.parametrize("num_extra", [0, 11])
@pytest.mark.parametrize("slowdown", [1.6, 3.0])
def test_streams_that_slow_the_answer_down_end(slowdown: float, num_extra: int) -> None:
    """At once, whatever was known of the server; what was lost is charged, so that the next trial is far off."""

    async def check() -> None:
        pair_stats = known_pair(num_extra=num_extra)
        answer = Answer(pair_stats)
        answer.draft()
        await answer.write(*WORDS[:5])
        assert answer.open_all()
        before_s = pair_stats.rows.estimate_allowed_loss_s(0.0, STEP_S, None)
        num_slow = 0
        while not answer.closed:
            await answer.write(WORDS[5 + num_slow], after_s=slowdown * STEP_S)
            num_slow += 1
        assert (slowdown - 1.0) * num_slow * STEP_S < 0.03 * 256 * STEP_S
        assert pair_stats.streams.num_extra == 0
        assert pair_stats.rows.estimate_allowed_loss_s(0.0, STEP_S, None) < before_s
        answer.opened.clear()
        answer.closed.clear()
        await answer.write(*WORDS[5 + num_slow : 35])
        assert answer.open_all() == []

    run_virtual(check())


def test_a_hiccup_is_no_lack_of_room() -> None:
    """One late token, however late, ends nothing."""

    async def check() -> None:
        answer = Answer(known_pair(num_extra=11))
        answer.draft()
        await answer.write(*WORDS[:5])
        for stream in answer.open_all():
            stream.timer.add_tokens(0)
        await answer.write(WORDS[5])
        await answer.write(WORDS[6], after_s=50 * STEP_S)
        await answer.write(*WORDS[7:10])
        assert answer.closed == []

    run_virtual(check())


async def open_one_that_makes_late(answer: Answer, num_steps: float) -> None:
    """A trial: a stream is opened, and the answer's next token is that many steps late."""
    answer.draft()
    await answer.write(*WORDS[:5])
    [stream] = answer.open_all()
    await answer.write(WORDS[5], after_s=(1.0 + num_steps) * STEP_S)
    stream.timer.add_tokens(1, is_disturbed=True)
    await answer.write(*WORDS[6:12])


def test_a_stream_that_costs_less_than_it_wins_is_kept() -> None:
    """Its prompt is read in a step of the first one, which is late by that once, and by more than a token."""

    async def check() -> None:
        answer = Answer(known_pair())
        answer.pair_stats.runs.add_right_tokens(0, 200)
        await open_one_that_makes_late(answer, 1.6)
        assert answer.closed == []
        assert answer.pair_stats.streams.num_extra == 1
        assert answer.pair_stats.streams.opening_cost == pytest.approx(1.6)

    run_virtual(check())


def test_a_stream_that_costs_more_than_it_wins_ends() -> None:
    """The draft is wrong at every fifth token: no stream wins as much."""

    async def check() -> None:
        answer = Answer(known_pair())
        for _ in range(20):
            answer.pair_stats.runs.add_right_tokens(0, 9)
            answer.pair_stats.runs.add_wrong_token(9)
        await open_one_that_makes_late(answer, 2.6)
        assert len(answer.closed) == 1
        assert answer.pair_stats.streams.num_extra == 0

    run_virtual(check())


def test_streams_that_cost_time_are_opened_as_far_as_the_answer_may_be_late() -> None:
    """Twelve would make it late by twelve tokens, of which it may lose a few."""

    async def check() -> None:
        pair_stats = known_pair(num_extra=11)
        pair_stats.runs.add_right_tokens(0, 500)
        pair_stats.streams.add_opening(1, 1.0)
        answer = Answer(pair_stats)
        answer.draft()
        await answer.write(*WORDS[:5])
        assert 1 <= len(answer.open_all()) <= 0.02 * 256

    run_virtual(check())


@pytest.mark.parametrize("is_free", [False, True])
def test_streams_that_cost_time_are_not_opened_where_nothing_more_may_be_lost(*, is_free: bool) -> None:
    """However good the draft is; streams that are free are."""

    async def check() -> None:
        pair_stats = known_pair(num_extra=11)
        pair_stats.runs.add_right_tokens(0, 500)
        pair_stats.streams.add_opening(1, 0.0 if is_free else 1.0)
        pair_stats.rows.add_lost_time(100.0)
        answer = Answer(pair_stats)
        answer.draft()
        await answer.write(*WORDS[:5])
        assert bool(answer.open_all()) == is_free

    run_virtual(check())


def test_an_opening_counts_in_full() -> None:
    """It takes longer than what passes for a hiccup of a stream beside others that have begun."""

    async def check() -> None:
        pair_stats = known_pair()
        pair_stats.rows.add_answer_time(1000.0)
        answer = Answer(pair_stats)
        await open_one_that_makes_late(answer, 6.0)
        assert answer.pair_stats.streams.opening_cost == pytest.approx(6.0)

    run_virtual(check())


@pytest.mark.parametrize("is_free", [False, True])
def test_before_the_first_token_only_streams_that_cost_nothing_are_opened(*, is_free: bool) -> None:
    """Nobody could tell how late the first token is by the others."""

    async def check() -> None:
        pair_stats = known_pair(num_extra=11)
        pair_stats.runs.add_right_tokens(0, 500)
        pair_stats.streams.add_opening(1, 0.0 if is_free else 0.5)
        answer = Answer(pair_stats)
        answer.draft()
        assert bool(answer.open_all()) == is_free

    run_virtual(check())


def test_streams_begin_where_the_first_one_will_be_and_further_apart_from_there() -> None:
    """The nearest after a first token's time; segments grow with the doubt."""

    async def check() -> None:
        answer = Answer(known_pair(num_extra=11))
        answer.draft()
        await answer.write(*WORDS[:10])
        starts = [len(stream.prefix.split()) for stream in answer.open_all()]
        assert len(starts) == 11
        assert FIRST_TOKENS < starts[0] - 10 <= FIRST_TOKENS + 15
        segments = [later - earlier for earlier, later in pairwise(starts)]
        assert segments == sorted(segments)
        assert segments[-1] > segments[0]

    run_virtual(check())


def test_the_draft_is_asked_anew_at_once_where_it_is_promising() -> None:
    """After a wrong token that came after several right ones; a draft that is wrong each time rests."""

    async def check() -> None:
        answer = Answer(known_pair(num_extra=11))
        answer.draft()
        await answer.write(*WORDS[:60])
        await answer.write(" differs")
        assert answer.chain.is_draft_wrong
        request = answer.scheduler.choose_draft_request(MAX_DRAFT_REACH, has_ended=False, is_cut=False)
        assert request is not None
        assert request.answer == "".join(WORDS[:60]) + " differs"
        answer.draft(words=[" wrong"])
        await answer.write(" again")
        assert answer.scheduler.choose_draft_request(MAX_DRAFT_REACH, has_ended=False, is_cut=False) is None
        await answer.write(" and")
        assert answer.scheduler.choose_draft_request(MAX_DRAFT_REACH, has_ended=False, is_cut=False) is not None

    run_virtual(check())


def test_a_whole_draft_is_divided_among_the_streams() -> None:
    """A short answer has short segments, however good the draft is."""

    async def check() -> None:
        answer = Answer(known_pair(num_extra=3), max_streams=4)
        answer.pair_stats.runs.add_right_tokens(0, 1000)
        answer.draft(words=WORDS[:60])
        await answer.write(*WORDS[:5])
        while (
            stream := answer.scheduler.choose_stream_to_open(answer.num_open, answer.now_s, is_draft_whole=True)
        ) is not None:
            answer.opened.append(stream)
        assert len(answer.opened) == 3

    run_virtual(check())
