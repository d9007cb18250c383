"""Credentials, queries, redirects and proxies, by every kind of provider, whole and streamed."""

from __future__ import annotations

import asyncio
import base64
import logging
import traceback
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

import aiohttp
import llm_spec_anthropic.client
import llm_spec_openai.client
import pytest
from aiohttp import web
from anthropic import AsyncAnthropic
from llm_spec_anthropic import AnthropicProvider
from llm_spec_http import HttpProvider
from llm_spec_openai import OpenAIProvider
from openai import AsyncOpenAI, DefaultAioHttpClient, DefaultAsyncHttpxClient
from support.doubles import KEY, TEXT, Double, forget_environment
from support.wire import served

from llm_spec import (
    ChatRequest,
    ConfigError,
    LlmProvider,
    LlmSpecError,
    TargetError,
    TransientError,
    open_draft,
    open_provider,
)
from llm_spec.contract.response import complete_from_stream

pytestmark = [
    pytest.mark.virtual_clock,
    pytest.mark.filterwarnings("ignore:.*(BasicAuth|proxy_auth).* is deprecated:DeprecationWarning"),  # the SDKs' use
]

KINDS: Final = ("generic", "vllm", "llamacpp", "openrouter", "openai", "openai httpx2", "anthropic", "anthropic httpx2")
SHAPES: Final = ("whole", "streamed")
QUESTION: Final = ChatRequest.create("question")
PASSWORD: Final = "s3cr3t-pw"  # noqa: S105 - of nobody


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key for all, and nothing else."""
    forget_environment(monkeypatch)
    for name in ("OPENAI", "ANTHROPIC", "OPENROUTER", "LLM_SPEC"):
        monkeypatch.setenv(f"{name}_API_KEY", KEY)


class Site(Double):
    """`Double` that keeps what it was asked by, and may answer with a status of its own, or as a proxy with one."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[web.BaseRequest] = []
        self.status = 200
        self.headers: dict[str, str] = {}
        self.echoes = False

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request)
        if self.echoes:
            return web.json_response(
                {"error": {"message": f"not {request.headers['Authorization']} {request.url} {dict(request.headers)}"}},
                status=400,
            )
        if self.status != 200:
            return web.Response(status=self.status, headers=self.headers)
        return await super().answer(request)


@asynccontextmanager
async def serve_site() -> AsyncGenerator[Site]:
    site = Site()
    async with served("/{path:.*}", site.answer, shutdown_s=0.05) as root:
        site.url = f"{root}/v1"
        yield site


@asynccontextmanager
async def serve_proxy_of_tunnels(status: int) -> AsyncGenerator[tuple[str, list[str]]]:
    """A proxy that opens no tunnel: its address, and the heads of what it is asked."""
    heads: list[str] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(f"HTTP/1.1 {status} Not Now\r\nContent-Length: 0\r\n\r\n".encode())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        yield f"{host}:{port}", heads


def spec_of(kind: str, url: str, credentials: str = "") -> str:
    name = kind.removesuffix(" httpx2")
    return f"{name}:m@{url.replace('://', f'://{credentials}@') if credentials else url}"


def open_kind(kind: str, url: str, monkeypatch: pytest.MonkeyPatch, credentials: str = "") -> LlmProvider:
    if kind.endswith("httpx2"):
        for module in (llm_spec_openai.client, llm_spec_anthropic.client):
            monkeypatch.setattr(module, "DefaultAioHttpClient", module.DefaultAsyncHttpxClient)
    return open_provider(spec_of(kind, url, credentials))


async def ask(provider: LlmProvider, shape: str) -> str:
    try:
        answer = provider.complete(QUESTION) if shape == "whole" else complete_from_stream(provider, QUESTION)
        return (await answer).content
    finally:
        await provider.aclose()


async def fail(provider: LlmProvider, shape: str) -> LlmSpecError:
    with pytest.raises(LlmSpecError) as caught:
        await ask(provider, shape)
    return caught.value


