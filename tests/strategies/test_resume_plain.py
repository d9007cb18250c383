"""Going on alone: after the confirmed tokens, by ids or by text, nothing lost and nothing twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.matrix import every_combination
from support.probing import patient
from support.targets import Fault, Table, Target, bytewise

from llm_spec import (
    ChatRequest,
    Finish,
    Fixed,
    ReferenceDraft,
    SpeculativeConfig,
    SpeculativeDecoder,
    SpeculativeResult,
    StreamEvent,
    TargetError,
    TextDelta,
)
from llm_spec.contract.provider import Capabilities
from llm_spec.strategies.resume_plain import continue_by_text, stream_remainder_plain
from llm_spec.testing import ScriptedProvider
from llm_spec.testing.clock import run_virtual
from llm_spec.testing.simulated import SimulatedTarget

ANSWER = "one two  three\n\nfour five six seven"


IDS_BREAK = Fault("stream_after", how=TargetError("ids are broken"))
ROUNDS_END = Fault("sample_next", 2)


def make_target(*faults: Fault, tokens: str | list[bytes] = ANSWER, **options: Any) -> Target:
    """Its rounds are ahead of its stream."""
    options = {"by_ids": True, "continue_prefix": True, "first_token_s": 0.02, "token_s": 0.5, **options}
    return Target(tokens, faults=faults, **options)


async def resumed(target: Target, num_confirmed: int, **options: Any) -> tuple[str, Finish, list[TextDelta]]:
    """The answer goes on behind its first tokens."""
    prompt_ids = await target.encode_chat(ChatRequest.create("tell"))
    answer_ids = (await target.encode(ANSWER))[:num_confirmed]
    text = await target.decode(answer_ids)
    request = ChatRequest.create("tell", **options)
    plain = stream_remainder_plain(target, target, request, prompt_ids=prompt_ids, answer_ids=answer_ids, text=text)
    deltas: list[TextDelta] = []
    finish: Finish | None = None
    async with aclosing(plain) as events:
        async for event in events:
            if isinstance(event, TextDelta):
                deltas.append(event)
            elif isinstance(event, Finish):
                finish = event
    assert finish is not None
    return text + "".join(delta.text for delta in deltas), finish, deltas


@given(num_confirmed=st.integers(0, 12), max_tokens=st.none() | st.integers(13, 20))
def test_by_ids_it_goes_on_behind_the_confirmed_tokens(num_confirmed: int, max_tokens: int | None) -> None:
    """The whole is the answer; the cap counts what was confirmed."""
    target = make_target()
    text, finish, _ = run_virtual(resumed(target, num_confirmed, max_tokens=max_tokens))
    assert text == ANSWER
    assert finish.finish_reason == "stop"
    assert target.num_open == 0


@given(num_confirmed=st.integers(0, 5), max_tokens=st.integers(6, 8))
def test_the_cap_is_what_is_left_of_it(num_confirmed: int, max_tokens: int) -> None:
    """Confirmed and further tokens together are as many as were asked for."""
    _, finish, deltas = run_virtual(resumed(make_target(), num_confirmed, max_tokens=max_tokens))
    assert num_confirmed + len(deltas) == max_tokens
    assert finish.finish_reason == "length"


@pytest.mark.parametrize("tokens", [ANSWER, bytewise(ANSWER)], ids=["words", "bytes"])
@pytest.mark.parametrize("num_confirmed", range(1, 12))
def test_by_text_whitespace_at_the_seam_is_neither_sent_nor_doubled(
    num_confirmed: int, tokens: str | list[bytes]
) -> None:
    """Wherever the confirmed text ends, the prefix ends in no whitespace and the whole is the answer."""
    target = make_target(IDS_BREAK, tokens=tokens)
    text, _, _ = run_virtual(resumed(target, num_confirmed, stop=["never"]))
    assert text == ANSWER
    request = target.requests[-1]
    assert len(target.get_calls("stream")) == 1
    assert request.prefix == request.prefix.rstrip()
    assert ANSWER.startswith(request.prefix)
    assert request.stop == ()  # stop strings are matched by us, over the whole text


def test_a_target_that_goes_on_elsewhere_is_not_believed() -> None:
    """Whitespace was confirmed and something else comes: an error with the confirmed text, not a changed answer."""

    async def write_other(number: int, events: AsyncIterator[StreamEvent]) -> AsyncGenerator[StreamEvent]:
        yield TextDelta("!other") if number else await anext(events)

    target = make_target(IDS_BREAK, spoil=write_other)

    async def run() -> None:
        num_confirmed = 3  # it ends in two spaces
        with pytest.raises(TargetError) as caught:
            await resumed(target, num_confirmed)
        assert caught.value.partial_text == "one two  "

    run_virtual(run())


@pytest.mark.parametrize("continue_prefix", [False, True])
def test_where_nothing_goes_on_the_error_has_the_partial_text(continue_prefix: bool) -> None:
    """Neither by ids nor by text: TargetError, with what was confirmed."""
    target = make_target(IDS_BREAK, Fault("stream"), continue_prefix=continue_prefix)

    async def run() -> None:
        with pytest.raises(TargetError) as caught:
            await resumed(target, 2)
        assert caught.value.partial_text in ("one two", "")  # "": the decoder fills in what it has shown

    run_virtual(run())


async def shown_before_error(target: Target) -> tuple[str, TargetError]:
    """What a caller has been shown, and the error that ended it."""
    shown = ""
    decoder = patient(ReferenceDraft(ANSWER), target, lookahead=Fixed(2), max_concurrent_streams=1)

    async def follow() -> None:
        nonlocal shown
        async with decoder.stream("tell") as events:
            async for event in events:
                shown += event.text if isinstance(event, TextDelta) else ""

    with pytest.raises(TargetError) as caught:
        await follow()
    return shown, caught.value


@pytest.mark.parametrize("num_pieces", [0, 1, 3])
@pytest.mark.parametrize("continue_prefix", [False, True])
def test_the_partial_text_is_all_that_was_shown_when_ids_break(num_pieces: int, continue_prefix: bool) -> None:
    """Also what came after the rounds: a caller that retries from it repeats nothing."""
    faults = [ROUNDS_END, replace(IDS_BREAK, at=num_pieces), *([] if num_pieces else [Fault("stream")])]
    target = make_target(*faults, continue_prefix=continue_prefix)
    shown, error = run_virtual(shown_before_error(target))
    assert shown
    assert error.partial_text == shown


@pytest.mark.parametrize("fail_at", [0, 1])
def test_the_partial_text_is_all_that_was_shown_when_text_breaks(fail_at: int) -> None:
    """A provider tells what its own stream gave: in front of that stands what the rounds gave."""
    broken = TargetError("text is broken", partial_text="two" if fail_at else "")
    target = make_target(ROUNDS_END, IDS_BREAK, Fault("stream", at=fail_at, how=broken))
    shown, error = run_virtual(shown_before_error(target))
    assert shown
    assert error.partial_text == shown


# ------------------------------------------------------------------------------------------ what holds of the text


def probing(target: Target, **options: Any) -> SpeculativeDecoder:
    options = {"lookahead": Fixed(2), "max_concurrent_streams": 1, **options}
    return patient(ReferenceDraft(ANSWER), target, **options)


@pytest.mark.parametrize("by_ids", [True, False])
def test_an_answer_that_went_on_by_text_says_so(*, by_ids: bool) -> None:
    """By token ids it is as exact as it was."""
    target = make_target(ROUNDS_END, *([] if by_ids else [IDS_BREAK]))
    result = run_virtual(probing(target).decode("tell", temperature=0.0))
    assert result.content == ANSWER
    assert len(target.get_calls("stream")) == (0 if by_ids else 1)
    assert (result.guarantee, result.same_text) == ("exact" if by_ids else "exact-text", False)


def test_a_deadline_does_not_strengthen_what_went_on_by_text() -> None:
    """Also where the end is not the target's."""
    target = make_target(ROUNDS_END, IDS_BREAK)
    result = run_virtual(probing(target, deadline_s=2.0).decode("tell", temperature=0.0))
    assert ANSWER.startswith(result.content)
    assert (result.stopped_by, result.guarantee) == ("deadline", "exact-text")


