"""HttpProvider against real servers with a real model: what the fakes of other tests promise, and the servers keep."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

import aiohttp
import pytest
from llm_spec_http import DIALECTS, HttpProvider
from peers.servers import MODELS

from llm_spec import (
    ChatRequest,
    InvalidRequestError,
    LlmSpecError,
    SpeculativeConfig,
    SpeculativeDecoder,
    TargetError,
)
from llm_spec.testing import check_provider_conformance

pytestmark = pytest.mark.peers

PROMPTS = [json.loads(line)["messages"] for line in (MODELS / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
QUESTIONS = [ChatRequest.create(prompt, max_tokens=48, temperature=0.0) for prompt in PROMPTS[:8]]


@dataclass(frozen=True)
class Peer:
    """A running server, and how much it is working on."""

    dialect: str
    url: str
    model: str
    busy_metric: str
    tokens_metric: str

    def open(self, model: str | None = None) -> HttpProvider:
        return HttpProvider(model or self.model, base_url=self.url, dialect=DIALECTS[self.dialect])

    async def num_running(self) -> float:
        """Answers being written, as the server says, which is a little late."""
        return await self._read_metric(self.busy_metric)

    async def num_written(self) -> float:
        """Tokens of all answers; of one whose reader has gone perhaps none."""
        return await self._read_metric(self.tokens_metric)

    async def _read_metric(self, name: str) -> float:
        async with aiohttp.ClientSession() as session, session.get(self.url.removesuffix("v1") + "metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


Report = Callable[[str, object], None]


@pytest.fixture
def vllm(vllm_target: str) -> Peer:
    """vLLM with the target."""
    return Peer("vllm", vllm_target, "target", "vllm:num_requests_running", "vllm:generation_tokens_total")


@pytest.fixture
def llama(llama_target: str) -> Peer:
    """llama-server with the target."""
    return Peer("llamacpp", llama_target, "target", "llamacpp:requests_processing", "llamacpp:tokens_predicted_total")


@pytest.fixture
def llama_drafting(llama_draft: str) -> Peer:
    """llama-server with the draft."""
    return Peer("llamacpp", llama_draft, "draft", "llamacpp:requests_processing", "llamacpp:tokens_predicted_total")


@pytest.fixture(params=["vllm", "llama"])
def target(request: pytest.FixtureRequest) -> Peer:
    """Each server that has the target."""
    peer: Peer = request.getfixturevalue(request.param)
    return peer


@pytest.fixture(params=["vllm", "llama", "llama_drafting"])
def peer(request: pytest.FixtureRequest) -> Peer:
    """Each server."""
    peer: Peer = request.getfixturevalue(request.param)
    return peer


async def texts_of(peer: Peer, *requests: ChatRequest) -> list[str]:
    async with aclosing(peer.open()) as provider:
        return [(await provider.complete(request)).content for request in requests]


async def refusal_by(provider: HttpProvider, request: ChatRequest) -> LlmSpecError:
    """The error that a request ends in."""
    async with aclosing(provider):
        with pytest.raises(LlmSpecError) as caught:
            await provider.complete(request)
    return caught.value


async def test_conforms(peer: Peer) -> None:
    """HttpProvider keeps a provider's promises with a real server behind it."""
    await check_provider_conformance(peer.open, requests=QUESTIONS[:2])


async def test_servers_agree(vllm: Peer, llama: Peer, report: Report) -> None:
    """Two engines with one float32 model write the same greedy answers, but for a near tie now and then."""
    ours = await texts_of(vllm, *QUESTIONS)
    theirs = await texts_of(llama, *QUESTIONS)
    num_same = sum(map(str.__eq__, ours, theirs))
    report("greedy answers of vLLM and llama-server that are the same", f"{num_same} of {len(QUESTIONS)}")
    assert all(ours)
    assert num_same >= 6


