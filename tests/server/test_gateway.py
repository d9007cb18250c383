"""The server's doors: paths, methods, hosts and origins, bodies that are too long, too slow or none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, Final

import pytest
from support.serving import ENDPOINTS, HANGS_S, OPENAI, RULES, ask, check_error, raw, remote, serving, until

from llm_spec.server import KeyConfig, ModelConfig
from llm_spec.testing.server import ScriptedModelServer, ServerLatency

pytestmark = pytest.mark.virtual_clock

CHAT: Final = "/v1/chat/completions"
KEYS: Final = {"ann": KeyConfig(key="secret-of-ann")}


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("stream", [False, True])
async def test_every_path_is_there_without_its_version(path: str, stream: bool) -> None:
    """A client whose base address lacks /v1 gets the same answer."""
    async with serving() as server:
        with_version = await server.post(path, ask(path, stream=stream))
        without = await server.post(path.removeprefix("/v1"), ask(path, stream=stream))
    assert with_version.status == without.status == 200
    assert len(with_version.frames if stream else with_version.json) == len(without.frames if stream else without.json)


@pytest.mark.parametrize("prefix", ["/v1", ""])
async def test_models_are_listed(prefix: str) -> None:
    """Every model of the config is listed, and told of by its name."""
    async with serving({"fast": RULES, "a/b:c": RULES}) as server:
        listed = (await server.get(f"{prefix}/models")).json
        one = (await server.get(f"{prefix}/models/a/b:c")).json
        none = await server.get(f"{prefix}/models/other")
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["fast", "a/b:c"]
    assert listed["data"][1] == one
    assert one["object"] == "model"
    assert (none.status, none.error["code"]) == (404, "model_not_found")


async def test_a_models_description_tells_no_address() -> None:
    """Where a target is served is nobody's business."""
    async with serving(remote("http://10.0.0.5:9999/v1")) as server:
        reply = await server.get("/v1/models")
    assert b"vllm:tiny" in reply.data
    assert b"10.0.0.5" not in reply.data


async def test_it_says_that_it_lives_and_is_ready() -> None:
    """Orchestrators ask for both, without a key."""
    async with serving(keys=KEYS) as server:
        assert (await server.get("/health/live")).status == 200
        assert (await server.get("/health/ready")).status == 200


async def test_its_page_may_load_nothing_from_elsewhere() -> None:
    """The page at / has a policy that allows its own server alone."""
    async with serving() as server:
        reply = await server.get("/")
    assert reply.status == 200
    assert "default-src 'none'" in reply.headers["Content-Security-Policy"]
    assert reply.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a_wrong_method_is_told_the_right_one(path: str) -> None:
    """405, in the API's form, with the methods that there are."""
    async with serving() as server:
        reply = await server.get(path)
    assert reply.status == 405
    assert "POST" in reply.headers["Allow"]
    check_error(path, reply)


@pytest.mark.parametrize("path", ["/v1/nothing", "/v2/chat/completions", "/v1/chat/completions/x", "/../etc/passwd"])
async def test_a_wrong_path_is_not_found(path: str) -> None:
    """404, as an error object."""
    async with serving() as server:
        reply = await server.post(path, {})
    assert reply.status == 404
    check_error(path, reply)


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("name", ["other", "", "x" * 5000, "a\r\nX-Bad: 1", "<script>"])
async def test_an_unknown_model_is_not_found(path: str, name: str) -> None:
    """A name that is not served gets 404 and its code, and cannot blow up the error."""
    async with serving() as server:
        reply = await server.post(path, ask(path, model=name))
    assert reply.status == 404
    check_error(path, reply)
    assert len(reply.data) < 1000
    assert "X-Bad" not in reply.headers
    if path in OPENAI:
        assert (reply.error["code"], reply.error["param"]) == ("model_not_found", "model")


@pytest.mark.parametrize("name", ["other", ""])
async def test_a_default_model_answers_any_name(name: str) -> None:
    """With `default_model` a name that is not known is answered by that model, which says its own name."""
    async with serving(default_model="fast") as server:
        reply = await server.chat(model=name)
    assert reply.status == 200
    assert reply.json["model"] == "fast"