def test_what_is_promised_is_what_the_target_could_do_at_the_beginning() -> None:
    """A race by text stays one, even if the target takes token ids before it has ended, and the other way round."""

    class Changing(SimulatedTarget):
        @asynccontextmanager
        async def stream(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
            self.capabilities = Capabilities(continue_prefix=True, token_endpoint=self)
            async with super().stream(request) as events:
                yield events

        @asynccontextmanager
        async def stream_chat(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
            self.capabilities = Capabilities(continue_prefix=True)
            async with super().stream_chat(request) as events:
                yield events

    for by_ids in (False, True):
        target = Changing(ANSWER, by_ids=by_ids)
        config = SpeculativeConfig(strategy="race")
        result = run_virtual(
            SpeculativeDecoder(target=target, draft=ReferenceDraft(ANSWER), config=config).decode(
                "tell", temperature=0.0
            )
        )
        assert (target.capabilities.token_endpoint is None) == by_ids
        assert (result.content, result.guarantee) == (ANSWER, "exact" if by_ids else "exact-text")


@pytest.mark.parametrize(("temperature", "is_reseeded"), [(0.8, True), (None, True), (0.0, False)])
def test_what_goes_on_by_text_is_drawn_from_other_noise(temperature: float | None, *, is_reseeded: bool) -> None:
    """A server draws the first token of any request with one seed from the same noise; greedily nothing is drawn."""
    target = ScriptedProvider(ANSWER, capabilities=Capabilities(continue_prefix=True))
    request = ChatRequest.create("tell", temperature=temperature, seed=7)

    async def run(text: str) -> None:
        async with aclosing(continue_by_text(target, request, text)) as events:
            assert [event async for event in events]

    for text in ("one", "one two", "one"):
        run_virtual(run(text))
    seeds = [request.sampling.seed for request in target.requests]
    assert seeds[0] == seeds[2]
    assert len({7, *seeds}) == (3 if is_reseeded else 1)


# ------------------------------------------------------------------------------------------ half a character

NUM_ANSWERS = 200  # "é" again and again by chance is a share of 0.25: five deviations from what passes


def draw_half_characters(written: Sequence[bytes]) -> dict[bytes, float]:
    """Writes "a" or "é", by the same chance; "é" has two tokens."""
    if not written:
        return {b"a": 0.5, b"\xc3": 0.5}
    return {b"\xa9" if written[-1] == b"\xc3" else b"": 1.0}


async def tell_whole_characters(_: int, events: AsyncIterator[StreamEvent]) -> AsyncGenerator[StreamEvent]:
    """Ids come only with the text of a whole character."""
    held_ids: tuple[int, ...] = ()
    async for event in events:
        if isinstance(event, TextDelta) and event.token_ids is not None:
            held_ids += event.token_ids
            if event.text in ("", "\ufffd"):
                continue
            event, held_ids = replace(event, token_ids=held_ids), ()  # noqa: PLW2901 - the same event
        yield event


def shares(
    fault: Fault, *, tells_halves: bool = True, temperature: float = 1.0, table: Table = draw_half_characters
) -> tuple[float, Counter[str]]:
    """How often "é" is written, and how many answers have which guarantee; each meets the fault anew."""

    async def answer(seed: int) -> SpeculativeResult:
        spoil = None if tells_halves else tell_whole_characters
        target = Target(
            table=table,
            by_ids=True,
            encode_size=1,
            first_token_s=1.0,
            row_s=0.0,
            faults=[fault],
            spoil=spoil,
            seed=seed,
        )  # the answer's first tokens come from rounds
        decoder = patient(ReferenceDraft("aaa"), target, baseline_every=0, max_concurrent_streams=2)
        result = await decoder.decode("tell", temperature=temperature)
        assert all(call.sampling is not None and call.sampling.seed is None for call in target.sample_calls)
        return result

    async def answer_all() -> list[SpeculativeResult]:
        return [await answer(seed) for seed in range(NUM_ANSWERS)]

    found = run_virtual(answer_all())
    assert {result.content for result in found} <= {"a", "é"}
    return sum(result.content == "é" for result in found) / NUM_ANSWERS, Counter(result.guarantee for result in found)


@every_combination(lost=("sample_next", "stream_after"), num_failures=("1", "1000000"), num_good=("0", "1", "2"))
def test_half_a_character_that_was_drawn_is_not_drawn_again(lost: str, num_failures: str, num_good: str) -> None:
    """Whichever call is lost, for once or for good: "é" is as likely as in the target, and all of it is exact."""
    share, guarantees = shares(Fault(lost, int(num_good), int(num_failures)))
    assert share == pytest.approx(0.5, abs=0.1)
    assert set(guarantees) == {"exact"}


def test_half_a_character_whose_text_was_not_told_is_not_drawn_again() -> None:
    """The call that decodes it fails once."""
    share, guarantees = shares(Fault("decode", 0, 1))
    assert share == pytest.approx(0.5, abs=0.1)
    assert set(guarantees) == {"exact"}


@pytest.mark.parametrize("lost", ["sample_next", "decode"])
def test_where_half_a_character_must_be_drawn_again_the_answer_says_so(lost: str) -> None:
    """No call tells what follows it, or nothing tells its text: whole characters become likelier."""
    share, guarantees = shares(Fault(lost, int(lost == "sample_next")), tells_halves=False)
    assert share < 0.35
    assert guarantees["lossy"] > 0.3 * NUM_ANSWERS
    assert set(guarantees) == {"exact", "lossy"}


def test_greedily_half_a_character_comes_again() -> None:
    """It is the same one."""
    greedily = {(): b"\xc3", (b"\xc3",): b"\xa9"}
    fault = Fault("sample_next", 1)
    shown = shares(fault, tells_halves=False, temperature=0.0, table=lambda ids: {greedily.get(tuple(ids), b""): 1.0})
    assert shown == (1.0, Counter({"exact": NUM_ANSWERS}))
