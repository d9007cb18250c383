"""AnthropicProvider against a real server on loopback: every oddity of the protocol, and whoever goes away closes."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import re
import socket
import subprocess
import sys
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from llm_spec_anthropic import ANTHROPIC, AnthropicProvider, client
from support.messages_wire import PROSE, MessagesWire, answer_frames, begin, end, frame, text_frames

from llm_spec import (
    ChatMessage,
    ChatRequest,
    ConfigError,
    Finish,
    InvalidRequestError,
    ReasoningDelta,
    ReasoningDetail,
    ReferenceDraft,
    SpeculativeConfig,
    SpeculativeDecoder,
    StreamEvent,
    TargetError,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    TransientError,
    Usage,
    open_provider,
)
from llm_spec.contract.errors import MissingExtraError
from llm_spec.testing import check_provider_conformance

pytestmark = pytest.mark.virtual_clock

KEY = "sk-ant-very-secret"
MODEL = "claude-sonnet-4-5"
QUESTION = ChatRequest.create("question")
HALF = [*begin(), *text_frames("half")[:-1]]
TRANSPORTS = ["aiohttp", "httpx2"]


@asynccontextmanager
async def provider_of(wire: MessagesWire, transport: str = "aiohttp") -> AsyncIterator[AnthropicProvider]:
    """A provider with a client of its own (aiohttp), or with one that is given and would retry (httpx2)."""
    if transport == "aiohttp":
        provider = AnthropicProvider(MODEL, base_url=wire.url, api_key=KEY)
        yield provider
        await provider.aclose()
        return
    async with AsyncAnthropic(base_url=wire.url, api_key=KEY, max_retries=3) as given:
        provider = AnthropicProvider(MODEL, client=given)
        yield provider
        await provider.aclose()
        assert not given.is_closed()


async def events_of(wire: MessagesWire, request: ChatRequest = QUESTION) -> list[StreamEvent]:
    async with provider_of(wire) as provider, provider.stream(request) as events:
        return [event async for event in events]


async def failure_of(wire: MessagesWire, transport: str = "aiohttp") -> Exception:
    """What a request raises; the transport must have asked once."""
    async with provider_of(wire, transport) as provider:
        with pytest.raises(Exception) as caught:  # noqa: PT011 - the tests look at it
            await provider.complete(QUESTION)
    assert len(wire.bodies) == 1
    return caught.value


# ---------------------------------------------------------------------------------------------- events


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_text_and_usage(wire: MessagesWire, transport: str) -> None:
    """Text comes piece by piece; input counts its cached parts, and the last output count stands, not the sum."""
    wire.frames = [
        *begin(input_tokens=7, cache_read_input_tokens=4, cache_creation_input_tokens=2, output_tokens=3),
        *text_frames("", "héllo", " world"),
        frame("message_delta", delta={"stop_reason": None}, usage={"output_tokens": 5}),
        *end(output_tokens=9, output_tokens_details={"thinking_tokens": 2}),
    ]
    usage = Usage(
        input_tokens=13, output_tokens=9, cached_input_tokens=4, cache_write_input_tokens=2, reasoning_tokens=2
    )
    async with provider_of(wire, transport) as provider, provider.stream(QUESTION) as events:
        assert [event async for event in events] == [
            TextDelta("héllo"),
            TextDelta(" world"),
            Finish("stop", usage, "eos"),
        ]
    assert any(KEY in value for value in wire.headers[0].values())


async def test_a_sessions_id_goes_along(wire: MessagesWire) -> None:
    """In the header that the config names, beside that of betas."""
    request = ChatRequest.create("question", session_id="chat-17", extra={"betas": ["some-beta"]})
    async with provider_of(wire, TRANSPORTS[0]) as provider:
        for header in ("x-session-id", None):
            await SpeculativeDecoder(
                target=provider, draft=None, config=SpeculativeConfig(session_header=header)
            ).decode(request)
    first, second = ({name.lower(): value for name, value in headers.items()} for headers in wire.headers)
    assert first["x-session-id"] == "chat-17"
    assert "x-session-id" not in second
    assert first["anthropic-beta"] == second["anthropic-beta"] == "some-beta"


async def test_counts_that_are_lowered(wire: MessagesWire) -> None:
    """After the context was compacted the last counts are lower, down to 0; a count of null changes nothing."""
    wire.frames = [
        *begin(input_tokens=181, cache_read_input_tokens=55_000, cache_creation_input_tokens=96),
        *text_frames("x"),
        *end(input_tokens=181, cache_read_input_tokens=0, cache_creation_input_tokens=None, output_tokens=9),
    ]
    (*_, finish) = await events_of(wire)
    usage = Usage(input_tokens=181 + 96, cache_write_input_tokens=96, output_tokens=9)
    assert finish == Finish("stop", usage, "eos")


async def test_a_server_that_does_not_count(wire: MessagesWire) -> None:
    """Zeros alone are no usage."""
    wire.frames = [*begin(input_tokens=0, output_tokens=0), *text_frames("x"), *end(output_tokens=0)]
    assert (await events_of(wire))[-1] == Finish("stop", None, "eos")


async def test_tool_calls(wire: MessagesWire) -> None:
    """Calls are counted among themselves, arguments add up, a call without input has an empty object."""
    calls = [
        frame("content_block_start", index=1, content_block={"type": "tool_use", "id": "a", "name": "f", "input": {}}),
        *(
            frame("content_block_delta", index=1, delta={"type": "input_json_delta", "partial_json": piece})
            for piece in ("", '{"x"', ": 1}")
        ),
        frame("content_block_stop", index=1),
        frame("content_block_start", index=2, content_block={"type": "tool_use", "id": "b", "name": "g", "input": {}}),
        frame("content_block_delta", index=2, delta={"type": "input_json_delta", "partial_json": ""}),
        frame("content_block_stop", index=2),
    ]
    wire.frames = [*begin(), *text_frames("let me see"), *calls, *end("tool_use")]
    assert (await events_of(wire))[1:-1] == [
        ToolCallDelta(0, "a", "f"),
        ToolCallDelta(0, arguments='{"x"'),
        ToolCallDelta(0, arguments=": 1}"),
        ToolCallDelta(1, "b", "g"),
        ToolCallDelta(1, arguments="{}"),
    ]
    async with provider_of(wire) as provider:
        answer = await provider.complete(QUESTION)
    assert answer.message.tool_calls == (ToolCall("a", "f", '{"x": 1}'), ToolCall("b", "g", "{}"))
    assert (answer.finish_reason, answer.stopped_by) == ("tool_calls", "tool_calls")


async def test_input_that_comes_with_the_call(wire: MessagesWire) -> None:
    """A server that tells the arguments at once is understood too."""
    block = {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}}
    wire.frames = [
        *begin(),
        frame("content_block_start", index=0, content_block=block),
        frame("content_block_stop", index=0),
        *end("tool_use"),
    ]
    assert (await events_of(wire))[:-1] == [ToolCallDelta(0, "a", "f"), ToolCallDelta(0, arguments='{"x":1}')]


async def test_thinking(wire: MessagesWire) -> None:
    """Thoughts are told apart from text, and from what the API alone can read of them."""
    wire.frames = [
        *begin(),
        frame("content_block_start", index=0, content_block={"type": "thinking", "thinking": "", "signature": ""}),
        frame("content_block_delta", index=0, delta={"type": "thinking_delta", "thinking": "hm"}),
        frame("content_block_delta", index=0, delta={"type": "signature_delta", "signature": "c2ln"}),
        frame("content_block_stop", index=0),
        frame("content_block_start", index=1, content_block={"type": "redacted_thinking", "data": "eA=="}),
        frame("content_block_stop", index=1),
        *text_frames("x", index=2),
        *end(),
    ]
    assert (await events_of(wire))[:-1] == [
        ReasoningDelta("hm"),
        ReasoningDetail("messages", {"type": "signature_delta", "signature": "c2ln"}),
        ReasoningDetail("messages", {"type": "redacted_thinking", "data": "eA=="}),
        TextDelta("x"),
    ]


async def test_thinking_goes_back_with_the_answer_it_led_to(wire: MessagesWire) -> None:
    """The message of a response, and of a decoder's result, is enough for the next turn."""
    thought = {"type": "thinking", "thinking": "hm", "signature": "c2ln"}
    frames = [
        *begin(),
        frame("content_block_start", index=0, content_block={"type": "thinking", "thinking": "", "signature": ""}),
        frame("content_block_delta", index=0, delta={"type": "thinking_delta", "thinking": "hm"}),
        frame("content_block_delta", index=0, delta={"type": "signature_delta", "signature": "c2ln"}),
        frame("content_block_stop", index=0),
        *text_frames("x", index=1),
        *end(),
    ]
    async with provider_of(wire) as provider, SpeculativeDecoder(target=provider, draft=None) as decoder:
        wire.frames = frames
        responses = [await provider.complete(QUESTION), await decoder.decode(QUESTION)]
        for response in responses:
            await decoder.decode([*QUESTION.messages, response.message, ChatMessage("user", "and?")])
            assert wire.bodies[-1]["messages"][1]["content"] == [thought, {"type": "text", "text": "x"}]


