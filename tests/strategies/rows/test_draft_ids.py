"""A draft's text in the target's own ids: all of it, in order, and wrong exactly when the target says otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_spec import ChatRequest, TargetError
from llm_spec.contract.draft import DraftPiece
from llm_spec.contract.endpoint import TokenEndpoint
from llm_spec.drafting.background_draft import BackgroundDraft
from llm_spec.measure.shared_vocabulary import SharedVocabularyStats
from llm_spec.strategies.rows.draft_ids import EncodedDraft
from llm_spec.testing.clock import run_virtual

TEXT = "def area(radius):\n    return 3.14 * radius ** 2  # naïve 日本 😀\n\n\nprint( area(2) )"


class Pieces:
    """Drafts given pieces, one every `token_s`, from the start of each call; `prefixes` are those it was asked."""

    name = "pieces"

    def __init__(self, pieces: Sequence[str], token_s: float = 0.01) -> None:
        self.prefixes: list[str] = []
        self._given = pieces
        self._token_s = token_s

    @asynccontextmanager
    async def draft(self, request: ChatRequest, max_tokens: int) -> AsyncGenerator[AsyncIterator[DraftPiece]]:
        self.prefixes.append(request.prefix)

        async def written() -> AsyncGenerator[DraftPiece]:
            for index, text in enumerate(self._given[:max_tokens]):
                await asyncio.sleep(self._token_s)
                yield DraftPiece(text, (index,))
            yield DraftPiece("", finish_reason="stop")

        pieces = written()
        try:
            yield pieces
        finally:
            await pieces.aclose()

    async def aclose(self) -> None:
        pass


class Words:
    """Encodes each text by itself, one id for a character; a call takes `call_s`, and may fail."""

    def __init__(self, call_s: float = 0.0, fail_at: int | None = None) -> None:
        self.texts: list[str] = []
        self.num_open = self.max_open = 0
        self._call_s = call_s
        self._fail_at = fail_at

    async def encode(self, text: str) -> list[int]:
        self.texts.append(text)
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        try:
            await asyncio.sleep(self._call_s)
        finally:
            self.num_open -= 1
        if self._fail_at == len(self.texts) - 1:
            raise TargetError("encode is broken")
        return [ord(sign) for sign in text]


class Bench:
    """A guess, its feed and its endpoint."""

    def __init__(self, draft: Pieces, endpoint: Words, max_tokens: int | None) -> None:
        self.changed = asyncio.Event()
        self.background_draft = BackgroundDraft(
            draft, ChatRequest.create("tell"), max_tokens=max_tokens, timeout_s=30.0, changed=self.changed.set
        )
        self.shared_vocabulary = SharedVocabularyStats()
        self.guess = EncodedDraft(
            self.background_draft, cast("TokenEndpoint", endpoint), self.shared_vocabulary, self.changed.set
        )

    async def until(self, reached: Callable[[], bool]) -> None:
        """Follow the draft until something holds."""
        async with asyncio.timeout(100):
            while True:
                self.guess.encode_new_text()
                if reached():
                    return
                await self.changed.wait()
                self.changed.clear()

    async def aclose(self) -> None:
        await self.guess.aclose()
        await self.background_draft.aclose()


def run(draft: Pieces, endpoint: Words, body: Callable[[Bench], Any], *, max_tokens: int | None = None) -> None:
    async def opened() -> None:
        bench = Bench(draft, endpoint, max_tokens)
        try:
            await body(bench)
        finally:
            await bench.aclose()
        assert endpoint.num_open == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(opened())


def ids(text: str) -> list[int]:
    return [ord(sign) for sign in text]


@settings(max_examples=60, deadline=None)
@given(cuts=st.sets(st.integers(1, len(TEXT) - 1)), call_s=st.sampled_from([0.0, 0.004, 0.05]))
def test_the_whole_draft_is_encoded_once_and_in_order(cuts: set[int], call_s: float) -> None:
    """However its pieces are cut and however slow the server is; a few calls at a time."""
    ends = sorted({0, *cuts, len(TEXT)})
    endpoint = Words(call_s)

    async def body(bench: Bench) -> None:
        bench.guess.restart("", 64)
        await bench.until(lambda: bench.guess.is_idle)
        assert bench.guess.ids == ids(TEXT)
        assert "".join(endpoint.texts) == TEXT
        assert endpoint.max_open <= 4

    run(Pieces([TEXT[a:b] for a, b in pairwise(ends)]), endpoint, body)


def test_tokens_that_come_late_are_judged() -> None:
    """What the target wrote before the draft came to it says how good the draft is, reported once."""

    async def body(bench: Bench) -> None:
        bench.guess.restart("", 64)
        for token_id in [*ids(TEXT[:5]), -1]:
            bench.guess.confirm_token(token_id)
        await bench.until(lambda: bench.guess.is_wrong)
        assert bench.guess.take_late_token_counts() == (5, 1)
        assert bench.guess.take_late_token_counts() == (0, 0)

    run(Pieces([TEXT]), Words(), body)


def test_no_word_is_encoded_before_its_end_is_known() -> None:
    """What a tokenizer may join with the text that comes waits for it: words, runs of signs and of whitespace."""
    endpoint = Words()

    async def body(bench: Bench) -> None:
        bench.guess.restart("", 64)
        await bench.until(lambda: bench.guess.is_idle)
        assert len(endpoint.texts) > 10
        for text in endpoint.texts[:-1]:
            at = "".join(endpoint.texts).index(text) + len(text)
            before, behind = TEXT[at - 1], TEXT[at]
            assert not (before.isalnum() and behind.isalnum())
            if before.isspace() and behind.isspace():
                assert behind == " "  # the last space of a run goes with the word behind it
                assert not TEXT[at + 1].isspace()

    run(Pieces(list(TEXT)), endpoint, body)


@settings(max_examples=60, deadline=None)
@given(num_early=st.integers(0, 20), num_right=st.integers(0, 40))
def test_it_is_wrong_exactly_when_a_token_differs(num_early: int, num_right: int) -> None:
    """Also for tokens that were confirmed before the draft came to them."""

    async def body(bench: Bench) -> None:
        bench.guess.restart("", 64)
        for token_id in ids(TEXT[:num_early]):
            bench.guess.confirm_token(token_id)
        assert not bench.guess.is_wrong
        await bench.until(lambda: bench.guess.is_idle)
        assert not bench.guess.is_wrong
        assert bench.guess.ids == ids(TEXT[num_early:])
        for token_id in ids(TEXT[num_early : num_early + num_right]):
            bench.guess.confirm_token(token_id)
            assert not bench.guess.is_wrong
        bench.guess.confirm_token(1)
        assert bench.guess.is_wrong

    run(Pieces([TEXT[:9], TEXT[9:30], TEXT[30:]]), Words(0.003), body)


def test_a_difference_in_what_was_confirmed_early_is_found() -> None:
    """The draft comes late, and says something else than the target had said."""

    async def body(bench: Bench) -> None:
        bench.guess.restart("", 64)
        for token_id in ids("deg"):
            bench.guess.confirm_token(token_id)
        await bench.until(lambda: bench.guess.is_wrong)
        assert bench.guess.ids == []

    run(Pieces([TEXT]), Words(), body)


@pytest.mark.parametrize("after_s", [0.0, 0.015, 0.033, 0.2])
@pytest.mark.parametrize("is_behind", [False, True])
def test_a_restart_forgets_everything(after_s: float, is_behind: bool) -> None:
    """Text, owed tokens, an encoding under way: what comes is the new draft's alone, behind the new answer."""
    draft = Pieces([TEXT[:20], TEXT[20:40], TEXT[40:]])

    async def body(bench: Bench) -> None:
        bench.guess.restart("", 64)
        if is_behind:
            bench.guess.confirm_token(ord("x"))
        async with asyncio.timeout(100):
            end_s = asyncio.get_running_loop().time() + after_s
            while asyncio.get_running_loop().time() < end_s:
                bench.guess.encode_new_text()
                await asyncio.sleep(0.005)
        bench.guess.restart("x = 1\n", 64)
        assert bench.guess.ids == []
        assert not bench.guess.is_wrong
        await bench.until(lambda: bench.guess.is_idle)
        assert bench.guess.ids == ids(TEXT)
        assert draft.prefixes[-1] == "x = 1"  # no whitespace at the seam

    # the draft does not repeat the newline: the seam is not doubled
    run(draft, Words(0.02), body)