async def test_continuing_an_answer(target: Peer, report: Report) -> None:
    """An answer cut before a space and continued is the answer: the server's prefix is neither lost nor doubled."""
    answers = await texts_of(target, *QUESTIONS)
    prefixes = [answer[: answer.find(" ", len(answer) // 2)].rstrip() for answer in answers]
    requests = [
        ChatRequest.create(prompt, max_tokens=48, temperature=0.0, prefix=prefix)
        for prompt, prefix in zip(PROMPTS, prefixes, strict=False)
    ]
    rests = await texts_of(target, *requests)
    continued = [prefix + rest for prefix, rest in zip(prefixes, rests, strict=True)]
    num_same = sum(text.startswith(answer) for text, answer in zip(continued, answers, strict=True))
    report(f"{target.dialect}: answers that are the same when they are continued", f"{num_same} of {len(answers)}")
    assert num_same >= 6


LONG = ChatRequest.create(PROMPTS[0], max_tokens=1900, temperature=0.0, extra={"ignore_eos": True})


async def test_leaving_stops_the_server(target: Peer) -> None:
    """A server whose reader has gone stops writing."""

    async def leave_stream() -> None:
        async with aclosing(target.open()) as provider, provider.stream(LONG) as events:
            await anext(events)

    await check_server_stops(target, leave_stream)


async def test_leaving_a_whole_answer_stops_the_server(target: Peer) -> None:
    """A server that would write a whole answer to its end (llama-server) is asked for a stream."""

    async def leave_whole_answer() -> None:
        async with aclosing(target.open()) as provider:
            task = asyncio.create_task(provider.complete(LONG))
            while not await target.num_running():
                if task.done():
                    break
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()  # raises what went wrong

    await check_server_stops(target, leave_whole_answer)


async def check_server_stops(target: Peer, leave: Callable[[], Awaitable[None]]) -> None:
    """On a busy machine a small model may have come to its end before it hears of anything: then once more."""
    written: list[float] = []
    for _ in range(8):
        before = await target.num_written()
        await leave()
        await wait_until_idle(target)
        written.append(await target.num_written() - before)
        if written[-1] < 1900:
            return
    pytest.fail(f"it wrote all of its answers after its reader had gone: {written} tokens")


async def wait_until_idle(target: Peer) -> None:
    """Wait until the server has said for a while that it writes nothing: llama-server looks once a second."""
    async with asyncio.timeout(60):
        num_idle = 0
        while num_idle < 10:  # the server is another party, it sets no event here
            num_idle = 0 if await target.num_running() else num_idle + 1
            await asyncio.sleep(0.2)


async def test_too_long_a_context(target: Peer) -> None:
    """A prompt longer than the server's window is the request's fault, in one line."""
    error = await refusal_by(target.open(), ChatRequest.create("word " * 5000, max_tokens=4))
    assert isinstance(error, InvalidRequestError)
    assert f"{target.dialect}:target" in str(error)
    assert "context" in str(error)
    assert "\n" not in str(error)


async def test_unknown_model(vllm: Peer) -> None:
    """vLLM does not have another model, and the error says what to check."""
    error = await refusal_by(vllm.open("another"), QUESTIONS[0])
    assert isinstance(error, TargetError)
    assert "vllm:another" in str(error)
    assert "check the model's name" in str(error)
    assert "\n" not in str(error)


async def test_llama_server_answers_to_any_name(llama: Peer) -> None:
    """It has one model and ignores what it is called: a wrong name cannot be noticed."""
    async with aclosing(llama.open("another")) as provider:
        answer = await provider.complete(QUESTIONS[0])
    assert [answer.content] == await texts_of(llama, QUESTIONS[0])


async def test_a_real_pair(llama_drafting: Peer, vllm: Peer) -> None:
    """A draft on one server is accepted in part by a target on another, and changes nothing in its text."""
    config = SpeculativeConfig(strategy="regenerate")
    async with aclosing(llama_drafting.open()) as draft, aclosing(vllm.open()) as target:
        result = await SpeculativeDecoder(target=target, draft=draft, config=config).decode(
            PROMPTS[0], max_tokens=48, temperature=0.0
        )
        plain = await target.complete(QUESTIONS[0])
    assert result.content == plain.content
    assert result.fallbacks == ()
    assert result.stats.num_accepted_draft_tokens > 0