def tell_all(error: BaseException) -> str:
    """All that a traceback and a debugger may show of an error and its causes."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    shown = [repr(vars(link)) for link in chain if isinstance(link, LlmSpecError)]
    return "\n".join(["".join(traceback.format_exception(error)), *map(str, chain), *shown])


# ------------------------------------------------------------------------------- credentials


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("credentials", "meant"),
    [("svc:pw", "svc:pw"), ("svc", "svc:"), ("svc%40org:p%2Fw%3A", "svc@org:p/w:"), ("svc:p%C3%A4ss", "svc:päss")],
)
@pytest.mark.parametrize("kind", KINDS)
async def test_credentials_are_sent_in_place_of_the_key(
    kind: str, credentials: str, meant: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the SDKs and httpx send them; the server gets no other Authorization."""
    async with serve_site() as site:
        assert await ask(open_kind(kind, site.url, monkeypatch, credentials), shape) == TEXT
        (request,) = site.requests
    assert request.headers.getall("Authorization") == ["Basic " + base64.b64encode(meant.encode()).decode()]


@pytest.mark.parametrize("kind", KINDS)
async def test_credentials_need_no_key(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI", "ANTHROPIC", "OPENROUTER", "LLM_SPEC"):
        monkeypatch.delenv(f"{name}_API_KEY")
    async with serve_site() as site:
        assert await ask(open_kind(kind, site.url, monkeypatch, "svc:pw"), "streamed") == TEXT
        assert site.requests[0].headers["Authorization"].startswith("Basic ")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("vllm", "llamacpp")])  # they have none