def test_a_draft_that_was_cut_goes_on_behind_all_that_was_guessed() -> None:
    """Further tokens join those that are there, and the draft is asked for what follows both."""
    draft = Pieces(["one", " two", " three"])

    async def body(bench: Bench) -> None:
        bench.guess.restart("zero ", 2)
        await bench.until(lambda: bench.guess.is_idle)
        assert bench.background_draft.is_cut
        bench.guess.extend_guess(3)
        assert not bench.guess.is_idle
        await bench.until(lambda: bench.guess.is_idle)
        assert bench.guess.ids == ids("one twoone two")  # " three" may go on, and waits for what follows
        assert len(bench.guess.seconds) == len(bench.guess.ids)

    run(draft, Words(), body)
    assert draft.prefixes == ["zero", "zero one two"]


class InParts(Pieces):
    """Writes its text in parts, one for each call, whatever the prefix."""

    def __init__(self, parts: Sequence[Sequence[str]]) -> None:
        super().__init__([])
        self._parts = iter(parts)

    @asynccontextmanager
    async def draft(self, request: ChatRequest, max_tokens: int) -> AsyncGenerator[AsyncIterator[DraftPiece]]:
        self._given = next(self._parts)
        async with super().draft(request, max_tokens) as pieces:
            yield pieces


