"""What goes wrong, each as the error that says what to do, after exactly one request."""

from __future__ import annotations

import asyncio
import logging
import traceback

import aiohttp
import httpx2
import pytest
from llm_spec_openai import OpenAIProvider, client
from llm_spec_openai.failures import ModelAddress, convert_sdk_error_to_library
from openai import APITimeoutError, AsyncOpenAI, DefaultAsyncHttpxClient
from support.openai_wire import KEY, QUESTION, provider_of
from support.wire import Wire, chunk, text_chunks

from llm_spec import ConfigError, InvalidRequestError, LlmSpecError, TargetError, TransientError
from llm_spec.kit.server_addresses import ServerAddress

pytestmark = pytest.mark.virtual_clock

SHORT = httpx2.Timeout(connect=5.0, read=0.25, write=5.0, pool=None)


async def failure_from(provider: OpenAIProvider) -> LlmSpecError:
    try:
        with pytest.raises(LlmSpecError) as caught:
            await provider.complete(QUESTION)
    finally:
        await provider.aclose()
    return caught.value


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        (400, InvalidRequestError, "context is too long"),
        (401, TargetError, "check the key (OPENAI_API_KEY)"),
        (403, TargetError, "check the key (OPENAI_API_KEY)"),
        (404, TargetError, "check the model's name"),
        (422, InvalidRequestError, "answered 422"),
        (429, TransientError, "answered 429"),
        (500, TransientError, "answered 500"),
        (529, TransientError, "answered 529"),
        (307, TargetError, "answered 307"),
    ],
)
async def test_refusals(wire: Wire, status: int, kind: type[Exception], words: str) -> None:
    """Each is one line naming provider, model, address and what to do, after one request to one address."""
    wire.status, wire.error = status, {"error": {"message": "context\nis too long", "type": "x", "code": None}}
    wire.error_headers = {"Location": f"{wire.url}/elsewhere"}
    error = await failure_from(provider_of(wire))
    assert type(error) is kind
    for part in ("openai:gpt-4.1", wire.url, words):
        assert part in str(error)
    assert "\n" not in str(error)
    assert len(wire.bodies) == 1


async def test_azures_key_is_called_by_its_name(wire: Wire) -> None:
    """The advice is for the variable that Azure's clients read."""
    wire.status, wire.error = 401, {"error": {"message": "no", "code": "401"}}
    provider = OpenAIProvider.on_azure("mine", endpoint=wire.url, api_key=KEY, api_version="1")
    assert "check the key (AZURE_OPENAI_API_KEY)" in str(await failure_from(provider))


@pytest.mark.parametrize("padding", [0, 290])
async def test_the_key_is_nowhere(wire: Wire, caplog: pytest.LogCaptureFixture, padding: int) -> None:
    """A key that the server repeats is in no message, traceback or log, not even the half of it that fits a quote."""
    caplog.set_level(logging.DEBUG)
    wire.status, wire.error = 401, {"error": {"message": f"{'x' * padding}{KEY} is wrong"}}
    error = await failure_from(provider_of(wire))
    shown = "".join(traceback.format_exception(error)) + caplog.text
    assert "answered 401" in shown
    assert KEY[:9] not in shown


@pytest.mark.parametrize(
    ("headers", "wanted"),
    [({"Retry-After": "7"}, 7.0), ({"retry-after-ms": "1500", "Retry-After": "7"}, 1.5), ({}, None)],
)
async def test_retry_after(wire: Wire, headers: dict[str, str], wanted: float | None) -> None:
    """What the server asks to wait is reported, not waited for."""
    wire.status, wire.error, wire.error_headers = 429, {"error": {"message": "slower"}}, headers
    error = await failure_from(provider_of(wire))
    assert isinstance(error, TransientError)
    assert error.retry_after_s == wanted


async def test_a_server_that_says_whether_to_ask_again(wire: Wire) -> None:
    """`x-should-retry` counts for more than the status, and still no request is repeated here."""
    wire.status, wire.error, wire.error_headers = 429, {"error": {"message": "no credit"}}, {"x-should-retry": "false"}
    assert type(await failure_from(provider_of(wire))) is TargetError
    wire.status, wire.error_headers = 404, {"X-Should-Retry": "true"}
    assert type(await failure_from(provider_of(wire))) is TransientError
    assert len(wire.bodies) == 2


@pytest.mark.parametrize("error", [None, "overloaded", [1], {"detail": "overloaded"}, {"error": "overloaded"}])
async def test_refusals_of_other_forms(wire: Wire, error: object) -> None:
    """Whatever JSON a gateway puts beside a status, it is a line and not a crash."""
    wire.status, wire.error = 503, error
    told = await failure_from(provider_of(wire))
    assert type(told) is TransientError
    assert f"answered 503: {'overloaded' if 'overloaded' in str(error) else ''}" in str(told)