async def test_without_credentials_the_key_is_sent(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve_site() as site:
        assert await ask(open_kind(kind, site.url, monkeypatch), "streamed") == TEXT
        headers = site.requests[0].headers
    assert KEY in headers.get("Authorization", "") + headers.get("X-Api-Key", "")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("failure", ["unreachable", "echo", "401", "404", "500", "307"])
@pytest.mark.parametrize("kind", KINDS)
async def test_no_error_has_a_password(
    kind: str, failure: str, shape: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor any log, at any level; also where a server repeats what it was sent."""
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.INFO, logger="httpcore2")  # it logs whatever a server sends
    async with serve_site() as site:
        site.status = int(failure) if failure.isdecimal() else 200
        site.headers = {"Location": f"http://svc:{PASSWORD}@elsewhere.example/{PASSWORD}?key={PASSWORD}"}
        site.echoes = failure == "echo"
        url = "http://127.0.0.1:9/v1" if failure == "unreachable" else site.url
        error = await fail(open_kind(kind, url, monkeypatch, f"svc:{PASSWORD}"), shape)
    told = tell_all(error) + caplog.text
    assert PASSWORD not in told
    assert base64.b64encode(f"svc:{PASSWORD}".encode()).decode() not in told
    assert f"at {url.replace('//', '//***@').removesuffix('/v1')}" in str(error)
    if failure == "401":
        assert "check the user and password of the address" in str(error)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_draft_does_not_tell_its_password(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Drafts are opened from the same strings."""
    caplog.set_level(logging.DEBUG)
    draft = open_draft(spec_of(kind, "http://127.0.0.1:9/v1", f"svc:{PASSWORD}"))

    async def draw() -> None:
        async with draft.draft(QUESTION, 8) as drafted:
            async for _ in drafted:
                pass

    with pytest.raises(LlmSpecError) as caught:
        await draw()
    await draft.aclose()
    assert PASSWORD not in tell_all(caught.value) + repr(draft) + repr(vars(draft)) + caplog.text


GIVEN: Final = ("session", "openai client", "openai client on httpx2", "azure", "anthropic client")


@asynccontextmanager
async def open_given(kind: str, url: str) -> AsyncGenerator[LlmProvider]:
    """A provider whose client is the caller's own, and Azure's, whose address becomes another one."""
    if kind == "session":
        async with aiohttp.ClientSession() as session:
            yield HttpProvider("m", base_url=url, session=session, api_key=KEY)
    elif kind == "azure":
        provider = OpenAIProvider.on_azure("m", endpoint=url, api_key=KEY)
        yield provider
        await provider.aclose()
    elif kind == "anthropic client":
        async with AsyncAnthropic(base_url=url, api_key=KEY) as anthropic:
            yield AnthropicProvider("m", client=anthropic)
    else:
        kind_of_client = DefaultAsyncHttpxClient if "httpx2" in kind else DefaultAioHttpClient
        async with AsyncOpenAI(base_url=url, api_key=KEY, http_client=kind_of_client()) as openai:
            yield OpenAIProvider("m", client=openai)


@pytest.mark.parametrize("kind", GIVEN)
async def test_credentials_and_query_of_a_client_that_is_given(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """They are sent as those of a string, and told as little."""
    caplog.set_level(logging.DEBUG)
    async with serve_site() as site:
        url = site.url.replace("//", f"//svc:{PASSWORD}@") + "?api-version=2024-10-21"
        async with open_given(kind, url) as provider:
            assert (await provider.complete(QUESTION)).content == TEXT
            site.echoes = True
            with pytest.raises(LlmSpecError) as caught:
                await provider.complete(QUESTION)
    for request in site.requests:
        assert request.headers["Authorization"] == "Basic " + base64.b64encode(f"svc:{PASSWORD}".encode()).decode()
        assert dict(request.query) == {"api-version": "2024-10-21"}
        assert request.path.endswith(("/chat/completions", "/messages"))
    assert PASSWORD not in tell_all(caught.value)
    assert not [record for record in caplog.records if PASSWORD in record.getMessage() and "llm_spec" in record.name]


async def test_a_session_that_is_given_has_its_own_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    async with serve_site() as site, open_given("session", site.url) as provider:
        assert (await provider.complete(QUESTION)).content == TEXT


@pytest.mark.parametrize(
    ("kind", "variable", "host"),
    [
        ("openai", "OPENAI_BASE_URL", "api.openai.com"),
        ("anthropic", "ANTHROPIC_BASE_URL", "api.anthropic.com"),
    ],
)
async def test_an_empty_variable_is_no_address(
    kind: str, variable: str, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As compose files leave one that is not set; the vendor is asked, here through a proxy that refuses."""
    monkeypatch.setenv(variable, "")
    async with serve_proxy_of_tunnels(403) as (place, heads):
        monkeypatch.setenv("HTTPS_PROXY", f"http://{place}")
        await fail(open_provider(f"{kind}:m"), "whole")
    assert heads[0].startswith(f"CONNECT {host}:443 ")
    async with serve_site() as site:
        assert await ask(open_provider(spec_of(kind, site.url)), "whole") == TEXT
        monkeypatch.setenv(variable, site.url)
        assert await ask(open_provider(f"{kind}:m"), "whole") == TEXT
    assert len(site.requests) == 2


# ------------------------------------------------------------------------------- queries and redirects


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_query_comes_behind_the_path(kind: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every request, as gateways want it."""
    async with serve_site() as site:
        assert await ask(open_kind(kind, f"{site.url}?api-version=3&code=a%20b", monkeypatch), shape) == TEXT
        (request,) = site.requests
    path = "/v1/messages" if "anthropic" in kind else "/v1/chat/completions"
    assert request.path == path
    assert dict(request.query) == {"api-version": "3", "code": "a b"}


@pytest.mark.parametrize("kind", KINDS)
async def test_no_error_has_what_is_secret_in_a_query(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve_site() as site:
        site.echoes = True
        error = await fail(open_kind(kind, f"{site.url}?key={PASSWORD}", monkeypatch), "whole")
    assert PASSWORD not in tell_all(error)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("status", [301, 302, 307, 308])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_redirect_is_named_and_not_followed(
    kind: str, status: int, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key goes where it was meant to go; the error says where the server is instead."""
    async with serve_site() as site, serve_site() as other:
        site.status = status
        site.headers = {"Location": f"{other.url.replace('//', f'//svc:{PASSWORD}@')}/chat?key={PASSWORD}"}
        error = await fail(open_kind(kind, site.url, monkeypatch), shape)
        assert not other.requests
    assert type(error) is TargetError
    assert f"answered {status}" in str(error)
    assert f"it redirects to {other.url.replace('//', '//***@')}/chat: make that the address" in str(error)
    assert PASSWORD not in tell_all(error)


# ------------------------------------------------------------------------------- proxies


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"])
@pytest.mark.parametrize("kind", KINDS)
async def test_the_environments_proxy_is_used(
    kind: str, variable: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets the whole address, the key, and its own password."""
    async with serve_site() as proxy:
        written = proxy.url.replace("//", f"//me:{PASSWORD}@").removesuffix("/v1")
        monkeypatch.setenv(variable, written)
        assert await ask(open_kind(kind, "http://model.invalid:8000/v1", monkeypatch), shape) == TEXT
        (request,) = proxy.requests
    assert request.headers["Host"] == "model.invalid:8000"
    assert str(request.rel_url if request.rel_url.absolute else request.url).startswith("http://model.invalid:8000/v1/")
    wanted = "Basic " + base64.b64encode(f"me:{PASSWORD}".encode()).decode()
    assert request.headers.getall("Proxy-Authorization") == [wanted]
    assert "Basic" not in request.headers.get("Authorization", "")


@pytest.mark.parametrize("exempt", ["127.0.0.1", "*", "other.example, 127.0.0.0/8"])
@pytest.mark.parametrize("kind", KINDS)
async def test_what_needs_no_proxy_is_reached_directly(kind: str, exempt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NO_PROXY; and the HTTPS_PROXY is none for http."""
    async with serve_site() as proxy, serve_site() as site:
        monkeypatch.setenv("HTTPS_PROXY", proxy.url.removesuffix("/v1"))
        assert await ask(open_kind(kind, site.url, monkeypatch), "whole") == TEXT
        monkeypatch.setenv("HTTP_PROXY", proxy.url.removesuffix("/v1"))
        monkeypatch.setenv("NO_PROXY", exempt)
        assert await ask(open_kind(kind, site.url, monkeypatch), "whole") == TEXT
        monkeypatch.delenv("NO_PROXY")
        assert await ask(open_kind(kind, site.url, monkeypatch), "whole") == TEXT
        assert [len(site.requests), len(proxy.requests)] == [2, 1]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_proxy_that_is_not_there_is_named(kind: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the server, which nobody has asked; its password is not."""
    monkeypatch.setenv("HTTP_PROXY", f"http://me:{PASSWORD}@127.0.0.1:9")
    error = await fail(open_kind(kind, "http://model.invalid:8000/v1", monkeypatch), shape)
    assert type(error) is TransientError
    assert "cannot be reached; check the proxy http://***@127.0.0.1:9 (HTTP_PROXY)" in str(error)
    assert PASSWORD not in tell_all(error)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("status", [407, 403, 502])
@pytest.mark.parametrize("kind", KINDS)
async def test_https_goes_through_a_tunnel(kind: str, status: int, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy is asked for one, and told its own password alone; where it refuses, it is named."""
    async with serve_proxy_of_tunnels(status) as (place, heads):
        monkeypatch.setenv("HTTPS_PROXY", f"http://me:{PASSWORD}@{place}")
        error = await fail(open_kind(kind, "https://model.invalid/v1", monkeypatch, "svc:other"), shape)
    (head,) = set(heads)  # a client may try a connection again
    assert head.startswith("CONNECT model.invalid:443 HTTP/1.1\r\n")
    wanted = base64.b64encode(f"me:{PASSWORD}".encode()).decode()
    assert head.lower().count("proxy-authorization:") == 1
    assert wanted in head
    assert "\nauthorization:" not in head.lower()
    assert f"cannot be reached: the proxy http://***@{place} (HTTPS_PROXY)" in str(error)
    assert str(status) in str(error)
    assert PASSWORD not in tell_all(error)
    assert wanted not in tell_all(error)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_proxy_that_wants_a_password(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its 407 is told as what it is."""
    async with serve_site() as proxy:
        proxy.status = 407
        monkeypatch.setenv("HTTP_PROXY", proxy.url.removesuffix("/v1"))
        error = await fail(open_kind(kind, "http://model.invalid/v1", monkeypatch), "streamed")
    assert "answered 407" in str(error)
    assert "check the user and password of the proxy" in str(error)


@pytest.mark.parametrize("kind", KINDS)
def test_a_proxy_that_cannot_be_used(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One error when the provider is made, without the password. SOCKS needs a package that is not installed here."""
    for written in (f"socks5://me:{PASSWORD}@127.0.0.1:9", f"ftp://me:{PASSWORD}@127.0.0.1:9"):
        monkeypatch.setenv("ALL_PROXY", written)
        with pytest.raises(ConfigError, match=r"ALL_PROXY|SOCKS") as caught:
            open_kind(kind, "http://model.invalid/v1", monkeypatch)
        assert PASSWORD not in tell_all(caught.value)