@pytest.mark.parametrize(
    ("parts", "whole"),
    [
        ([["a", " b", " wor"], ["ld", " is", "."]], "a b world is."),  # within a word
        ([["a ", "b "], ["world ", "is"]], "a b world is"),  # after the space that belongs to the next one
        ([["a", " b", "\n"], ["\n\n", "c"]], "a b\n\nc"),  # its prompt ends without whitespace, which it repeats
    ],
)
def test_no_word_is_cut_where_the_draft_was(parts: list[list[str]], whole: str) -> None:
    """A tokenizer would make other tokens of its two halves, and the draft would be wrong at each such place."""
    endpoint, lengths = Words(), [len(part) for part in parts]

    async def body(bench: Bench) -> None:
        bench.guess.restart("x", lengths[0])
        await bench.until(lambda: bench.guess.is_idle)
        assert bench.background_draft.is_cut
        bench.guess.extend_guess(lengths[1] + 1)  # it ends by itself
        await bench.until(lambda: bench.guess.is_idle)
        assert bench.guess.ids == ids(whole)
        assert sum(bench.guess.seconds) == pytest.approx(0.01 * sum(lengths))

    run(InParts(parts), endpoint, body)
    ends = {len("".join(endpoint.texts[: n + 1])) for n in range(len(endpoint.texts))}
    cut = len("".join(parts[0]))
    assert cut not in ends


def test_a_word_without_an_end_is_not_waited_for() -> None:
    """More and more would be requested of a draft that repeats one sign for good, and nothing of it would be sent."""
    draft = Pieces(["!"] * 100)

    async def body(bench: Bench) -> None:
        bench.guess.restart("", 8)
        for num_calls in range(1, 4):
            await bench.until(lambda: bench.guess.is_idle)
            assert bench.guess.ids == ids("!" * 8 * num_calls)
            bench.guess.extend_guess(8)

    run(draft, Words(), body)


def test_what_may_not_be_drafted_further_is_encoded_to_its_end() -> None:
    """Nothing follows that its last word could belong to."""
    draft = Pieces(["one", " two", " three"])

    async def body(bench: Bench) -> None:
        bench.guess.restart("zero ", 3)
        await bench.until(lambda: bench.guess.is_idle)
        assert bench.background_draft.is_cut
        assert bench.background_draft.is_exhausted
        assert bench.guess.ids == ids("one two three")

    run(draft, Words(), body, max_tokens=3)


# ---------------------------------------------------------------------------------------- the draft's own ids


