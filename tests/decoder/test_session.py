"""Session affinity: replicas behind a balancer see all calls of a conversation, and nothing of who else asks."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final

import pytest
from llm_spec_http import DIALECTS, HttpProvider
from support.balancer import SESSION_HEADER, Balancer, balanced
from support.probing import make_patient
from support.serving import ask, serving

from llm_spec import (
    ChatRequest,
    ConfigError,
    InvalidRequestError,
    RetryPolicy,
    SpeculativeConfig,
    SpeculativeDecoder,
    TextDelta,
)
from llm_spec.contract.draft import DraftProvider
from llm_spec.contract.provider import LlmProvider
from llm_spec.contract.request import Messages
from llm_spec.server import KeyConfig, ModelConfig
from llm_spec.testing.server import ScriptedModelServer, ServerFaults, ServerLatency
from llm_spec.testing.simulated import SimulatedDraft

pytestmark = pytest.mark.virtual_clock

WORDS: Final = " ".join(f"word{i}" for i in range(60))
LATENCY: Final = ServerLatency(first_token_s=0.02, token_s=0.004)
CHAT: Final = "/v1/chat/completions"


@asynccontextmanager
async def replicas(**settings: Any) -> AsyncGenerator[Balancer]:
    """A balancer before two servers of the same model."""
    settings = {"latency": LATENCY, "continues_prefix": "fields", **settings}
    async with (
        ScriptedModelServer(WORDS, **settings) as one,
        ScriptedModelServer(WORDS, **settings) as other,
        balanced(one.url, other.url) as balancer,
    ):
        yield balancer


@asynccontextmanager
async def decoding(
    balancer: Balancer, draft: DraftProvider | LlmProvider | None = None, **options: Any
) -> AsyncGenerator[SpeculativeDecoder]:
    """A decoder whose target is behind a balancer, and which speculates whether it pays or not."""
    target = HttpProvider("scripted", base_url=balancer.url, dialect=DIALECTS["vllm"])
    config = SpeculativeConfig(**{"session_header": SESSION_HEADER, **options})
    try:
        async with SpeculativeDecoder(target=target, draft=draft, config=config) as decoder:
            make_patient(decoder)
            yield decoder
    finally:
        await target.aclose()


async def find_id(balancer: Balancer, decoder: SpeculativeDecoder, request: Messages, **options: Any) -> str | None:
    """What a conversation was called."""
    balancer.calls.clear()
    await decoder.decode(request, **options)
    (session,) = balancer.sessions
    return session


@pytest.mark.parametrize("strategy", ["race", "probe", "score", "judge", "regenerate", "plain"])
async def test_all_calls_of_an_answer_come_to_one_replica(strategy: str) -> None:
    """Its stream, its rows or further streams, its scores, and what is tokenized and found out for it."""
    draft = SimulatedDraft(WORDS, 1.0, 1, token_s=0.001)
    async with replicas() as balancer, decoding(balancer, draft, strategy=strategy) as decoder:
        await decoder.discover()
        balancer.calls.clear()
        result = await decoder.decode("Tell me.", temperature=0.0)
        assert result.content == WORDS
        assert {call.replica for call in balancer.calls} == {balancer.calls[0].replica}
        assert len(balancer.sessions) == 1
        if strategy in ("race", "probe"):
            assert result.stats.num_accepted_draft_tokens > 0
        if strategy in ("race", "probe", "score"):
            assert {"/v1/chat/completions", "/v1/completions", "/tokenize"} <= {call.path for call in balancer.calls}
        balancer.calls.clear()
        for _ in range(4):
            await decoder.with_config(replace(decoder.config, session_header=None)).decode("Tell me.", temperature=0.0)
        assert balancer.sessions == {None}
        assert {call.replica for call in balancer.calls} == {0, 1}


async def test_trials_before_the_first_request_come_to_one_replica() -> None:
    """They compare answers with each other, so they carry an id of their own."""
    draft = SimulatedDraft(WORDS, 1.0, 1, token_s=0.001)
    async with replicas() as balancer, decoding(balancer, draft, strategy="race") as decoder:
        await decoder.discover()
        assert len({call.replica for call in balancer.calls}) == 1
        (session,) = balancer.sessions
        assert session is not None
        assert await find_id(balancer, decoder, "Tell me.") != session


async def test_drafts_on_servers_are_told_too() -> None:
    """A draft's calls carry the same id, by which its replicas are kept together as well."""
    async with replicas() as balancer, replicas() as for_drafts:
        draft = HttpProvider("scripted", base_url=for_drafts.url, dialect=DIALECTS["vllm"])
        async with decoding(balancer, draft, strategy="probe") as decoder:
            await decoder.discover()
            balancer.calls.clear()
            await decoder.decode("Tell me.")
        await draft.aclose()
        assert for_drafts.calls
        assert balancer.sessions == for_drafts.sessions


