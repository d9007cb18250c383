"""Retries, timeouts, the circuit breaker and limits: by virtual clock, and counted at a server's side."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_spec_http import DIALECTS, HttpProvider
from support.failing_targets import CONTINUES, NO_WAIT, OVERLOADED, WORDS, Failing, plainly

from llm_spec import (
    BreakerPolicy,
    ChatRequest,
    CircuitOpenError,
    ConcurrencyLimit,
    ConfigError,
    Finish,
    InvalidRequestError,
    ProviderDraft,
    ReasoningDelta,
    Retry,
    RetryPolicy,
    SpeculativeConfig,
    SpeculativeDecoder,
    SpeculativeFinish,
    SpeculativeResult,
    StreamEvent,
    TargetError,
    TextDelta,
    Timeouts,
    ToolCallDelta,
    TransientError,
)
from llm_spec.contract.draft import DraftPiece
from llm_spec.contract.provider import Capabilities
from llm_spec.decoder.breaker import CircuitBreaker, GuardedDraft
from llm_spec.kit.http_errors import make_status_error, read_retry_after_s
from llm_spec.measure.tokens import split_into_pieces
from llm_spec.testing import ScriptedProvider
from llm_spec.testing.clock import run_virtual
from llm_spec.testing.server import MODEL, ScriptedModelServer, ServerFaults, ServerLatency

pytestmark = pytest.mark.virtual_clock


async def events_of(decoder: SpeculativeDecoder, request: ChatRequest | None = None) -> list[StreamEvent]:
    async with decoder.stream(request or ChatRequest.create("q"), rounds=True) as events:
        return [event async for event in events]


def text_of(events: list[StreamEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


# ------------------------------------------------------------------------------------------ before anything came


@pytest.mark.parametrize(("num_failures", "max_attempts"), [(0, 1), (1, 2), (2, 3), (4, 5)])
def test_a_target_that_fails_for_a_while_is_asked_again(num_failures: int, max_attempts: int) -> None:
    """As often as the policy says; the answer is whole, and says what happened."""
    target = Failing(*[(0, OVERLOADED)] * num_failures)
    result = run_virtual(plainly(target, retry=RetryPolicy(max_attempts=max_attempts)).decode("q"))
    assert (result.content, result.guarantee, result.same_text) == (WORDS, "exact", True)
    assert len(target.requests) == num_failures + 1
    assert result.retries == ("TransientError: overloaded",) * num_failures
    assert target.num_open == 0


@pytest.mark.parametrize("max_attempts", [1, 2, 5])
def test_the_last_error_is_raised(max_attempts: int) -> None:
    """It is the target's own; no request more than allowed was made."""
    target = Failing(*[(0, TransientError(f"number {n}", status=429)) for n in range(9)])
    with pytest.raises(TransientError, match=f"number {max_attempts - 1}"):
        run_virtual(plainly(target, retry=RetryPolicy(max_attempts=max_attempts)).decode("q"))
    assert len(target.requests) == max_attempts


@pytest.mark.parametrize("error", [TargetError("no"), InvalidRequestError("no"), RuntimeError("no"), OSError("no")])
def test_what_will_not_pass_is_not_tried_again(error: Exception) -> None:
    """Only what is said to be transient is."""
    target = Failing((0, error))
    with pytest.raises((TargetError, InvalidRequestError), match="no"):
        run_virtual(plainly(target).decode("q"))
    assert len(target.requests) == 1


def test_the_server_says_how_long_to_wait() -> None:
    """It is obeyed to the tick; where it says nothing the wait grows, and is never longer than the policy's."""
    policy = RetryPolicy(max_attempts=6, first_wait_s=0.5, max_wait_s=2.0)
    told = Failing((0, TransientError("wait", retry_after_s=7.5)))
    run_virtual(plainly(told, retry=policy).decode("q"))
    assert told.times[1] - told.times[0] == pytest.approx(7.5)
    waits: list[list[float]] = []
    for _ in range(60):
        silent = Failing(*[(0, OVERLOADED)] * 4)
        run_virtual(plainly(silent, retry=policy).decode("q"))
        waits.append([b - a for a, b in zip(silent.times, silent.times[1:], strict=False)])
    for number, longest in enumerate([0.5, 1.0, 2.0, 2.0]):
        of_this = [wait[number] for wait in waits]
        assert max(of_this) <= longest + 1e-9
        assert max(of_this) > 0.8 * longest
        assert min(of_this) < 0.2 * longest