class Family(Pieces):
    """Tells ids of its pieces: the target's own, or with `offset` others. A sign alone has no text, as half of one."""

    def __init__(self, pieces: Sequence[str], offset: int = 0) -> None:
        super().__init__(pieces)
        self.offset = offset

    @asynccontextmanager
    async def draft(self, request: ChatRequest, max_tokens: int) -> AsyncGenerator[AsyncIterator[DraftPiece]]:
        async with super().draft(request, max_tokens) as pieces:

            async def add_ids() -> AsyncGenerator[DraftPiece]:
                async for piece in pieces:
                    token_ids = tuple(ord(sign) + self.offset for sign in piece.text)
                    for token_id in token_ids[:-1]:
                        yield DraftPiece("", (token_id,))
                    yield piece._replace(token_ids=token_ids[-1:] if token_ids else None)

            async with aclosing(add_ids()) as opened:
                yield opened


WORDS = [f" word{n}" for n in range(100)]


def test_whoever_waits_is_woken_by_what_is_believed() -> None:
    """Also where the draft has ended before, and nothing else will happen."""

    async def body(bench: Bench) -> None:
        bench.shared_vocabulary.add_comparison(16, has_same=True)
        bench.guess.restart("", 1000)
        await asyncio.sleep(10)
        assert bench.background_draft.ended
        bench.changed.clear()
        bench.guess.encode_new_text()
        assert bench.guess.ids == ids("".join(WORDS))
        assert bench.changed.is_set()

    run(Family(WORDS), Words(), body)


async def read_all_words(bench: Bench) -> None:
    bench.guess.restart("", 1000)
    await bench.until(lambda: bench.guess.is_idle)
    assert bench.guess.ids == ids("".join(WORDS))
    assert sum(bench.guess.seconds) == pytest.approx(0.01 * len(WORDS))


def test_a_draft_of_the_targets_vocabulary_is_soon_not_encoded() -> None:
    """After 16 tokens in a row for which both had the same ids."""
    endpoint = Words(0.001)

    async def body(bench: Bench) -> None:
        for _ in range(3):
            await read_all_words(bench)

    run(Family(WORDS), endpoint, body)
    assert endpoint.texts == WORDS[:3]


def test_what_is_believed_waits_for_no_end_of_a_word() -> None:
    """Each token is there when the draft has written it."""
    endpoint = Words(0.1)

    async def body(bench: Bench) -> None:
        bench.shared_vocabulary.add_comparison(16, has_same=True)
        bench.guess.restart("", 1000)
        for text in (" wo", " word", " words"):
            await bench.until(partial(has_written, bench, text))
            assert bench.guess.ids == ids(text)

    def has_written(bench: Bench, text: str) -> bool:
        return bench.background_draft.text == text

    run(Family([" wo", "rd", "s"]), endpoint, body)
    assert not endpoint.texts


@pytest.mark.parametrize("offset", [1, 1000])
def test_ids_of_another_vocabulary_are_never_believed(offset: int) -> None:
    endpoint = Words(0.001)
    run(Family(WORDS, offset), endpoint, read_all_words)
    assert "".join(endpoint.texts) == "".join(WORDS)


async def judge_one_token(bench: Bench, token_id: int, *, is_draft_late: bool = False) -> None:
    """The draft's first token is compared with the target's."""
    bench.guess.restart("", 1000)
    if is_draft_late:
        bench.guess.confirm_token(token_id)
        await bench.until(lambda: bench.guess.is_wrong)
        return
    await bench.until(lambda: bool(bench.guess.ids))
    bench.guess.confirm_token(token_id)


@pytest.mark.parametrize("is_draft_late", [False, True])
def test_a_draft_that_gets_another_vocabulary_is_found_out(*, is_draft_late: bool) -> None:
    """Another model at the same address: its ids are believed until 16 of the target's tokens contradict them."""
    draft, endpoint = Family(WORDS), Words(0.001)

    async def body(bench: Bench) -> None:
        await read_all_words(bench)
        draft.offset = 1
        for _ in range(16):
            assert bench.shared_vocabulary.is_believed
            await judge_one_token(bench, ord(" "), is_draft_late=is_draft_late)
            assert bench.guess.is_wrong
        await read_all_words(bench)

    run(draft, endpoint, body)


