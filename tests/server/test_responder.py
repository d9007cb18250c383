"""One request on its way: its status, its headers, how it breaks, and what is left when its client leaves."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from typing import Any, Final

import aiohttp
import pytest
from aiohttp import web
from support.serving import ENDPOINTS, HANGS_S, PAIR, RULES, Asking, ask, check_error, frames_of, remote, serving, until
from support.wire import served

from llm_spec import RetryPolicy, SpeculativeConfig
from llm_spec.decoder.decoder import SpeculativeDecoder
from llm_spec.decoder.entry_points import open_draft, open_provider
from llm_spec.server import ModelConfig
from llm_spec.testing.server import ScriptedModelServer, ServerFaults, ServerLatency

pytestmark = pytest.mark.virtual_clock

CHAT: Final = "/v1/chat/completions"
ONCE: Final = SpeculativeConfig(stream_always=False, retry=RetryPolicy(max_attempts=1))
TEXT: Final = "one two three four five six"
SLOW: Final = ServerLatency(token_s=0.02)


# ------------------------------------------------------------------------------------------ headers


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("stream", [False, True])
async def test_headers_say_how_it_was_answered(path: str, stream: bool) -> None:
    """Strategy, guarantee and overhead are known before the first byte; a request id comes with every answer."""
    async with serving() as server:
        reply = await server.post(path, ask(path, stream=stream))
    assert reply.headers["x-llm-spec-strategy"] == "plain"
    assert reply.headers["x-llm-spec-guarantee"] == "exact"
    assert 0.0 <= float(reply.headers["x-llm-spec-overhead-ms"]) < 1000.0
    assert reply.headers["x-request-id"]


async def test_figures_come_with_whole_answers_alone() -> None:
    """The acceptance rate is in the headers where it is known before the body is sent."""
    async with serving(PAIR) as server:
        whole = await server.chat("def test_spawnl(self):")
        streamed = await server.chat("def test_spawnl(self):", stream=True)
    assert whole.headers["x-llm-spec-strategy"] == streamed.headers["x-llm-spec-strategy"] == "tokens"
    assert 0.0 < float(whole.headers["x-llm-spec-acceptance-rate"]) <= 1.0
    assert "x-llm-spec-acceptance-rate" not in streamed.headers
    assert "x-llm-spec-speedup" not in streamed.headers


@pytest.mark.parametrize("strategy", ["plain", "regenerate", "tokens"])
async def test_a_request_may_choose_its_strategy(strategy: str) -> None:
    """The request header decides, for this request alone."""
    speculative = SpeculativeConfig(max_total_tokens=8)
    pair = ModelConfig(target="builtin:target", draft="builtin:draft", speculative=speculative)
    async with serving(pair) as server:
        chosen = await server.post(CHAT, ask(CHAT), x_llm_spec_strategy=strategy)
        usual = await server.post(CHAT, ask(CHAT))
    assert chosen.headers["x-llm-spec-strategy"] == strategy
    assert usual.headers["x-llm-spec-strategy"] == "tokens"
    assert chosen.json["choices"][0]["message"] == usual.json["choices"][0]["message"]


async def test_a_prediction_can_be_asked_to_be_used() -> None:
    """With the strategy `predict` a target that takes predictions is given the request's own."""
    async with (
        ScriptedModelServer(TEXT) as upstream,
        serving(ModelConfig(target=f"mistral:tiny@{upstream.url}")) as server,
    ):
        body = ask(CHAT, prediction={"type": "content", "content": TEXT})
        reply = await server.post(CHAT, body, x_llm_spec_strategy="predict")
        assert upstream.requests[-1]["prediction"]["content"] == TEXT
    assert reply.headers["x-llm-spec-strategy"] == "predict"
    assert reply.json["choices"][0]["message"]["content"] == TEXT


@pytest.mark.parametrize("strategy", ["mystery", "tokens", "x" * 4000])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_strategy_that_cannot_be_is_refused(strategy: str, stream: bool) -> None:
    """A strategy that is none, or that this model cannot use, is a 400 that says what there is."""
    async with serving() as server:
        reply = await server.post(CHAT, ask(CHAT, stream=stream), x_llm_spec_strategy=strategy)
    assert reply.status == 400
    check_error(CHAT, reply)
    assert "x-llm-spec-strategy" in reply.error["message"] or "strategy" in reply.error["message"]