async def test_what_is_unknown_is_passed_over(wire: MessagesWire) -> None:
    """Events, blocks and deltas of another day, and tools that the server runs itself, change nothing."""
    server_tool = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}
    wire.frames = [
        *begin(),
        frame("something_new", text="?"),
        frame("content_block_start", index=0, content_block=server_tool),
        frame("content_block_delta", index=0, delta={"type": "input_json_delta", "partial_json": '{"q": 1}'}),
        frame("content_block_stop", index=0),
        frame("content_block_delta", index=1, delta={"type": "citations_delta", "citation": {}}),
        frame("content_block_start", index=2, content_block={"type": "something_new", "text": "?"}),
        frame("content_block_delta", index=2, delta={"type": "something_new_delta"}),
        frame("content_block_stop", index=2),
        *text_frames("x", index=3),
        *end(),
    ]
    assert (await events_of(wire))[:-1] == [TextDelta("x")]


@pytest.mark.parametrize(
    ("reason", "finish", "stopped_by"),
    [
        ("end_turn", "stop", "eos"),
        ("stop_sequence", "stop", "stop_string"),
        ("max_tokens", "length", "max_tokens"),
        ("model_context_window_exceeded", "length", "context_length"),
        ("refusal", "content_filter", "content_filter"),
        ("pause_turn", "length", None),
        ("stop", "stop", None),  # of gateways to other models
        ("SAFETY", "content_filter", None),
        ("something_new", "length", None),
    ],
)
async def test_stop_reasons(wire: MessagesWire, reason: str, finish: str, stopped_by: str | None) -> None:
    """Each is reported in this library's words."""
    wire.frames = answer_frames("x", reason=reason)
    last = (await events_of(wire))[-1]
    assert isinstance(last, Finish)
    assert (last.finish_reason, last.stopped_by) == (finish, stopped_by)


