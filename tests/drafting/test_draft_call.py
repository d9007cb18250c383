"""One call of a draft: its limit, its end, and whose cancellation it was."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from support.draft_checks import ItemDraft

from llm_spec import ChatRequest, DraftError
from llm_spec.contract.draft import DraftPiece
from llm_spec.drafting.draft_call import DraftCall, choose_max_draft_tokens
from llm_spec.testing.clock import run_virtual


class Reading:
    """A call that is read; `text` is what may be used."""

    def __init__(self, draft: Any, max_tokens: int = 100, *, max_pieces: int | None = None) -> None:
        self.text = ""
        self.call = DraftCall(draft, ChatRequest.create("q"), max_tokens, max_pieces=max_pieces)

    async def read(self) -> None:
        await self.call.read_pieces(self._take)

    def _take(self, piece: DraftPiece, _: int) -> None:  # the call counts
        self.text += piece.text


def read(*items: Any, **options: Any) -> Reading:
    """A draft that ends by itself, or at its limit; it is closed."""
    draft = ItemDraft(*items)
    reading = Reading(draft, **options)
    run_virtual(reading.read())
    assert draft.num_open == 0
    return reading


# ------------------------------------------------------------------------------------------------ limits


@pytest.mark.parametrize(
    ("items", "options", "text", "num_tokens"),
    [
        ([" a", " b", " c"], {"max_tokens": 3}, " a b c", 3),
        ([" a"] * 9, {"max_tokens": 3}, " a" * 3, 4),
        ([" a"] * 9, {"max_tokens": 9, "max_pieces": 4}, " a" * 4, 5),
        (["):"] * 9, {"max_tokens": 3}, "):" * 3, 4),  # a token may be two pieces …
        ([" a b c d e f g h"], {"max_tokens": 3}, " a b c d e f", 8),  # … and a text many tokens
        ([""] * 9, {"max_tokens": 3}, "", 0),
        ([" a b", " c d"], {"max_tokens": 9, "max_pieces": 3}, " a b c", 4),
        ([DraftPiece(" a", (1,))] * 9, {"max_tokens": 3}, " a" * 3, 4),
        ([DraftPiece(" a b c", (1, 2, 3))] * 2, {"max_tokens": 4}, " a b c a", 6),
        ([DraftPiece(" a b c", ())] * 9, {"max_tokens": 3}, " a b c" * 2, 9),  # ids that are not known
        ([DraftPiece("", (1,)), DraftPiece("é", (2,))] * 3, {"max_tokens": 4}, "éé", 5),
    ],
)
def test_no_more_is_used_than_was_asked_for(
    items: list[Any], options: dict[str, Any], text: str, num_tokens: int
) -> None:
    """The draft is left where it goes beyond that; what it wrote is counted."""
    reading = read(*items, **options)
    assert (reading.text, reading.call.num_tokens) == (text, num_tokens)
    assert reading.call.has_reached_max_tokens


def test_an_endless_draft_is_left() -> None:
    """Soon after its limit, however fast it writes."""
    draft = ItemDraft(*[" a"] * 1000)
    run_virtual(Reading(draft, 10).read())
    assert draft.num_given == 11
    assert draft.num_open == 0


@pytest.mark.parametrize(
    ("items", "is_complete"),
    [
        ([" a", DraftPiece("", finish_reason="stop")], True),
        ([" a"], True),
        ([" a", DraftPiece("", finish_reason="length")], False),
        ([" a"] * 5, False),
        ([" a"] * 50, False),
    ],
)
def test_a_draft_is_complete_where_it_came_to_its_own_end(items: list[Any], is_complete: bool) -> None:
    assert read(*items, max_tokens=5).call.is_complete is is_complete


@pytest.mark.parametrize(("allowed", "asked"), [(None, 4096), (5, 5), (10**9, 16_384)])
def test_a_whole_answer_is_within_reason(allowed: int | None, asked: int) -> None:
    """A budget allows a request more tokens than any draft should write."""
    assert choose_max_draft_tokens(ChatRequest.create("q", max_tokens=allowed)) == asked


def test_a_draft_that_has_everything_ready_leaves_turns_to_others() -> None:
    """It is read without a wait, and yet not at once."""

    async def check() -> None:
        reading = Reading(ItemDraft(*[" a"] * 1000), 1000)
        task, num_turns = asyncio.ensure_future(reading.read()), 0
        while not task.done():
            await asyncio.sleep(0)
            num_turns += 1
        assert reading.call.num_tokens == 1000
        assert num_turns >= 1000 / 64

    run_virtual(check())


# ------------------------------------------------------------------------------------------------ faults


def test_a_draft_that_cancels_itself_has_failed() -> None:
    """Nobody cancelled the request, so nobody but the draft ends."""

    async def check() -> None:
        reading = Reading(ItemDraft(" a", asyncio.CancelledError()))
        with pytest.raises(DraftError, match="but the request was not"):
            await reading.read()
        assert reading.text == " a"

    run_virtual(check())


def test_a_cancellation_that_was_survived_before_is_not_the_drafts() -> None:
    """The task that reads was cancelled once, and went on."""

    async def check() -> None:
        async def survive() -> None:
            try:
                await asyncio.sleep(1.0)
            except asyncio.CancelledError:
                with pytest.raises(DraftError):
                    await Reading(ItemDraft(" a", asyncio.CancelledError())).read()

        task = asyncio.ensure_future(survive())
        await asyncio.sleep(0.5)
        task.cancel()
        await task

    run_virtual(check())


STAGES: dict[str, Callable[[], ItemDraft]] = {
    "before it writes": lambda: ItemDraft(5.0, " a"),
    "while it writes": lambda: ItemDraft(" a", 5.0),
    "with much ready": lambda: ItemDraft(*[" a"] * 10_000),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_real_cancellation_passes_through(stage: str) -> None:
    """It stays one, and the draft is closed."""

    async def check() -> None:
        draft = STAGES[stage]()
        task = asyncio.ensure_future(Reading(draft, 20_000).read())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert draft.num_open == 0

    run_virtual(check())


def test_a_time_limit_around_it_is_a_time_limit() -> None:
    """Although it cancels the task."""

    async def check() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await Reading(ItemDraft(" a", 5.0)).read()

    run_virtual(check())
