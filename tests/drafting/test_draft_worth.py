"""Joined drafts that take time: what they may lose, and that those that pay are used. By a clock of the test's own.

The answer has one token only, a plain step takes a second, and each drafted token makes it .05 s longer.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest
from support.draft_checks import TARGET, choose

from llm_spec import CascadeDraft, DraftError
from llm_spec.contract.draft import DraftCapabilities
from llm_spec.contract.token_model import DraftToken, SelfPacedTokenDraft, TokenDraft, TokenModel, TokenSampler
from llm_spec.drafting.draft_worth import DraftWorth

RIGHT, WRONG = 7, 1
ROW_S = 0.05


class TimedDraft:
    """Takes `reading_s` for each token that it has not seen, and `token_s` for each that it drafts."""

    name = "timed"

    def __init__(self, clock: list[float], token_s: float, *, reading_s: float = 0.0, rate: float = 1.0) -> None:
        self._clock = clock
        self._random = random.Random(0)  # noqa: S311 - a seed gives one answer
        self._num_read = 0
        self.token_s, self.reading_s, self.rate = token_s, reading_s, rate
        self.confidence: float | None = None
        self.stalls_s: list[float] = []  # of the next turns, beside that
        self.num_turns = self.num_tokens = 0

    def token_draft_refusal(self, target: TokenModel) -> str | None:  # noqa: ARG002 - any target
        return None

    def open_token_draft(self, target: TokenModel, choose: TokenSampler, prompt_ids: Sequence[int]) -> TokenDraft:  # noqa: ARG002
        self._num_read = 0
        return self

    def propose(self, context_ids: Sequence[int]) -> Iterator[DraftToken]:
        self.num_turns += 1
        self._clock[0] += self.reading_s * (len(context_ids) - self._num_read)
        self._clock[0] += self.stalls_s.pop(0) if self.stalls_s else 0.0
        self._num_read = len(context_ids)
        is_right = True
        while True:
            self._clock[0] += self.token_s
            self.num_tokens += 1
            is_right = is_right and self._random.random() < self.rate
            yield DraftToken(RIGHT if is_right else WRONG, self.confidence)

    def close(self) -> None:
        """Nothing to release."""


class Free:
    """Asks no model, and drafts a wrong token with a confidence that may be set."""

    name = "free"
    capabilities = DraftCapabilities(is_free=True)
    confidence = 0.1

    def token_draft_refusal(self, target: TokenModel) -> str | None:  # noqa: ARG002 - any target
        return None

    def open_token_draft(self, target: TokenModel, choose: TokenSampler, prompt_ids: Sequence[int]) -> TokenDraft:  # noqa: ARG002
        return self

    def propose(self, context_ids: Sequence[int]) -> Iterator[DraftToken]:  # noqa: ARG002 - always the same
        yield DraftToken(WRONG, self.confidence)

    def close(self) -> None:
        """Nothing to release."""


class Clock:
    """The time that joined drafts see."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = [0.0]
        self.row_s = ROW_S
        monkeypatch.setattr("llm_spec.drafting.draft_worth.perf_counter", lambda: self.now[0])

    def write_answer(
        self, joined: CascadeDraft, num_tokens: int, *, num_prompt: int = 40, lookahead: int = 8, plain_every: int = 0
    ) -> float:
        """Write an answer; the seconds that it took, which are those of `num_tokens` plain steps without a draft.

        In each `plain_every`th round the draft is not asked.
        """
        began_s = self.now[0]
        context_ids, end = [0] * num_prompt, num_prompt + num_tokens
        draft: Any = joined.for_request().open_token_draft_for_request(None, TARGET, choose, context_ids)
        for number in itertools.count(1):
            is_plain = plain_every and number % plain_every == 0
            room = 0 if is_plain else min(lookahead, end - len(context_ids) - 1)
            proposal = propose(draft, context_ids, room) if room else []
            num_right = sum(1 for _ in itertools.takewhile(lambda token_id: token_id == RIGHT, proposal))
            self.end_round(draft, context_ids, [RIGHT] * (1 + num_right), len(proposal))
            if len(context_ids) == end:
                break
        draft.close()
        return self.now[0] - began_s

    def end_round(self, draft: Any, context_ids: list[int], token_ids: list[int], num_verified: int) -> None:
        """The target takes its time, and the round is reported to the draft."""
        verify_s = 1.0 + ROW_S * num_verified
        self.now[0] += verify_s
        context_ids += token_ids
        draft.end_round(token_ids, verify_s)


