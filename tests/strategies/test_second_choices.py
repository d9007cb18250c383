"""Rows of second choices: sent where they are likely to be of use, followed where they are right, and exact."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

import pytest
from strategies.test_probe_sampling import sampled_text, triples_p_value
from strategies.test_row_ownership import PacedTarget, answers_p_value
from strategies.test_row_ownership import draw as draw_texts
from strategies.test_row_scheduler import STEP_S, Run, paced

from llm_spec import ChatRequest, DraftCapabilities, DraftPiece, SecondChoice
from llm_spec.contract.endpoint import SampledToken
from llm_spec.drafting.encoded_draft import SecondToken
from llm_spec.row_stats import RowCallStats, SecondTokenStats
from llm_spec.simulation import run_virtual
from llm_spec.strategies import row_scheduler, server_rounds
from llm_spec.strategies.row_scheduler import Branch, ConfirmedToken, RowCall, RowDecision, RowScheduler

# ------------------------------------------------------------------------------------------ calls and branches


def make_call() -> RowCall:
    """Rows for the positions 12, 13 and 14, and for 13 and 14 after second choices before them."""
    return RowCall(10, 2, (100, 101, 102, 103), branches=(Branch(2, 55), Branch(3, 66)))


def answer(call: RowCall) -> None:
    call.tokens = [SampledToken(n, "") for n in range(call.num_sent_rows)]


def test_a_branch_has_the_second_choice_in_the_place_of_the_first() -> None:
    call = make_call()
    assert call.list_prefixes_of_branches() == [(100, 101, 55), (100, 101, 102, 66)]
    assert (call.num_rows, call.num_sent_rows, call.num_drafted) == (3, 5, 2)
    assert [call.has_branch(position) for position in (11, 12, 13)] == [False, True, True]
    assert [call.has_branch(13, token_id) for token_id in (55, 66)] == [False, True]


@pytest.mark.parametrize("is_answered_before", [True, False])
def test_a_branch_that_is_followed_leaves_its_own_row(is_answered_before: bool) -> None:
    call = make_call()
    if is_answered_before:
        answer(call)
    assert call.follow_branch(13, 66)
    answer(call)
    assert (call.start, call.end, call.assumed_ids) == (14, 15, (100, 101, 102, 66))
    assert call.get_token(14) == SampledToken(4, "")  # the last row's
    assert not call.branches


def test_a_token_that_is_neither_choice_leads_nowhere() -> None:
    call = make_call()
    assert not call.follow_branch(12, 66)
    assert (call.start, call.end, len(call.branches)) == (12, 15, 2)


# ------------------------------------------------------------------------------------------------ decisions


class UnsureRun(Run):
    """Its draft tells a second choice for each token, 7, and how likely it finds that."""

    probability = 0.5

    def decide(self) -> RowDecision:
        ids = self.drafted()
        second = SecondToken(7, self.probability)
        self.scheduler.draft.update(
            ids, [0.003] * len(ids), self.now_s, is_idle=True, is_exhausted=False, second_tokens=[second] * len(ids)
        )
        decision = self.scheduler.decide_next_actions(self.now_s)
        self.calls += decision.calls
        return decision


def run_until_calls(run: Run) -> list[RowCall]:
    run.stream(6)
    run.decide()
    return run.calls


def know_second_choices(run: Run, *, num_right: int = 50, num_wrong: int = 50) -> None:
    for n in range(num_right + num_wrong):
        run.stats.rows.second_tokens.add_next_token(0.5, is_first_wrong=True, is_right=n < num_right)


def test_nothing_is_sent_for_second_choices_before_any_was_right() -> None:
    calls = run_until_calls(UnsureRun(paced()))
    assert calls
    assert not any(call.branches for call in calls)


def test_second_choices_that_are_likely_enough_go_along() -> None:
    """Each once; the further ahead, the less likely it is that the answer comes to it."""
    run = UnsureRun(paced(agreement=0.6))
    know_second_choices(run)
    calls = run_until_calls(run)
    sent = [call.base + branch.offset for call in calls for branch in call.branches]
    assert sent
    assert len(set(sent)) == len(sent)
    assert max(sent) < max(call.end for call in calls) - 1  # those far ahead are left


def test_a_draft_that_tells_none_has_the_same_calls_as_ever() -> None:
    """Whatever is known of second choices."""
    run, other = Run(paced()), Run(paced())
    know_second_choices(run)
    calls, same = run_until_calls(run), run_until_calls(other)
    assert [(c.base, c.first, c.assumed_ids, c.branches) for c in calls] == [
        (c.base, c.first, c.assumed_ids, ()) for c in same
    ]


def test_rows_that_cost_more_than_they_save_are_not_sent() -> None:
    stats = paced()
    for num_rows in (1, 2, 4, 8, 16):
        stats.rows.add_call_time(num_rows, 0.045 + 0.01 * num_rows)
    run = UnsureRun(stats)
    know_second_choices(run, num_right=20, num_wrong=80)
    calls = run_until_calls(run)
    assert calls
    assert not any(call.branches for call in calls)


def test_scores_have_no_branches() -> None:
    run = UnsureRun(paced())
    know_second_choices(run)
    run.scheduler._has_branches = False
    assert not any(call.branches for call in run_until_calls(run))


def test_a_right_second_choice_saves_a_round_trip() -> None:
    """The target writes 7 where the draft is wrong: the token after it is known from the same call."""
    run = UnsureRun(paced(agreement=0.6))
    know_second_choices(run)
    calls = run_until_calls(run)
    call = next(call for call in calls if call.branches)
    branch = call.branches[0]
    num_before = len(run.scheduler.ids)
    run.stream(call.base + branch.offset - num_before)  # up to the position of the second choice
    position = call.base + branch.offset
    run.scheduler.confirm_streamed_tokens([7], run.now_s + STEP_S)
    assert run.scheduler.ids[position] == 7
    tokens = [SampledToken(1000 + n, f" {n}") for n in range(call.num_sent_rows)]
    run.scheduler.record_call_answer(call, tokens, 0.045)
    confirmed = run.scheduler.take_confirmed(run.now_s + STEP_S)
    assert confirmed is not None
    assert confirmed.token.token_id == 1000 + call.num_drafted + 1  # the first row after its own rows
    assert run.scheduler.take_confirmed(run.now_s + STEP_S) is None


def test_second_choices_are_believed_as_far_as_they_were_right() -> None:
    stats = SecondTokenStats()
    assert stats.estimate_probability(0.5) == 0.0
    for n in range(400):
        stats.add_next_token(0.4, is_first_wrong=n % 5 == 0, is_right=n % 10 == 0)
    assert stats.estimate_probability(0.4) == pytest.approx(0.1, rel=0.15)
    assert stats.estimate_probability(0.2) == pytest.approx(0.05, rel=0.15)


def test_a_draft_is_asked_for_them_until_they_were_of_no_use() -> None:
    stats = SecondTokenStats()
    for _ in range(63):
        stats.add_next_token(0.3, is_first_wrong=True, is_right=False)
    assert stats.is_worth_requesting
    for _ in range(30):
        stats.add_next_token(0.3, is_first_wrong=True, is_right=False)
    assert not stats.is_worth_requesting


# ------------------------------------------------------------------------------------------ the target's distribution


class UnsureDraft:
    """Guesses tokens in a pattern of its own, each with the next letter as second choice."""

    name = "unsure"
    capabilities = DraftCapabilities(tells_second_choices=True)

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self.num_asked = 0

    @asynccontextmanager
    async def draft(self, request: ChatRequest, max_tokens: int) -> AsyncGenerator[AsyncIterator[DraftPiece]]:
        self.num_asked += request.top_logprobs is not None
        start, pattern = len(request.prefix), self._pattern

        async def write() -> AsyncGenerator[DraftPiece]:
            for at in range(start, start + min(max_tokens, 6)):
                await asyncio.sleep(0)
                letter = pattern[at % len(pattern)]
                yield DraftPiece(letter, second=SecondChoice("bca"["abc".index(letter)], 0.4))
            yield DraftPiece("", finish_reason="length")

        async with aclosing(write()) as pieces:
            yield pieces

    async def aclose(self) -> None:
        pass


draw = partial(draw_texts, make_draft=UnsureDraft)


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The positions at which a branch was followed; all answers know that second choices are right now and then."""
    found: list[int] = []

    class Watched(RowCall):
        def follow_branch(self, position: int, token_id: int) -> bool:
            is_followed = super().follow_branch(position, token_id)
            if is_followed:
                found.append(position)
            return is_followed

    monkeypatch.setattr(row_scheduler, "RowCall", Watched)
    monkeypatch.setattr(SecondTokenStats, "estimate_probability", lambda _, probability: probability)
    return found


