"""Probing where something is not served or fails: the plain answer, and at most one word about it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from support.probing import WORDS, TextDraft, end_of, patient, probed, probing
from support.targets import PROMPT_ID, Fault, Target, bytewise

from llm_spec import (
    ChatRequest,
    Fixed,
    ReferenceDraft,
    SpeculativeConfig,
    SpeculativeDecoder,
    SpeculativeResult,
    StreamEvent,
    TargetError,
    TextDelta,
    TransientError,
    UnsupportedError,
)
from llm_spec.contract.endpoint import SampledToken
from llm_spec.testing.clock import run_virtual
from llm_spec.testing.simulated import SimulatedTarget

# ------------------------------------------------------------------------------------------ what is not served


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": {}}}]),
        ("response_format", {"type": "json_object"}),
        ("extra", {"guided_regex": "a*"}),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
    ],
)
def test_what_depends_on_more_than_the_prefix_is_refused_by_name(field: str, value: Any) -> None:
    """`probe` names the field; `auto` serves the request plain, to the target unchanged, whatever it has learned."""
    target = SimulatedTarget(WORDS, first_token_s=0.02, token_s=0.02, by_ids=True)
    request = ChatRequest.create("tell", **{field: value})
    [named] = value if field == "extra" else [field]
    with pytest.raises(UnsupportedError, match=named):
        probed(ReferenceDraft(WORDS), target, request)
    assert target.num_calls == 0

    async def served() -> list[str]:
        decoder = SpeculativeDecoder(target=target, draft=TextDraft(WORDS), config=SpeculativeConfig(strategy="auto"))
        others = [await decoder.decode("tell") for _ in range(4)]  # it gets to know what pays
        assert {other.strategy for other in others} > {"plain"}
        results = [await decoder.decode(request) for _ in range(3)]
        assert all(result.content == WORDS for result in results)
        return [result.strategy for result in results]

    assert run_virtual(served()) == ["plain"] * 3


def test_a_pair_that_cannot_be_probed_is_refused() -> None:
    """No draft, or a target without token ids: the error says which."""
    with pytest.raises(UnsupportedError, match="no draft"):
        run_virtual(probing(None, SimulatedTarget(WORDS, by_ids=True)).decode("tell"))
    with pytest.raises(UnsupportedError, match="simulated:target"):
        probed(ReferenceDraft(WORDS), SimulatedTarget(WORDS))


# ------------------------------------------------------------------------------------------ faults


@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.parametrize("at", range(8))
def test_a_failing_call_leaves_the_rest_to_the_target_alone(at: int, streams: int) -> None:
    """From any call on: nothing is lost or said twice, one fallback, and the rest comes after the confirmed tokens."""
    target = Target(bytewise(WORDS), call_s=0.03, faults=[Fault("sample_next", at)])
    result = probed(TextDraft(WORDS, token_s=0.001), target, lookahead=Fixed(4), max_concurrent_streams=streams)
    assert end_of(result) == (WORDS, "stop", "eos")
    assert len(result.fallbacks) == 1
    assert "sample_next is broken" in result.fallbacks[0]
    assert target.num_open == 0
    assert 1 <= len(target.streams) <= 2  # a stream, and a new one if rounds had overtaken it
    for call in target.get_calls("stream_after"):
        (token_ids,) = call.prefixes
        assert token_ids == [PROMPT_ID, *target.answer_ids[: len(token_ids) - 1]]


def test_a_failing_call_of_a_sampled_request_leaves_the_rest_to_the_target_alone() -> None:
    """As of a greedy one."""
    target = Target(bytewise(WORDS), call_s=0.03, faults=[Fault("sample_next", 9)])
    request = ChatRequest.create("tell", temperature=1.0)
    result = probed(TextDraft(WORDS), target, request, lookahead=Fixed(4), max_concurrent_streams=2)
    assert result.content == WORDS
    assert len(result.fallbacks) == 1
    assert "sample_next is broken" in result.fallbacks[0]


def test_a_rest_without_a_finish_is_an_error() -> None:
    """As of the target alone: nobody knows whether it was the whole answer."""
    cuts = [Fault(method, at=10**6, how="cut") for method in ("stream_chat", "stream_after")]
    target = Target(bytewise(WORDS), faults=[Fault("sample_next", 3), *cuts])
    with pytest.raises(TargetError, match="without a finish reason") as caught:
        probed(TextDraft(WORDS), target, lookahead=Fixed(4))
    assert caught.value.partial_text == WORDS


@pytest.mark.parametrize("method", ["encode", "encode_chat"])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_text_that_cannot_be_encoded_any_more_ends_speculation_alone(method: str, at: int) -> None:
    """The target goes on, from where the answer stood."""
    if method == "encode_chat" and at:
        pytest.skip("it is called once")
    target = Target(bytewise(WORDS), call_s=0.02, faults=[Fault(method, at)])
    result = probed(TextDraft(WORDS, token_s=0.01), target, lookahead=Fixed(3))
    assert result.content == WORDS
    assert len(result.fallbacks) == 1
    assert f"{method} is broken" in result.fallbacks[0]


# Where the chat's own stream breaks off.
BREAKS = Fault("stream_chat", at=3, how=TransientError("the connection broke"))


def test_an_answer_goes_on_after_its_prompt_and_not_without_it() -> None:
    """Where the stream breaks off before the prompt's tokens are known, they are waited for."""
    target = Target(bytewise(WORDS), call_s=0.02, encode_chat_s=1.0, faults=[BREAKS])
    result = probed(TextDraft(WORDS), target)
    assert (result.content, result.guarantee) == (WORDS, "exact")
    assert [call.prefixes for call in target.get_calls("stream_after")] == [[[PROMPT_ID, *target.answer_ids[:3]]]]