async def test_a_stop_reason_that_is_an_error(wire: MessagesWire) -> None:
    """An answer that broke off at its server is none."""
    wire.frames = answer_frames("half", reason="abort")
    with pytest.raises(TransientError):
        await events_of(wire)


@pytest.mark.parametrize("count", [float("nan"), float("inf"), -5, "5", True, [5], 2**53 + 1])
@pytest.mark.parametrize("name", ["input_tokens", "output_tokens"])
async def test_counts_that_are_none(wire: MessagesWire, name: str, count: object) -> None:
    """The answer is there, and not counted."""
    usage = {"input_tokens": 7, "output_tokens": 2, "cache_read_input_tokens": "x", name: count}
    wire.frames = [
        frame("message_start", message={"usage": usage}),
        *text_frames("hi \ud83d"),
        frame("message_delta", delta={"stop_reason": "end_turn"}),
    ]
    assert await events_of(wire) == [TextDelta("hi "), TextDelta("\ufffd"), Finish("stop", None, "eos")]


async def test_a_server_that_counts_nothing(wire: MessagesWire) -> None:
    """Usage is unknown then, not zero; and an end without `message_stop` that gives a reason is an end."""
    wire.frames = [
        frame("message_start", message={}),
        *text_frames("x"),
        frame("message_delta", delta={"stop_reason": "end_turn"}),
    ]
    assert await events_of(wire) == [TextDelta("x"), Finish("stop", None, "eos")]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_connection_is_used_again(wire: MessagesWire, transport: str) -> None:
    """An answer that was read to its end leaves its connection for the next request."""
    wire.end_s = 0.02  # the response ends a little after its last event
    async with provider_of(wire, transport) as provider:
        for _ in range(3):
            await provider.complete(QUESTION)
    assert len(wire.peers) == 3
    assert len(set(wire.peers)) == 1


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_response_that_does_not_end(wire: MessagesWire, transport: str) -> None:
    """The answer is there with `message_stop`, whatever the server still waits for."""
    wire.end_s = 60.0
    async with provider_of(wire, transport) as provider:
        assert (await provider.complete(QUESTION)).finish_reason == "stop"
    assert asyncio.get_running_loop().time() < 60