def test_sampled_text_with_second_choices_has_the_targets_distribution(followed: list[int]) -> None:
    """Windows of three tokens, in long answers."""
    assert triples_p_value(draw(60, 100)) > 1e-3
    assert len(followed) > 300


def test_short_answers_with_second_choices_have_the_targets_law(followed: list[int]) -> None:
    assert answers_p_value(draw(1500, 3, ["bbb", "abc"])) > 1e-3
    assert followed


def test_with_one_place_the_law_is_the_targets(followed: list[int]) -> None:
    assert triples_p_value(draw(100, 60, num_places=1)) > 1e-3
    assert len(followed) > 300


def test_the_row_after_the_first_choice_in_its_place_is_noticed(
    followed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: the token after the second choice is read from the row after the first one."""
    read = row_scheduler.RowCall.get_token

    def read_first_choices_row(self: RowCall, position: int) -> SampledToken | None:
        if self._first_token and self.tokens is not None:
            return self.tokens[self.num_drafted]
        return read(self, position)

    monkeypatch.setattr(row_scheduler.RowCall, "get_token", read_first_choices_row)
    assert triples_p_value(draw(60, 100)) < 1e-6
    assert followed


class PrefersDraftedTokens(RowScheduler):
    """The planted fault: a call whose first token is neither choice is dropped, and its position asked for again."""

    def take_confirmed(self, now_s: float) -> ConfirmedToken | None:
        at = len(self.ids)
        for call in [call for call in self.calls if call.start <= at < call.end and call.branches]:
            token = call.get_token(at)
            if token is None or not call.has_branch(at) or call.has_branch(at, token.token_id):
                continue
            if token.token_id != call.assumed_ids[at - call.base]:
                self.calls.remove(call)
                self._dropped_calls.append(call)
        return super().take_confirmed(now_s)


def test_to_ask_again_where_neither_choice_is_right_is_noticed(
    followed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the draft likes first or second becomes likelier."""
    monkeypatch.setattr(server_rounds, "RowScheduler", PrefersDraftedTokens)
    assert triples_p_value(draw(60, 100)) < 1e-6
    assert followed


def test_greedy_text_is_the_same_with_second_choices(followed: list[int]) -> None:
    """A target that always writes its likeliest token."""

    class Greedy(PacedTarget):
        def _sampled(self, last: int, noise: float | None) -> SampledToken:  # noqa: ARG002 - nothing is drawn
            token_id = (last + 1 + (last == 1)) % 3  # a b a b …, never c
            return SampledToken(token_id, "abc"[token_id])

    async def text(draft: Any) -> str:
        request = ChatRequest.create("tell", temperature=0.0, max_tokens=120)
        return await sampled_text(Greedy(1), request, draft)

    draft = UnsureDraft("aab")
    assert run_virtual(text(draft)) == "".join("ba"[n % 2] for n in range(120))
    assert draft.num_asked
    assert followed


def test_none_are_requested_before_a_call_of_rows_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """They could not have a row, and a vLLM stands still for seconds when it first computes log-probabilities."""
    monkeypatch.setattr(RowCallStats, "is_measured", False)
    draft: Any = UnsureDraft("aab")
    request = ChatRequest.create("tell", temperature=1.0, max_tokens=60)
    assert len(run_virtual(sampled_text(PacedTarget(1), request, draft))) == 60
    assert draft.num_asked == 0