# ------------------------------------------------------------------------------------------ errors before the answer


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_the_answer_has_its_status(path: str, stream: bool) -> None:
    """A stream's 200 is not sent before the target's first byte: a target that fails is reported as such."""
    async with ScriptedModelServer(TEXT, faults=ServerFaults(status=503, retry_after_s=7.0)) as upstream:
        async with serving(remote(upstream.url, speculative=ONCE)) as server:
            reply = await server.post(path, ask(path, stream=stream))
        address = upstream.url.split("/")[2]
    assert reply.status == 503
    check_error(path, reply)
    assert reply.headers["Retry-After"] == "7"
    assert reply.headers["x-should-retry"] == "false"
    assert reply.headers["Content-Type"].startswith("application/json")
    assert address not in reply.data.decode()


@pytest.mark.parametrize(
    ("upstreams", "ours"), [(429, 429), (500, 502), (502, 502), (503, 503), (404, 502), (401, 502)]
)
async def test_a_targets_status_is_told_in_this_servers_words(upstreams: int, ours: int) -> None:
    """Overload and rate limits are passed on; what is this server's own trouble with its target is a bad gateway."""
    async with (
        ScriptedModelServer(TEXT, faults=ServerFaults(status=upstreams)) as upstream,
        serving(remote(upstream.url, speculative=ONCE)) as server,
    ):
        reply = await server.chat()
    assert reply.status == ours
    assert reply.headers["x-should-retry"] == "false"


async def test_what_a_target_calls_invalid_is_the_clients_fault() -> None:
    """A 400 of the target is a 400 here, with its words."""
    async with ScriptedModelServer(TEXT, context_length=3) as upstream:
        async with serving(remote(upstream.url)) as server:
            reply = await server.chat()
        address = upstream.url.split("/")[2]
    assert reply.status == 400
    assert "maximum context length" in reply.error["message"]
    assert address not in reply.data.decode()