def propose(draft: Any, context_ids: Sequence[int], room: int) -> list[int]:
    with contextlib.closing(draft.propose(context_ids)) as tokens:
        return [token.token_id for token in itertools.islice(tokens, room)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.mark.parametrize(("num_prompt", "num_tokens"), [(40, 2), (40, 3), (40, 5), (40, 64), (400, 64), (3000, 200)])
@pytest.mark.parametrize(
    ("token_s", "reading_s"), [(0.05, 0.002), (0.3, 0.02), (0.5, 0.002), (0.5, 0.02), (1.5, 0.0), (2.0, 0.05)]
)
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.7])
def test_what_drafts_lose_is_bounded(  # noqa: PLR0917 - a case has so many sides
    clock: Clock, num_prompt: int, num_tokens: int, token_s: float, reading_s: float, rate: float
) -> None:
    """A few steps at first, 4 %, and what one turn overdraws: above all if reading takes longer than was believed."""
    joined = CascadeDraft(cast("Any", TimedDraft(clock.now, token_s, reading_s=reading_s, rate=rate)))
    took_s, surprise_s = 0.0, max(0.0, reading_s - 0.02) * num_prompt
    for num_answers in range(1, 101):
        took_s += clock.write_answer(joined, num_tokens, num_prompt=num_prompt)
        plain_s = num_answers * num_tokens
        assert took_s <= 1.04 * plain_s + 2.0 + 2.0 * (token_s + 1.0) + surprise_s + 4.0


@pytest.mark.parametrize(
    ("num_prompt", "token_s", "reading_s", "rate", "speedup"),
    [
        (40, 0.05, 0.002, 1.0, 4.0),
        (40, 0.3, 0.02, 0.9, 1.25),
        (400, 0.15, 0.01, 0.9, 1.5),
        (600, 0.1, 0.02, 0.8, 1.2),
        (3000, 0.05, 0.0002, 1.0, 4.0),
    ],
)
def test_drafts_that_pay_are_used(  # noqa: PLR0917 - a case has so many sides
    clock: Clock, num_prompt: int, token_s: float, reading_s: float, rate: float, speedup: float
) -> None:
    """Also where reading takes less than was believed, or as much as a few turns win."""
    joined = CascadeDraft(cast("Any", TimedDraft(clock.now, token_s, reading_s=reading_s, rate=rate)))
    took_s = [clock.write_answer(joined, 64, num_prompt=num_prompt) for _ in range(100)]
    assert 64 * 50 / sum(took_s[50:]) >= speedup


def test_what_verifying_takes_counts(clock: Clock) -> None:
    """A token more in a pass takes as long as a step: a draft that is right at one of two loses."""
    clock.row_s, draft = 1.0, TimedDraft(clock.now, 0.01, rate=0.5)
    joined = CascadeDraft(cast("Any", draft))
    assert sum(clock.write_answer(joined, 100, lookahead=1) for _ in range(10)) < 1050