def test_a_server_that_wants_too_long_is_not_waited_for() -> None:
    target = Failing((0, TransientError("come back tomorrow", retry_after_s=86_400.0)))
    with pytest.raises(TransientError, match="tomorrow"):
        run_virtual(plainly(target).decode("q"))
    assert len(target.requests) == 1


def test_the_deadline_ends_the_waiting() -> None:
    """The answer is what there is: nothing."""
    target = Failing((0, TransientError("wait", retry_after_s=50.0)))

    async def check() -> None:
        result = await plainly(target, deadline_s=2.0).decode("q")
        assert (result.content, result.stopped_by) == ("", "deadline")
        assert asyncio.get_running_loop().time() == pytest.approx(2.0)

    run_virtual(check())
    assert len(target.requests) == 1


@pytest.mark.parametrize("after_s", [0.1, 1.0])
def test_cancelling_passes_through(after_s: float) -> None:
    """While an answer is awaited and while the next attempt is; nothing is asked afterwards."""
    target = Failing((0, TransientError("wait", retry_after_s=5.0)), delay_first_s=0.5)

    async def check() -> None:
        task = asyncio.create_task(plainly(target).decode("q"))
        await asyncio.sleep(after_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(60)

    run_virtual(check())
    assert (len(target.requests), target.num_open) == (1, 0)


# ------------------------------------------------------------------------------------------ in the middle


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 39), max_size=4), st.sampled_from([None, 1, 7, 39, 60]))
def test_an_answer_that_breaks_off_goes_on(breaks: list[int], max_tokens: int | None) -> None:
    """Wherever it does, however often: nothing twice, nothing lost, and no more tokens than asked for."""
    broken = TransientError("the connection broke")
    target = Failing(*[(at, broken) for at in breaks], capabilities=CONTINUES)
    decoder = plainly(target, retry=replace(NO_WAIT, max_attempts=9))
    events = run_virtual(events_of(decoder, ChatRequest.create("q", max_tokens=max_tokens)))
    assert text_of(events) == "".join(split_into_pieces(WORDS)[:max_tokens])
    finish = events[-1]
    assert isinstance(finish, SpeculativeFinish)
    assert finish.result is not None
    num_retries = sum(isinstance(event, Retry) for event in events)
    assert len(finish.result.retries) == num_retries
    if num_retries:
        assert (finish.result.guarantee, finish.result.same_text) == ("exact-text", False)
        usage = finish.result.usage
        assert usage is not None
        assert usage.output_tokens == len(split_into_pieces(text_of(events)))
        assert (usage.input_tokens > usage.extra_input_tokens, usage.cancelled_output_tokens) == (True, 0)
        assert all(event.is_continued for event in events if isinstance(event, Retry))


@pytest.mark.parametrize("max_tokens", [1, 7])
@pytest.mark.parametrize("capabilities", [CONTINUES, Capabilities()])
def test_an_answer_that_breaks_at_its_cap_has_ended(max_tokens: int, capabilities: Capabilities) -> None:
    """Only its end was missing: no error, and nothing more is asked."""
    target = Failing((max_tokens, TransientError("it broke")), capabilities=capabilities)
    result = run_virtual(plainly(target, retry=NO_WAIT).decode("q", max_tokens=max_tokens))
    assert result.content == "".join(split_into_pieces(WORDS)[:max_tokens])
    assert (result.finish_reason, result.stopped_by, len(target.requests)) == ("length", "max_tokens", 1)