# ---------------------------------------------------------------------------------------------- errors


def overloaded(words: str = "Overloaded", kind: str = "overloaded_error") -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": words}}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        (307, TargetError, "answered 307"),
        (400, InvalidRequestError, "too long"),
        (401, TargetError, r"check the key \(ANTHROPIC_API_KEY\)"),
        (403, TargetError, r"check the key \(ANTHROPIC_API_KEY\)"),
        (404, TargetError, "check the model's name"),
        (413, InvalidRequestError, "answered 413"),
        (429, TransientError, "answered 429"),
        (500, TransientError, "answered 500"),
        (529, TransientError, "answered 529"),
    ],
)
async def test_refusals(
    caplog: pytest.LogCaptureFixture, wire: MessagesWire, *, transport: str, status: int, kind: type, words: str
) -> None:
    """Each is asked once and told in one line; a key that the server repeats is in no error, traceback or log."""
    caplog.set_level(logging.DEBUG)
    wire.status, wire.error = status, overloaded(f"too long\nfor {KEY}", "some_error")
    if transport == "aiohttp":
        wire.error_headers = {"Location": f"{wire.url}/v1/messages"}
    error = await failure_of(wire, transport)
    assert type(error) is kind
    assert re.search(words, str(error))
    assert "\n" not in str(error)
    assert f"anthropic:{MODEL} at {wire.url}" in str(error)
    assert KEY not in "".join(traceback.format_exception(error)) + caplog.text
    assert (error.__cause__, error.__context__) == (None, None)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_retry_after(wire: MessagesWire, transport: str) -> None:
    """What the server asks to wait goes along, and nobody waits for it here."""
    wire.status, wire.error, wire.error_headers = 429, overloaded(kind="rate_limit_error"), {"Retry-After": "7"}
    error = await failure_of(wire, transport)
    assert isinstance(error, TransientError)
    assert error.retry_after_s == 7.0


async def test_a_refusal_that_is_no_json(wire: MessagesWire) -> None:
    """A gateway's own page is quoted."""
    wire.status, wire.error = 502, "<html>Bad Gateway</html>"
    assert "Bad Gateway" in str(await failure_of(wire))


@pytest.mark.parametrize(
    ("told", "kind"),
    [
        ("overloaded_error", TransientError),
        ("api_error", TransientError),
        ("rate_limit_error", TransientError),
        ("timeout_error", TransientError),
        ("invalid_request_error", InvalidRequestError),
        ("authentication_error", TargetError),
        ("something_new", TransientError),
    ],
)
async def test_an_error_event(wire: MessagesWire, told: str, kind: type[Exception]) -> None:
    """An error after a 200 is reported by its type, with the text so far."""
    wire.frames = [*HALF, frame("error", error={"type": told, "message": f"no more for {KEY}"})]
    error = await failure_of(wire)
    assert type(error) is kind
    assert f"{told}: no more for ***" in str(error)
    assert getattr(error, "partial_text", "half") == "half"
    assert (error.__cause__, error.__context__) == (None, None)


async def test_what_cannot_be_read(wire: MessagesWire) -> None:
    """It is an error of the target that says what was wrong, with the text so far."""
    wire.frames = [*HALF, frame("content_block_delta", index=0, delta=" more"), *end()]
    error = await failure_of(wire)
    assert type(error) is TargetError
    assert f"anthropic:{MODEL} at {wire.url} sent a delta of type str" in str(error)
    assert error.partial_text == "half"