async def test_a_conversation_keeps_its_id_over_its_turns() -> None:
    """Later messages do not change it; another beginning does."""
    first = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me."}]
    second = [*first, {"role": "assistant", "content": WORDS}, {"role": "user", "content": "More."}]
    other = [first[0], {"role": "user", "content": "Tell him."}]
    async with replicas() as balancer, decoding(balancer) as decoder:
        ids = [await find_id(balancer, decoder, messages) for messages in (first, second, other)]
        again = decoder.with_config(replace(decoder.config, strategy="plain"))
        assert await find_id(balancer, again, first) == ids[0]
    assert ids[0] == ids[1] != ids[2]


async def test_images_tell_conversations_apart() -> None:
    """One text with two images begins two conversations."""
    names = ("one", "other")
    parts = [[{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": n}}] for n in names]
    async with replicas() as balancer, decoding(balancer) as decoder:
        ids = {await find_id(balancer, decoder, [{"role": "user", "content": part}]) for part in parts}
    assert len(ids) == 2


async def test_ids_of_two_decoders_and_of_two_clients_differ() -> None:
    """The key is a decoder's own, and another for each client, so nobody can compare or guess."""
    async with replicas() as balancer, decoding(balancer) as one, decoding(balancer) as other:
        decoders = (one, other, one.copy_for_new_client())
        ids = {await find_id(balancer, decoder, "Tell me.") for decoder in decoders}
    assert len(ids) == 3


async def test_an_id_of_the_callers_own_is_sent_as_it_is() -> None:
    """`session_id` of a request comes first."""
    async with replicas() as balancer, decoding(balancer) as decoder:
        assert await find_id(balancer, decoder, "Tell me.", session_id="tenant-7/chat#1") == "tenant-7/chat#1"
        await decoder.with_config(replace(decoder.config, session_header=None)).decode("Hi", session_id="x")
        assert balancer.calls[-1].session is None


@pytest.mark.parametrize("session_id", ["", "a b", "a\nb", "ü", "x" * 257, 7])
def test_an_id_that_no_header_can_carry_is_refused(session_id: Any) -> None:
    with pytest.raises(InvalidRequestError, match="session_id is"):
        ChatRequest.create("Hi", session_id=session_id)


@pytest.mark.parametrize("name", ["", "x session", "x:y", "ü", "Authorization", "content-type", "x-api-key"])
def test_a_header_that_cannot_be_used_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="session_header is"):
        SpeculativeConfig(session_header=name)


async def test_streams_that_are_read_in_turn_do_not_mix() -> None:
    """Two answers are read by one task, piece by piece; each one's calls carry its own id."""
    async with replicas() as balancer:
        draft = SimulatedDraft(WORDS, 1.0, 1, token_s=0.001)
        async with decoding(balancer, draft, strategy="probe", baseline_every=0) as decoder:
            await decoder.discover()
            balancer.calls.clear()
            a = ChatRequest.create("Tell me.", temperature=0.0, session_id="a")
            async with decoder.stream(a) as one, decoder.stream(replace(a, session_id="b")) as other:
                texts = {"a": "", "b": ""}
                for _ in range(400):
                    for name, events in (("a", one), ("b", other)):
                        event = await anext(events, None)
                        texts[name] += event.text if isinstance(event, TextDelta) else ""
    assert texts == {"a": WORDS, "b": WORDS}
    paths = {name: {call.path for call in balancer.calls if call.session == name} for name in "ab"}
    assert balancer.sessions == {"a", "b"}
    assert paths["a"] == paths["b"] >= {"/v1/chat/completions", "/v1/completions"}


async def test_a_retry_comes_to_the_same_replica() -> None:
    """Whatever breaks, the id stays."""
    faults, once = ServerFaults(num_requests=1, status=503), RetryPolicy(first_wait_s=0.0, max_wait_s=0.0)
    async with replicas(faults=faults) as balancer, decoding(balancer, retry=once) as decoder:
        result = await decoder.decode("Tell me.")
    assert (result.content, len(result.retries)) == (WORDS, 1)
    assert len({(call.session, call.replica) for call in balancer.calls}) == 1
    assert len(balancer.calls) == 2


# ---------------------------------------------------------------------------------------------- behind the server


def served_model(balancer: Balancer, **options: Any) -> ModelConfig:
    options = {"session_header": SESSION_HEADER, "stream_always": False, **options}
    return ModelConfig(target=f"vllm:scripted@{balancer.url}", speculative=SpeculativeConfig(**options))


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 2}, {"n": 2, "stream": True}])
async def test_the_server_passes_a_clients_id_on(fields: dict[str, Any]) -> None:
    """Whole, streamed or relayed. Without keys it is the client's own value, and without one it is derived."""
    async with replicas() as balancer, serving(served_model(balancer)) as server:
        assert (await server.post(CHAT, ask(CHAT, **fields), x_session_id="mine")).status == 200
        assert {call.session for call in balancer.calls} == {"mine"}
        balancer.calls.clear()
        for _ in range(2):
            await server.post(CHAT, ask(CHAT, **fields))
        (derived,) = balancer.sessions
    assert derived is not None
    assert len(derived) == 32


