"""What goes over the wire, to the byte of its JSON."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest
from llm_spec_openai import OpenAIProvider
from openai import AsyncAzureOpenAI
from support.openai_wire import KEY, events_of, openai_itself, provider_of
from support.wire import Wire, text_chunks

from llm_spec import ChatRequest, InvalidRequestError, SpeculativeConfig, SpeculativeDecoder, open_provider

PLAIN = {
    "messages": [{"role": "user", "content": "q"}],
    "stream": True,
    "stream_options": {"include_usage": True},
}


async def asked_of_openai(wire: Wire, model: str, request: ChatRequest) -> dict[str, Any]:
    """The body that OpenAI's own address gets."""
    wire.frames = text_chunks("x")
    client = openai_itself(wire)
    try:
        await OpenAIProvider(model, client=client).complete(request)
    finally:
        await client.close()
    return wire.bodies[-1]


async def test_what_is_asked(wire: Wire) -> None:
    """The body holds what the caller said and nothing that was left open; the key goes into a header."""
    wire.frames = text_chunks("x")
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}, "strict": True}}
    request = ChatRequest.create(
        "q",
        temperature=0.0,
        top_p=0.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        max_tokens=5,
        stop="END",
        seed=3,
        logit_bias={5: -1.0},
        tools=[tool],
        tool_choice={"type": "function", "function": {"name": "f"}},
        response_format=schema,
    )
    await events_of(wire, request)
    assert wire.bodies == [
        {
            "model": "gpt-4.1",
            **PLAIN,
            "temperature": 0.0,
            "top_p": 0.5,
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "seed": 3,
            "logit_bias": {"5": -1.0},
            "max_tokens": 5,
            "stop": ["END"],
            "tools": [tool],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "response_format": schema,
        }
    ]
    assert wire.paths == ["/v1/chat/completions"]
    assert wire.headers[0]["Authorization"] == f"Bearer {KEY}"


async def test_a_sessions_id_goes_along(wire: Wire) -> None:
    """In the header that the config names, and only where it names one."""
    wire.frames = text_chunks("x")
    provider = provider_of(wire)
    for header in ("x-session-id", None):
        decoder = SpeculativeDecoder(target=provider, draft=None, config=SpeculativeConfig(session_header=header))
        await decoder.decode("question", session_id="chat-17")
    await provider.aclose()
    first, second = wire.headers
    assert first["x-session-id"] == "chat-17"
    assert "x-session-id" not in second
    assert first["Authorization"] == second["Authorization"] == f"Bearer {KEY}"


async def test_parts_and_calls_go_untouched(wire: Wire) -> None:
    """Images, parts that nobody here knows, and a conversation with tools arrive as they were written."""
    wire.frames = text_chunks("x")
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{ }"}}
    messages = [
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "low"}},
                {"type": "file", "file": {"file_id": "f"}, "new": None},
            ],
        },
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "é", "tool_call_id": "a"},
    ]
    await events_of(wire, ChatRequest.create(messages))
    assert wire.bodies[0]["messages"] == messages


@pytest.mark.parametrize(("model", "name"), [("gpt-5-mini", "max_completion_tokens"), ("gpt-4o", "max_tokens")])
async def test_the_limit(wire: Wire, model: str, name: str) -> None:
    """OpenAI's models are capped by the field that they take."""
    body = await asked_of_openai(wire, model, ChatRequest.create("q", max_tokens=5))
    assert body == {"model": model, **PLAIN, name: 5}


async def test_a_prediction_with_its_limit(wire: Wire) -> None:
    """A model that predicts gets the prediction, and `max_tokens`, the only limit that goes with one."""
    body = await asked_of_openai(wire, "gpt-4.1-mini", ChatRequest.create("q", prediction="guess", max_tokens=5))
    assert body == {
        "model": "gpt-4.1-mini",
        **PLAIN,
        "max_tokens": 5,
        "prediction": {"type": "content", "content": "guess"},
    }


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("gpt-5", {}),
        ("gpt-4o", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        ("gpt-4o", {"presence_penalty": 0.1}),
        ("gpt-4o", {"frequency_penalty": 0.1}),
    ],
)
async def test_a_prediction_that_would_be_refused_is_left_out(wire: Wire, model: str, options: dict[str, Any]) -> None:
    """It is only a hint: where OpenAI would refuse the request for it, the request goes without."""
    body = await asked_of_openai(wire, model, ChatRequest.create("q", prediction="guess", **options))
    assert "prediction" not in body