async def test_an_error_that_only_its_type_tells(wire: MessagesWire) -> None:
    """A server that names all of its events alike is understood too."""
    data = json.dumps(overloaded(f"busy with {KEY}"))
    wire.frames = [*HALF, f"event: message\ndata: {data}\n\n".encode(), *end()]
    error = await failure_of(wire)
    assert isinstance(error, TransientError)
    assert (error.status, error.partial_text) == (529, "half")
    assert "reported an error: overloaded_error: busy with ***" in str(error)


@pytest.mark.parametrize("frames", [HALF, [*HALF, *end(None)]])
async def test_no_stop_reason(wire: MessagesWire, frames: list[bytes]) -> None:
    """An answer that just ends may come whole another time."""
    wire.frames = frames
    error = await failure_of(wire)
    assert isinstance(error, TransientError)
    assert "without a stop reason" in str(error)
    assert error.partial_text == "half"


@pytest.mark.parametrize("data", [b"{", b"[1]", b"null", b"\xff"])
async def test_malformed_events(wire: MessagesWire, data: bytes) -> None:
    """An answer that is not a JSON object is an error, not a crash."""
    wire.frames = [*HALF, b"event: content_block_delta\ndata: " + data + b"\n\n"]
    error = await failure_of(wire)
    assert type(error) is TargetError
    assert "not valid JSON" in str(error)
    assert error.partial_text == "half"


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_dropped_connection(wire: MessagesWire, transport: str) -> None:
    """A connection that breaks in the middle is not asked for again here; the text so far goes along."""
    wire.frames, wire.drop = HALF, True
    error = await failure_of(wire, transport)
    assert isinstance(error, TransientError)
    assert "broke the connection" in str(error)
    assert error.partial_text == "half"
    assert (error.__cause__, error.__context__) == (None, None)