def test_nested_decoders_fail_once() -> None:
    """A decoder as target: the inner one owns the retries of its target, the outer one those of the inner."""
    target = ScriptedProvider(WORDS, fail_at={0: TransientError("down", status=500)}, capabilities=CONTINUES)
    once, twice = (SpeculativeConfig(retry=replace(NO_WAIT, max_attempts=number)) for number in (1, 2))
    outer = SpeculativeDecoder(
        target=SpeculativeDecoder(target=target, draft=None, config=once), draft=None, config=twice
    )
    with pytest.raises(TransientError, match="down"):
        run_virtual(outer.decode("q"))
    assert (len(target.requests), target.num_open) == (2, 0)


def test_whitespace_at_the_break_is_not_sent() -> None:
    """Templates strip it; the answer has it once."""
    text = "one\n\n  two\n\n  three"
    for size in (1, 2, 3, 4):
        for at in range(1, len(text) // size):
            target = Failing((at, OVERLOADED), script=text, piece_size=size, capabilities=CONTINUES)
            target.requests.clear()
            events = run_virtual(events_of(plainly(target, retry=NO_WAIT)))
            assert text_of(events) == text
            assert target.requests[1].prefix == text[: at * size].rstrip()


def breaking(at: int, **options: Any) -> Failing:
    return Failing((at, TransientError("it broke")), **options)


@pytest.mark.parametrize(
    ("target", "request_"),
    [
        (breaking(5), ChatRequest.create("q")),
        (breaking(5, capabilities=CONTINUES), ChatRequest.create("q", tools=[{"type": "function"}])),
        (breaking(5, capabilities=CONTINUES), ChatRequest.create("q", response_format={"type": "json"})),
        (
            breaking(1, script=[ReasoningDelta("hm"), TextDelta("x"), Finish("stop")], capabilities=CONTINUES),
            ChatRequest.create("q"),
        ),
        (
            breaking(1, script=[ToolCallDelta(0, "a", "f", "{"), Finish("tool_calls")], capabilities=CONTINUES),
            ChatRequest.create("q"),
        ),
    ],
    ids=["cannot continue", "tools", "response_format", "reasoning", "a tool call"],
)
def test_what_cannot_go_on_is_an_error_with_the_text_so_far(target: Failing, request_: ChatRequest) -> None:
    """Never a second answer behind the first."""
    shown: list[StreamEvent] = []

    async def check() -> None:
        async with plainly(target, retry=NO_WAIT).stream(request_) as events:
            async for event in events:
                shown.append(event)  # noqa: PERF401 - it is read when this fails

    with pytest.raises(TransientError, match="it broke") as caught:
        run_virtual(check())
    assert caught.value.partial_text == text_of(shown)
    assert len(target.requests) == 1


def test_a_target_that_does_not_go_on_where_it_was_is_found_out() -> None:
    """Whitespace that it does not repeat: the seam does not fit."""
    answers = iter(["one \n two", "other"])
    target = breaking(2, script=lambda _: next(answers), piece_size=3, capabilities=CONTINUES)
    with pytest.raises(TargetError, match="does not go on"):
        run_virtual(plainly(target, retry=NO_WAIT).decode("q"))


# ------------------------------------------------------------------------------------------ silence


@pytest.mark.parametrize("max_attempts", [1, 3])
def test_silence_before_the_first_piece(max_attempts: int) -> None:
    target = ScriptedProvider(WORDS, delay_first_s=10.0)
    config = {"timeouts": Timeouts(first_chunk_s=3.0), "retry": replace(NO_WAIT, max_attempts=max_attempts)}

    async def check() -> None:
        with pytest.raises(TransientError, match=r"silent for 3\.0 s"):
            await plainly(target, **config).decode("q")
        assert asyncio.get_running_loop().time() == pytest.approx(3.0 * max_attempts)

    run_virtual(check())
    assert (len(target.requests), target.num_open) == (max_attempts, 0)


def test_silence_between_two_pieces() -> None:
    """It is a break like any other."""
    target = ScriptedProvider("one two three", delay_piece_s=10.0)
    with pytest.raises(TransientError, match=r"silent for 4\.0 s") as caught:
        run_virtual(plainly(target, timeouts=Timeouts(first_chunk_s=12.0, between_chunks_s=4.0)).decode("q"))
    assert caught.value.partial_text
    assert target.num_open == 0


def test_slow_is_not_silent() -> None:
    target = ScriptedProvider(WORDS, delay_first_s=2.9, delay_piece_s=0.9)
    config = {"timeouts": Timeouts(first_chunk_s=4.0, between_chunks_s=1.0)}
    assert run_virtual(plainly(target, **config).decode("q")).content == WORDS


# ------------------------------------------------------------------------------------------ configuration


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: RetryPolicy(max_attempts=0), "max_attempts"),
        (lambda: RetryPolicy(first_wait_s=-1.0), "first_wait_s"),
        (lambda: RetryPolicy(first_wait_s=2.0, max_wait_s=1.0), "max_wait_s"),
        (lambda: RetryPolicy(max_retry_after_s=-1.0), "max_retry_after_s"),
        (lambda: Timeouts(first_chunk_s=0.0), "first_chunk_s"),
        (lambda: Timeouts(between_chunks_s=-1.0), "between_chunks_s"),
        (lambda: ConcurrencyLimit(0), "max_requests"),
        (lambda: BreakerPolicy(max_failures=-1), "max_failures"),
    ],
)
def test_values_out_of_range_are_named(make: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        make()


# ------------------------------------------------------------------------------------------ statuses and headers


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 502, 503, 529])
def test_transient_statuses(status: int) -> None:
    error = make_status_error(status, {"retry-after": "3"}, "a line")
    assert isinstance(error, TransientError)
    assert (error.status, error.retry_after_s, str(error)) == (status, 3.0, "a line")


