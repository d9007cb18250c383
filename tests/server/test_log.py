"""What is logged, at DEBUG and by whomever: no prompt, no answer, no key, and no address of a server behind."""

from __future__ import annotations

import logging
from typing import Final

import pytest
from support.serving import ENDPOINTS, ask, discover_features, raw, remote, serving, until

from llm_spec import RetryPolicy, SpeculativeConfig
from llm_spec.decoder.entry_points import NamedProvider
from llm_spec.server import KeyConfig, ModelConfig
from llm_spec.testing.server import ScriptedModelServer, ServerFaults

pytestmark = pytest.mark.virtual_clock

PROMPT: Final = "zebra-prompt"
ANSWER: Final = "quokka-answer one two three"
KEY: Final = "secret-of-ann"
UPSTREAM_KEY: Final = "sk-upstream-secret"
ONCE: Final = SpeculativeConfig(stream_always=False, retry=RetryPolicy(max_attempts=1))


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Everything at DEBUG, but for what the test's own client and event loop say."""
    caplog.set_level(logging.DEBUG)
    return caplog


def secrets_in(logged: pytest.LogCaptureFixture, *wants_more: str) -> list[str]:
    assert logged.records, "nothing was logged at all"
    return [secret for secret in (PROMPT, "quokka", KEY, "secret", *wants_more) if secret in logged.text]


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_answers_are_not_logged(path: str, logged: pytest.LogCaptureFixture) -> None:
    """Of an answered request the log has its figures alone."""
    async with ScriptedModelServer(ANSWER) as upstream:
        near = {"near": NamedProvider(type="vllm", base_url=upstream.url, api_key=UPSTREAM_KEY)}
        model = ModelConfig(target="near:tiny", speculative=ONCE)
        async with serving(model, providers=near, keys={"ann": KeyConfig(key=KEY)}) as server:
            for stream in (False, True):
                reply = await server.post(path, ask(path, PROMPT, stream=stream), Authorization=f"Bearer {KEY}")
                assert reply.status == 200
        address = upstream.url.split("/")[2]
    assert "request_finished" in logged.text
    assert secrets_in(logged, address) == []


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize(
    "faults",
    [
        ServerFaults(status=500),
        ServerFaults(status=401),
        ServerFaults(status=400),
        ServerFaults(drop_after=2),
        ServerFaults(malformed_after=2),
    ],
)
async def test_failures_are_logged_without_secrets(
    path: str, faults: ServerFaults, logged: pytest.LogCaptureFixture
) -> None:
    """A target that fails, at once or in the middle, is logged without what was said and where it is."""
    async with ScriptedModelServer(ANSWER, faults=faults) as upstream:
        near = {"near": NamedProvider(type="vllm", base_url=upstream.url, api_key=UPSTREAM_KEY)}
        model = ModelConfig(target="near:tiny", speculative=ONCE)
        async with serving(model, providers=near, keys={"ann": KeyConfig(key=KEY)}) as server:
            reply = await server.post(path, ask(path, PROMPT, stream=True), Authorization=f"Bearer {KEY}")
        address = upstream.url.split("/")[2]
    assert secrets_in(logged, address) == []
    assert UPSTREAM_KEY not in reply.data.decode()
    assert address not in reply.data.decode()


async def test_a_draft_that_fails_is_logged_without_secrets(logged: pytest.LogCaptureFixture) -> None:
    """Nor does a draft that was given up tell where it was."""
    async with (
        ScriptedModelServer(ANSWER) as upstream,
        ScriptedModelServer(ANSWER, faults=ServerFaults(status=500)) as draft,
    ):
        speculative = SpeculativeConfig(strategy="probe")
        model = remote(upstream.url, draft=f"vllm:tiny@{draft.url}", speculative=speculative)
        await discover_features(model)
        async with serving(model) as server:
            assert (await server.chat(PROMPT)).status == 200
        addresses = [one.url.split("/")[2] for one in (upstream, draft)]
    assert "draft_failed" in logged.text
    assert secrets_in(logged, *addresses) == []


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_refusals_are_logged_without_secrets(path: str, logged: pytest.LogCaptureFixture) -> None:
    """A refused request is logged by its path, status and code, not by what it held."""
    async with serving(keys={"ann": KeyConfig(key=KEY)}) as server:
        given = {"Authorization": f"Bearer {KEY}"}
        await server.post(path, ask(path, PROMPT), Authorization="Bearer wrong-secret-key")
        await server.post(path, ask(path, PROMPT, model=PROMPT), **given)
        await server.post(path, ask(path, PROMPT, temperature=PROMPT), **given)
        await server.post(path, f'{{"{PROMPT}'.encode(), **given)
        await server.post(path, ask(path, PROMPT), **given, x_llm_spec_strategy=PROMPT)
        reply = await server.post(path, ask(path, PROMPT), Origin=f"http://{PROMPT}")
    assert "refused" in logged.text
    assert reply.headers["x-request-id"] in logged.text
    assert secrets_in(logged) == []


async def test_a_mistake_is_logged_by_its_place(
    logged: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unexpected error is logged by its type and where it was raised; its message could quote the prompt."""
    from llm_spec.server import responder

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError(f"{PROMPT} {KEY}")

    monkeypatch.setattr(responder, "build_result_headers", fail)
    async with serving() as server:
        assert (await server.chat(PROMPT)).status == 500
    assert "RuntimeError" in logged.text
    assert "in fail" in logged.text
    assert secrets_in(logged) == []


@pytest.mark.parametrize(
    "line",
    [
        b"Authorization: Bearer secret-of-ann" + b"x" * 10_000,
        b"Authorization: Bearer secret-of-ann\x00",
        b"Authorization : Bearer secret-of-ann",
        b"x-api-key\x01: secret-of-ann",
    ],
)
async def test_a_header_that_is_none_is_not_logged(line: bytes, logged: pytest.LogCaptureFixture) -> None:
    """What cannot be parsed may be a key all the same."""
    async with serving() as server:
        await raw(server.url, b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n" + line + b"\r\n\r\n")
    assert secrets_in(logged) == []


async def test_a_client_that_leaves_is_logged_without_secrets(logged: pytest.LogCaptureFixture) -> None:
    """A cancelled request is only that."""
    async with (
        ScriptedModelServer(ANSWER, faults=ServerFaults(stall_after=1)) as upstream,
        serving(remote(upstream.url)) as server,
    ):
        path = ENDPOINTS[0]
        async with server.open(path, ask(path, PROMPT, stream=True)) as response:
            await response.content.readline()
        await until(lambda: upstream.num_open_streams == 0)
        address = upstream.url.split("/")[2]
    assert secrets_in(logged, address) == []


async def test_a_line_end_makes_no_line_of_its_own(logged: pytest.LogCaptureFixture) -> None:
    """Whoever asks for an odd path writes no lines into the log."""
    async with serving() as server:
        await server.get("/nothing%0aERROR%20forged")
    assert not [line for line in logged.text.splitlines() if line.startswith("ERROR forged")]
