"""How many requests a server sees, for each way to fail and each policy: tenacity and the SDKs together."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import httpx2
import pytest
from llm_spec_anthropic import client as anthropic_client
from llm_spec_http import client as http_client
from llm_spec_openai import client as openai_client
from support.doubles import (
    PIECES,
    PROVIDERS,
    TEXT,
    Double,
    Failure,
    by_every_provider,
    forget_environment,
    provider_at,
    serve,
)

from llm_spec import (
    AnswerStarted,
    DraftError,
    GuaranteeWeakened,
    LlmProvider,
    ProviderDraft,
    ReferenceDraft,
    Retry,
    RetryPolicy,
    SpeculativeConfig,
    SpeculativeDecoder,
    SpeculativeFinish,
    SpeculativeResult,
    TextDelta,
    Timeouts,
    TransientError,
)
from llm_spec.contract.endpoint import Discoverable
from llm_spec.contract.provider import Capabilities
from llm_spec.decoder.config import StrategyName
from llm_spec.testing import ScriptedProvider

pytestmark = pytest.mark.virtual_clock

NO_WAIT: dict[str, float] = {"first_wait_s": 0.0, "max_wait_s": 0.0}
PATIENCE_S = 0.25  # of the tests with silence

FAILURES = {
    "429 with Retry-After": Failure(status=429, headers={"Retry-After": "0"}),
    "500": Failure(status=500),
    "529": Failure(status=529),
    "503 with x-should-retry": Failure(status=503, headers={"x-should-retry": "true"}),
    "dropped before a status": Failure(drop_after=-1),
    "dropped before any text": Failure(drop_after=0),
    "timeout before a status": Failure(stall_after=-1),
    "timeout before any text": Failure(stall_after=0),
}
# Which model of which provider goes on from the text of its own answer, and which does not.
CONTINUING = [("anthropic", {"model": "claude-sonnet-4-5"}), ("aiohttp", {"dialect": "vllm"})]
NOT_CONTINUING = [("openai", {}), ("openai given", {}), ("anthropic", {}), ("anthropic given", {}), ("aiohttp", {})]


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_environment(monkeypatch)


@pytest.fixture
async def double() -> AsyncIterator[Double]:
    async with serve() as double:
        yield double


def plainly(target: LlmProvider, max_attempts: int, **config: Any) -> SpeculativeDecoder:
    """A new decoder, with a circuit breaker that remembers nothing."""
    policy = RetryPolicy(max_attempts=max_attempts, **NO_WAIT)
    return SpeculativeDecoder(target=target, draft=None, config=SpeculativeConfig(retry=policy, **config))


async def outcome_of(decoder: SpeculativeDecoder) -> SpeculativeResult | TransientError:
    """The answer, or the error that the caller sees."""
    try:
        return await decoder.decode("q")
    except TransientError as error:
        return error


async def streamed_outcome_of(decoder: SpeculativeDecoder) -> SpeculativeResult | TransientError:
    """The same of a caller who is given each piece, so that nothing can begin anew."""
    try:
        async with decoder.stream("q") as events:
            *_, finish = [event async for event in events]
    except TransientError as error:
        return error
    assert isinstance(finish, SpeculativeFinish)
    assert finish.result is not None
    return finish.result


async def known_to_continue(target: LlmProvider) -> None:
    """It was tried before, which takes two requests."""
    assert isinstance(target, Discoverable)
    await target.discover("continue_prefix")
    assert target.capabilities.continue_prefix


# ------------------------------------------------------------------------------------------ before any text


@pytest.mark.parametrize("name", FAILURES)
async def test_the_server_sees_as_many_requests_as_the_policy_says(name: str) -> None:
    """One for each failure and one for the answer, or as many as are allowed, whoever's client it is."""
    await by_every_provider(lambda double, kind: count(double, kind, name))


async def count(double: Double, kind: str, name: str) -> None:
    is_slow = name.startswith("timeout")
    cases = [(0, 1), (1, 1), (1, 2), (2, 3), (5, 3)] if not is_slow else [(1, 1), (1, 2), (2, 2)]
    timeouts = Timeouts(first_chunk_s=PATIENCE_S) if is_slow else Timeouts()
    async with provider_at(double.url, kind) as target:
        await plainly(target, 1).decode("q")  # what is loaded late is there
        for num_failures, max_attempts in cases:
            double.reset(*[FAILURES[name]] * num_failures)
            outcome = await outcome_of(plainly(target, max_attempts, timeouts=timeouts))
            await double.until_idle()
            assert len(double.bodies) == min(num_failures + 1, max_attempts), (num_failures, max_attempts)
            if num_failures < max_attempts:
                assert isinstance(outcome, SpeculativeResult)
                assert (outcome.content, outcome.guarantee) == (TEXT, "exact")
                assert len(outcome.retries) == num_failures
            else:
                assert isinstance(outcome, TransientError)
                assert outcome.partial_text == ""
                assert outcome.status == FAILURES[name].status
            assert all(body == double.bodies[0] for body in double.bodies)


