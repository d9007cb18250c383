"""The scripted provider answers as told and shows who opened and closed what."""

from __future__ import annotations

import asyncio

import pytest

from llm_spec import ChatRequest, Finish, LlmProvider, ProviderDraft, StreamEvent, TargetError, TextDelta, Usage
from llm_spec.contract.provider import Capabilities
from llm_spec.testing import ScriptedProvider, run_virtual

REQUEST = ChatRequest.create("say it")


async def collect(provider: ScriptedProvider, request: ChatRequest = REQUEST) -> list[StreamEvent]:
    async with provider.stream(request) as events:
        return [event async for event in events]


def texts(events: list[StreamEvent]) -> list[str]:
    return [event.text for event in events if isinstance(event, TextDelta)]


async def test_a_text_comes_in_words_and_ends() -> None:
    """A text is cut into words and ends with a Finish that counts them."""
    events = await collect(ScriptedProvider("one two, three"))
    assert texts(events) == ["one", " two", ",", " three"]
    assert events[-1] == Finish("stop", Usage(input_tokens=2, output_tokens=4))


async def test_piece_size_cuts_by_characters() -> None:
    """`piece_size` is the number of characters of a piece."""
    assert texts(await collect(ScriptedProvider("abcde", piece_size=2))) == ["ab", "cd", "e"]


async def test_it_is_a_provider() -> None:
    """It fits the protocol, and `complete` gives the same text."""
    provider = ScriptedProvider("hello there")
    assert isinstance(provider, LlmProvider)
    assert (await provider.complete(REQUEST)).content == "hello there"


async def test_a_callable_sees_the_request() -> None:
    """A script may depend on the request, and the provider keeps the requests it got."""
    provider = ScriptedProvider(lambda request: f"you said {request.messages[0].text}")
    assert "".join(texts(await collect(provider))) == "you said say it"
    assert provider.requests == [REQUEST]


async def test_events_come_as_they_are() -> None:
    """A list of events is replayed without being mended."""
    events: list[StreamEvent] = [TextDelta("a"), TextDelta("")]
    assert await collect(ScriptedProvider(events)) == events


async def test_max_tokens_cuts_pieces() -> None:
    """Pieces stand for tokens."""
    events = await collect(ScriptedProvider("one two three"), ChatRequest.create("x", max_tokens=2))
    assert texts(events) == ["one", " two"]
    assert events[-1] == Finish("length", Usage(input_tokens=1, output_tokens=2), "max_tokens")


async def test_max_tokens_of_the_whole_answer_cuts_nothing() -> None:
    """An answer of just as many pieces ends by itself."""
    events = await collect(ScriptedProvider("one two"), ChatRequest.create("x", max_tokens=2))
    assert isinstance(events[-1], Finish)
    assert events[-1].finish_reason == "stop"


async def test_the_first_stop_string_ends_the_text() -> None:
    """Where several stop strings occur, the one that begins first wins."""
    events = await collect(ScriptedProvider("one two three"), ChatRequest.create("x", stop=["ee", "o t"]))
    assert "".join(texts(events)) == "one tw"
    assert isinstance(events[-1], Finish)
    assert events[-1].stopped_by == "stop_string"


@pytest.mark.parametrize(
    ("prefix", "can", "rest"),
    [("one ", True, "two three"), ("one ", False, "one two three"), ("other", True, "one two three")],
)
async def test_a_prefix_is_continued_where_that_is_declared(prefix: str, can: bool, rest: str) -> None:
    """The answer goes on behind a prefix that the script begins with."""
    provider = ScriptedProvider("one two three", capabilities=Capabilities(continue_prefix=can))
    assert "".join(texts(await collect(provider, ChatRequest.create("x", prefix=prefix)))) == rest


async def test_a_failure_comes_at_its_piece() -> None:
    """`fail_at` raises instead of the piece of that index, and the stream is closed."""
    provider = ScriptedProvider("one two three", fail_at={1: TargetError("lost")})
    async with provider.stream(REQUEST) as events:
        assert await anext(events) == TextDelta("one")
        with pytest.raises(TargetError, match="lost"):
            await anext(events)
    assert (provider.num_open, provider.num_closed) == (0, 1)


def test_delays_go_by_the_clock() -> None:
    """The first event waits `delay_first_s`, each other one `delay_piece_s`."""

    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        async with ScriptedProvider("one two", delay_first_s=2, delay_piece_s=0.5).stream(REQUEST) as events:
            return [loop.time() async for _ in events]

    assert run_virtual(main()) == [2, 2.5, 3]


async def test_it_counts_open_streams() -> None:
    """Streams are counted while they are open and when they have been left, by whatever way."""
    provider = ScriptedProvider("one two three")
    async with provider.stream(REQUEST) as first, provider.stream(REQUEST):
        await anext(first)
        assert (provider.num_open, provider.num_closed) == (2, 0)
    assert (provider.num_open, provider.num_closed) == (0, 2)
    await provider.aclose()
    assert provider.num_acloses == 1


async def test_usage_can_be_given_or_left_out() -> None:
    """`usage` is what Finish carries."""
    told = Usage(output_tokens=99)
    assert (await collect(ScriptedProvider("a", usage=told)))[-1] == Finish("stop", told)
    assert (await collect(ScriptedProvider("a", usage=None)))[-1] == Finish("stop", None)


async def test_as_a_draft() -> None:
    """`ProviderDraft` makes a scripted draft of it, so none of its own is needed."""
    draft = ProviderDraft(ScriptedProvider("one two three"))
    async with draft.draft(REQUEST, 2) as pieces:
        got = [piece async for piece in pieces]
    assert [piece.text for piece in got] == ["one", " two", ""]
    assert got[-1].finish_reason == "length"