async def test_nobody_there(transport: str) -> None:
    """A wrong address is an error that says so."""
    error = await failure_from(OpenAIProvider("gpt-4o", base_url="http://127.0.0.1:9/v1", api_key=KEY))
    assert type(error) is TransientError
    assert "cannot be reached; check the address (Connect" in str(error), transport


async def test_silence_before_the_answer(wire: Wire, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that says nothing for too long is given up, after one request."""
    monkeypatch.setattr(client, "_TIMEOUT", SHORT)
    wire.is_silent = True
    error = await failure_from(provider_of(wire))
    assert type(error) is TransientError
    assert "was silent for too long" in str(error), transport
    assert len(wire.bodies) == 1


async def test_silence_in_the_answer(wire: Wire, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is for every piece, and what had come before it stays known."""
    monkeypatch.setattr(client, "_TIMEOUT", SHORT)
    wire.frames, wire.pause_s = text_chunks(*"abcd"), 0.08
    provider = provider_of(wire)
    assert (await provider.complete(QUESTION)).content == "abcd"
    wire.frames = [chunk({"content": "half"}), *[b""] * 20]
    error = await failure_from(provider)
    assert isinstance(error, TransientError)
    assert "was silent for too long" in str(error), transport
    assert error.partial_text == "half"
    assert len(wire.bodies) == 2


async def test_dropped_connection(wire: Wire, transport: str) -> None:
    """A connection that breaks in the middle is an error with the text so far, and no timeout as the SDK calls it."""
    wire.frames, wire.drop = [chunk({"content": "half"})], True
    error = await failure_from(provider_of(wire))
    assert isinstance(error, TransientError)
    assert "broke the connection" in str(error), transport
    assert error.partial_text == "half"
    assert len(wire.bodies) == 1


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_refusal_without_its_text(
    wire: Wire, transport: str, monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    """A refusal whose text never comes is given up as well, and its connection closed, whoever gives it up."""
    monkeypatch.setattr(client, "_TIMEOUT", SHORT)
    wire.status, wire.cuts_refusal = 500, True
    provider = provider_of(wire)
    asking = asyncio.create_task(provider.complete(QUESTION))
    if is_cancelled:
        await asyncio.sleep(0.1)
        asking.cancel()
    (outcome,) = await asyncio.gather(asking, return_exceptions=True)
    assert isinstance(outcome, asyncio.CancelledError if is_cancelled else TransientError)
    await wire.until_idle()
    assert wire.num_open == 0, transport
    await provider.aclose()


async def test_a_given_client_is_not_repeated_either(wire: Wire) -> None:
    """Retries that the owner of a client set are not ours."""
    wire.status, wire.error = 500, {}
    async with AsyncOpenAI(
        base_url=wire.url, api_key=KEY, max_retries=5, http_client=DefaultAsyncHttpxClient()
    ) as given:
        await failure_from(OpenAIProvider("gpt-4o", client=given))
    assert len(wire.bodies) == 1


async def test_a_failure_is_not_the_end(wire: Wire, transport: str) -> None:
    """A provider answers again when its server does."""
    wire.frames, wire.drop = [chunk({"content": "half"})], True
    provider = provider_of(wire)
    with pytest.raises(TransientError):
        await provider.complete(QUESTION)
    wire.frames, wire.drop = text_chunks("x"), False
    assert (await provider.complete(QUESTION)).content == "x", transport
    await provider.aclose()


@pytest.mark.parametrize(
    ("behind", "words"),
    [
        (
            [httpx2.ConnectTimeout("slow"), TimeoutError()],
            "cannot be reached; check the address (ConnectTimeout: slow)",
        ),
        ([httpx2.ConnectTimeout(""), aiohttp.ServerDisconnectedError()], "broke the connection (ServerDisconnected"),
        ([httpx2.ConnectTimeout(""), aiohttp.ConnectionTimeoutError("slow")], "cannot be reached; check the address"),
        ([httpx2.ReadTimeout("")], "was silent for too long (ReadTimeout)"),
    ],
)
def test_what_the_sdk_calls_a_timeout(behind: list[Exception], words: str) -> None:
    """Its one timeout error has several causes, which are what is reported."""
    error: BaseException = APITimeoutError(request=httpx2.Request("POST", "http://host"))
    last = error
    for cause in behind:
        last.__cause__ = cause
        last = cause
    assert isinstance(error, APITimeoutError)
    told = convert_sdk_error_to_library(
        error, ModelAddress("openai:x", ServerAddress(url="http://host"), "OPENAI_API_KEY"), secret=""
    )
    assert type(told) is TransientError
    assert words in str(told)


def test_arguments_that_contradict() -> None:
    """An address or key beside a whole client would be ignored; it is refused."""
    given = AsyncOpenAI(api_key=KEY)
    with pytest.raises(ConfigError, match="leave out base_url and api_key"):
        OpenAIProvider("gpt-4o", client=given, api_key=KEY)
