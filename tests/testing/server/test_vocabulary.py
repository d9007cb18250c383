"""ScriptedModelServer's token ids, frames of several tokens, and its context, as vLLM has them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from llm_spec.measure.tokens import split_into_pieces
from llm_spec.testing.server import EOS_ID, ScriptedModelServer, ServerLatency

pytestmark = pytest.mark.virtual_clock

ANSWER = "The cat sat on the mat."
PIECES = split_into_pieces(ANSWER)
QUESTION = [{"role": "user", "content": "Tell me."}]
CONTINUED = [*QUESTION, {"role": "assistant", "content": "The cat"}]
CHAT: dict[str, Any] = {"path": "/v1/chat/completions", "messages": QUESTION}
TEXT: dict[str, Any] = {"path": "/v1/completions", "prompt": "<|user|>Tell me.<|end|><|assistant|>", "max_tokens": 50}
IDS: dict[str, Any] = {"return_token_ids": True}


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        yield session


async def post(session: aiohttp.ClientSession, server: ScriptedModelServer, path: str, **body: Any) -> dict[str, Any]:
    async with session.post(server.url.removesuffix("/v1") + path, json=body) as response:
        return {"status": response.status, **await response.json()}


async def stream(
    session: aiohttp.ClientSession, server: ScriptedModelServer, path: str, **body: Any
) -> list[dict[str, Any]]:
    """The chunks of a stream."""
    url = server.url.removesuffix("/v1") + path
    async with session.post(url, json={**body, "stream": True}) as response:
        lines = (await response.text()).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


async def tokenized(session: aiohttp.ClientSession, server: ScriptedModelServer, **body: Any) -> list[int]:
    tokens: list[int] = (await post(session, server, "/tokenize", **body))["tokens"]
    return tokens


def choices(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [chunk["choices"][0] for chunk in chunks]


@pytest.mark.parametrize("request_", [CHAT, TEXT])
async def test_every_chunk_has_its_token_ids(session: aiohttp.ClientSession, request_: dict[str, Any]) -> None:
    async with ScriptedModelServer(ANSWER) as server:
        chunks = await stream(session, server, **request_, **IDS)
        script = await tokenized(session, server, prompt=ANSWER)
    assert [choice["token_ids"] for choice in choices(chunks)] == [[i] for i in [*script, EOS_ID]]
    assert [choice["finish_reason"] for choice in choices(chunks)] == [None] * len(script) + ["stop"]


@pytest.mark.parametrize("options", [{"max_tokens": 2}, {"max_tokens": 5, "stop": " sat"}])
async def test_an_answer_that_is_cut_has_no_end(session: aiohttp.ClientSession, options: dict[str, Any]) -> None:
    async with ScriptedModelServer(ANSWER) as server:
        chunks = await stream(session, server, **CHAT, **IDS, **options)
        script = await tokenized(session, server, prompt=ANSWER)
    assert [choice["token_ids"] for choice in choices(chunks)] == [[script[0]], [script[1]], []]


async def test_the_first_chunk_of_a_chat_has_the_prompts_ids(session: aiohttp.ClientSession) -> None:
    async with ScriptedModelServer(ANSWER) as server:
        chunks = await stream(session, server, **CHAT, **IDS)
        prompt = await tokenized(session, server, messages=QUESTION)
    assert chunks[0]["prompt_token_ids"] == prompt
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])


async def test_the_first_choice_of_a_completion_has_the_prompts_ids(session: aiohttp.ClientSession) -> None:
    """vLLM puts them there, streamed or not, because a batch has one for each choice."""
    async with ScriptedModelServer(ANSWER) as server:
        chunks = await stream(session, server, **TEXT, **IDS)
        whole = await post(session, server, **TEXT, **IDS)
        prompt = await tokenized(session, server, messages=QUESTION)
    assert choices(chunks)[0]["prompt_token_ids"] == prompt == whole["choices"][0]["prompt_token_ids"]
    assert not any("prompt_token_ids" in choice for choice in choices(chunks)[1:])


@pytest.mark.parametrize("request_", [CHAT, TEXT])
async def test_an_answer_that_is_not_streamed(session: aiohttp.ClientSession, request_: dict[str, Any]) -> None:
    async with ScriptedModelServer(ANSWER) as server:
        whole = await post(session, server, **request_, **IDS)
        script = await tokenized(session, server, prompt=ANSWER)
        prompt = await tokenized(session, server, messages=QUESTION)
    assert whole["choices"][0]["token_ids"] == [*script, EOS_ID]
    assert (whole if request_ is CHAT else whole["choices"][0])["prompt_token_ids"] == prompt


@pytest.mark.parametrize("request_", [CHAT, TEXT])
async def test_ids_come_only_when_asked_for(session: aiohttp.ClientSession, request_: dict[str, Any]) -> None:
    async with ScriptedModelServer(ANSWER) as server:
        chunks = await stream(session, server, **request_, return_token_ids=False)
        whole = await post(session, server, **request_)
    assert not any("token_ids" in json.dumps(each) for each in (*chunks, whole))


async def test_an_empty_answer_is_its_end_alone(session: aiohttp.ClientSession) -> None:
    async with ScriptedModelServer(ANSWER) as server:
        prompt = TEXT["prompt"] + ANSWER
        chunks = await stream(session, server, **{**TEXT, "prompt": prompt}, **IDS)
        asked = await tokenized(session, server, prompt=prompt)
    end = {"index": 0, "text": "", "token_ids": [EOS_ID], "prompt_token_ids": asked, "finish_reason": "stop"}
    assert choices(chunks) == [end]


async def test_a_repeated_prefix_has_no_ids(session: aiohttp.ClientSession) -> None:
    """It comes as text with the first tokens, or in a frame of its own where there are none."""
    async with ScriptedModelServer(ANSWER, continues_prefix="repeats") as server:
        chunks = await stream(session, server, "/v1/chat/completions", messages=CONTINUED, **IDS)
        whole = [*QUESTION, {"role": "assistant", "content": ANSWER}]
        others = await stream(session, server, "/v1/chat/completions", messages=whole, **IDS)
        sat = await tokenized(session, server, prompt=" sat")
    first, (alone, end) = choices(chunks)[0], choices(others)
    assert (first["delta"]["content"], first["token_ids"]) == ("The cat sat", sat)
    assert (alone["delta"]["content"], alone["token_ids"]) == (ANSWER, [])
    assert (end["delta"]["content"], end["token_ids"]) == ("", [EOS_ID])


async def test_a_busy_server_puts_several_tokens_into_a_frame(session: aiohttp.ClientSession) -> None:
    async with ScriptedModelServer(ANSWER, tokens_per_frame=3) as server:
        chunks = await stream(session, server, **CHAT, **IDS)
        script = await tokenized(session, server, prompt=ANSWER)
        assert server.num_generated_tokens == len(PIECES) == 7
    assert [choice["delta"]["content"] for choice in choices(chunks)] == ["The cat sat", " on the mat", ".", ""]
    assert [choice["token_ids"] for choice in choices(chunks)] == [script[:3], script[3:6], script[6:], [EOS_ID]]


async def test_a_frame_is_sent_when_its_last_token_is_there(session: aiohttp.ClientSession) -> None:
    loop = asyncio.get_running_loop()
    async with ScriptedModelServer(ANSWER, tokens_per_frame=5, latency=ServerLatency(token_s=0.01)) as server:
        start = loop.time()
        body = {"messages": QUESTION, "stream": True}
        async with session.post(f"{server.url}/chat/completions", json=body) as response:
            await response.content.readline()
            assert 0.039 < loop.time() - start < 1
            assert server.num_generated_tokens == 5


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "<|user|>Tell me.<|end|><|assistant|>The cat<|end|><|assistant|>"),
        ({"add_generation_prompt": False}, "<|user|>Tell me.<|end|><|assistant|>The cat<|end|>"),
        (
            {"add_generation_prompt": False, "continue_final_message": True},
            "<|user|>Tell me.<|end|><|assistant|>The cat",
        ),
    ],
)
async def test_tokenize_renders_messages(session: aiohttp.ClientSession, options: dict[str, Any], text: str) -> None:
    """With the fields that govern it, and whatever others there are."""
    unknown = {"model": "any", "add_special_tokens": False, "unheard_of": 1}
    async with ScriptedModelServer(ANSWER, context_length=99) as server:
        answer = await post(session, server, "/tokenize", messages=CONTINUED, **options, **unknown)
        tokens = await tokenized(session, server, prompt=text, **unknown)
    assert answer == {"status": 200, "tokens": tokens, "count": len(tokens), "max_model_len": 99}


@pytest.mark.parametrize("request_", [CHAT, TEXT, {**TEXT, "prompt": ["a", TEXT["prompt"]]}])
async def test_a_prompt_that_does_not_fit_is_refused(session: aiohttp.ClientSession, request_: dict[str, Any]) -> None:
    """As by vLLM: at least one token of the answer has to fit too."""
    async with ScriptedModelServer(ANSWER, context_length=6) as server:
        body = {**request_, "max_tokens": 1}
        assert len(await tokenized(session, server, messages=QUESTION)) == 6
        refusal = await post(session, server, **body)
        server.context_length = 7
        answer = await post(session, server, **body)
    assert (refusal["status"], answer["status"]) == (400, 200)
    words = "This model's maximum context length is 6 tokens. However, your request has 6 input tokens."
    assert words in refusal["error"]["message"]


async def test_max_tokens_that_do_not_fit_are_refused(session: aiohttp.ClientSession) -> None:
    async with ScriptedModelServer(ANSWER, context_length=10) as server:
        refusal = await post(session, server, **CHAT, max_tokens=5)
    assert refusal["status"] == 400
    assert "'max_tokens' or 'max_completion_tokens' is too large: 5." in refusal["error"]["message"]
    assert "(5 > 10 - 6)" in refusal["error"]["message"]


async def test_the_context_cuts_an_answer(session: aiohttp.ClientSession) -> None:
    async with ScriptedModelServer(ANSWER, context_length=9) as server:
        answer = await post(session, server, **CHAT)
    assert answer["choices"][0]["message"]["content"] == "The cat sat"
    assert answer["choices"][0]["finish_reason"] == "length"