@pytest.mark.parametrize("provider", ["vllm", "openai"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_target_out_of_reach_is_told_without_its_address(
    provider: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of where the target should have been is in the error: not its address, its host or its port."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-upstream-secret")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = str(sock.getsockname()[1])
        model = ModelConfig(target=f"{provider}:tiny@http://127.0.0.1:{port}/v1", speculative=ONCE)
        async with serving(model) as server:
            reply = await server.chat(stream=stream)
    assert reply.status == 502
    assert port not in reply.error["message"]
    assert "127.0.0.1" not in reply.error["message"]
    assert "sk-upstream-secret" not in reply.data.decode()


async def test_a_target_that_drops_at_once_is_asked_again() -> None:
    """Retries are this server's own: its client sees one whole answer."""
    retry = SpeculativeConfig(retry=RetryPolicy(first_wait_s=0.0, max_wait_s=0.0))
    async with ScriptedModelServer(TEXT, faults=ServerFaults(num_requests=1, status=500)) as upstream:
        async with serving(remote(upstream.url, speculative=retry)) as server:
            reply = await server.chat(stream=True)
        assert len(upstream.requests) == 2
    assert reply.text == TEXT


# ------------------------------------------------------------------------------------------ errors in the middle


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_an_error_in_the_middle_ends_the_stream(path: str) -> None:
    """What breaks after the first byte is reported as an error object, then [DONE]; nothing comes twice."""
    async with ScriptedModelServer(TEXT, faults=ServerFaults(drop_after=3)) as upstream:
        async with serving(remote(upstream.url, speculative=ONCE)) as server:
            reply = await server.post(path, ask(path, stream=True))
        address = upstream.url.split("/")[2]
    assert reply.status == 200
    *_, error, done = reply.frames
    assert done.data == "[DONE]"
    assert set(error.data) == {"error"}
    assert set(error.data["error"]) == {"message", "type", "param", "code"}
    assert [frame for frame in reply.frames if frame.data != "[DONE]" and "error" in frame.data] == [error]
    assert address not in reply.data.decode()


# ------------------------------------------------------------------------------------------ pauses


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a_pause_is_bridged(path: str) -> None:
    """While an answer pauses, clients are sent something to pass over; behind its end comes nothing."""
    async with (
        ScriptedModelServer("one two", latency=ServerLatency(token_s=0.2)) as upstream,
        serving(remote(upstream.url), keep_alive_s=0.02) as server,
    ):
        reply = await server.post(path, ask(path, stream=True))
    frames = reply.frames
    alive = [frame for frame in frames if frame.comment == "keep-alive" or frame.event == "ping"]
    assert len(alive) >= 3
    assert frames[-1] not in alive


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_no_sign_of_life_where_nothing_pauses(path: str) -> None:
    """A stream that goes on has no comments, at its end neither."""
    async with serving() as server:
        for _ in range(10):
            reply = await server.post(path, ask(path, stream=True))
            assert not [frame for frame in reply.frames if frame.comment is not None or frame.event == "ping"]


# ------------------------------------------------------------------------------------------ the text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_the_text_is_the_decoders_own(path: str) -> None:
    """What comes over the wire, streamed or whole, is what the pair says inside this process."""
    speculative = SpeculativeConfig(max_total_tokens=32)
    prompt = "def test_spawnl(self):"
    target, draft = open_provider("builtin:target"), open_draft("builtin:draft")
    expected = (
        await SpeculativeDecoder(target=target, draft=draft, config=speculative).decode(prompt, temperature=0.8, seed=7)
    ).content
    await target.aclose()
    await draft.aclose()
    pair = ModelConfig(target="builtin:target", draft="builtin:draft", speculative=speculative)
    async with serving(pair) as server:
        asked = ask(path, prompt, temperature=0.8, seed=7)
        whole = await server.post(path, asked)
        streamed = await server.post(path, asked | {"stream": True})
    assert expected
    assert whole_text(path, whole.json) == expected
    assert streamed_text(path, streamed.chunks) == expected


def whole_text(path: str, body: Any) -> str:
    match path:
        case "/v1/responses":
            return body["output"][0]["content"][0]["text"]
        case "/v1/messages":
            return body["content"][0]["text"]
        case _:
            return body["choices"][0]["message"]["content"]


def streamed_text(path: str, chunks: list[Any]) -> str:
    match path:
        case "/v1/responses":
            return "".join(chunk["delta"] for chunk in chunks if chunk["type"] == "response.output_text.delta")
        case "/v1/messages":
            return "".join(chunk["delta"]["text"] for chunk in chunks if chunk["type"] == "content_block_delta")
        case _:
            return "".join(c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"])


async def test_characters_of_all_kinds_come_through() -> None:
    """Text is JSON on the wire: quotes, line ends, other scripts and signs of all planes are what they were."""
    text = '„Grüße“ "q" \\ \n \r\n \u2028 日本 \U0001f600 \x00 end'
    async with serving() as server:
        reply = await server.chat(text, stream=True)
    assert reply.text == f"You said: {text}"


# ------------------------------------------------------------------------------------------ what the target is asked


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_target_is_asked_as_the_client_asks(path: str, stream: bool) -> None:
    """Who waits for the whole answer has the target send it at once, which costs it less."""
    async with ScriptedModelServer(TEXT) as upstream, serving(remote(upstream.url)) as server:
        reply = await server.post(path, ask(path, stream=stream))
    assert reply.status == 200
    assert TEXT.split()[-1] in reply.data.decode()
    assert bool(upstream.requests[0].get("stream")) is stream


@pytest.mark.parametrize(
    "settings", [{"stream_always": True}, {"stream_always": False, "deadline_s": 60.0}], ids=["always", "deadline"]
)
async def test_a_target_is_asked_for_a_stream_all_the_same(settings: dict[str, Any]) -> None:
    """Where the config says so, or something of it needs the pieces."""
    async with (
        ScriptedModelServer(TEXT) as upstream,
        serving(remote(upstream.url, speculative=SpeculativeConfig(**settings))) as server,
    ):
        assert TEXT in (await server.chat()).data.decode()
    assert upstream.requests[0]["stream"] is True


# ------------------------------------------------------------------------------------------ clients that leave


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a_client_that_leaves_a_stream_ends_the_work(path: str) -> None:
    """The upstream's stream is closed as soon as nobody reads it."""
    async with (
        ScriptedModelServer(TEXT, latency=ServerLatency(token_s=5.0)) as upstream,
        serving(remote(upstream.url)) as server,
    ):
        async with server.open(path, ask(path, stream=True)) as response:
            await response.content.readline()
            assert upstream.num_open_streams == 1
        await until(lambda: upstream.num_open_streams == 0)
        assert upstream.num_cancelled == 1


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a_client_that_does_not_wait_ends_the_work(path: str) -> None:
    """So it is where the whole answer was asked for."""
    async with (
        ScriptedModelServer(TEXT, latency=ServerLatency(token_s=5.0)) as upstream,
        serving(remote(upstream.url)) as server,
    ):
        task = asyncio.create_task(server.post(path, ask(path)))
        await until(lambda: upstream.num_open_streams == 1)
        task.cancel()
        await until(lambda: upstream.num_open_streams == 0)
        assert upstream.num_cancelled == 1
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("fields", [{"n": 2}, {"logprobs": True, "stream": True}])
async def test_a_client_that_leaves_a_passed_on_answer_ends_the_work(fields: dict[str, Any]) -> None:
    """Chunks that are only passed on are no exception."""
    async with (
        ScriptedModelServer(TEXT, latency=ServerLatency(token_s=5.0)) as upstream,
        serving(remote(upstream.url)) as server,
    ):
        task = asyncio.create_task(server.chat(**fields))
        await until(lambda: upstream.num_open_streams == 1)
        task.cancel()
        await until(lambda: upstream.num_open_streams == 0)
        assert upstream.num_cancelled == 1
        await asyncio.gather(task, return_exceptions=True)


async def test_clients_that_left_are_counted_and_leave_nothing() -> None:
    """No request stays open for a client that is gone."""
    async with (
        ScriptedModelServer(TEXT, latency=ServerLatency(token_s=5.0)) as upstream,
        serving(remote(upstream.url)) as server,
    ):
        async with server.open(CHAT, ask(CHAT, stream=True)) as response:
            await response.content.readline()
        await until(lambda: upstream.num_open_streams == 0)
        metrics = await open_requests(server)
        assert "llm_spec_open_requests 0.0" in metrics
        assert "llm_spec_cancelled_total 1.0" in metrics


async def test_a_client_that_leaves_as_its_answer_begins_is_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No traceback is logged for a connection that has just closed, here or at the simulated server."""
    prepare = web.StreamResponse.prepare

    async def close_and_prepare(response: web.StreamResponse, request: web.Request) -> Any:
        if request.transport is not None:
            request.transport.abort()
        return await prepare(response, request)

    async with ScriptedModelServer(TEXT) as upstream, serving() as server:
        with monkeypatch.context() as patch:
            patch.setattr(web.StreamResponse, "prepare", close_and_prepare)
            for url in (upstream.url.removesuffix("/v1"), server.url):
                with pytest.raises(aiohttp.ClientError):
                    async with aiohttp.request("POST", url + CHAT, json=ask(CHAT, stream=True)):
                        pass
        assert upstream.num_cancelled == 1
        assert "llm_spec_cancelled_total 1.0" in await open_requests(server)
    assert caplog.text == ""


async def open_requests(server: Asking) -> str:
    return (await server.get("/metrics")).data.decode()


async def test_a_slow_reader_holds_up_nobody_else() -> None:
    """While one client reads nothing, others are answered as ever."""
    text = "x" * 2000 + " "
    async with serving() as server, server.open(CHAT, ask(CHAT, text * 2000, stream=True)) as response:
        await response.content.readline()
        async with asyncio.timeout(HANGS_S):
            for _ in range(3):
                assert (await server.chat(stream=True)).text == "You said: Good morning"


async def test_a_reader_who_takes_nothing_is_left() -> None:
    """After `body_timeout_s` its connection is closed at once and the upstream's work ended, however much is unsent."""
    text = ("x" * 500 + " ") * 40_000
    async with ScriptedModelServer(text) as upstream, serving(remote(upstream.url), body_timeout_s=0.3) as server:
        host, port = server.url.removeprefix("http://").split(":")
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        before = num_descriptors()
        await loop.sock_connect(sock, (host, int(port)))
        body = json.dumps(ask(CHAT, stream=True)).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        await loop.sock_sendall(sock, head + body)
        await until(lambda: upstream.num_open_streams == 1)
        await until(lambda: upstream.num_open_streams == 0)
        assert upstream.num_cancelled == 1
        await until(lambda: num_descriptors() <= before)  # a close that waits for its reader never comes
        sock.close()


def num_descriptors() -> int:
    return len(os.listdir("/dev/fd"))


# ------------------------------------------------------------------------------------------ passed on


async def test_a_stream_ends_in_whole_frames_however_it_is_cut() -> None:
    """Every frame of a long stream is whole."""
    async with serving({"fast": RULES}) as server:
        reply = await server.chat(" ".join(map(str, range(3000))), stream=True)
    assert len(frames_of(reply.data)) > 3000


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a_whole_answer_that_breaks_off_once_is_given_all_the_same(path: str) -> None:
    """Its client has been given nothing, so that the target is asked again instead of the client."""
    faults = ServerFaults(num_requests=1, drop_after=2)
    async with (
        ScriptedModelServer("one two three", faults=faults) as upstream,
        serving(remote(upstream.url, draft="lookup")) as server,
    ):
        reply = await server.post(path, ask(path))
        assert reply.status == 200
        assert b"one two three" in reply.data


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_targets_code_and_param_reach_the_client(path: str, stream: bool) -> None:
    """Its own names for what is wrong with a request, by which clients tell a prompt that is too long."""
    error = {"message": "too many tokens", "type": "invalid_request_error", "code": "context_length_exceeded"}

    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({"error": {**error, "param": "messages"}}, status=400)

    async with served("/{_:.*}", refuse) as url, serving(ModelConfig(target=f"generic:m@{url}/v1")) as server:
        reply = await server.post(path, ask(path, stream=stream))
    assert reply.status == 400
    if path == "/v1/messages":
        assert reply.error["details"] == {"error_code": "context_length_exceeded"}
    else:
        assert (reply.error["code"], reply.error["param"]) == ("context_length_exceeded", "messages")