# ------------------------------------------------------------------------------------------ who may ask from where


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8700", "127.0.0.1.evil.example", "10.0.0.1", "[::1"])
async def test_another_host_is_refused(host: str) -> None:
    """Without keys a name that somebody made point here gets nothing (DNS rebinding)."""
    async with serving() as server:
        for reply in (await server.post(CHAT, ask(CHAT), Host=host), await server.get("/v1/models", Host=host)):
            assert reply.status == 403
            assert set(reply.error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1", "[::1]:80", "127.0.0.2"])
async def test_a_loopback_host_is_answered(host: str) -> None:
    """Whatever a client on this machine calls it."""
    async with serving() as server:
        assert (await server.post(CHAT, ask(CHAT), Host=host)).status == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1", "http://[", "", "file://"])
async def test_a_foreign_origin_is_refused(origin: str) -> None:
    """A page from elsewhere may not ask through its reader's browser, and gets no CORS header."""
    async with serving() as server:
        reply = await server.post(CHAT, ask(CHAT), Origin=origin)
        preflight = await server.send("OPTIONS", CHAT, None, Origin=origin)
    assert (reply.status, preflight.status) == (403, 403)
    assert not [name for name in (*reply.headers, *preflight.headers) if name.lower().startswith("access-control")]


async def test_its_own_page_may_ask() -> None:
    """An origin that is the server's own address is no foreign one."""
    async with serving() as server:
        assert (await server.post(CHAT, ask(CHAT), Origin=server.url)).status == 200


async def test_cors_is_there_for_those_it_was_allowed_to() -> None:
    """A page of `cors_origins` gets the headers that its browser wants, on answers, streams, errors and preflights."""
    page = "https://page.example"
    async with serving(cors_origins=(page,)) as server:
        replies = [
            await server.post(CHAT, ask(CHAT), Origin=page),
            await server.post(CHAT, ask(CHAT, stream=True), Origin=page),
            await server.post(CHAT, {}, Origin=page),
            await server.send("OPTIONS", CHAT, None, Origin=page),
        ]
        other = await server.post(CHAT, ask(CHAT), Origin="https://page.example.evil")
    assert [reply.status for reply in replies] == [200, 200, 404, 204]
    assert all(reply.headers["Access-Control-Allow-Origin"] == page for reply in replies)
    assert all("Origin" in reply.headers["Vary"] for reply in replies)
    assert replies[-1].headers["Access-Control-Allow-Headers"].split(", ") == ["authorization", "*"]
    assert other.status == 403


async def test_no_cors_by_default() -> None:
    """Without `cors_origins` no answer has a CORS header."""
    async with serving() as server:
        reply = await server.chat()
    assert not [name for name in reply.headers if name.lower().startswith("access-control")]


# ------------------------------------------------------------------------------------------ bodies


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a_long_body_is_refused(path: str) -> None:
    """A body over the limit gets 413 in the API's form."""
    async with serving(max_body_bytes=1000) as server:
        reply = await server.post(path, ask(path, "x" * 2000))
        assert reply.status == 413
        check_error(path, reply)
        assert (await server.post(path, ask(path))).status == 200


async def test_a_long_body_without_a_length_is_refused() -> None:
    """A chunked body is measured as it comes: an endless one is refused, too."""

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(50):
            yield b"x" * 1000
            await asyncio.sleep(0)

    async with serving(max_body_bytes=1000) as server:
        reply = await server.send("POST", CHAT, endless())
    assert reply.status == 413
    assert set(reply.error) == {"message", "type", "param", "code"}


async def test_a_body_of_megabytes_is_read() -> None:
    """The default limit leaves room for long prompts."""
    async with serving() as server:
        reply = await server.post(CHAT, json.dumps(ask(CHAT, max_tokens=1, mystery="x" * 3_000_000)).encode())
    assert reply.status == 200


async def test_the_default_limit_is_8_mib() -> None:
    """One byte less is read, the limit is not to be passed."""
    async with serving() as server:
        reply = await server.post(CHAT, b"[" + b" " * (8 * 1024 * 1024) + b"]")
    assert reply.status == 413


async def test_all_long_bodies_together_are_bounded() -> None:
    """One more is told to come again; short ones pass, and so does a long one when there is room again."""
    long, gone_on = ask(CHAT, "x" * 300_000), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        data = json.dumps(long).encode()
        yield data[:200_000]
        await gone_on.wait()
        yield data[200_000:]

    async with serving(max_body_bytes=400_000, max_bodies_bytes=450_000) as server:
        first = asyncio.create_task(server.send("POST", CHAT, slow()))
        async with asyncio.timeout(HANGS_S):
            while (refused := await server.post(CHAT, long)).status == 200:  # until the first has begun
                pass
        assert refused.status == 503
        assert refused.headers["Retry-After"] == "1"
        assert (await server.post(CHAT, ask(CHAT))).status == 200
        gone_on.set()
        assert (await first).status == 200
        assert (await server.post(CHAT, long)).status == 200


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a_long_body_of_many_small_things_is_refused(path: str) -> None:
    """What takes seconds to read, or to go through, is not read."""
    async with serving() as server:
        for data in (b'{"messages": [' + b"{}," * 100_000 + b"{}]}", b'{"x": [' + b"0," * 300_000 + b"0]}"):
            reply = await server.post(path, data)
            assert reply.status == 400
            check_error(path, reply)


async def test_what_is_no_http_is_not_told_who_serves() -> None:
    async with serving() as server:
        data = await raw(server.url, b"GET / HTTP/1.1\r\nHo st: x\r\n\r\n")
    assert data.startswith(b"HTTP/1.0 400 ")
    assert b"Server: llm-spec\r\n" in data
    assert b"aiohttp" not in data


async def test_a_body_that_trickles_is_given_up() -> None:
    """A body that does not come in time gets 408, and the connection is closed."""
    head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\nConnection: close\r\n\r\n".encode()
    async with serving(body_timeout_s=0.05) as server:
        data = await raw(server.url, head + b'{"a":')
    assert data.startswith(b"HTTP/1.1 408 ")
    assert json.loads(data.partition(b"\r\n\r\n")[2])["error"]["code"] == "timeout"


async def test_headers_that_trickle_are_given_up() -> None:
    """A connection that does not finish its headers in time is closed, however busy it keeps."""
    async with serving(idle_s=0.2) as server:
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /health/live HTTP/1.1\r\n")

        async def trickle() -> None:
            while True:
                writer.write(b"X: 1\r\n")
                await asyncio.sleep(0.02)

        task = asyncio.create_task(trickle())
        async with asyncio.timeout(HANGS_S):
            assert await reader.read() == b""
        task.cancel()
        writer.close()


@pytest.mark.parametrize(
    "data",
    [
        b"NONSENSE\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: a\x00b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost : 127.0.0.1\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_refused(data: bytes) -> None:
    """Bytes that are no request get 400 and the connection is closed; the server goes on."""
    async with serving() as server:
        assert b" 400 " in (await raw(server.url, data)).partition(b"\r\n")[0]
        assert (await server.chat()).status == 200


async def test_no_header_can_be_injected() -> None:
    """What a request says can get into no header of its answer."""
    bad = "x\r\nX-Bad: 1"
    async with serving(default_model="fast") as server:
        replies = [
            await server.chat(model=bad, user=bad, mystery=bad),
            await server.chat(model=bad, stream=True),
            await server.get("/v1/models/x%0d%0aX-Bad:%201"),
        ]
        data = await raw(
            server.url,
            b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nOrigin: http://a\nX-Bad: 1\r\nConnection: close\r\n\r\n",
        )
    assert not [reply for reply in replies if "X-Bad" in reply.headers]
    assert b"\nX-Bad" not in data.partition(b"\r\n\r\n")[0]


# ------------------------------------------------------------------------------------------ busy


async def test_more_requests_than_it_may_have_are_told_to_come_again() -> None:
    """At `max_requests` another gets 503 with Retry-After, and one that comes later is answered."""
    async with (
        ScriptedModelServer("one two", latency=ServerLatency(first_token_s=30.0)) as upstream,
        serving({"slow": remote(upstream.url), "fast": RULES}, max_requests=1) as server,
    ):
        slow = asyncio.create_task(server.chat(model="slow"))
        await until(lambda: upstream.num_open_streams > 0)
        reply = await server.chat()
        assert (reply.status, reply.error["code"]) == (503, "overloaded")
        assert int(reply.headers["Retry-After"]) >= 1
        slow.cancel()
        await asyncio.gather(slow, return_exceptions=True)
        async with asyncio.timeout(HANGS_S):
            while (await server.chat()).status == 503:  # noqa: ASYNC110 - what is asked is a server
                await asyncio.sleep(0.005)


async def test_a_failing_handler_is_told_as_an_error_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake of this server is a 500 that says nothing of it, and asks for no retry."""
    from llm_spec.server import responder

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("the secret prompt")

    monkeypatch.setattr(responder, "build_result_headers", fail)
    async with serving(ModelConfig(target="rules:any")) as server:
        reply = await server.chat()
    assert reply.status == 500
    assert set(reply.error) == {"message", "type", "param", "code"}
    assert reply.headers["x-should-retry"] == "false"
    assert b"secret" not in reply.data