@pytest.mark.parametrize("stall_after", [-1, 0, 3])
async def test_the_clients_own_timeout(stall_after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client's patience counts like any other failure: it asks once, and the policy again before there is text."""
    short = httpx2.Timeout(10.0, read=PATIENCE_S)
    monkeypatch.setattr(openai_client, "_TIMEOUT", short)
    monkeypatch.setattr(anthropic_client, "_IDLE_S", PATIENCE_S)
    monkeypatch.setattr(http_client, "_STREAM_TIMEOUT", aiohttp.ClientTimeout(total=None, sock_read=PATIENCE_S))

    async def check(double: Double, kind: str) -> None:
        async with provider_at(double.url, kind, timeout_s=PATIENCE_S) as target:
            double.reset(*[Failure(stall_after=stall_after)] * 3)
            outcome = await streamed_outcome_of(plainly(target, 2))
            await double.until_idle()
        assert isinstance(outcome, TransientError)
        assert "was silent for too long" in str(outcome)
        assert len(double.bodies) == (1 if stall_after > 0 else 2)

    await by_every_provider(check)


@pytest.mark.parametrize("kind", PROVIDERS)
async def test_failures_of_several_kinds_share_one_count(double: Double, kind: str) -> None:
    """`max_attempts` is of the answer, not of each kind of failure."""
    names = ["500", "dropped before any text", "529", "429 with Retry-After"]
    async with provider_at(double.url, kind) as target:
        for max_attempts in range(1, 6):
            double.reset(*[FAILURES[name] for name in names])
            outcome = await outcome_of(plainly(target, max_attempts))
            assert len(double.bodies) == min(5, max_attempts)
            assert isinstance(outcome, SpeculativeResult) == (max_attempts == 5)


@pytest.mark.parametrize("kind", PROVIDERS)
async def test_what_will_not_pass_is_asked_once(double: Double, kind: str) -> None:
    """Whatever the policy, and whatever the SDK would do."""
    async with provider_at(double.url, kind) as target:
        for status in (400, 401, 403, 404, 413, 422):
            double.reset(*[Failure(status=status)] * 3)
            with pytest.raises(Exception, match=f"answered {status}") as caught:
                await plainly(target, 3).decode("q")
            assert not isinstance(caught.value, TransientError)
            assert len(double.bodies) == 1


@pytest.mark.parametrize("kind", PROVIDERS)
async def test_connections_that_are_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens: as many connections are tried as there are attempts."""
    loop, ports = asyncio.get_running_loop(), list[int]()
    connect = loop.sock_connect

    async def counted(sock: socket.socket, address: Any) -> None:
        ports.append(address[1])
        await connect(sock, address)

    monkeypatch.setattr(loop, "sock_connect", counted)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        async with provider_at(f"http://127.0.0.1:{port}/v1", kind) as target:
            for max_attempts in (1, 2, 3):
                ports.clear()
                outcome = await outcome_of(plainly(target, max_attempts))
                assert isinstance(outcome, TransientError)
                assert "cannot be reached" in str(outcome)
                assert ports == [port] * max_attempts


@pytest.mark.parametrize(
    "headers",
    [{"Retry-After": "0.12"}, {"retry-after-ms": "120"}, {"retry-after-ms": "120", "Retry-After": "40"}],
    ids=repr,
)
async def test_the_servers_wish_is_obeyed(headers: dict[str, str]) -> None:
    """Although the policy itself would not wait, and an SDK would wait in its own way."""

    async def check(double: Double, kind: str) -> None:
        double.reset(Failure(status=429, headers=headers))
        async with provider_at(double.url, kind) as target:
            outcome = await outcome_of(plainly(target, 2))
        assert isinstance(outcome, SpeculativeResult)
        assert len(double.times) == 2
        assert 0.12 <= double.times[1] - double.times[0] < 2.0

    await by_every_provider(check)


@pytest.mark.parametrize("headers", [{"Retry-After": "0.12"}, {"Retry-After": "3600"}], ids=repr)
@pytest.mark.parametrize("draft", ["works", "fails"])
async def test_the_servers_wish_is_obeyed_beside_a_draft(double: Double, draft: str, headers: dict[str, str]) -> None:
    """Whether or not a draft that failed was told of before the target was asked."""
    double.reset(Failure(status=429, headers=headers))
    given = (
        ReferenceDraft(TEXT) if draft == "works" else ProviderDraft(ScriptedProvider(TEXT, fail_at={0: DraftError("")}))
    )
    policy = RetryPolicy(max_attempts=2, **NO_WAIT)
    async with provider_at(double.url, "openai") as target:
        config = SpeculativeConfig(strategy="predict", retry=policy)
        outcome = await outcome_of(SpeculativeDecoder(target=target, draft=given, config=config))
    if headers["Retry-After"] == "3600":
        assert isinstance(outcome, TransientError)
        assert len(double.times) == 1
    else:
        assert isinstance(outcome, SpeculativeResult)
        assert len(double.times) == 2
        assert 0.12 <= double.times[1] - double.times[0] < 2.0


@pytest.mark.parametrize("strategy", ["race", "regenerate"])
async def test_a_draft_ends_with_its_attempt(strategy: StrategyName) -> None:
    """It writes nothing more, and costs nothing, while the next attempt is waited for."""
    busy = TransientError("answered 429", status=429, retry_after_s=1.0)
    can = Capabilities(continue_prefix=True)
    target = ScriptedProvider(TEXT, delay_first_s=0.1, fail_at={0: busy}, capabilities=can)
    draft = ScriptedProvider(TEXT, delay_piece_s=10.0)
    config = SpeculativeConfig(strategy=strategy, retry=RetryPolicy(max_attempts=2))
    decoder = SpeculativeDecoder(target=target, draft=ProviderDraft(draft), config=config)
    answer = asyncio.create_task(decoder.decode("tell"))
    await asyncio.sleep(0.5)
    assert (len(target.requests), draft.num_open, draft.num_closed) == (1, 0, 1)
    with pytest.raises(TransientError):
        await answer


@pytest.mark.parametrize("kind", PROVIDERS)
async def test_a_wish_that_is_too_long_ends_it(double: Double, kind: str) -> None:
    """One request, and no wait."""
    double.reset(Failure(status=429, headers={"Retry-After": "3600"}))
    async with provider_at(double.url, kind) as target, asyncio.timeout(5):
        outcome = await outcome_of(plainly(target, 3))
    assert isinstance(outcome, TransientError)
    assert (outcome.status, outcome.retry_after_s, len(double.bodies)) == (429, 3600.0, 1)


# ------------------------------------------------------------------------------------------ in the middle


@pytest.mark.parametrize(("kind", "options"), NOT_CONTINUING, ids=str)
@pytest.mark.parametrize("way", ["drop", "silence"])
async def test_a_model_that_cannot_go_on_is_asked_once(
    double: Double, kind: str, options: dict[str, Any], way: str
) -> None:
    """Wherever its answer breaks off: an error that holds what was shown."""
    places = range(1, len(PIECES)) if way == "drop" else (7,)
    timeouts = Timeouts() if way == "drop" else Timeouts(between_chunks_s=PATIENCE_S)
    async with provider_at(double.url, kind, **options) as target:
        for place in places:
            double.reset(Failure(drop_after=place) if way == "drop" else Failure(stall_after=place))
            outcome = await streamed_outcome_of(plainly(target, 3, timeouts=timeouts))
            await double.until_idle()
            assert isinstance(outcome, TransientError)
            assert outcome.partial_text == "".join(PIECES[:place])
            assert len(double.bodies) == 1


@pytest.mark.parametrize(("kind", "options"), NOT_CONTINUING, ids=str)
async def test_a_whole_answer_begins_anew(double: Double, kind: str, options: dict[str, Any]) -> None:
    """Whose caller was given nothing: the same request again, as often as the policy says, and one text."""
    async with provider_at(double.url, kind, **options) as target:
        for num_breaks, max_attempts in itertools.product((1, 2, 3), (1, 2, 3)):
            double.reset(*[Failure(drop_after=5)] * num_breaks)
            outcome = await outcome_of(plainly(target, max_attempts))
            assert len(double.bodies) == min(num_breaks + 1, max_attempts)
            assert all(body == double.bodies[0] for body in double.bodies)
            if num_breaks < max_attempts:
                assert isinstance(outcome, SpeculativeResult)
                assert (outcome.content, len(outcome.retries)) == (TEXT, num_breaks)
                assert (outcome.guarantee, outcome.rounds) == ("exact", ())
                assert outcome.usage is not None
                assert outcome.usage.cancelled_output_tokens > 0
            else:
                assert isinstance(outcome, TransientError)


async def test_a_whole_answer_of_speculation_begins_anew(double: Double) -> None:
    """As well where there is a draft, and where the answer that broke off was an attempt to go on."""
    double.continues = False
    async with provider_at(double.url, "aiohttp", dialect="vllm") as target:
        assert isinstance(target, Discoverable)
        await target.discover("continue_prefix")
        for draft in (ReferenceDraft("something else"), None):
            double.reset(Failure(drop_after=5), Failure(drop_after=7))
            policy = RetryPolicy(max_attempts=3, **NO_WAIT)
            outcome = await SpeculativeDecoder(
                target=target, draft=draft, config=SpeculativeConfig(retry=policy)
            ).decode("q")
            assert outcome.content == TEXT
            assert len(double.bodies) == 3


@pytest.mark.parametrize(("kind", "options"), CONTINUING, ids=str)
@pytest.mark.parametrize("max_attempts", [1, 2, 3])
async def test_a_model_that_can_goes_on_by_one_more_request(
    double: Double, kind: str, options: dict[str, Any], max_attempts: int
) -> None:
    """It holds what was emitted; the text is whole, nothing twice, and the result says how it came about."""
    async with provider_at(double.url, kind, **options) as target:
        await known_to_continue(target)
        for place in range(1, len(PIECES)):
            double.reset(Failure(drop_after=place))
            outcome = await outcome_of(plainly(target, max_attempts))
            shown = "".join(PIECES[:place])
            if max_attempts == 1:
                assert isinstance(outcome, TransientError)
                assert outcome.partial_text == shown
                assert len(double.bodies) == 1
                continue
            assert isinstance(outcome, SpeculativeResult)
            assert (outcome.content, outcome.guarantee, outcome.same_text) == (TEXT, "exact-text", False)
            assert len(double.bodies) == 2
            first, second = (body["messages"] for body in double.bodies)
            assert (second[:-1], second[-1]["role"], second[-1]["content"]) == (first, "assistant", shown)


@pytest.mark.parametrize(("kind", "options"), CONTINUING, ids=str)
async def test_breaks_and_refusals_share_one_count(double: Double, kind: str, options: dict[str, Any]) -> None:
    """An answer that breaks twice and is refused in between: as many requests as allowed, and text as far as it got."""
    failures = [Failure(status=500), Failure(drop_after=3), FAILURES["429 with Retry-After"], Failure(drop_after=4)]
    shown = [0, 0, 3, 3, 7]  # pieces, once so many requests were made
    async with provider_at(double.url, kind, **options) as target:
        await known_to_continue(target)
        for max_attempts in range(1, 6):
            double.reset(*failures)
            outcome = await outcome_of(plainly(target, max_attempts))
            assert len(double.bodies) == max_attempts
            if max_attempts == 5:
                assert isinstance(outcome, SpeculativeResult)
                assert outcome.content == TEXT
                assert len(outcome.retries) == 4
            else:
                assert isinstance(outcome, TransientError)
                assert outcome.partial_text == "".join(PIECES[: shown[max_attempts]])


@pytest.mark.parametrize(("kind", "options"), CONTINUING, ids=str)
async def test_a_server_that_begins_anew_gives_nothing_twice(
    double: Double, kind: str, options: dict[str, Any]
) -> None:
    """Its dialect's servers go on, but this one passes over the field: the error of the break, with what was shown.

    It is tried once: the next answer that breaks asks for nothing more.
    """
    double.continues = False
    async with provider_at(double.url, kind, **options) as target:
        for num_requests in (3, 1):
            double.reset(Failure(drop_after=5))
            outcome = await streamed_outcome_of(plainly(target, 3))
            assert isinstance(outcome, TransientError)
            assert outcome.partial_text == "".join(PIECES[:5])
            assert len(double.bodies) == num_requests


@pytest.mark.parametrize(("kind", "options"), CONTINUING, ids=str)
async def test_a_server_that_cannot_be_tried_now_is_tried_again(
    double: Double, kind: str, options: dict[str, Any]
) -> None:
    """It is down for a while after the break: what it does is found out once it is there again."""
    async with provider_at(double.url, kind, **options) as target:
        double.reset(Failure(drop_after=5), Failure(status=503))
        outcome = await outcome_of(plainly(target, 3))
        assert isinstance(outcome, SpeculativeResult)
        assert (outcome.content, outcome.guarantee, len(outcome.retries)) == (TEXT, "exact-text", 2)
        double.reset(Failure(drop_after=5), *[Failure(status=503)] * 9)
        assert isinstance(await outcome_of(plainly(target, 3)), TransientError)
        assert len(double.bodies) == 3


async def test_what_is_streamed_is_labelled(double: Double) -> None:
    """The events: text, one `Retry` where it broke, what holds then, the rest; never the same piece again."""
    double.reset(Failure(drop_after=5))
    async with (
        provider_at(double.url, "aiohttp", dialect="vllm") as target,
        plainly(target, 3).stream("q", rounds=True) as stream,
    ):
        events = [event async for event in stream]
    kinds = [kind for kind, _ in itertools.groupby(type(event) for event in events)]
    assert kinds == [AnswerStarted, TextDelta, Retry, GuaranteeWeakened, TextDelta, SpeculativeFinish]
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == TEXT