def test_a_draft_that_has_nothing_to_say_is_charged_for_its_time(clock: Clock) -> None:
    """It takes two steps to find that out."""

    class Silent(TimedDraft):
        def propose(self, context_ids: Sequence[int]) -> Iterator[DraftToken]:
            yield from itertools.islice(super().propose(context_ids), 0)
            self.num_turns += 1
            self._clock[0] += 2.0

    draft = Silent(clock.now, 0.1)
    joined = CascadeDraft(cast("Any", draft))
    assert sum(clock.write_answer(joined, 100) for _ in range(10)) < 1050
    assert draft.num_turns > 1


def test_the_next_answer_knows_what_a_step_takes(clock: Clock) -> None:
    """In its first round a draft goes as far as it pays; in that of the first answer it drafts one token."""
    draft = TimedDraft(clock.now, 0.05)
    joined = CascadeDraft(cast("Any", draft))
    lengths: list[int] = []
    for _ in range(2):
        context_ids = [0] * 40
        with contextlib.closing(cast("Any", joined.open_token_draft(TARGET, choose, context_ids))) as opened:
            lengths.append(len(propose(opened, context_ids, 16)))
            clock.end_round(opened, context_ids, [RIGHT] * (lengths[-1] + 1), lengths[-1])
    assert lengths[0] == 1 < lengths[1]


def test_an_answer_without_a_round_teaches_nothing(clock: Clock) -> None:
    """It was cancelled before; the next one drafts as if it were the first."""
    joined = CascadeDraft(cast("Any", TimedDraft(clock.now, 0.1)))
    joined.open_token_draft(TARGET, choose, [0] * 40).close()
    assert clock.write_answer(joined, 100) < 40


def test_a_round_that_took_no_time_teaches_nothing(clock: Clock) -> None:
    """As a coarse clock has it."""
    joined, context_ids = CascadeDraft(cast("Any", TimedDraft(clock.now, 0.1))), [0] * 40
    with contextlib.closing(cast("Any", joined.open_token_draft(TARGET, choose, context_ids))) as opened:
        propose(opened, context_ids, 1)
        opened.end_round([RIGHT], 0.0)
    assert clock.write_answer(joined, 100) < 40


def test_a_draft_that_becomes_good_is_used_again(clock: Clock) -> None:
    """Though it was left out ever more seldom tried."""
    draft = TimedDraft(clock.now, 0.1, reading_s=0.005, rate=0.0)
    joined = CascadeDraft(cast("Any", draft))
    for _ in range(30):
        clock.write_answer(joined, 100)
    num_turns, draft.rate = draft.num_turns, 1.0
    assert num_turns < 200
    took_s = [clock.write_answer(joined, 100) for _ in range(30)]
    assert sum(took_s[10:]) < 0.5 * 100 * 20


def test_a_draft_that_becomes_bad_is_left_out(clock: Clock) -> None:
    """What it won of late is soon forgotten, and gives it no more credit than at first."""
    draft = TimedDraft(clock.now, 0.3, rate=1.0)
    joined = CascadeDraft(cast("Any", draft))
    for _ in range(10):
        clock.write_answer(joined, 100)
    draft.rate = 0.0
    assert clock.write_answer(joined, 100) < 130
    assert clock.write_answer(joined, 100) < 105


def test_a_hiccup_does_not_ban_a_good_draft(clock: Clock) -> None:
    """However long a turn stalls, it is charged like a few steps."""
    draft = TimedDraft(clock.now, 0.1)
    draft.stalls_s = [0.0] * 10 + [500.0]
    joined = CascadeDraft(cast("Any", draft))
    for _ in range(4):
        clock.write_answer(joined, 100)
    assert not draft.stalls_s
    assert clock.write_answer(joined, 100) < 50


def test_reading_is_not_held_against_a_draft(clock: Clock) -> None:
    """It takes 3 steps, and not 1.2 as believed; its tokens pay."""
    draft = TimedDraft(clock.now, 0.1, reading_s=0.05)
    assert clock.write_answer(CascadeDraft(cast("Any", draft)), 100, num_prompt=60) < 50


