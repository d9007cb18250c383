"""BackgroundDraft: a draft in the background, begun anew, realigned, bounded and closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_spec import ChatRequest
from llm_spec.contract.draft import DraftCapabilities, DraftPiece
from llm_spec.drafting.background_draft import BackgroundDraft
from llm_spec.measure.tokens import split_into_pieces
from llm_spec.testing.clock import run_virtual

TEXT = "one two three four five six seven eight nine ten"


class Draft:
    """What `answer` gives for a prefix: a text comes in pieces, a number is a sleep, an error is raised."""

    name = "draft"

    def __init__(self, answer: Callable[[str], list[Any]], *, continues_prefix: bool = True) -> None:
        self.capabilities = DraftCapabilities(continues_prefix=continues_prefix)
        self.requests: list[ChatRequest] = []
        self.asked: list[int] = []
        self.num_open = 0
        self._answer = answer

    @asynccontextmanager
    async def draft(self, request: ChatRequest, max_tokens: int) -> AsyncGenerator[AsyncIterator[DraftPiece]]:
        self.requests.append(request)
        self.asked.append(max_tokens)
        self.num_open += 1
        try:
            async with aclosing(self._pieces(request.prefix, max_tokens)) as pieces:
                yield pieces
        finally:
            self.num_open -= 1

    async def aclose(self) -> None:
        """Nothing to release."""

    async def _pieces(self, prefix: str, max_tokens: int) -> AsyncGenerator[DraftPiece]:
        num_left = max_tokens
        for item in self._answer(prefix):
            if isinstance(item, Exception):
                raise item
            if isinstance(item, float):
                await asyncio.sleep(item)
                continue
            for piece in [item] if isinstance(item, DraftPiece) else map(DraftPiece, split_into_pieces(item)):
                if num_left <= 0:
                    return
                num_left -= 1
                await asyncio.sleep(0.001)
                yield piece


def following(text: str) -> Callable[[str], list[Any]]:
    return lambda prefix: [text[len(prefix) :]] if text.startswith(prefix) else []


class Feeding:
    """A feed whose news are counted."""

    def __init__(self, draft: Draft, *, prefix: str = "", **options: Any) -> None:
        self.num_news = 0
        request = ChatRequest.create("q", prefix=prefix, stop="x", max_tokens=options.pop("request_tokens", None))
        options = {"max_tokens": None, "timeout_s": 1.0, **options}
        self.background_draft = BackgroundDraft(draft, request, changed=self._count, **options)

    def _count(self) -> None:
        self.num_news += 1


def run(check: Coroutine[Any, Any, None]) -> None:
    run_virtual(check)


async def closed(feeding: Feeding) -> None:
    await feeding.background_draft.aclose()
    assert len(asyncio.all_tasks()) == 1


async def test_a_guess_grows_and_ends() -> None:
    """Every change is news; the request goes without its stop strings."""
    draft = Draft(following(TEXT))
    feeding = Feeding(draft)
    assert feeding.background_draft.ended
    feeding.background_draft.restart("one two", 100)
    assert not feeding.background_draft.ended
    await asyncio.sleep(0.2)
    assert feeding.background_draft.text == TEXT.removeprefix("one two")
    assert feeding.background_draft.ended
    assert not feeding.background_draft.is_cut
    assert feeding.background_draft.num_tokens == 8
    assert feeding.num_news == 9
    assert draft.requests == [ChatRequest.create("q", prefix="one two")]
    await closed(feeding)


def test_a_guess_that_was_as_long_as_asked_is_cut() -> None:
    """So that more may be asked for behind it."""

    async def check() -> None:
        feeding = Feeding(Draft(following(TEXT)))
        feeding.background_draft.restart("", 3)
        await asyncio.sleep(1)
        assert (feeding.background_draft.text, feeding.background_draft.ended, feeding.background_draft.is_cut) == (
            "one two three",
            True,
            True,
        )
        feeding.background_draft.restart("one two three", 30)
        assert (feeding.background_draft.text, feeding.background_draft.ended, feeding.background_draft.is_cut) == (
            "",
            False,
            False,
        )
        await asyncio.sleep(1)
        assert feeding.background_draft.text == TEXT.removeprefix("one two three")
        assert not feeding.background_draft.is_cut
        await closed(feeding)

    run(check())


def test_restarting_cancels_the_older_call() -> None:
    """It is closed, and nothing that it wrote afterwards is seen."""

    async def check() -> None:
        draft = Draft(lambda prefix: [" old", 1.0, " old"] if not prefix else [" new", 5.0, " new"])
        feeding = Feeding(draft, timeout_s=60.0)
        feeding.background_draft.restart("", 100)
        await asyncio.sleep(0.5)
        assert feeding.background_draft.text == " old"
        feeding.background_draft.restart("answer", 100)
        assert feeding.background_draft.text == ""
        await asyncio.sleep(0.01)
        assert draft.num_open == 1
        await asyncio.sleep(3)
        assert feeding.background_draft.text == " new"
        await closed(feeding)
        assert draft.num_open == 0

    run(check())


def test_restarting_before_the_older_call_began() -> None:
    """The older one is not even asked."""

    async def check() -> None:
        draft = Draft(following(TEXT))
        feeding = Feeding(draft)
        feeding.background_draft.restart("", 100)
        feeding.background_draft.restart("one", 100)
        await asyncio.sleep(1)
        assert [request.prefix for request in draft.requests] == ["one"]
        assert feeding.background_draft.text == TEXT.removeprefix("one")
        await closed(feeding)

    run(check())


@pytest.mark.parametrize(
    ("answer", "written", "guess"),
    [
        ("one ", " two three", "two three"),  # what it writes includes the whitespace, as it was
        ("one ", "two three", "two three"),  # a draft that leaves it out
        ("one\n\n", "\n\ntwo", "two"),
        ("one\n\n", "\ntwo", "two"),  # other whitespace than was there
        ("one\n\n", " two", "two"),
        ("one\n", "\n\ntwo", "\ntwo"),
        ("one\n\n", "\n\n\n", "\n"),
        ("one  ", " ", ""),
        ("one", " two", " two"),
        ("", " two", " two"),
        (" \n", "two", "two"),
    ],
)
def test_whitespace_at_the_seam(answer: str, written: str, guess: str) -> None:
    """It is never sent, since chat templates strip it, and what the draft repeats of it is no guess."""

    async def check() -> None:
        draft = Draft(lambda _: [written])
        feeding = Feeding(draft, prefix="before ")
        feeding.background_draft.restart(answer, 100)
        await asyncio.sleep(1)
        assert draft.requests[0].prefix == ("before " + answer).rstrip()
        if answer.strip():
            assert feeding.background_draft.text == guess
        await closed(feeding)

    run(check())


@settings(deadline=None, max_examples=50)
@given(st.text("a \n", max_size=12), st.text("a \n", max_size=12))
def test_a_guess_only_grows(answer: str, written: str) -> None:
    """Whatever whitespace is where: what was told once is not taken back, and a right continuation is told whole."""

    async def check() -> None:
        draft = Draft(lambda prefix: [*((answer + written)[len(prefix) :])])
        feeding = Feeding(draft)
        feeding.background_draft.restart(answer, 1000)
        before = ""
        for _ in range(28):
            await asyncio.sleep(0.001)
            assert feeding.background_draft.text.startswith(before)
            before = feeding.background_draft.text
        assert feeding.background_draft.text == written
        await closed(feeding)

    run(check())


def test_max_tokens_bound_all_calls_together() -> None:
    """Then it is spent: nothing more is asked, and what is left of a call is not waited for."""

    async def check() -> None:
        draft = Draft(following(TEXT))
        feeding = Feeding(draft, max_tokens=5)
        feeding.background_draft.restart("", 3)
        await asyncio.sleep(1)
        assert not feeding.background_draft.is_exhausted
        feeding.background_draft.restart("one two three", 30)
        await asyncio.sleep(1)
        assert draft.asked == [3, 2]
        assert (
            feeding.background_draft.num_tokens,
            feeding.background_draft.is_exhausted,
            feeding.background_draft.ended,
        ) == (5, True, True)
        feeding.background_draft.restart("one two three four five", 30)
        await asyncio.sleep(1)
        assert len(draft.requests) == 2
        assert (feeding.background_draft.text, feeding.background_draft.ended) == ("", True)
        await closed(feeding)

    run(check())


def test_max_tokens_bound_a_draft_that_writes_on() -> None:
    """Also one that does not honour what it was asked for; tokens are counted by ids where it gives them."""

    async def check() -> None:
        pieces = [DraftPiece(f" {i}", token_ids=(i, i)) for i in range(100)]
        draft = Draft(lambda _: [*pieces])
        feeding = Feeding(draft, max_tokens=10)
        feeding.background_draft.restart("", 3)  # the fake counts pieces
        await asyncio.sleep(1)
        assert (
            feeding.background_draft.num_tokens,
            feeding.background_draft.text,
            feeding.background_draft.is_cut,
        ) == (4, " 0 1", True)
        feeding.background_draft.restart("", 30)
        await asyncio.sleep(1)
        assert (
            feeding.background_draft.num_tokens,
            feeding.background_draft.text,
            feeding.background_draft.is_exhausted,
        ) == (12, " 0 1 2", True)
        assert draft.num_open == 0
        await closed(feeding)

    run(check())


@pytest.mark.parametrize(("continues", "left"), [(True, ""), (False, " four five")])
def test_a_restart_when_all_was_drafted(continues: bool, left: str) -> None:
    """What follows an earlier answer is forgotten, also where its call ends later; one text for all is realigned."""

    class SlowToClose(Draft):
        @asynccontextmanager
        async def draft(self, request: ChatRequest, max_tokens: int) -> AsyncGenerator[AsyncIterator[DraftPiece]]:
            async with super().draft(request, max_tokens) as pieces:
                yield pieces
                await asyncio.sleep(0.5)

    async def check() -> None:
        feeding = Feeding(SlowToClose(following(TEXT), continues_prefix=continues), max_tokens=5)
        feeding.background_draft.restart("", 30)
        await asyncio.sleep(0.1)
        assert (feeding.background_draft.is_exhausted, feeding.background_draft.ended) == (True, False)
        feeding.background_draft.restart("one two three", 30)
        await asyncio.sleep(1)
        assert (feeding.background_draft.text, feeding.background_draft.ended) == (left, True)
        await closed(feeding)

    run(check())


def test_no_tokens_at_all() -> None:
    """`max_tokens=0`: the draft is never asked."""

    async def check() -> None:
        draft = Draft(following(TEXT))
        feeding = Feeding(draft, max_tokens=0)
        feeding.background_draft.restart("", 30)
        await asyncio.sleep(1)
        assert (draft.requests, feeding.background_draft.ended, feeding.background_draft.is_exhausted) == (
            [],
            True,
            True,
        )
        await closed(feeding)

    run(check())


@pytest.mark.parametrize("written", [[], ["one"]])
def test_silence_is_a_failure(written: list[str]) -> None:
    """At the first piece or a later one; each piece has the whole time, however long all take."""

    async def check() -> None:
        slow = [item for word in written for item in (0.9, word)] * 3
        draft = Draft(lambda _: [*slow, 100.0, " never"])
        feeding = Feeding(draft, timeout_s=1.0)
        feeding.background_draft.restart("", 30)
        await asyncio.sleep(0.95 * max(1, 3 * len(written)) - (0 if written else 0.1))
        assert feeding.background_draft.failure is None
        await asyncio.sleep(1.2)
        assert feeding.background_draft.failure == "late: the draft was silent for 1 s"
        assert feeding.background_draft.ended
        assert draft.num_open == 0
        feeding.background_draft.restart("x", 30)
        await asyncio.sleep(1)
        assert len(draft.requests) == 1
        await closed(feeding)

    run(check())


def test_an_alarm_rings_once_it_has_drafted_for_so_long() -> None:
    """In calls of any number, however long there is none between them."""

    async def check() -> None:
        feeding = Feeding(Draft(lambda _: [10.0, "never"]), timeout_s=100.0)
        background = feeding.background_draft
        background.set_alarm(0.5, feeding._count)
        await asyncio.sleep(1)
        background.restart("", 30)
        await asyncio.sleep(0.3)
        background.stop()
        await asyncio.sleep(1)
        background.restart("x", 30)
        await asyncio.sleep(0.19)
        assert feeding.num_news == 0
        await asyncio.sleep(0.02)
        assert feeding.num_news == 1
        background.set_alarm(2.0, feeding._count)
        background.set_alarm(1.0, feeding._count)
        await asyncio.sleep(2)
        assert feeding.num_news == 2
        background.set_alarm(9.0, feeding._count)
        await closed(feeding)
        await asyncio.sleep(9)
        assert feeding.num_news == 2

    run(check())


def test_an_error_is_a_failure() -> None:
    """Told in one line; what was written before it stays."""

    async def check() -> None:
        draft = Draft(lambda _: ["one two", ValueError("not\n  good")])
        feeding = Feeding(draft)
        feeding.background_draft.restart("", 30)
        await asyncio.sleep(1)
        assert feeding.background_draft.failure == "ValueError: not good"
        assert (
            feeding.background_draft.text,
            feeding.background_draft.ended,
            feeding.background_draft.is_exhausted,
        ) == ("one two", True, True)
        await closed(feeding)

    run(check())


def test_a_draft_that_fails_when_it_is_asked() -> None:
    """As one that fails later."""

    class Broken(Draft):
        def draft(self, request: ChatRequest, max_tokens: int) -> Any:  # noqa: ARG002 - the protocol's
            raise RuntimeError(f"not for {max_tokens}")

    async def check() -> None:
        feeding = Feeding(Broken(following(TEXT)))
        feeding.background_draft.restart("", 30)
        await asyncio.sleep(1)
        assert feeding.background_draft.failure == "RuntimeError: not for 30"
        await closed(feeding)

    run(check())


def test_an_error_of_a_call_that_was_left_is_nobodys_concern() -> None:
    """The newer call goes on."""

    class Grumpy(Draft):
        @asynccontextmanager
        async def draft(self, request: ChatRequest, max_tokens: int) -> AsyncGenerator[AsyncIterator[DraftPiece]]:
            async with super().draft(request, max_tokens) as pieces:
                try:
                    yield pieces
                except asyncio.CancelledError:
                    raise RuntimeError("left alone") from None

    async def check() -> None:
        feeding = Feeding(Grumpy(lambda prefix: [" old", 1e3] if not prefix else [0.3, " fine"]))
        feeding.background_draft.restart("", 30)
        await asyncio.sleep(0.1)
        feeding.background_draft.restart("x", 30)
        await asyncio.sleep(0.1)
        assert (feeding.background_draft.text, feeding.background_draft.ended) == ("", False)
        await asyncio.sleep(0.5)
        assert feeding.background_draft.failure is None
        assert feeding.background_draft.text == " fine"
        await closed(feeding)

    run(check())


@pytest.mark.parametrize("after_s", [0.0, 0.0005, 0.003, 50.0])
def test_closing_leaves_nothing(after_s: float) -> None:
    """Before a call began, while it writes, after it ended; twice is harmless."""

    async def check() -> None:
        draft = Draft(following(TEXT))
        feeding = Feeding(draft)
        feeding.background_draft.restart("", 30)
        feeding.background_draft.restart("one", 30)
        await asyncio.sleep(after_s)
        await closed(feeding)
        await closed(feeding)
        assert draft.num_open == 0

    run(check())


# ------------------------------------------------------------------------------------------ drafts that write once


def writing_once(text: str) -> Draft:
    return Draft(lambda _: [text], continues_prefix=False)


def test_a_draft_that_cannot_continue_is_asked_once() -> None:
    """For the whole answer and without a prefix; then it is realigned."""

    async def check() -> None:
        draft = writing_once("Sure! " + TEXT)
        feeding = Feeding(draft, request_tokens=77)
        feeding.background_draft.restart("", 3)
        await asyncio.sleep(1)
        feeding.background_draft.restart("one two", 3)
        assert feeding.background_draft.text == " three four five six seven eight nine ten"
        feeding.background_draft.restart("one two three and five six", 3)
        assert feeding.background_draft.text == " seven eight nine ten"
        feeding.background_draft.restart("one two three and five six something else", 3)
        assert feeding.background_draft.text == ""
        assert len(draft.requests) == 1
        assert (draft.requests[0].prefix, draft.asked) == ("", [77])
        await closed(feeding)

    run(check())


def test_it_is_realigned_while_it_still_writes() -> None:
    """Also where the answer is ahead of it, or no match is there yet."""

    async def check() -> None:
        draft = Draft(lambda _: ["Well", 1.0, " then", 1.0, " one two three", 1.0, " four"], continues_prefix=False)
        feeding = Feeding(draft, timeout_s=9.0)
        feeding.background_draft.restart("", 3)
        await asyncio.sleep(0.5)
        feeding.background_draft.restart("one two", 3)
        assert feeding.background_draft.text == ""
        await asyncio.sleep(2)
        assert feeding.background_draft.text == " three"
        await asyncio.sleep(1)
        assert feeding.background_draft.text == " three four"
        assert len(draft.requests) == 1
        await closed(feeding)

    run(check())


def test_it_is_realigned_with_the_requests_own_prefix() -> None:
    """A draft that answers from the start writes that too, and what it says of it is no guess at the rest."""

    async def check() -> None:
        feeding = Feeding(writing_once(TEXT), prefix="one two three")
        feeding.background_draft.restart("", 3)
        await asyncio.sleep(1)
        assert feeding.background_draft.text == " four five six seven eight nine ten"
        await closed(feeding)

    run(check())


# ------------------------------------------------------------------------------------------ times


async def until_ended(background_draft: BackgroundDraft) -> None:
    while not background_draft.ended:  # noqa: ASYNC110 - by virtual clock
        await asyncio.sleep(0.01)


def test_pieces_tell_how_long_they_took() -> None:
    """The first one waits for the call to open; one that a stretch cuts belongs where it ends."""

    async def check() -> None:
        feeding = Feeding(Draft(lambda _: [0.5, "one", 0.2, " two", " three"]))
        background_draft = feeding.background_draft
        background_draft.restart("", 9)
        assert background_draft.list_piece_times(0, 5) == []  # nothing has come
        await until_ended(background_draft)
        pieces = [(3, pytest.approx(0.501)), (7, pytest.approx(0.201)), (13, pytest.approx(0.001))]
        for start, end, found in ((0, 3, pieces[:1]), (3, 7, pieces[1:2]), (2, 12, pieces[:2]), (0, 13, pieces)):
            assert background_draft.list_piece_times(start, end) == found
        assert (background_draft.list_piece_times(0, 2), background_draft.list_piece_times(4, 6)) == ([], [])
        await background_draft.aclose()

    run_virtual(check())


def test_pieces_of_a_draft_that_writes_once_keep_their_times() -> None:
    """Wherever the answer comes to use them."""

    async def check() -> None:
        feeding = Feeding(Draft(lambda _: [0.5, "one", 0.2, " two", 0.1, " three"], continues_prefix=False))
        background_draft = feeding.background_draft
        background_draft.restart("", 9)
        await until_ended(background_draft)
        background_draft.restart("one two", 9)
        assert background_draft.text == " three"
        assert background_draft.list_piece_times(0, 6) == [(6, pytest.approx(0.101))]
        await background_draft.aclose()

    run_virtual(check())