@pytest.mark.parametrize("status", [307, 401, 403, 404, 451])
def test_lasting_statuses(status: int) -> None:
    assert type(make_status_error(status, {}, "a line")) is TargetError


@pytest.mark.parametrize("status", [400, 413, 422])
def test_invalid_requests(status: int) -> None:
    assert type(make_status_error(status, {}, "a line")) is InvalidRequestError


def test_the_server_may_say_whether_to_ask_again() -> None:
    assert type(make_status_error(500, {"x-should-retry": "false"}, "")) is TargetError
    assert type(make_status_error(404, {"x-should-retry": "true"}, "")) is TransientError


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after-ms": "1500", "retry-after": "9"}, 1.5),
        ({"retry-after-ms": "soon", "retry-after": "9"}, 9.0),
        ({"retry-after": "0.25"}, 0.25),
        ({"retry-after": "-4"}, 0.0),
        ({"retry-after": "tomorrow"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
    ],
)
def test_retry_after(headers: dict[str, str], seconds: float | None) -> None:
    assert read_retry_after_s(headers) == seconds


def test_retry_after_a_date() -> None:
    from datetime import UTC, datetime

    now = datetime(2015, 10, 21, 7, 27, 30, tzinfo=UTC)
    assert read_retry_after_s({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, now) == 30.0
    assert read_retry_after_s({"retry-after": "Wed, 21 Oct 2015 07:27:00 GMT"}, now) == 0.0


# ------------------------------------------------------------------------------------------ counted at the server


async def asked(server_url: str, **config: Any) -> SpeculativeResult:
    provider = HttpProvider(MODEL, base_url=server_url, dialect=DIALECTS["vllm"])
    try:
        return await plainly(provider, **config).decode("q", temperature=0.0)
    finally:
        await provider.aclose()


FAILURES = [
    ServerFaults(status=429, retry_after_s=0),
    ServerFaults(status=500),
    ServerFaults(status=529),
    ServerFaults(drop_after=0),
]


@pytest.mark.parametrize("faults", FAILURES, ids=repr)
@pytest.mark.parametrize("num_failures", [1, 2, 5])
async def test_requests_are_as_many_as_the_policy_says(faults: ServerFaults, num_failures: int) -> None:
    """One for each failure and one for the answer, or as many as are allowed."""
    faults = replace(faults, num_requests=num_failures)
    async with ScriptedModelServer(WORDS, latency=ServerLatency(), faults=faults) as server:
        if num_failures < 3:
            assert (await asked(server.url, retry=replace(NO_WAIT, max_attempts=3))).content == WORDS
        else:
            with pytest.raises(TransientError):
                await asked(server.url, retry=replace(NO_WAIT, max_attempts=3))
        assert len(server.requests) == min(num_failures + 1, 3)


async def test_a_silent_server_is_asked_again() -> None:
    faults = ServerFaults(stall_after=0, num_requests=1)
    async with ScriptedModelServer(WORDS, latency=ServerLatency(), faults=faults) as server:
        result = await asked(server.url, retry=NO_WAIT, timeouts=Timeouts(first_chunk_s=0.2))
        assert (result.content, len(server.requests)) == (WORDS, 2)


@pytest.mark.parametrize("after", [1, 7, 39])
async def test_a_dropped_stream_is_continued_by_one_request(after: int) -> None:
    """Which holds what was emitted, once two have found out that the server goes on from a text."""
    faults = ServerFaults(drop_after=after, num_requests=1)
    async with ScriptedModelServer(WORDS, latency=ServerLatency(), faults=faults, continues_prefix="fields") as server:
        result = await asked(server.url, retry=NO_WAIT)
        assert (result.content, result.guarantee) == (WORDS, "exact-text")
        first, *others, last = (body["messages"] for body in server.requests)
        assert len(others) == 2
        assert (last[:-1], last[-1]["role"]) == (first, "assistant")
        assert WORDS.startswith(last[-1]["content"])


async def test_nobody_listens() -> None:
    """A connection that is refused is tried again, too."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        provider, num_asked = HttpProvider(MODEL, base_url=url), 0
        stream = provider.stream

        def counted(request: ChatRequest) -> Any:
            nonlocal num_asked
            num_asked += 1
            return stream(request)

        provider.stream = counted
        try:
            with pytest.raises(TransientError, match="cannot be reached"):
                await plainly(provider, retry=NO_WAIT).decode("q")
        finally:
            await provider.aclose()
        assert num_asked == 3


async def test_a_draft_is_asked_once() -> None:
    """Its failures are nobody's to repeat."""
    async with (
        ScriptedModelServer(WORDS, latency=ServerLatency(first_token_s=0.05), continues_prefix="fields") as server,
        ScriptedModelServer(WORDS, faults=ServerFaults(status=500), continues_prefix="fields") as broken,
    ):
        target = HttpProvider(MODEL, base_url=server.url, dialect=DIALECTS["vllm"])
        draft = HttpProvider(MODEL, base_url=broken.url, dialect=DIALECTS["vllm"])
        try:
            for strategy in ("race", "probe"):
                config = SpeculativeConfig(strategy=strategy)  # type: ignore[arg-type]
                decoder = SpeculativeDecoder(target=target, draft=draft, config=config)
                await decoder.discover()
                result = await decoder.decode("q", temperature=0.0)
                assert result.content == WORDS
                assert len(result.fallbacks) == 1
        finally:
            await draft.aclose()
            await target.aclose()
        assert len(broken.requests) == 2


def test_pieces_of_a_draft_pass_the_guard() -> None:
    """What it gives and what it is stay as they were."""

    async def check() -> list[DraftPiece]:
        guarded = GuardedDraft(ProviderDraft(ScriptedProvider("a b")), CircuitBreaker("d"), ConcurrencyLimit(1), 30.0)
        assert (guarded.name, guarded.capabilities.continues_prefix) == ("scripted:script", False)
        async with guarded.draft(ChatRequest.create("q"), 10) as pieces:
            return [piece async for piece in pieces]

    assert "".join(piece.text for piece in run_virtual(check())) == "a b"


@pytest.mark.parametrize("status", [500, 501, 505])
def test_an_answer_of_500_closes_a_model_to_nobody(status: int) -> None:
    """It may be the request's doing; the server is alive, as it answers."""
    target = Failing(*[(0, TransientError("an error", status=status))] * 20)

    async def check() -> None:
        decoder = plainly(target, retry=RetryPolicy(max_attempts=2, first_wait_s=0.0, max_wait_s=0.0))
        for _ in range(10):
            with pytest.raises(TransientError):
                await decoder.decode("q")
        assert not decoder.is_target_circuit_open
        assert (await decoder.decode("q")).content == WORDS

    run_virtual(check())


@pytest.mark.parametrize("status", [None, 502, 503, 504, 522, 529])
def test_all_attempts_of_a_request_are_one_failure(status: int | None) -> None:
    """As it may be what breaks the server; as many requests as the policy says open the circuit, for so long."""
    target = Failing(*[(0, TransientError("gone", status=status))] * 6)

    async def check() -> None:
        retry = RetryPolicy(max_attempts=3, first_wait_s=0.0, max_wait_s=0.0)
        decoder = plainly(target, retry=retry, breaker=BreakerPolicy(max_failures=2, open_s=7.0))
        with pytest.raises(TransientError):
            await decoder.decode("q")
        assert (len(target.requests), decoder.is_target_circuit_open) == (3, False)
        with pytest.raises(TransientError):
            await decoder.decode("q")
        assert decoder.is_target_circuit_open
        with pytest.raises(CircuitOpenError) as caught:
            await decoder.decode("q")
        assert caught.value.retry_after_s == pytest.approx(7.0)

    run_virtual(check())


def test_one_clients_failures_close_a_model_to_nobody_else() -> None:
    """Its requests may be what breaks the connection; when those of another fail, too, it is the server."""
    fails, answers = (0, OVERLOADED), (99, OVERLOADED)
    target = Failing(*[fails] * 3, answers, *[fails] * 4)

    async def check() -> None:
        decoder = plainly(target, retry=RetryPolicy(max_attempts=1), breaker=BreakerPolicy(max_failures=3))
        one, another, third = (decoder.copy_for_new_client() for _ in range(3))
        for _ in range(3):
            with pytest.raises(TransientError):
                await one.decode("q")
        with pytest.raises(CircuitOpenError):
            await one.decode("q")
        assert (await another.decode("q")).content == WORDS  # which shows that the server is alive
        assert not one.is_target_circuit_open
        for client in (one, one, one, another):
            with pytest.raises(TransientError):
                await client.decode("q")
        for client in (one, another, third):
            assert client.is_target_circuit_open
            with pytest.raises(CircuitOpenError):
                await client.decode("q")
        assert len(target.requests) == 8

    run_virtual(check())


def test_one_clients_broken_drafts_are_anothers_too_only_when_they_fail_there() -> None:
    """A draft's circuit is like a target's."""
    draft = Failing(*[(0, OVERLOADED)] * 2)
    target = ScriptedProvider(WORDS, capabilities=CONTINUES, delay_piece_s=0.01)

    async def check() -> None:
        config = SpeculativeConfig(strategy="race", baseline_every=0, breaker=BreakerPolicy(max_failures=2))
        decoder = SpeculativeDecoder(target=target, draft=draft, config=config)
        one, another = decoder.copy_for_new_client(), decoder.copy_for_new_client()
        for _ in range(2):
            assert (await one.decode("q", temperature=0.0)).fallbacks
        assert (one.is_draft_circuit_open, another.is_draft_circuit_open) == (True, False)
        assert not (await another.decode("q", temperature=0.0)).fallbacks

    run_virtual(check())


def test_a_breaker_that_never_opens() -> None:
    """Some have their own."""
    target = Failing(*[(0, OVERLOADED)] * 30)

    async def check() -> None:
        decoder = plainly(target, retry=RetryPolicy(max_attempts=1), breaker=BreakerPolicy(max_failures=0))
        for _ in range(30):
            with pytest.raises(TransientError):
                await decoder.decode("q")
        assert (await decoder.decode("q")).content == WORDS

    run_virtual(check())