async def test_a_prediction_by_argument(wire: Wire) -> None:
    """Whoever knows better than the model's name says so, either way."""
    wire.frames = text_chunks("x")
    for model, takes in (("mine", True), ("gpt-4o", False)):
        provider = OpenAIProvider(model, base_url=wire.url, api_key=KEY, takes_predictions=takes)
        await provider.complete(ChatRequest.create("q", prediction="guess", frequency_penalty=-1.0))
        await provider.aclose()
        assert provider.capabilities.prediction is takes
        assert ("prediction" in wire.bodies[-1]) is takes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prefix": "one two"}, "prefix is 'one two'"),
        ({"top_k": 3}, "top_k is 3"),
        ({"min_p": 0.1}, "min_p is 0.1"),
        ({"repetition_penalty": 1.1}, "repetition_penalty is 1.1"),
    ],
)
async def test_what_openai_cannot_do(wire: Wire, options: dict[str, Any], words: str) -> None:
    """Options of other servers are refused by name, before anything is sent."""
    with pytest.raises(InvalidRequestError, match=words):
        await asked_of_openai(wire, "gpt-4o", ChatRequest.create("q", **options))
    assert wire.bodies == []


async def test_other_servers_get_their_options(wire: Wire) -> None:
    """At another address the options of other servers go along; a prefix is refused there too."""
    wire.frames = text_chunks("x")
    await events_of(wire, ChatRequest.create("q", top_k=3, min_p=0.1, repetition_penalty=1.1))
    assert wire.bodies == [{"model": "gpt-4.1", **PLAIN, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1}]
    with pytest.raises(InvalidRequestError, match="prefix"):
        await events_of(wire, ChatRequest.create("q", prefix="one"))


async def test_extra_wins(wire: Wire) -> None:
    """What is in `extra` goes untouched and last: over our own fields, and past what is refused otherwise."""
    extra = MappingProxyType({"max_tokens": 7, "top_k": 3, "service_tier": "flex", "metadata": {"a": None}})
    request = ChatRequest.create("q", max_tokens=5, top_k=9, extra=extra)
    body = await asked_of_openai(wire, "gpt-4o", request)
    assert body == {"model": "gpt-4o", **PLAIN, **extra}


async def test_azure(wire: Wire) -> None:
    """A deployment is asked at its own path, with Azure's header and the version; no prediction unless told."""
    wire.frames = text_chunks("x")
    endpoint = wire.url.removesuffix("/v1")
    request = ChatRequest.create("q", prediction="guess", max_tokens=5)
    for takes in (False, True):
        provider = OpenAIProvider.on_azure(
            "gpt-4o", endpoint=endpoint, api_key=KEY, api_version="2026-01-01", takes_predictions=takes
        )
        assert (provider.name, provider.capabilities.prediction) == ("azure:gpt-4o", takes)
        assert (await provider.complete(request)).content == "x"
        await provider.aclose()
    plain = {"model": "gpt-4o", **PLAIN, "max_tokens": 5}
    assert wire.bodies == [plain, {**plain, "prediction": {"type": "content", "content": "guess"}}]
    assert set(wire.paths) == {"/openai/deployments/gpt-4o/chat/completions?api-version=2026-01-01"}
    assert wire.headers[0]["api-key"] == KEY
    assert "Authorization" not in wire.headers[0]


async def test_azure_refuses_what_openai_refuses(wire: Wire) -> None:
    """Azure is OpenAI, whatever the address; a client that is given is enough to tell."""
    async with AsyncAzureOpenAI(azure_endpoint=wire.url, api_key=KEY, api_version="1") as client:
        provider = OpenAIProvider("mine", client=client)
        assert provider.name == "azure:mine"
        with pytest.raises(InvalidRequestError, match="top_k"):
            await provider.complete(ChatRequest.create("q", top_k=3))
        wire.frames = text_chunks("x")
        await provider.complete(ChatRequest.create("q", max_tokens=5))
    assert wire.bodies == [{"model": "mine", **PLAIN, "max_completion_tokens": 5}]


async def test_the_key_from_the_environment(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strings open providers with the SDK's environment variables; the key is in no repr."""
    wire.frames = text_chunks("x")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_BASE_URL", wire.url)
    monkeypatch.setenv("AZURE_OPENAI_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_API_VERSION", "1")
    for text in ("openai:gpt-4o", f"azure:gpt-4o@{wire.url}"):
        provider = open_provider(text)
        assert (await provider.complete(ChatRequest.create("q"))).content == "x"
        assert provider.name == text.partition("@")[0]
        assert KEY not in repr(provider)
        await provider.aclose()
    assert wire.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert wire.headers[1]["api-key"] == KEY


async def test_a_client_that_is_given_stays_open(wire: Wire) -> None:
    """It goes on serving its owner, with the retries that its owner set."""
    wire.frames = text_chunks("x")
    async with openai_itself(wire) as client:
        provider = OpenAIProvider("gpt-4o", client=client)
        await provider.complete(ChatRequest.create("q"))
        await provider.aclose()
        assert not client.is_closed()
        assert client.max_retries == 2


async def test_one_connection_serves_many_requests(wire: Wire) -> None:
    """An answer that was read to its end leaves the connection to the next."""
    wire.frames = text_chunks("x")
    provider = provider_of(wire)
    for _ in range(3):
        await provider.complete(ChatRequest.create("q"))
    await provider.aclose()
    assert len(set(wire.peers)) == 1
