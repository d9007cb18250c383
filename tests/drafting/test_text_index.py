"""The pieces of a conversation: read once, in steps, and in line with the answer wherever it stands."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_spec import ChatMessage, ChatRequest
from llm_spec.drafting.copying import ConversationIndex, TextIndex
from llm_spec.drafting.ngrams import OccurrenceIndex
from llm_spec.measure.tokens import PIECES_PER_LOOP_TURN, split_into_pieces
from llm_spec.testing.clock import run_virtual

TEXTS = st.text("ab \n,", max_size=20)


def pieces_of(request: ChatRequest) -> list[str]:
    texts = [*(message.text for message in request.messages), request.prefix]
    return [piece for text in texts for piece in split_into_pieces(text)]


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(TEXTS, st.integers(2, 6)), min_size=1, max_size=5))
def test_a_text_that_changes_is_in_the_pieces_of_what_it_is_now(changes: list[tuple[str, int]]) -> None:
    """Whatever of earlier ones was read, and in whatever steps: a word that goes on is one piece."""
    index = TextIndex()
    for number, (text, step) in enumerate(changes):
        index.update_last_text_partly(text, step)
        if number == len(changes) - 1:
            while not index.update_last_text_partly(text, step):
                pass
    assert index.pieces == split_into_pieces(changes[-1][0])


@settings(max_examples=200, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=3), st.lists(TEXTS, min_size=1, max_size=4))
def test_a_conversation_is_in_its_own_pieces(messages: list[str], answers: list[str]) -> None:
    """Each message for itself, and the answer behind them as it is now."""
    index, first = ConversationIndex(), ChatRequest(messages=tuple(ChatMessage("user", text) for text in messages))

    async def check() -> None:
        for answer in answers:
            request = ChatRequest(messages=first.messages, prefix=answer)
            await index.index_request(request)
            assert index.pieces == pieces_of(request)

    run_virtual(check())


def test_other_messages_begin_anew() -> None:
    """Nothing of another conversation is left."""

    async def check() -> None:
        index = ConversationIndex()
        await index.index_request(ChatRequest.create("the secret is out", prefix="yes"))
        other = ChatRequest.create("hello", prefix="yes")
        await index.index_request(other)
        assert index.pieces == pieces_of(other)
        assert index.find_longest_match(["secret"], 8) is None

    run_virtual(check())


@pytest.fixture
def num_appended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many pieces were taken in since it was last cleared."""
    counted = [0]
    append = OccurrenceIndex.append

    def counting(self: OccurrenceIndex[str], item: str) -> None:
        counted[0] += 1
        append(self, item)

    monkeypatch.setattr(OccurrenceIndex, "append", counting)
    return counted


def test_each_call_reads_what_is_new(num_appended: list[int]) -> None:
    """The conversation once, of the answer what came since; after a guess that was wrong what differs."""
    messages = [{"role": "user", "content": "one two three " * 1000}]

    async def check() -> None:
        index, first = ConversationIndex(), ChatRequest.create(messages)
        answer = "".join(f"word{n} " for n in range(1000))
        num_pieces = len(pieces_of(first))
        for start, end in [(0, 400), (400, 500), (500, 501), (501, 1000)]:
            num_appended[0] = 0
            text = answer[: 7 * end]
            await index.index_request(ChatRequest(messages=first.messages, prefix=text))
            num_new = len(split_into_pieces(text)) - len(split_into_pieces(answer[: 7 * start]))
            assert num_appended[0] <= num_new + 2 + (num_pieces if start == 0 else 0)
        num_appended[0] = 0
        await index.index_request(ChatRequest(messages=first.messages, prefix=answer[:3000] + "other"))
        assert num_appended[0] <= 4
        assert "".join(index.pieces).endswith(answer[2000:3000] + "other")

    run_virtual(check())


@pytest.mark.parametrize("num_messages", [1, 7, 5000])
def test_between_two_turns_of_the_loop_only_so_much_is_read(num_messages: int, num_appended: list[int]) -> None:
    """However the text is cut into messages; and nearly as much in each."""
    messages = [{"role": "user", "content": "to be or " * (5000 // num_messages)}] * num_messages
    request = ChatRequest.create(messages, prefix="not to be " * 1000)
    steps: list[int] = []

    async def check() -> None:
        reading = asyncio.ensure_future(ConversationIndex().index_request(request))
        while not reading.done():
            num_appended[0] = 0
            await asyncio.sleep(0)
            steps.append(num_appended[0])

    run_virtual(check())
    assert max(steps) <= PIECES_PER_LOOP_TURN
    assert sum(steps) <= len(pieces_of(request)) + len(steps)
    assert len(steps) <= 2 * len(pieces_of(request)) / PIECES_PER_LOOP_TURN + 3


def test_reading_that_was_cancelled_goes_on(num_appended: list[int]) -> None:
    """A draft that is begun anew again and again comes to its end."""
    request = ChatRequest.create("to be or not " * 2000, prefix="to be")

    async def check() -> None:
        index = ConversationIndex()
        for _ in range(100):
            reading = asyncio.ensure_future(index.index_request(request))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            reading.cancel()
            await asyncio.wait([reading])
        assert index.pieces == pieces_of(request)
        assert num_appended[0] <= len(pieces_of(request)) + 200

    run_virtual(check())


async def test_what_calls_hold_stands_before_the_messages() -> None:
    """As text, where escapes make it another one; of requests with tools alone."""
    call = {"id": "c", "type": "function", "function": {"name": "write", "arguments": '{"text": "old\\nfile"}'}}
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "ok"},
    ]
    index = ConversationIndex()
    await index.index_request(ChatRequest.create(messages, prefix="yes"))
    assert index.pieces == ["old", "\n", "file", "hello", "ok", "yes"]