@pytest.mark.parametrize("when", ["wait_s", "end_s"])
async def test_silence(wire: MessagesWire, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that says nothing for too long, before its answer or within it, is given up; asked once."""
    monkeypatch.setattr(client, "_IDLE_S", 0.1)
    wire.frames = HALF
    setattr(wire, when, 60.0)
    error = await failure_of(wire)
    assert isinstance(error, TransientError)
    assert "silent for too long" in str(error)
    assert error.partial_text == ("half" if when == "end_s" else "")


async def test_silence_with_a_given_client(wire: MessagesWire) -> None:
    """A client that is given keeps its timeout, not its retries."""
    wire.wait_s = 60.0
    async with AsyncAnthropic(base_url=wire.url, api_key=KEY, timeout=0.1) as given:
        with pytest.raises(TransientError, match="silent for too long"):
            await AnthropicProvider(MODEL, client=given).complete(QUESTION)
    assert len(wire.bodies) == 1


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_nobody_there(wire: MessagesWire, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong address is an error that says so, at once: nothing connects again."""
    loop = asyncio.get_running_loop()
    connect = loop.sock_connect
    addresses: list[Any] = []

    async def count_and_connect(sock: socket.socket, address: Any) -> None:
        addresses.append(address)
        await connect(sock, address)

    monkeypatch.setattr(loop, "sock_connect", count_and_connect)
    wire.url = "http://127.0.0.1:9"
    async with provider_of(wire, transport) as provider:
        with pytest.raises(TransientError, match="cannot be reached; check the address"):
            await provider.complete(QUESTION)
    assert addresses == [("127.0.0.1", 9)]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_server_that_hangs_up(wire: MessagesWire, transport: str) -> None:
    """A connection that is closed instead of answered is not opened again here."""
    num_connections = 0

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        wire.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with provider_of(wire, transport) as provider:
            with pytest.raises(TransientError):
                await provider.complete(QUESTION)
    assert num_connections == 1


async def test_a_request_that_is_no_json(wire: MessagesWire) -> None:
    """What cannot be written is the request's fault."""
    async with provider_of(wire) as provider:
        with pytest.raises(InvalidRequestError, match="cannot be sent"):
            await provider.complete(replace(QUESTION, extra={"metadata": {"x": object()}}))
    assert wire.bodies == []


# ------------------------------------------------------------------------------------------- contract


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_conformance(wire: MessagesWire, transport: str) -> None:
    """All that is promised of a provider, continuing a prefix included."""
    wire.pause_s = 0.001
    async with AsyncAnthropic(base_url=wire.url, api_key=KEY) as given:

        def make() -> AnthropicProvider:
            if transport == "aiohttp":
                return AnthropicProvider(MODEL, base_url=wire.url, api_key=KEY)
            return AnthropicProvider(MODEL, client=given)

        await check_provider_conformance(make, num_open=lambda _: wire.num_open, secret=KEY)
    assert any(body["messages"][-1]["role"] == "assistant" for body in wire.bodies)


async def test_without_aiohttp(wire: MessagesWire, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the SDK has no aiohttp it goes its own way, to the same answer."""

    def missing(**_: object) -> None:
        raise RuntimeError("To use the aiohttp client you must have installed the package with the `aiohttp` extra")

    monkeypatch.setattr(client, "DefaultAioHttpClient", missing)
    async with provider_of(wire) as provider:
        assert (await provider.complete(QUESTION)).content == PROSE


async def test_as_a_racing_target(wire: MessagesWire) -> None:
    """A model that continues a text can race: later streams begin where the draft says, and the text is its own."""
    wire.wait_s, wire.pause_s = 0.01, 0.002
    config = SpeculativeConfig(strategy="race")
    async with provider_of(wire) as provider:
        result = await SpeculativeDecoder(target=provider, draft=ReferenceDraft(PROSE), config=config).decode("count")
    assert result.content == PROSE
    assert result.fallbacks == ()
    assert any(body["messages"][-1]["role"] == "assistant" for body in wire.bodies)


async def test_as_draft_of_a_sampling_target(wire: MessagesWire) -> None:
    """A seed, which a local target's decoder gives its drafts too, does not put this one off."""
    wire.frames = answer_frames("    return", " f()")
    target = open_provider("builtin:target")
    async with provider_of(wire) as provider:
        decoder = SpeculativeDecoder(target=target, draft=provider, config=SpeculativeConfig(strategy="regenerate"))
        result = await decoder.decode("def f():", max_tokens=12, temperature=0.5, seed=1)
    assert len(wire.bodies) == 1
    assert result.fallbacks == ()


async def test_by_a_string(wire: MessagesWire, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key comes from the environment and is in no repr; an address may end in /v1."""
    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
    provider = open_provider(f"anthropic:{MODEL}@{wire.url}/v1/")
    assert (await provider.complete(QUESTION)).content == PROSE
    await provider.aclose()
    assert provider.name == f"anthropic:{MODEL}"
    assert any(KEY in value for value in wire.headers[0].values())
    assert KEY not in repr(provider) + repr(vars(provider))


def test_arguments_that_say_too_little_or_too_much() -> None:
    """A model and a key are needed; a client brings its own key and address."""
    with pytest.raises(ConfigError, match="needs a model"):
        open_provider("anthropic")
    with pytest.raises(ConfigError, match="set ANTHROPIC_API_KEY"):
        open_provider(f"anthropic:{MODEL}")
    with pytest.raises(ConfigError, match="client is given, which has"):
        AnthropicProvider(MODEL, client=AsyncAnthropic(api_key=KEY), api_key=KEY)


def test_the_sdk_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the error holds the command that brings it."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "anthropic" else find(name))
    with pytest.raises(MissingExtraError, match=r"pip install 'llm-spec\[anthropic\]'"):
        open_provider(f"anthropic:{MODEL}")
    with pytest.raises(MissingExtraError, match=r"pip install 'llm-spec\[anthropic\]'"):
        ANTHROPIC.load(MODEL, None)


def test_importing_does_not_load_the_sdk() -> None:
    """The package can be listed without loading anything of the SDK."""
    code = "import llm_spec_anthropic, sys; llm_spec_anthropic.ANTHROPIC; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "llm_spec_anthropic" in loaded
    assert [name for name in ("anthropic", "httpx2", "aiohttp", "pydantic") if name in loaded] == []