def test_a_draft_that_is_often_wrong_is_still_believed() -> None:
    """A wrong token says nothing of the vocabulary where another one is right."""
    endpoint = Words(0.001)

    async def body(bench: Bench) -> None:
        await read_all_words(bench)
        num_encoded = len(endpoint.texts)
        for number in range(100):
            await judge_one_token(bench, ord(" " if number % 10 == 0 else "x"))
        assert len(endpoint.texts) == num_encoded

    run(Family(WORDS), endpoint, body)


def test_ids_that_hold_more_than_a_stretch_are_not_taken_for_it() -> None:
    """A space that the answer has already, and the draft repeats, is in its first token."""
    endpoint = Words(0.001)

    async def body(bench: Bench) -> None:
        bench.shared_vocabulary.add_comparison(16, has_same=True)
        bench.guess.restart("x ", 1000)
        await bench.until(lambda: bench.guess.is_idle)
        assert bench.guess.ids == ids("".join(WORDS)[1:])

    run(Family(WORDS), endpoint, body)
    assert endpoint.texts[0].startswith("word0")


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([" a", "b", "1 ", "\n", "é", ").", " "]), max_size=12), min_size=1, max_size=4),
    st.integers(0, 40),
    st.booleans(),
)
def test_own_ids_change_nothing_but_calls(parts: list[list[str]], num_same: int, tells_all: bool) -> None:
    """However the text is cut and however often more of it is requested, the ids are those of all of its text."""
    texts: list[str] = []

    class Parts(InParts, Family):
        def __init__(self) -> None:
            Family.__init__(self, [])
            self._parts = iter([*parts, []])

        @asynccontextmanager
        async def draft(self, request: ChatRequest, max_tokens: int) -> AsyncGenerator[AsyncIterator[DraftPiece]]:
            async with super().draft(request, max_tokens) as pieces:

                async def add_ids() -> AsyncGenerator[DraftPiece]:
                    async for piece in pieces:
                        yield piece if tells_all or piece.text != "b" else piece._replace(token_ids=None)

                async with aclosing(add_ids()) as opened:
                    yield opened

    async def body(bench: Bench) -> None:
        bench.shared_vocabulary.add_comparison(num_same, has_same=True)
        bench.guess.restart("x", 1000)
        await bench.until(lambda: bench.guess.is_idle)
        texts.append(bench.background_draft.text)
        for _ in parts:
            bench.background_draft.is_cut = True
            bench.guess.extend_guess(1000)
            await bench.until(lambda: bench.guess.is_idle)
            texts.append(bench.background_draft.text)
        assert bench.guess.ids == ids("".join(texts))

    run(Parts(), Words(), body)


def test_text_that_is_no_token_changes_nothing() -> None:
    """Some normalizers drop characters: what follows them is encoded all the same."""

    class Dropping(Words):
        async def encode(self, text: str) -> list[int]:
            return [token_id for token_id in await super().encode(text) if token_id != 0x200B]

    errors: list[object] = []

    async def body(bench: Bench) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        bench.guess.restart("", 64)
        await bench.until(lambda: bench.guess.is_idle)
        assert bench.guess.ids == ids("one two")
        assert len(bench.guess.seconds) == len(bench.guess.ids)

    run(Pieces(["one two", "\u200b"]), Dropping(), body)
    assert errors == []


def test_a_failure_to_encode_is_told_and_raised_nowhere() -> None:
    """What was encoded before stays."""
    endpoint = Words(fail_at=1)

    async def body(bench: Bench) -> None:
        bench.guess.restart("", 64)
        await bench.until(lambda: bench.guess.failure is not None)
        assert "encode is broken" in str(bench.guess.failure)
        assert bench.guess.ids == ids(endpoint.texts[0])

    run(Pieces([TEXT[:20], TEXT[20:40], TEXT[40:]]), endpoint, body)


@pytest.mark.parametrize("after_s", [0.0, 0.011, 0.025, 0.05])
def test_closing_ends_an_encoding_under_way(after_s: float) -> None:
    """No call to the server and no task is left."""

    async def body(bench: Bench) -> None:
        bench.guess.restart("", 64)
        end_s = asyncio.get_running_loop().time() + after_s
        while asyncio.get_running_loop().time() < end_s:
            bench.guess.encode_new_text()
            await asyncio.sleep(0.001)

    run(Pieces(list(TEXT)), Words(10.0), body)