async def test_a_server_without_the_option_passes_none_on() -> None:
    """The header is the operator's choice."""
    async with replicas() as balancer, serving(served_model(balancer, session_header=None)) as server:
        await server.post(CHAT, ask(CHAT), x_session_id="mine")
    assert balancer.sessions == {None}


async def test_a_clients_id_that_cannot_be_sent_is_its_mistake() -> None:
    async with replicas() as balancer, serving(served_model(balancer)) as server:
        reply = await server.post(CHAT, ask(CHAT), x_session_id="two words")
    assert (reply.status, reply.error["param"]) == (400, "session_id")
    assert balancer.calls == []


async def test_ids_of_clients_with_keys_are_never_alike() -> None:
    """Whether they give the same one or ask the same thing; over restarts of a worker each keeps its own."""
    keys = {name: KeyConfig(key=f"the key of {name}") for name in ("ann", "bob")}
    ids: dict[str, list[str | None]] = {"ann": [], "bob": []}
    async with replicas() as balancer:
        for _ in range(2):
            async with serving(served_model(balancer), keys=keys, session_key=b"of all workers") as server:
                for name, key in keys.items():
                    for headers in ({}, {"x_session_id": "same"}):
                        reply = await server.post(CHAT, ask(CHAT), authorization=f"Bearer {key.key}", **headers)
                        assert reply.status == 200
                        ids[name].append(balancer.calls[-1].session)
    assert ids["ann"][:2] == ids["ann"][2:]
    assert ids["bob"][:2] == ids["bob"][2:]
    assert len({*ids["ann"], *ids["bob"]}) == 4
    assert "same" not in balancer.sessions