@pytest.mark.parametrize("continue_prefix", [True, False])
def test_without_the_tokens_of_the_prompt_an_answer_goes_on_by_text(*, continue_prefix: bool) -> None:
    """Or, greedily, is written anew where the target cannot do that: never after something else than the prompt."""
    faults = [BREAKS, Fault("encode_chat")]
    target = Target(bytewise(WORDS), continue_prefix=continue_prefix, faults=faults, call_s=0.02, encode_chat_s=1.0)
    result = probed(TextDraft(WORDS), target)
    assert (result.content, result.guarantee) == (WORDS, "exact-text" if continue_prefix else "exact")
    assert [call.method for call in target.streams] == ["stream_chat", "stream"]
    assert target.requests[1].prefix == (WORDS[:3] if continue_prefix else "")


def test_a_stream_that_breaks_off_behind_its_last_token_has_ended() -> None:
    """The limit is reached: nothing is left to be asked for."""
    target = Target(bytewise(WORDS), call_s=0.02, faults=[BREAKS])
    result = probed(TextDraft("x"), target, ChatRequest.create("tell", max_tokens=3))
    assert end_of(result) == (WORDS[:3], "length", "max_tokens")
    assert len(target.streams) == 1


def raising(_: list[SampledToken]) -> list[SampledToken]:
    raise RuntimeError("a bug")


@pytest.mark.parametrize(
    "spoil", [raising, lambda _: [], lambda tokens: tokens[1:], lambda tokens: [*tokens, tokens[0]]]
)
def test_a_round_that_ends_oddly_is_given_up(spoil: Callable[[list[SampledToken]], list[SampledToken]]) -> None:
    """With an error of another kind, or with too few or too many tokens: the target goes on alone."""
    target = Target(
        bytewise(WORDS), call_s=0.02, spoil_reply=lambda _, number, tokens: spoil(tokens) if number else tokens
    )
    result = probed(TextDraft(WORDS, token_s=0.01), target, lookahead=Fixed(3), max_concurrent_streams=1)
    assert (result.content, result.guarantee, len(result.fallbacks)) == (WORDS, "exact", 1)
    assert len(target.sample_calls) == 2


DECODED = "ab😀cd😀efgh😀ij" * 2


@pytest.mark.parametrize("at", range(9))
def test_a_call_for_text_that_fails_once_loses_and_doubles_none(at: int) -> None:
    """Tokens that a round had confirmed before the failure are shown, once; the rest follows them."""
    target = Target(bytewise(DECODED), call_s=0.02, faults=[Fault("decode", at, 1)])
    result = run_virtual(patient(TextDraft(DECODED), target, lookahead=Fixed(6)).decode("tell"))
    assert result.content == DECODED
    assert len(result.fallbacks) == 1


@pytest.mark.parametrize("at", range(9))
def test_text_that_cannot_be_told_any_more_is_never_wrong(at: int) -> None:
    """Either the target alone tells the rest, or the error has what was confirmed."""
    target = Target(bytewise(DECODED), call_s=0.02, faults=[Fault("decode", at)])
    shown = ""

    async def run() -> None:
        nonlocal shown
        async with patient(TextDraft(DECODED), target, lookahead=Fixed(6)).stream("tell") as events:
            async for event in events:
                shown += event.text if isinstance(event, TextDelta) else ""

    error: TargetError | None = None
    try:
        run_virtual(run())
    except TargetError as raised:
        error = raised
    assert DECODED.startswith(shown)
    assert shown == (DECODED if error is None else error.partial_text)


@pytest.mark.parametrize("at", range(1, 8))
@pytest.mark.parametrize("by_text", [False, True])
def test_a_failure_inside_a_character_gives_it_whole(at: int, by_text: bool) -> None:
    """The bytes confirmed so far are part of it: neither U+FFFD nor the character twice."""
    text = "😀日é😁" * 3
    methods = ("stream_chat", "stream_after") if by_text else ()
    faults = [Fault("sample_next", at), *map(Fault, methods)]
    target = Target(bytewise(text), call_s=0.02, faults=faults, continue_prefix=by_text)
    decoder = patient(TextDraft("x"), target, lookahead=Fixed(2), max_concurrent_streams=1)
    assert run_virtual(decoder.decode("tell")).content == text


