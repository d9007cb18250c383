"""Whether a server goes on from a text is tried before it is believed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llm_spec_http import DIALECTS, HttpProvider
from llm_spec_http.convert import RepeatedPrefixStripper

from llm_spec import (
    ChatRequest,
    ClosedError,
    InvalidRequestError,
    JudgeConfig,
    ReasoningDelta,
    ReferenceDraft,
    RetryPolicy,
    SpeculativeConfig,
    SpeculativeDecoder,
    StreamEvent,
    TextDelta,
    Timeouts,
    TransientError,
    UnsupportedError,
)
from llm_spec.contract.provider import Capabilities
from llm_spec.contract.response import complete_from_stream
from llm_spec.kit.continuation import ContinuationTest
from llm_spec.measure.tokens import split_into_pieces
from llm_spec.strategies.resume_plain import CannotContinueError, continue_by_text
from llm_spec.testing import ScriptedProvider
from llm_spec.testing.clock import run_virtual
from llm_spec.testing.server import ScriptedModelServer, ServerFaults

WEEK = "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday."
CONTINUES = Capabilities(continue_prefix=True)


def is_believed(provider: ScriptedProvider) -> bool:
    return run_virtual(ContinuationTest(provider.name, provider.stream).can_continue())


# ------------------------------------------------------------------------------------------ what it does


@pytest.mark.parametrize(
    "answer",
    [
        WEEK,
        "Sure! Here are the days of the week:\n\n1. Monday\n2. Tuesday\n3. Wednesday",
        "    def __init__(self, name):\n        self.name = name\n",
        "Yes, my friend, certainly so.",
    ],
)
@pytest.mark.parametrize("piece_size", [None, 1, 3])
def test_a_server_that_goes_on_is_believed(answer: str, piece_size: int | None) -> None:
    """Whatever the model writes, if it has words; two short requests, the second ends inside one of them."""
    provider = ScriptedProvider(answer, capabilities=CONTINUES, piece_size=piece_size)
    assert is_believed(provider) or (piece_size is not None and len(answer) > 24 * piece_size)
    first, *others = provider.requests
    assert first.prefix == ""
    for second in others:
        assert answer.startswith(second.prefix)
        assert second.prefix[-1].isalpha()
        assert answer[len(second.prefix)].isalpha()
    assert sum(request.max_tokens or 999 for request in provider.requests) < 30


def test_a_server_that_begins_anew_is_not_believed() -> None:
    """The same answer again."""
    assert not is_believed(ScriptedProvider(WEEK))


@pytest.mark.parametrize(
    "turn",
    [
        "Thursday, Friday",  # the given beginning is a finished turn, and this one goes on behind it
        " Thursday, Friday",
        "day",  # by chance, of another word
        "Wednesday, Thursday",
        "Is there anything else?",
        "",
        "\n",
    ],
)
def test_a_new_turn_is_not_taken_for_the_rest(turn: str) -> None:
    """Also where it goes on with the sense of it; only the rest of that very word will do."""
    words = "Eins, zwei, drei, vier, siebenundzwanzig, acht."
    assert not is_believed(ScriptedProvider(lambda request: turn if request.prefix else words))


def test_a_beginning_that_is_repeated_is_not_taken_for_the_rest() -> None:
    """As of a server whose dialect does not say so."""

    def script(request: ChatRequest) -> str:
        return request.prefix + WEEK.removeprefix(request.prefix) if request.prefix else WEEK

    assert not is_believed(ScriptedProvider(script))


@pytest.mark.parametrize(
    "answer", ["", "Yes", "1, 2, 3, 4, 5, 6, 7, 8, 9", "a b c d e f", "星期一、星期二、星期三", WEEK[:6]]
)
def test_where_no_word_can_be_cut_nothing_is_believed(answer: str) -> None:
    """And the second request is not made."""
    provider = ScriptedProvider(answer, capabilities=CONTINUES)
    assert not is_believed(provider)
    assert len(provider.requests) == 1


def test_a_model_that_reasons_first_is_not_believed() -> None:
    """Its few tokens hold no answer."""
    assert not is_believed(ScriptedProvider([ReasoningDelta("The user wants the days of the week")]))


@given(
    st.lists(st.sampled_from(["Monday", " Tuesday", ",", " the", "\n", " days", "wordless", " ", "-day"]), max_size=30)
)
def test_beginning_anew_is_seen_where_a_repeated_beginning_is_removed(pieces: list[str]) -> None:
    """Although the answer that begins anew begins with what was given: it ends before it goes beyond that."""
    answer = "".join(pieces)

    @asynccontextmanager
    async def stream(request: ChatRequest) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        async def written() -> AsyncGenerator[StreamEvent]:
            stripper = RepeatedPrefixStripper(request.prefix)
            for piece in split_into_pieces(answer)[: request.max_tokens]:
                yield TextDelta(stripper.push(piece))
            yield TextDelta(stripper.flush())

        async with aclosing(written()) as events:
            yield events

    assert not run_virtual(ContinuationTest("any", stream).can_continue())


# ------------------------------------------------------------------------------------------ once


def test_it_is_tried_once() -> None:
    """Also by several answers that break at a time; and it goes on when those who wait for it have left."""
    provider = ScriptedProvider(WEEK, capabilities=CONTINUES, delay_first_s=1.0)
    target = Claiming(lambda: True)
    trial = ContinuationTest(provider.name, provider.stream)

    async def discover(_: str) -> None:
        target.capabilities = Capabilities(continue_prefix=await trial.can_continue())

    async def run() -> list[bool]:
        target.discover = discover  # type: ignore[method-assign,assignment]
        async with SpeculativeDecoder(target=target, draft=None) as decoder:
            trying = [asyncio.create_task(decoder.discover("continue_prefix")) for _ in range(5)]
            await asyncio.sleep(0.5)
            for left in trying[1:]:
                left.cancel()
            await asyncio.wait(trying)
            return [await trial.can_continue() for _ in range(3)]

    assert run_virtual(run()) == [True] * 3
    assert len(provider.requests) == 2


@pytest.mark.parametrize("at", [0, 3])
def test_a_server_that_cannot_answer_now_is_tried_again(at: int) -> None:
    """Nothing was found out."""
    failures: dict[int, Exception] = {at: TransientError("busy", status=503)}
    provider = ScriptedProvider(WEEK, capabilities=CONTINUES, fail_at=failures)
    trial = ContinuationTest(provider.name, provider.stream)
    with pytest.raises(TransientError, match="busy"):
        run_virtual(trial.can_continue())
    failures.clear()
    assert run_virtual(trial.can_continue())


def test_a_server_that_is_silent_is_not_waited_for_for_ever() -> None:
    """As one that cannot answer now."""
    provider = ScriptedProvider(WEEK, name="scripted:slow", capabilities=CONTINUES, delay_first_s=1e6)
    with pytest.raises(TransientError, match="scripted:slow was silent for 30 s"):
        is_believed(provider)
    assert provider.num_open == 0


@pytest.mark.parametrize("error", [InvalidRequestError("unknown field"), RuntimeError("a bug")])
def test_a_server_that_refuses_does_not_go_on(error: Exception) -> None:
    """It is not asked again."""
    provider = ScriptedProvider(WEEK, capabilities=CONTINUES, fail_at={0: error})
    trial = ContinuationTest(provider.name, provider.stream)
    for _ in range(2):
        assert not run_virtual(trial.can_continue())
    assert len(provider.requests) == 1


# ------------------------------------------------------------------------------------------ over sockets


@pytest.mark.parametrize(
    ("dialect", "mode", "is_continuing"),
    [
        ("vllm", "fields", True),
        ("vllm", None, False),
        ("vllm", "repeats", False),
        ("sglang", "fields", True),
        ("mistral", "repeats", True),
        ("mistral", None, False),
        ("mistral", "fields", False),
        ("llamacpp", "repeats", True),
        ("llamacpp", None, False),
    ],
)
@pytest.mark.parametrize("tokens_per_frame", [1, 5])
async def test_dialects_and_servers(dialect: str, mode: Any, *, is_continuing: bool, tokens_per_frame: int) -> None:
    """What a dialect says is not believed of a server that does otherwise."""
    async with ScriptedModelServer(WEEK, continues_prefix=mode, tokens_per_frame=tokens_per_frame) as server:
        provider = HttpProvider("m", base_url=server.url, dialect=DIALECTS[dialect])
        assert provider.capabilities.continue_prefix
        for _ in range(2):
            await provider.discover("continue_prefix")
            assert provider.capabilities.continue_prefix == is_continuing
        assert len(server.requests) == 2
        await provider.aclose()


async def test_a_dialect_that_cannot_is_not_tried() -> None:
    """Nobody knows how to ask."""
    async with ScriptedModelServer(WEEK, continues_prefix="repeats") as server:
        provider = HttpProvider("m", base_url=server.url)
        await provider.discover("continue_prefix")
        assert not provider.capabilities.continue_prefix
        assert server.requests == []
        await provider.aclose()


# ------------------------------------------------------------------------------------------ who needs to know


class Claiming(ScriptedProvider):
    """Says that it goes on from a text; tried, it does as `tried` says."""

    def __init__(self, tried: Callable[[], bool], **options: Any) -> None:
        super().__init__(WEEK, capabilities=CONTINUES, **options)
        self.features: list[str] = []
        self._tried = tried

    async def discover(self, feature: str) -> None:
        self.features.append(feature)
        if feature == "continue_prefix":
            self.capabilities = Capabilities(continue_prefix=self._tried())


def racing(target: Any, strategy: Any = "race") -> SpeculativeDecoder:
    return SpeculativeDecoder(
        target=target, draft=ReferenceDraft(WEEK), config=SpeculativeConfig(strategy=strategy, baseline_every=0)
    )


def busy() -> bool:
    raise TransientError("busy", status=503)


def test_a_race_by_text_is_refused_where_the_server_begins_anew() -> None:
    """By name; with the reason."""
    with pytest.raises(UnsupportedError, match="neither continue token ids nor an assistant's text"):
        run_virtual(racing(Claiming(lambda: False)).decode("q", temperature=0.0))


def test_a_race_by_text_waits_until_the_server_can_be_tried() -> None:
    """Until then answers are plain."""
    target = Claiming(busy)
    result = run_virtual(racing(target).decode("q", temperature=0.0))
    assert (result.content, result.strategy, result.plain_reason) == (WEEK, "plain", "discovery")
    target._tried = lambda: True
    result = run_virtual(racing(target).decode("q", temperature=0.0))
    assert (result.content, result.guarantee, result.strategy) == (WEEK, "exact-text", "race")


def test_auto_does_not_try_what_it_would_not_use() -> None:
    """It takes no race by text."""
    target = Claiming(lambda: True)
    decoder = racing(target, "auto")
    for _ in range(3):
        assert run_virtual(decoder.decode("q", temperature=0.0)).content == WEEK
    assert "continue_prefix" not in target.features


def test_a_decoder_tries_its_target() -> None:
    """So that a decoder that is a target is believed no more than that."""
    target = Claiming(lambda: False)
    decoder = SpeculativeDecoder(target=target, draft=None)
    run_virtual(decoder.discover("continue_prefix"))
    run_virtual(decoder.discover("token_endpoint"))
    assert not decoder.capabilities.continue_prefix
    assert target.features == ["continue_prefix"]


async def test_a_broken_answer_is_not_continued_by_a_server_that_begins_anew() -> None:
    """The error of the break, with the text so far; in a race as alone."""
    faults = ServerFaults(drop_after=10, num_requests=1)
    async with ScriptedModelServer(WEEK, faults=faults) as server:
        provider = HttpProvider("m", base_url=server.url, dialect=DIALECTS["vllm"])
        with pytest.raises(TransientError, match="broke the connection") as caught:
            await complete_from_stream(
                SpeculativeDecoder(target=provider, draft=None), ChatRequest.create("q", temperature=0.0)
            )
        await provider.aclose()
    assert caught.value.partial_text == "".join(split_into_pieces(WEEK)[:10])


def test_nothing_continues_a_text_by_itself() -> None:
    """Whoever wants what follows a text gets an error that has it, and no request for it is made."""
    target = Claiming(lambda: False)

    async def run() -> None:
        async with aclosing(continue_by_text(target, ChatRequest.create("q"), "Monday, ")) as events:
            async for _ in events:
                pass

    with pytest.raises(CannotContinueError, match="does not continue a text") as caught:
        run_virtual(run())
    assert caught.value.partial_text == "Monday, "
    assert target.requests == []


@pytest.mark.parametrize("is_continuing", [True, False])
def test_a_judge_that_begins_anew_is_asked_for_the_rest(*, is_continuing: bool) -> None:
    """By a question, where it does not go on from its text."""
    target = Claiming(lambda: is_continuing)

    def script(request: ChatRequest) -> str:
        _, is_question, nonce = request.messages[-1].text.rpartition("The nonce is ")
        if is_question:
            return f'{{"nonce": {nonce[:-1]}, "accepted": 1, "then": "Tuesday,"}}'
        return "Monday, \nTuesday, Wednesday." if is_continuing else " Wednesday."

    target.script = script
    config = SpeculativeConfig(strategy="judge", judge=JudgeConfig(max_rounds=1))
    result = run_virtual(
        SpeculativeDecoder(target=target, draft=ReferenceDraft("Monday, \nwrong"), config=config).decode(
            "q", temperature=0.0
        )
    )
    assert result.content == "Monday, \nTuesday, Wednesday."
    assert bool(target.requests[-1].prefix) == is_continuing


def test_what_was_not_tried_to_its_end_is_not_believed() -> None:
    """The decoder is closed while an answer that broke off waits for the trial: an error, not the text twice."""

    class Slow(Claiming):
        async def discover(self, feature: str) -> None:
            self.features.append(feature)
            await asyncio.sleep(1e6)

    target = Slow(lambda: True, fail_at={3: TransientError("it broke")})
    decoder = SpeculativeDecoder(
        target=target, draft=None, config=SpeculativeConfig(retry=RetryPolicy(first_wait_s=0.0))
    )

    async def run() -> None:
        answering = asyncio.create_task(decoder.decode("q"))
        for _ in range(3):  # attempts
            await asyncio.sleep(10.0)
            await decoder._discovery.aclose()
        with pytest.raises(ClosedError, match="its decoder was closed") as caught:
            await answering
        assert caught.value.partial_text == "".join(split_into_pieces(WEEK)[:3])

    run_virtual(run())
    assert len(target.requests) == 1


def test_a_server_that_goes_on_later_is_believed_then() -> None:
    """A provider may try it again: whoever needs to know asks every time."""
    found = iter([False, *[True] * 9])
    target = Claiming(lambda: next(found), fail_at={3: TransientError("it broke")})
    decoder = SpeculativeDecoder(
        target=target, draft=None, config=SpeculativeConfig(retry=RetryPolicy(first_wait_s=0.0, max_attempts=2))
    )
    with pytest.raises(TransientError, match="it broke"):
        run_virtual(decoder.decode("q"))
    assert [request.prefix for request in target.requests] == ["", ""]
    with pytest.raises(TransientError, match="it broke") as caught:
        run_virtual(decoder.decode("q"))
    assert [bool(request.prefix) for request in target.requests[2:]] == [False, True]  # and its rest breaks, too
    assert caught.value.partial_text == "".join(split_into_pieces(WEEK)[:6])


@pytest.mark.parametrize("strategy", ["plain", "race"])
def test_a_silent_trial_is_waited_for_no_longer_than_a_first_chunk(strategy: str) -> None:
    """By a broken answer at each of its attempts; a race by text does not wait for it, and goes on alone."""

    class Silent(Claiming):
        async def discover(self, feature: str) -> None:
            self.features.append(feature)
            if feature == "continue_prefix":
                await asyncio.sleep(1e6)

    breaks = {3: TransientError("it broke")} if strategy == "plain" else None
    target = Silent(lambda: True, fail_at=breaks)
    retry = RetryPolicy(first_wait_s=0.0)
    config = SpeculativeConfig(strategy=strategy, baseline_every=0, retry=retry, timeouts=Timeouts(first_chunk_s=2.0))  # type: ignore[arg-type]

    async def run() -> tuple[object, float]:
        async with SpeculativeDecoder(target=target, draft=ReferenceDraft(WEEK), config=config) as decoder:
            try:
                result = await decoder.decode("q", temperature=0.0)
                return result.plain_reason, asyncio.get_running_loop().time()
            except TransientError as error:
                return error.partial_text, asyncio.get_running_loop().time()

    if strategy == "plain":
        assert run_virtual(run()) == ("".join(split_into_pieces(WEEK)[:3]), 4.0)
    else:
        assert run_virtual(run()) == ("discovery", 0.0)
    assert target.features.count("continue_prefix") == 1