def test_a_draft_that_has_won_again_is_trusted_again(clock: Clock) -> None:
    """After two bad answers it is left out for as long as one that was never bad before."""
    draft = TimedDraft(clock.now, 0.1)
    lately, always = CascadeDraft(cast("Any", draft)), CascadeDraft(cast("Any", draft))
    took_s: list[float] = []
    for joined, rates in ((lately, [0.0] * 30 + [1.0] * 50), (always, [1.0] * 50)):
        for draft.rate in rates:
            clock.write_answer(joined, 100)
        for draft.rate in [0.0] * 2 + [1.0] * 20:
            took_s.append(clock.write_answer(joined, 100))
    assert sum(took_s[:22]) < 1.05 * sum(took_s[22:])


@pytest.mark.parametrize(("num_won", "num_lost"), [(0, 3), (10, 5)])
def test_a_draft_may_lose_more_once_it_has_won(num_won: int, num_lost: int) -> None:
    """Turns of a step each, of which the good ones win one and a half."""
    worth = DraftWorth()

    def take_turn(won_s: float) -> bool:
        if not worth.take_turn(0):
            return False
        worth.turn_s = 1.0
        worth.end_turn(won_s, 1.0)
        return True

    assert all(take_turn(1.5) for _ in range(num_won))
    assert [take_turn(0.0) for _ in range(num_lost + 2)].count(True) == num_lost


@pytest.mark.parametrize(("num_won", "num_rounds"), [(3, 95), (60, 16)])
def test_a_draft_that_has_won_much_is_tried_again_soon(num_won: int, num_rounds: int) -> None:
    """Turns of a step each, some of which win one and a half. What did not fit into the account pays for the trial."""
    worth = DraftWorth()
    turns = [1.5] * num_won + [0.0] * 20
    for won_s in turns:
        if not worth.take_turn(0):
            break
        worth.turn_s = 1.0
        worth.end_turn(won_s, 1.0)
    waited = next(number for number in itertools.count(1) if worth.take_turn(0))
    assert waited == pytest.approx(num_rounds, rel=0.1)


def test_rounds_without_a_draft_hide_nothing_of_what_it_wins(clock: Clock) -> None:
    """Nor do they count as its own."""
    draft = TimedDraft(clock.now, 0.1)
    assert clock.write_answer(CascadeDraft(cast("Any", draft)), 100, plain_every=2) < 40


def test_tokens_that_were_not_verified_have_won_nothing(clock: Clock) -> None:
    """Plain steps bring the same tokens; that is not the draft's merit."""
    draft, context_ids = TimedDraft(clock.now, 0.2), [0] * 40
    joined = CascadeDraft(cast("Any", draft)).open_token_draft(TARGET, choose, context_ids)
    for _ in range(100):
        propose(joined, context_ids, 5)
        clock.end_round(joined, context_ids, [RIGHT], 0)
    assert draft.num_turns < 10


def test_a_draft_that_fails_is_charged_for_its_time(clock: Clock) -> None:
    """Its round has no end; the next answers wait before they ask it again."""

    class Failing(TimedDraft):
        def propose(self, context_ids: Sequence[int]) -> Iterator[DraftToken]:  # noqa: ARG002 - it fails whatever it is
            self._clock[0] += 3.0
            yield from ()
            raise DraftError("the draft broke")

    draft, num_failures = Failing(clock.now, 0.1), 0
    joined = CascadeDraft(cast("Any", draft))
    for _ in range(50):
        with contextlib.closing(cast("Any", joined.open_token_draft(TARGET, choose, [0] * 40))) as opened:
            try:
                propose(opened, [0] * 40, 8)
            except DraftError:
                num_failures += 1
            else:
                opened.end_round([RIGHT], 1.0)
    assert 1 < num_failures < 10


