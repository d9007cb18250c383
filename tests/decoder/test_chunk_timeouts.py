"""How long a target may be silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final, cast

import pytest
from aiohttp import web
from llm_spec_http.dialects import DIALECTS
from support.wire import served

from llm_spec import (
    ChatRequest,
    RetryPolicy,
    SpeculativeConfig,
    SpeculativeDecoder,
    StreamEvent,
    Timeouts,
    TransientError,
)
from llm_spec.contract.provider import Capabilities
from llm_spec.decoder.chunk_timeouts import ChunkTimeouts
from llm_spec.decoder.entry_points import open_provider
from llm_spec.testing import ScriptedProvider, run_virtual

pytestmark = pytest.mark.virtual_clock


async def test_a_late_first_chunk_is_a_transient_error() -> None:
    """The error names the target and the seconds."""
    timeouts = ChunkTimeouts("vllm:tiny", Timeouts(first_chunk_s=2.0))
    with pytest.raises(TransientError, match=r"vllm:tiny was silent for 2\.0 s"):
        await timeouts.wait_for_first_chunk(asyncio.sleep(2.1))


async def test_in_time_is_not_late() -> None:
    timeouts = ChunkTimeouts("vllm:tiny", Timeouts(first_chunk_s=2.0))
    assert await timeouts.wait_for_first_chunk(asyncio.sleep(1.9, "chunk")) == "chunk"


async def test_without_a_timeout_nothing_is_late() -> None:
    timeouts = ChunkTimeouts("vllm:tiny", Timeouts())
    assert await timeouts.wait_for_first_chunk(asyncio.sleep(1e6, "chunk")) == "chunk"


class Silent(ScriptedProvider):
    """Opens its streams, and sends nothing for as long as it is waited for, nor anything after its first word."""

    def __init__(self, can: Capabilities, *, num_words: int = 0) -> None:
        super().__init__("word " * num_words, capabilities=can)
        self._num_words = num_words

    @asynccontextmanager
    async def stream(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        async with super().stream(request) as events, aclosing(self._stall(events)) as stalling:
            yield stalling

    async def _stall(self, events: AsyncIterator[StreamEvent]) -> AsyncGenerator[StreamEvent]:
        for _ in range(self._num_words):
            yield await anext(events)
        await asyncio.sleep(1e6)

    @asynccontextmanager
    async def stream_chunks(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[Any]]:
        async with self.stream(request) as events:
            yield ({"choices": [{"index": 0, "delta": {"content": "word "}}]} async for _ in events)


@pytest.mark.parametrize(
    ("timeouts", "num_words", "waited_s"),
    [
        (Timeouts(), 0, 600.0),
        (Timeouts(between_chunks_s=3.0), 0, 600.0),
        (Timeouts(first_chunk_s=1000.0), 0, 1000.0),
        (Timeouts(first_chunk_s=5.0), 0, 5.0),
        (Timeouts(), 1, 120.0),
        (Timeouts(first_chunk_s=5.0), 1, 120.0),
        (Timeouts(between_chunks_s=7.0), 1, 7.0),
        (Timeouts(between_chunks_s=700.0), 1, 700.0),
    ],
)
@pytest.mark.parametrize("is_relayed", [False, True])
def test_a_silent_target_is_waited_for_as_its_provider_says(
    is_relayed: bool, timeouts: Timeouts, num_words: int, waited_s: float
) -> None:
    """Unless the config says it; the error says how long that was."""
    target = Silent(Capabilities(first_chunk_s=600.0, between_chunks_s=120.0), num_words=num_words)
    config = SpeculativeConfig(timeouts=timeouts, retry=RetryPolicy(max_attempts=1))

    async def run() -> float:
        decoder = SpeculativeDecoder(target=cast("Any", target), draft=None, config=config)
        began_s = asyncio.get_running_loop().time()
        request = ChatRequest.create("q")
        opened: Any = decoder.stream_chunks(request) if is_relayed else decoder.stream(request)
        with pytest.raises(TransientError, match=rf"was silent for {waited_s} s"):
            await read_all(opened)
        return asyncio.get_running_loop().time() - began_s

    assert run_virtual(run()) == pytest.approx(waited_s)


async def read_all(opened: Any) -> None:
    async with opened as items:
        async for _ in items:
            pass


@pytest.mark.parametrize(
    ("model", "first_chunk_s"),
    [
        ("vllm:m", 600.0),
        ("sglang:m", 600.0),
        ("llamacpp:m", 600.0),
        ("ollama:m", 600.0),
        ("lmstudio:m", 600.0),
        ("generic:m@http://127.0.0.1:9/v1", 600.0),
        ("deepseek:m", 900.0),
        ("openrouter:m", 900.0),
        ("kimi:m", 900.0),
        ("qwen:m", 900.0),
        ("mistral:m", 900.0),
        ("together:m", 900.0),
        ("fireworks:m", 900.0),
        ("cerebras:m", 900.0),
        ("openai:m", 900.0),
        ("anthropic:m", 900.0),
        ("builtin:target", None),
        ("rules:any", None),
    ],
)
async def test_each_kind_of_target_has_a_bound_but_for_those_in_this_process(
    model: str, first_chunk_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for dialect in DIALECTS.values():
        if dialect.key_variable:
            monkeypatch.setenv(dialect.key_variable, "sk-0123456789")
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.setenv(name, "sk-0123456789")
    provider = open_provider(model)
    assert provider.capabilities.first_chunk_s == first_chunk_s
    await provider.aclose()


ROLE: Final = b'data: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}\n\n'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("comment", "fields"),
    [
        (b": ping\n\n", {}),
        (b"\n", {}),
        (b"event: ping\ndata: {}\n\n", {}),
        (ROLE, {}),
        (b": ping\n\n", {"n": 2}),  # relayed, chunk by chunk: any chunk of the server's is passed on
        (b"\n", {"n": 2}),
    ],
)
async def test_signs_of_life_are_no_first_word(comment: bytes, fields: dict[str, Any], stream: bool) -> None:
    """A server that sends nothing else is left after `first_chunk_s`, and a client told so."""

    async def ping(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while True:
            await response.write(comment)
            await asyncio.sleep(30.0)

    async with served("/v1/chat/completions", ping, shutdown_s=0.1) as root:
        config = SpeculativeConfig(retry=RetryPolicy(max_attempts=1))
        decoder = SpeculativeDecoder(target=f"llamacpp:m@{root}/v1", draft=None, config=config)
        began_s = asyncio.get_running_loop().time()
        async with decoder, asyncio.timeout(2000.0):
            with pytest.raises(TransientError, match="was silent for 600"):
                await answer(decoder, fields, stream=stream)
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(600.0, abs=1.0)


async def answer(decoder: SpeculativeDecoder, fields: dict[str, Any], *, stream: bool) -> None:
    request = ChatRequest.create("q", extra=fields)
    if fields:
        await (read_all(decoder.stream_chunks(request)) if stream else decoder.collect_chunks(request))
    else:
        await (read_all(decoder.stream(request)) if stream else decoder.decode(request))
