"""Requests with tools at real servers: the message is the chat endpoint's own.

At a vLLM they speculate with `--enable-scale-out`. That takes a chat model that calls tools in Hermes' form;
`LLM_SPEC_PEER_CHAT_MODEL` names its Hugging Face folder. A vLLM without the flag and llama-server stay plain.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llm_spec_http import DIALECTS, HttpProvider
from peers.servers import serve_vllm
from peers.test_providers import Peer, wait_until_idle
from server_tools import constrain, open_decoder
from support.message_server import is_json
from tool_requests import make_tool_requests

from llm_spec import (
    ChatRequest,
    ReferenceDraft,
    Sampling,
    SpeculativeResult,
    SuffixDraft,
    ToolCallDelta,
    UnsupportedError,
)
from llm_spec.decoder.config import StrategyName

pytestmark = pytest.mark.peers

TEMPLATE = Path(__file__).parents[2] / "benchmarks" / "hermes_template.jinja"
OPTIONS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--chat-template", str(TEMPLATE))
REQUESTS = [
    replace(made.request, prediction=None, sampling=Sampling(temperature=0.0)) for made in make_tool_requests(40)[:12]
]


@pytest.fixture(scope="module")
def chat_model() -> Path:
    folder = os.environ.get("LLM_SPEC_PEER_CHAT_MODEL")
    if not folder:
        pytest.skip("peers: no chat model is named; set LLM_SPEC_PEER_CHAT_MODEL")
    return Path(folder)


@pytest.fixture(scope="module")
def vllm_with_parser(chat_model: Path, peers_folder: Path) -> Iterator[str]:
    with serve_vllm(chat_model, "chat", peers_folder, *OPTIONS, "--enable-scale-out") as url:
        yield url


@pytest.fixture(scope="module")
def vllm_without_parser(chat_model: Path, peers_folder: Path) -> Iterator[str]:
    with serve_vllm(chat_model, "chat", peers_folder, *OPTIONS) as url:
        yield url


def write_call(name: str, given: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {given}}}\n</tool_call>'


def message(result: SpeculativeResult) -> tuple[Any, ...]:
    calls = tuple((made.name, made.arguments) for made in result.tool_calls)
    return result.content, result.reasoning, calls, result.finish_reason


async def answer_all(
    target: HttpProvider, strategy: StrategyName, requests: Sequence[ChatRequest] = REQUESTS
) -> list[SpeculativeResult]:
    decoder = open_decoder(target, SuffixDraft(), strategy, is_eager=strategy != "auto")
    return [await decoder.decode(request) for request in requests]


async def test_vllm_calls_what_it_calls_alone(vllm_with_parser: str) -> None:
    target = HttpProvider("chat", base_url=vllm_with_parser, dialect=DIALECTS["vllm"])
    try:
        await target.discover("token_endpoint")
        plain = await answer_all(target, "plain")
        speculated = await answer_all(target, "race")
        assert [message(result) for result in speculated] == [message(result) for result in plain]
        assert sum(bool(result.tool_calls) for result in plain) >= 4
        assert sum(result.stats.num_accepted_draft_tokens > 0 for result in speculated) >= 3
    finally:
        await target.aclose()


async def test_vllm_calls_strict_tools_as_alone(vllm_with_parser: str) -> None:
    """Its constrained decoding holds calls in each stream; drafts are right, and streams begin before the call."""
    target = HttpProvider("chat", base_url=vllm_with_parser, dialect=DIALECTS["vllm"])
    try:
        await target.discover("token_endpoint")
        num_calls = num_speculated = 0
        for request in map(constrain, REQUESTS):
            plain = await open_decoder(target, None, "plain", is_eager=False).decode(request)
            calls = "".join(write_call(made.name, made.arguments) for made in plain.tool_calls)
            decoder = open_decoder(target, ReferenceDraft(plain.content + calls), "race", is_eager=True)
            result = await decoder.decode(request)
            assert (message(result), result.fallbacks) == (message(plain), ())
            num_calls += bool(plain.tool_calls)
            num_speculated += result.stats.num_accepted_draft_tokens > 0
        assert num_calls >= 4
        assert num_speculated >= 2
    finally:
        await target.aclose()


async def test_a_vllm_without_the_endpoint_stays_plain(vllm_without_parser: str) -> None:
    target = HttpProvider("chat", base_url=vllm_without_parser, dialect=DIALECTS["vllm"])
    try:
        await target.discover("token_endpoint")
        plain = await answer_all(target, "plain")
        speculated = await answer_all(target, "race")
        assert [message(result) for result in speculated] == [message(result) for result in plain]
        assert {result.strategy for result in speculated} == {"plain"}
        assert speculated[-1].plain_reason == "target"
        assert not any(result.fallbacks for result in speculated)
    finally:
        await target.aclose()


async def test_leaving_in_the_middle_of_a_call_leaves_nothing_running(vllm_with_parser: str) -> None:
    """Of an answer and its streams; by the server's own count."""
    peer = Peer("vllm", vllm_with_parser, "chat", "vllm:num_requests_running", "vllm:generation_tokens_total")
    target = peer.open()
    try:
        await target.discover("token_endpoint")
        await answer_all(target, "race", REQUESTS[:4])
        decoder = open_decoder(target, SuffixDraft(), "race", is_eager=True)
        num_left_within = 0
        for request in REQUESTS:
            async with decoder.stream(replace(request, max_tokens=400)) as events:
                async for event in events:
                    if isinstance(event, ToolCallDelta) and event.arguments:
                        num_left_within += not is_json(event.arguments)
                        break
            if num_left_within == 2:
                break
        await wait_until_idle(peer)
        assert num_left_within > 0
    finally:
        await target.aclose()


async def test_llama_server_stays_plain_with_tools(llama_target: str) -> None:
    """It has no call that reads token ids as its chat does, and holds calls to a grammar."""
    target = HttpProvider("target", base_url=llama_target, dialect=DIALECTS["llamacpp"])
    try:
        await target.discover("token_endpoint")
        await target.discover("message_parser")
        plain = await answer_all(target, "plain")
        decided = await answer_all(target, "auto")
        assert [message(result) for result in decided] == [message(result) for result in plain]
        assert {result.strategy for result in decided} == {"plain"}
        assert (decided[-1].plain_reason, decided[-1].plain_detail) == ("request", "the request sets tools")
        with pytest.raises(UnsupportedError, match="the request sets tools"):
            await answer_all(target, "race")
    finally:
        await target.aclose()