def test_rounds_are_reported_to_drafts_that_were_joined_before(clock: Clock) -> None:
    """A prediction of the request is joined with the decoder's own draft, which may be joined itself."""
    draft = TimedDraft(clock.now, 0.1)
    inner = CascadeDraft(cast("Any", Free()), cast("Any", draft))
    assert clock.write_answer(CascadeDraft(cast("Any", Free()), inner), 100) < 40


@pytest.mark.parametrize(("seconds", "most"), [(0.01, 5), (0.05, 3), (0.2, 2), (0.3, 1)])
def test_a_draft_goes_no_further_than_it_pays(clock: Clock, seconds: float, most: int) -> None:
    """Each token has half a chance once those before it were right: the second, a quarter."""
    draft, context_ids, lengths = TimedDraft(clock.now, seconds), [0] * 40, list[int]()
    draft.confidence = 0.5
    joined = CascadeDraft(cast("Any", draft)).open_token_draft(TARGET, choose, context_ids)
    for number in range(12):
        lengths.append(len(propose(joined, context_ids, 16)))
        clock.end_round(joined, context_ids, [RIGHT, 8] if number % 2 else [8], lengths[-1])
    assert max(lengths) == most


def test_a_draft_drafts_one_token_before_a_step_was_seen(clock: Clock) -> None:
    """Nobody knows yet what its tokens save."""
    draft = TimedDraft(clock.now, 20.0)
    joined = CascadeDraft(cast("Any", draft))
    assert clock.write_answer(joined, 100) < 100 + 2 * 21
    assert draft.num_tokens == draft.num_turns


@pytest.mark.parametrize(("seconds", "rate"), [(0.85, 1.0), (0.0, 0.0)])
def test_a_draft_that_pays_or_takes_no_time_stays(clock: Clock, seconds: float, rate: float) -> None:
    """In every round; the last has no room for a draft."""
    draft = TimedDraft(clock.now, seconds, rate=rate)
    clock.write_answer(CascadeDraft(cast("Any", draft)), 51, lookahead=1)
    assert draft.num_turns == (25 if rate else 50)


def test_a_long_prompt_is_read_only_for_a_long_answer(clock: Clock) -> None:
    """Reading 400 tokens takes 8 steps, as it is taken to be; it may lose 2 at first, and .03 more in a turn."""
    draft = TimedDraft(clock.now, 0.1)
    joined = CascadeDraft(cast("Any", draft))
    clock.write_answer(joined, 190, num_prompt=400)
    assert draft.num_turns == 0
    clock.write_answer(joined, 100, num_prompt=400)
    assert draft.num_turns > 0
    assert clock.write_answer(joined, 100, num_prompt=400) < 50, "it was quick, and its tokens are right"


def test_reading_pays_once_so_many_turns_would_have_won_it(clock: Clock) -> None:
    """It takes 8 steps, of which a turn wins 4 or so; the credit has 2."""
    draft = TimedDraft(clock.now, 0.1, reading_s=0.02)
    joined = CascadeDraft(cast("Any", draft))
    for _ in range(10):
        clock.write_answer(joined, 100, num_prompt=400)
    draft.num_turns = 0
    clock.write_answer(joined, 2, num_prompt=400)
    assert draft.num_turns == 0
    clock.write_answer(joined, 30, num_prompt=400)
    assert draft.num_turns >= 3


def test_joined_drafts_report_what_they_weigh_themselves(clock: Clock) -> None:
    """The seconds of the last proposal's drafts that take time: none where a free one was sure."""
    free = Free()
    joined = CascadeDraft(cast("Any", free), cast("Any", TimedDraft(clock.now, 0.25))).open_token_draft(
        TARGET, choose, [0] * 40
    )
    assert isinstance(joined, SelfPacedTokenDraft)
    for confidence, seconds in ((0.1, 0.25), (0.9, 0.0), (0.1, 0.25)):
        free.confidence = confidence
        propose(joined, [0] * 40, 1)
        assert joined.self_paced_s == seconds
        joined.end_round([RIGHT], 1.0)