def test_failures_of_overlapping_rounds_are_nobodys_concern() -> None:
    """Only the first of several failing rounds is told; asyncio has nothing to say about the others."""
    told: list[Mapping[str, Any]] = []

    async def run() -> SpeculativeResult:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        target = Target(bytewise(WORDS), call_s=0.02, faults=[Fault("sample_next", 6)])
        decoder = probing(TextDraft(WORDS), target, lookahead=Fixed(2), max_concurrent_streams=5)
        result = await decoder.decode("tell")
        gc.collect()
        await asyncio.sleep(0.1)
        return result

    result = run_virtual(run())
    gc.collect()
    assert result.content == WORDS
    assert told == []


def test_the_context_length_ends_the_answer() -> None:
    """No prefix leaves no room for its token; the end is told as the context's."""
    for length in (2, 5, 17, 40):
        target = Target(bytewise(WORDS), call_s=0.01, context_length=length)
        result = probed(TextDraft(WORDS), target, lookahead=Fixed(6), max_concurrent_streams=3)
        assert end_of(result) == (WORDS[: length - 1], "length", "context_length")
        assert max((len(prefix) for call in target.sample_calls for prefix in call.prefixes), default=0) <= length - 1


@pytest.mark.parametrize("num_prompt_tokens", [10, 11])
def test_a_prompt_that_fills_the_context_is_the_targets_to_refuse(num_prompt_tokens: int) -> None:
    """There is no room for a round: the target answers, or refuses, as it would alone; nothing is waited for."""

    async def run() -> None:
        target = Target(
            bytewise(WORDS), context_length=10, num_prompt_tokens=num_prompt_tokens, faults=[Fault("stream", 0)]
        )
        async with asyncio.timeout(100):
            with pytest.raises(TargetError, match="stream is broken"):
                await probing(TextDraft(WORDS), target).decode("tell")
        assert target.sample_calls == []

    run_virtual(run())


# ------------------------------------------------------------------------------------------ when it does not pay


@pytest.mark.parametrize("draft_token_s", [0.0, 0.001, 0.05])
@pytest.mark.parametrize("round_trip_s", [0.0, 0.05])
def test_a_useless_draft_is_given_up_soon(draft_token_s: float, round_trip_s: float) -> None:
    """With the plain speed known, 300 tokens take at most 1.3 times the plain time, the rest of them plainly."""
    text = " ".join(f"word{i}" for i in range(300))
    target = SimulatedTarget(text, first_token_s=0.05, token_s=0.02, round_trip_s=round_trip_s, by_ids=True)

    async def run() -> tuple[SpeculativeResult, SpeculativeResult]:
        plain = SpeculativeConfig(strategy="plain")
        decoder = SpeculativeDecoder(target=target, draft=TextDraft("no " * 400, token_s=draft_token_s), config=plain)
        first = await decoder.decode("tell")
        decoder.config = replace(plain, strategy="probe")
        return first, await decoder.decode("tell")

    plain, result = run_virtual(run())
    assert result.content == text
    assert result.timings.total_s <= 1.3 * plain.timings.total_s
    assert len(result.rounds) < 60


# ------------------------------------------------------------------------------------------ streams without ids


async def without_ids(_: int, events: AsyncIterator[StreamEvent]) -> AsyncGenerator[StreamEvent]:
    """No ids from the third token on."""
    num_seen = 0
    async for event in events:
        num_seen += 1
        yield replace(event, token_ids=None) if isinstance(event, TextDelta) and num_seen > 2 else event


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_stream_that_does_not_tell_its_ids_costs_no_text(temperature: float) -> None:
    """Greedily rows tell them; sampled text, once seen, is not drawn again, and goes on as the stream writes it."""
    target = Target(bytewise(WORDS), call_s=0.02, spoil=without_ids)
    request = ChatRequest.create("tell", temperature=temperature)
    result = probed(TextDraft(WORDS, token_s=0.1), target, request)
    assert end_of(result) == (WORDS, "stop", "eos")
    if temperature == 0.0:
        assert result.fallbacks == ()
        assert result.stats.num_accepted_draft_tokens > 40


def test_a_draft_that_is_always_wrong_is_asked_less_and_less() -> None:
    """It is not begun anew with each token of the stream: that would be a request each, for nothing."""
    target = SimulatedTarget(" ".join(f"word{n}" for n in range(300)), first_token_s=0.05, token_s=0.05, by_ids=True)
    draft = TextDraft("nothing of the kind " * 200, token_s=0.001)
    result = run_virtual(probing(draft, target).decode("tell"))
    assert result.plain_reason == "not_verified"  # no call was timed
    assert draft.num_calls < 60
